"""A clipped table must reach every key a query sees and give the same numbers, whatever the row's length."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.ops import paged_attention
from gemma_npu_compile.passes.clip_to_window import clip_to_window, window_blocks
from gemma_npu_compile.passes.fx import argument
from gemma_npu_compile.passes.sites import attention_nodes

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def inputs(lens: list[int], q_len: int, block_size: int, width: int, window: int) -> tuple[Tensor, ...]:
    """Rows with blocks of their own; every block no query can see is NaN, block 0 (the null block) is finite."""
    torch.manual_seed(sum(lens) + q_len)
    rows = len(lens)
    keys, values = (torch.randn(1 + rows * width, block_size, KV_HEADS, HEAD_DIM) for _ in range(2))
    table = torch.zeros(rows, width, dtype=torch.int32)
    for row, length in enumerate(lens):
        for column in range(width):
            block = 1 + row * width + column
            oldest = length - (window + q_len - 1)
            if column * block_size < length and (column + 1) * block_size > oldest:
                table[row, column] = block
            else:
                keys[block] = values[block] = torch.nan
    query = torch.randn(rows * q_len, HEADS, HEAD_DIM)
    return query, keys, values, table, torch.tensor(lens, dtype=torch.int32)


def traced(args: tuple[Tensor, ...], window: int | None, layers: int = 1, mode: str = "fake") -> GraphModule:
    def fn(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lens: Tensor) -> list[Tensor]:
        return [
            paged_attention(query, keys, values, table, lens, 0.7, window, "TND", f"verify/t.layers.{i}")
            for i in range(layers)
        ]

    return make_fx(fn, tracing_mode=mode)(*args)


@settings(max_examples=15)
@given(
    lens=st.lists(st.integers(1, 100), min_size=2, max_size=4),
    q_len=st.integers(1, 4),
    block_size=st.sampled_from([4, 8, 16]),
    window=st.integers(1, 40),
)
@example(lens=[100, 3], q_len=2, block_size=4, window=9)  # a row at the end of its table
def test_the_numbers_stay(lens: list[int], q_len: int, block_size: int, window: int) -> None:
    width = -(-100 // block_size)
    lens = [max(length, q_len) for length in lens]
    args = inputs(lens, q_len, block_size, width, window)
    gm = traced(args, window)
    expected = gm(*args)[0]
    assert torch.isfinite(expected).all()
    result = clip_to_window(gm)
    gm.recompile()
    span = window_blocks(window, q_len, block_size)
    assert result.changed == (span < width)
    if result.changed:
        (node,) = attention_nodes(gm)
        assert argument(node, "block_table").meta["val"].shape[1] == span
        assert argument(node, "window") == window
        output = gm.graph.find_nodes(op="output")[0]
        output.args = ([*output.args[0], argument(node, "block_table")],)
        gm.recompile()
        for row, column in zip(gm(*args)[1].tolist(), args[3].tolist(), strict=True):
            assert sorted(filter(None, row)) == sorted(filter(None, column)), "every visible block once"
    torch.testing.assert_close(gm(*args)[0], expected, rtol=1e-5, atol=1e-6)


@given(window=st.integers(1, 300), q_len=st.integers(1, 17), block_size=st.sampled_from([1, 16, 128]))
def test_blocks_of_a_window_are_enough_and_not_one_too_many(window: int, q_len: int, block_size: int) -> None:
    """Compared with counting, for every place in a block where the oldest key can lie."""
    reach = window + q_len - 1  # keys from the oldest one of the first query to the last one of the last
    worst = max((start + reach - 1) // block_size + 1 for start in range(block_size))
    assert window_blocks(window, q_len, block_size) == worst


def test_layers_of_one_table_share_its_clip() -> None:
    args = inputs([40, 70], 4, 16, 6, 10)
    assert dict(clip_to_window(traced(args, 10, mode="symbolic")).left) == {"the table is of symbolic width": 1}
    gm = traced(args, 10, layers=3)
    assert clip_to_window(gm).changed == 3
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.gather.default)) == 1
    assert len({argument(node, "block_table") for node in attention_nodes(gm)}) == 1
    again = clip_to_window(gm)
    assert (again.changed, dict(again.left)) == (0, {"the table is no wider than the window": 3})


@pytest.mark.parametrize(("window", "left"), [(None, {}), (90, {"the table is no wider than the window": 1})])
def test_what_is_left(window: int | None, left: dict[str, int]) -> None:
    args = inputs([40, 70], 2, 16, 6, 1000)
    gm = traced(args, window)
    result = clip_to_window(gm)
    assert (result.changed, dict(result.left)) == (0, left)
