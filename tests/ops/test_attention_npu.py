"""The device kernel of paged attention, on the emulated operator, against the CPU kernel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gemma_npu_compile.ops.npu  # noqa: F401  (the emulated operator)
from gemma_npu_compile.ops import attention_npu
from gemma_npu_compile.ops.attention import paged_attention
from gemma_npu_compile.ops.attention_npu import on_host, paged_attention_npu

BLOCK, WIDTH, KV_HEADS, HEADS, DIM = 16, 4, 2, 4, 16


def problem(lens: list[int], counts: list[int], seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(sum(counts), HEADS, DIM, generator=generator)
    blocks = 1 + len(lens) * WIDTH
    keys, values = (torch.randn(blocks, BLOCK, KV_HEADS, DIM, generator=generator) for _ in range(2))
    table = 1 + torch.randperm(blocks - 1, generator=generator).int().view(len(lens), WIDTH)
    return query, keys, values, table, torch.tensor(lens, dtype=torch.int32)


@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), min_size=1, max_size=5),
    window=st.sampled_from([None, 1, 5, 40, 200]),
    seed=st.integers(0, 99),
)
def test_ragged_queries(rows: list[tuple[int, int]], window: int | None, seed: int) -> None:
    counts = [count for count, _ in rows]
    lens = [max(1, count + before) for count, before in rows]
    operands = problem(lens, counts, seed)
    query_lens = torch.tensor(counts, dtype=torch.int32)
    more = 0.3, window, "TND", "prefill/target.layers.0", query_lens
    torch.testing.assert_close(paged_attention_npu(*operands, *more), paged_attention(*operands, *more))


@pytest.mark.parametrize("layout", ["TND", "BNSD"])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("window", [None, 20])
def test_equally_many_queries(layout: str, count: int, window: int | None) -> None:
    query, *operands = problem([5, 64, 33], [count] * 3, 0)
    if layout == "BNSD":
        query = query.view(3, count, HEADS, DIM).transpose(1, 2)
    more = 0.3, window, layout, "verify/target.layers.0"
    torch.testing.assert_close(paged_attention_npu(query, *operands, *more), paged_attention(query, *operands, *more))


def test_lengths_past_the_table_name_the_layer() -> None:
    query, keys, values, table, lens = problem([5], [1], 0)
    with pytest.raises(ValueError, match=r"layer 'a': kv_lens has 65, the table's 4 blocks of 16 hold 64"):
        paged_attention_npu(query, keys, values, table, lens + 60, 1.0, None, "TND", "a")


def test_counts_that_do_not_add_up_name_the_layer() -> None:
    query, keys, values, table, lens = problem([5, 9], [1, 2], 0)
    with pytest.raises(ValueError, match=r"layer 'a': query_lens \[1, 1\] must be 2 counts adding up to 3"):
        paged_attention_npu(query, keys, values, table, lens, 1.0, None, "TND", "a", torch.tensor([1, 1]))


def test_lengths_are_read_once_and_again_after_a_change() -> None:
    counts = torch.tensor([1, 2])
    first = on_host(counts)
    assert on_host(counts) is first
    counts.add_(1)
    assert on_host(counts) == [2, 3]
    assert len(attention_npu._ON_HOST) >= 1
    with torch.inference_mode():
        untracked = torch.tensor([1])
        assert on_host(untracked) == [1]
        untracked.add_(1)
        assert on_host(untracked) == [2]
