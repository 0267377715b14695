"""A block in two rows, or one given back too early, is silent corruption: the cache is compared with a model of it.

The model counts positions (which keys a row still needs) where the cache counts blocks, and looks at the cache only
through what a user sees: tables, lengths, free counts and errors.
"""

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

from gemma_npu_compile.kv_cache import OutOfBlocksError, PagedKVCache

SLIDING, FULL = "sliding_attention", "full_attention"
CONFIGS = {
    window: Gemma4TextConfig(
        num_hidden_layers=2,
        layer_types=[SLIDING, FULL],
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=2,
        global_head_dim=4,
        sliding_window=window,
    )
    for window in (1, 24, 40)
}


def snapshot(cache: PagedKVCache) -> Any:
    """Everything a user can see of the books."""
    tables = [table.tolist() for table in cache.block_tables(cache.rows)]
    free = [cache.free_blocks(group.index) for group in cache.groups]
    return cache.rows, [cache.length(row) for row in cache.rows], tables, free


class Books(RuleBasedStateMachine):
    """Rows come, grow, roll back and go, in pools small enough to run out."""

    @initialize(
        window=st.sampled_from(list(CONFIGS)),
        sizes=st.tuples(st.sampled_from([16, 32]), st.sampled_from([16, 48])),
        blocks=st.tuples(st.integers(4, 16), st.integers(4, 16)),
        rows=st.integers(1, 3),
    )
    def start(self, window: int, sizes: tuple[int, int], blocks: tuple[int, int], rows: int) -> None:
        names = (SLIDING, FULL)
        self.cache = PagedKVCache(
            CONFIGS[window],
            max_rows=rows,
            max_model_len=150,
            prefill_chunk=32,
            num_blocks=dict(zip(names, blocks, strict=True)),
            block_size=dict(zip(names, sizes, strict=True)),
        )
        self.windows, self.sizes, self.blocks, self.max_rows = (window, None), sizes, blocks, rows
        self.lengths: dict[int, int] = {}
        self.ends: dict[int, int] = {}  # positions a row has room for
        self.held: dict[int, list[set[int]]] = {}
        self.slots: dict[tuple[int, int], dict[int, int]] = {}  # (row, group): position -> where its key was written

    def first_read(self, group: int, length: int) -> int:
        """First position the next step reads: the assistant sees window + 1 keys."""
        window = self.windows[group]
        return 0 if window is None else max(0, length - (window + 1))

    def oldest(self, group: int, length: int) -> int:
        """First position a row may still need: what a step reads at a length up to 16 tokens shorter."""
        return self.first_read(group, max(0, length - 16))

    def free(self, group: int) -> int:
        return self.blocks[group] - sum(len(held[group]) for held in self.held.values())

    def missing(self, row: int | None, end: int) -> list[set[int]]:
        length, held = (0, [set(), set()]) if row is None else (self.lengths[row], self.held[row])
        return [
            {p // size for p in range(self.first_read(group, length), end)} - held[group]
            for group, size in enumerate(self.sizes)
        ]

    def grow(self, row: int, end: int, missing: list[set[int]]) -> None:
        self.ends[row] = max(self.ends[row], end)
        for group, table in enumerate(self.cache.block_tables([row])):
            self.held[row][group] |= missing[group]
            slots, size = self.slots[row, group], self.sizes[group]
            for p in range(self.lengths[row], end):
                slots[p] = int(table[0, p // size]) * size + p % size

    @rule(end=st.integers(0, 166))
    def allocate(self, end: int) -> None:
        missing, before = self.missing(None, end), snapshot(self.cache)
        fits = all(len(new) <= self.free(group) for group, new in enumerate(missing))
        if len(self.lengths) == self.max_rows or not fits:
            with pytest.raises(OutOfBlocksError):
                self.cache.allocate(end)
            assert snapshot(self.cache) == before
            return
        row = self.cache.allocate(end)
        assert row not in self.lengths
        assert 0 <= row < self.max_rows
        self.lengths[row], self.ends[row], self.held[row] = 0, 0, [set(), set()]
        self.slots[row, 0], self.slots[row, 1] = {}, {}
        self.grow(row, end, missing)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), more=st.integers(0, 40))
    def extend(self, data: st.DataObject, more: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.lengths)))
        end = self.lengths[row] + more
        before = snapshot(self.cache)
        if end > 150 + 16:
            with pytest.raises(ValueError, match=f"row {row} cannot hold {end} tokens.*150"):
                self.cache.extend(row, end)
            assert snapshot(self.cache) == before
            return
        missing = self.missing(row, end)
        short = [group for group, new in enumerate(missing) if len(new) > self.free(group)]
        if short:
            group = self.cache.groups[short[0]]
            with pytest.raises(OutOfBlocksError, match=f"{group.name}.*row {row}"):
                self.cache.extend(row, end)
            assert snapshot(self.cache) == before
            return
        self.cache.extend(row, end)
        self.grow(row, end, missing)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def set_length(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.lengths)))
        length = data.draw(st.integers(self.lengths[row], self.ends[row]))
        self.cache.set_length(row, length)
        self.shorten(row, length)

    @precondition(lambda self: any(self.lengths.values()))
    @rule(data=st.data(), back=st.integers(1, 16))
    def roll_back(self, data: st.DataObject, back: int) -> None:
        row = data.draw(st.sampled_from(sorted(r for r, length in self.lengths.items() if length)))
        length = max(0, self.lengths[row] - back)
        before = snapshot(self.cache)
        refusal = ""
        try:
            self.cache.set_length(row, length)
        except ValueError as error:
            refusal = str(error)
        if not refusal:
            self.shorten(row, length)
            return
        # Allowed only where a block went that a second rollback would need.
        assert self.oldest(0, length) // self.sizes[0] not in self.held[row][0]
        assert f"row {row} cannot have length {length}" in refusal
        assert f"{SLIDING!r} was given back" in refusal
        assert snapshot(self.cache) == before

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def set_length_without_blocks(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.lengths)))
        full = self.held[row][1]
        length = (max(full, default=-1) + 1) * self.sizes[1] + 1
        before = snapshot(self.cache)
        with pytest.raises(ValueError, match=f"row {row} cannot have length {length}"):
            self.cache.set_length(row, length)
        assert snapshot(self.cache) == before

    def shorten(self, row: int, length: int) -> None:
        self.lengths[row] = length
        for group, size in enumerate(self.sizes):
            oldest = self.oldest(group, length)
            self.held[row][group] = {b for b in self.held[row][group] if (b + 1) * size > oldest}

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.lengths)))
        self.cache.release(row)
        for books in (self.lengths, self.ends, self.held):
            del books[row]
        with pytest.raises(ValueError, match=f"row {row} is not allocated"):
            self.cache.length(row)

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.lengths, self.ends, self.held = {}, {}, {}

    @invariant()
    def tables_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert sorted(self.cache.rows) == sorted(self.lengths)
        assert self.cache.get_seq_length() == max(self.lengths.values(), default=0)
        for group, tables in enumerate(self.cache.block_tables(sorted(self.lengths))):
            assert tables.dtype == torch.int32
            null, seen = self.cache.groups[group].null_blocks, []
            for row, table in zip(sorted(self.lengths), tables.tolist(), strict=True):
                assert {column for column, block in enumerate(table) if block} == self.held[row][group]
                seen += [block for block in table if block]
            assert len(set(seen)) == len(seen)
            assert all(null <= block < null + self.blocks[group] for block in seen)
            assert self.cache.free_blocks(group) == self.free(group) == self.blocks[group] - len(seen)

    @invariant()
    def needed_keys_stay_where_they_were_written(self) -> None:
        for row, length in getattr(self, "lengths", {}).items():
            assert self.cache.length(row) == length
            for group, table in enumerate(self.cache.block_tables([row])):
                size, window = self.sizes[group], self.windows[group]
                first = 0 if window is None else max(0, length - window - 1)
                for p in range(first, length):
                    assert int(table[0, p // size]) * size + p % size == self.slots[row, group][p]


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=100, stateful_step_count=40)
