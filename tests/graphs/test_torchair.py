"""``engine="torchair"`` where there is no NPU: refused at the door, with what it needs."""

import pytest
import torch

from gemma_npu_compile import Options


def test_without_an_npu_it_is_refused(fresh_dynamo):
    run = torch.compile(lambda x: x + 1, backend="gemma_npu", options={"engine": "torchair"})
    with pytest.raises(ValueError, match="torch_npu is not installed here; use engine='aclgraph'"):
        run(torch.ones(3))


def test_an_unknown_engine_is_refused():
    with pytest.raises(ValueError, match=r"engine is 'torchai' .did you mean 'torchair'"):
        Options(engine="torchai")
