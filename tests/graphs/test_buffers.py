"""Stable buffers: stale padded rows have written other requests' KV caches, and wider tables have garbled layers."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gemma_npu_compile.errors import ReplayError
from gemma_npu_compile.graphs.buffers import StableBuffers
from gemma_npu_compile.graphs.plan import Input


def item(name: str, source: int, role: str = "other", static: bool = False, **more: Any) -> Input:
    return Input(name, name, source, role, static, (), torch.int32, **more)


TABLE = item("t", 0, "block_table", padding=2, group="g0")
BOUND = item("b", 0, "block_table", padding=2, group="g0", layer="m.layers.3", phase="verify")
TOKEN = item("x", 1, "token", padding=3)
REST = (item("tp", 2, "padding"), item("xp", 3, "padding"), item("cache", 4, "cache", static=True))
INPUTS = (TABLE, BOUND, TOKEN, *REST)


def call(rows: int, width: int = 3, fill: int = 1) -> list[Tensor]:
    """Arguments of a call: a table, tokens, their paddings for 4 rows, a cache."""
    table = torch.full((rows, width), fill, dtype=torch.int32) * torch.arange(1, rows + 1, dtype=torch.int32)[:, None]
    pad = -torch.arange(1, 5, dtype=torch.int32)
    return [table, table[:, 0].clone(), pad[:, None].expand(4, width).clone(), pad * 10, torch.zeros(9)]


def test_one_buffer_per_name_in_the_largest_shape() -> None:
    buffers = StableBuffers(INPUTS, call(2), 4)
    assert {name: tuple(b.shape) for name, b in buffers.buffers.items()} == {"block_table.g0": (4, 3), "input.1": (4,)}
    assert buffers.nbytes == 4 * (12 + 4)
    view = buffers.view(BOUND, 2)
    assert view.shape == (2, 3)
    assert view.data_ptr() == buffers.view(BOUND, 4).data_ptr() == buffers.buffers["block_table.g0"].data_ptr()


def test_stale_rows_hold_the_padding() -> None:
    buffers = StableBuffers(INPUTS, call(4), 4)
    buffers.load(call(4, fill=5), 4, 4)
    assert buffers.buffers["input.1"].tolist() == [5, 10, 15, 20]
    copied = buffers.load(call(2, fill=7), 2, 4)
    assert copied == buffers.nbytes
    assert buffers.buffers["input.1"].tolist() == [7, 14, -30, -40]
    assert buffers.buffers["block_table.g0"][:, 0].tolist() == [7, 14, -3, -4]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=8))
def test_any_sequence_of_calls(calls: list[tuple[int, int]]) -> None:
    buffers = StableBuffers(INPUTS, call(1), 4)
    addresses = {name: b.data_ptr() for name, b in buffers.buffers.items()}
    for rows, fill in calls:
        args = call(rows, fill=fill)
        size = 2 if rows <= 2 else 4
        buffers.load(args, rows, size)
        for source, name in ((0, "block_table.g0"), (1, "input.1")):
            expected = torch.cat([args[source], args[source + 2][rows:size]])
            torch.testing.assert_close(buffers.buffers[name][:size], expected, rtol=0, atol=0)
    assert {name: b.data_ptr() for name, b in buffers.buffers.items()} == addresses


@pytest.mark.parametrize("width", [2, 4])
def test_another_width_names_the_layer_and_both_widths(width: int) -> None:
    buffers = StableBuffers(INPUTS, call(2), 4)
    buffers.check(call(4))
    message = (
        rf"layer m\.layers\.3 \(verify, group g0\) is {width} blocks wide, it was captured 3 wide; nothing was run"
    )
    with pytest.raises(ReplayError, match=message):
        buffers.check(call(2, width=width))


@pytest.mark.parametrize("wrong", [torch.ones(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int64)])
def test_another_shape_or_dtype_names_the_input(wrong: Tensor) -> None:
    buffers = StableBuffers(INPUTS, call(2), 4)
    args = call(2)
    args[1] = wrong
    with pytest.raises(ReplayError, match=r"input x is \(2.*captured as \(rows.*int32; nothing was run"):
        buffers.check(args)


def test_without_rows_the_shape_is_that_of_the_call() -> None:
    buffers = StableBuffers(INPUTS, call(3), None)
    assert buffers.view(TOKEN, None).shape == (3,)
    assert buffers.load(call(3, fill=2), None, None) == buffers.nbytes
    assert buffers.buffers["input.1"].tolist() == [2, 4, 6]
