"""What the host is told about lengths must be what the attention sees, also when the graph itself moves them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.ops import paged_attention, row_padding


@pytest.fixture(autouse=True)
def _clean(fresh_dynamo: None) -> Iterator[None]:
    with torch.no_grad():
        yield


def inputs(lens: list[int]) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    rows = len(lens)
    keys, values = torch.randn(2, 6 * rows, 128, 1, 16).unbind()
    table = torch.randperm(6 * rows).view(rows, 6).int()
    return torch.randn(rows, 2, 16), keys, values, table, torch.tensor(lens, dtype=torch.int32)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("step", [1, 130])
def test_lengths_the_graph_writes_to(window: int | None, step: int) -> None:
    """Attention, lengths in place, attention: the second one sees the new lengths, whatever bucket they are in."""

    def fn(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lens: Tensor) -> Any:
        first = paged_attention(query, keys, values, table, lens, 1.0, window, layer="verify/m.layers.0")
        lens.add_(step)
        return first, paged_attention(query, keys, values, table, lens, 1.0, window, layer="verify/m.layers.1")

    run = torch.compile(fn, backend=Backend(), fullgraph=True, options={"on_fallback": "error"})
    for lens in ([128, 255], [20, 500]):
        args = inputs(lens)
        expected = fn(*(arg.clone() for arg in args))
        torch.testing.assert_close(run(*(arg.clone() for arg in args)), expected, rtol=1e-5, atol=1e-5)


def test_padded_rows_of_lengths_only_the_host_reads() -> None:
    """With exact host lengths nothing on the device reads them; their padded rows are needed all the same."""
    pads = torch.zeros(4, 2, 16), torch.zeros(4, 6, dtype=torch.int32), torch.ones(4, dtype=torch.int32)

    def fn(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lens: Tensor, pads: Any) -> Tensor:
        query, table, lens = map(row_padding, (query, table, lens), pads)
        return paged_attention(query, keys, values, table, lens, 1.0, layer="draft.0/m.layers.0")

    run = torch.compile(fn, backend=Backend(), fullgraph=True, options={"kv_lens": "host", "on_fallback": "error"})
    for lens in ([10, 700, 40], [300, 5], [1, 2, 3, 760]):
        query, keys, values, table, lengths = inputs([*lens, *[1] * (4 - len(lens))])
        rows = len(lens)
        args = query[:rows].clone(), keys, values, table[:rows].clone(), lengths[:rows].clone()
        for each in (args[0], args[3], args[4]):
            torch._dynamo.mark_dynamic(each, 0)
        torch.testing.assert_close(run(*args, pads), fn(*args, pads), rtol=1e-5, atol=1e-5)


def test_strided_operands() -> None:
    """The dialect takes them, the fused operator does not."""

    def fn(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        return paged_attention(
            query.transpose(1, 2), keys, values, table[:, :5], lens, 1.0, None, "BNSD", "verify/m.layers.0"
        )

    query, *rest = inputs([100, 300])
    wide = torch.stack([query, query * 2], dim=1)  # (rows, q_len, heads, head_dim)
    run = torch.compile(fn, backend=Backend(), fullgraph=True, options={"on_fallback": "error"})
    torch.testing.assert_close(run(wide, *rest), fn(wide, *rest), rtol=1e-5, atol=1e-5)
