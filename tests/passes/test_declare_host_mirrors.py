"""The mirror of lengths: a fact about an input, read by the host instead of the device's tensor."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.capabilities import platform
from gemma_npu_compile.graphs.extras import Extras
from gemma_npu_compile.graphs.plan import make_plan
from gemma_npu_compile.ops import host_mirror, paged_attention
from gemma_npu_compile.passes.declare_host_mirrors import declare_host_mirrors
from gemma_npu_compile.passes.fx import placeholders
from gemma_npu_compile.passes.pipeline import run_passes


def _attend(query, keys, values, table, lens, host):
    lens = host_mirror(lens, host)
    return [paged_attention(query, keys, values, table, lens + 1, 1.0, None, "TND", "verify/target.layers.0")]


def _graph():
    cache = torch.zeros(4, 128, 1, 16, dtype=torch.float16)
    table, lens = torch.tensor([[1, 2], [2, 3]], dtype=torch.int32), torch.tensor([5, 7], dtype=torch.int32)
    args = [torch.zeros(2, 2, 16, dtype=torch.float16), cache, cache.clone(), table, lens, lens.clone()]
    gm = make_fx(_attend, tracing_mode="fake")(*args)
    for index, node in enumerate(placeholders(gm)):
        node.meta.update(source=index, label=node.name)
    return gm, args


def test_the_node_goes_and_the_fact_stays() -> None:
    gm, _ = _graph()
    result = declare_host_mirrors(gm)
    assert (result.changed, dict(result.left)) == (1, {})
    inputs = placeholders(gm)
    assert inputs[4].meta["mirror"] is inputs[5]
    assert not inputs[5].users
    assert declare_host_mirrors(gm).changed == 0


def test_host_lists_read_the_mirror() -> None:
    """The device's lengths and their mirror differ here on purpose: the list shows which was read."""
    gm, args = _graph()
    run_passes(gm, platform=platform("ascend910b"), kv_lens="host")
    plan = make_plan(gm, set())
    assert [each.role for each in plan.inputs if each.label.startswith("host")] == ["host"]
    args[5] = torch.tensor([100, 200], dtype=torch.int32)
    assert Extras(plan).host_lists(lambda item: args[item.source]) == [[101, 201]]


def test_a_computed_mirror_is_left_with_a_reason() -> None:
    def attend(lens, host):
        return [host_mirror(lens, host + 1) * 2]

    lens = torch.tensor([1, 2])
    gm = make_fx(attend, tracing_mode="fake")(lens, lens.clone())
    result = declare_host_mirrors(gm)
    assert result.changed == 0
    assert dict(result.left) == {"the lengths or their mirror are computed in the graph": 1}
    assert torch.equal(gm(lens, lens)[0], lens * 2)


def test_a_mirror_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"host is \(1, 2\) torch.int64, values \(2,\) torch.int64"):
        host_mirror(torch.tensor([1, 2]), torch.tensor([[1, 2]]))
