"""A host length that is too short loses keys; one that changes too often costs an update per layer per step."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.passes.host_lengths import HostLengths, bucket, integer_slice


@given(length=st.integers(1, 300_000), block_size=st.sampled_from([16, 128, 512]))
def test_a_bucket_holds_its_length_and_little_more(length: int, block_size: int) -> None:
    found = bucket(length, block_size)
    assert found % block_size == 0
    assert length <= found < length + max(block_size, length / 4 + 1)
    assert bucket(found, block_size) == found
    assert bucket(length + 1, block_size) >= found


def test_a_growing_row_changes_its_bucket_rarely() -> None:
    lengths = [bucket(length, 128) for length in range(1, 32_769)]
    changes = sum(a != b for a, b in itertools.pairwise(lengths))
    assert changes == 7 + 4 * 5, "blocks up to 1024 tokens, then four steps a doubling"


def output_of(fn, *args: Tensor) -> Node:
    gm = make_fx(fn, tracing_mode="fake")(*args)
    return gm.graph.find_nodes(op="output")[0].args[0]


def test_the_slice_computes_what_the_graph_computes() -> None:
    """``seq_len + 4`` and clamps, next to work on other tensors that must not come along."""
    lens, other = torch.tensor([3, 200, 1025], dtype=torch.int32), torch.randn(3)

    def fn(other: Tensor, lens: Tensor) -> Tensor:
        (other * lens).sum()
        return ((lens + 4).clamp(min=8).to(torch.int64) * 1).to(torch.int32)

    gm, inputs = integer_slice(output_of(fn, other, lens))
    assert [node.name for node in inputs] == ["lens_1"]
    assert gm(lens).tolist() == [8, 204, 1029]
    assert sum(node.op == "call_function" for node in gm.graph.nodes) <= 5
    exact = HostLengths("h", (1,), gm, ("verify/t.layers.0",), None, 4096)
    assert exact([lens]) == [8, 204, 1029]
    rounded = HostLengths("h", (1,), gm, (), 128, 1152)
    assert rounded([lens]) == [128, 256, 1152], "1280 is cut to what the table reaches"


@pytest.mark.parametrize(
    "fn",
    [
        lambda lens: lens.cumsum(0),
        lambda lens: (lens * 1.5).to(torch.int32),
        lambda lens: lens.sort().values,
        lambda lens: lens.gather(0, lens),
    ],
)
def test_anything_else_is_not_a_slice(fn) -> None:
    assert integer_slice(output_of(fn, torch.tensor([1, 0, 2]))) is None


def test_an_input_is_its_own_slice() -> None:
    gm, (node,) = integer_slice(output_of(lambda lens: lens, torch.tensor([5, 6])))
    assert node.op == "placeholder"
    assert gm(torch.tensor([7, 8])).tolist() == [7, 8]
