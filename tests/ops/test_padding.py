"""``row_padding`` states a fact and must change nothing: a step with it and one without it compute the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.ops import row_padding
from gemma_npu_compile.ops.library import KERNELS

OP = torch.ops.gemma_npu.row_padding


@given(
    rows=st.integers(0, 5),
    trailing=st.lists(st.integers(0, 4), max_size=2),
    dtype=st.sampled_from([torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.bool]),
)
def test_returns_the_rows_in_new_memory(rows: int, trailing: list[int], dtype: torch.dtype) -> None:
    given_rows = torch.arange(rows * torch.Size(trailing).numel()).view(rows, *trailing).to(dtype)
    padding = torch.full((5, *trailing), 77).to(dtype)
    result = row_padding(given_rows, padding)
    assert result.dtype == dtype
    assert torch.equal(result, given_rows)
    assert result.numel() == 0 or result.data_ptr() != given_rows.data_ptr()


def test_out_writes_to_the_given_address() -> None:
    rows, out = torch.arange(6).view(3, 2), torch.full((3, 2), -1)
    returned = KERNELS[OP.default].run(rows, torch.zeros(5, 2, dtype=torch.int64), out=out)
    assert returned.data_ptr() == out.data_ptr()
    assert torch.equal(out, rows)


@pytest.mark.parametrize("fake", [False, True], ids=["cpu", "fake"])
@pytest.mark.parametrize(
    ("padding", "message"),
    [
        (torch.zeros(5, 2), "float32"),
        (torch.zeros(5, dtype=torch.int32), r"\(5,\)"),
        (torch.zeros(5, 2, 1, dtype=torch.int32), r"\(5, 2, 1\)"),
        (torch.zeros(5, 3, dtype=torch.int32), "axis 1 of the input is 2 wide, its padding 3"),
        (torch.zeros(5, 1, dtype=torch.int32), "axis 1 of the input is 2 wide, its padding 1"),
    ],
    ids=["dtype", "fewer dimensions", "more dimensions", "wider", "broadcastable"],
)
def test_padding_that_does_not_fit(padding: torch.Tensor, message: str, fake: bool) -> None:
    rows = torch.zeros(3, 2, dtype=torch.int32)
    if fake:
        mode = FakeTensorMode()
        rows, padding = mode.from_tensor(rows), mode.from_tensor(padding)
    with pytest.raises(ValueError, match=f"row_padding.*{message}"):
        row_padding(rows, padding)


def test_opcheck() -> None:
    args = torch.arange(6).view(3, 2), torch.zeros(5, 2, dtype=torch.int64)
    torch.library.opcheck(OP.default, args, test_utils=("test_schema", "test_faketensor"))


def test_result_of_a_strided_input_is_contiguous() -> None:
    rows, padding = torch.arange(6).view(2, 3).t(), torch.zeros(5, 2, dtype=torch.int64)
    torch.library.opcheck(OP.default, (rows, padding), test_utils=("test_faketensor",))


def test_node_survives_tracing_with_a_symbolic_row_count() -> None:
    """The plan reads the node; a tracer that drops or specializes it would lose the padding."""
    graph = make_fx(lambda r, p: row_padding(r, p) + 1, tracing_mode="symbolic")(torch.zeros(3, 2), torch.zeros(5, 2))
    (node,) = [node for node in graph.graph.nodes if node.target is OP.default]
    assert isinstance(node.meta["val"].shape[0], torch.SymInt)
    assert graph(torch.zeros(4, 2), torch.zeros(5, 2)).shape == (4, 2)
