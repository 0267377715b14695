"""A paged KV cache that transformers' models write through ``Cache.update``.

Layers that own keys and values have one pool each; layers with the same geometry form a KV group with one block table.
The pools themselves are what ``update`` returns, so KV-shared layers and the assistant receive them without any change
to the models, and the tracer sees caches and tables as plain graph inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from gemma_npu_compile.kv_groups import MAX_QUERY_LEN, Capacity, null_row, plan_groups
from gemma_npu_compile.ops import store_kv


class OutOfBlocksError(RuntimeError):
    """A row needs more blocks of a KV group than are free. Nothing was allocated."""


@dataclass
class _Row:
    length: int
    blocks: list[dict[int, int]]  # per group: logical block -> block id


class PagedKVCache(Cache):
    """Paged keys and values of a Gemma 4 target (a transformers ``Cache``).

    Args:
        config: the target's config, or its text config.
        max_rows: requests that can be in flight at once.
        max_model_len: positions a request can reach, prompt included.
        num_blocks: blocks for requests in each group (an int, or a dict by group name); by default enough for
            ``max_rows`` requests of ``max_model_len``. Null blocks come on top.
        block_size: tokens of a block, a multiple of 16 (an int, or a dict by group name). 128 is the one size legal for
            every head size on every Ascend SoC (op-plugin, ``npu_fused_infer_attention_score``).
        dtype, device: of the pools.
        prefill_chunk: tokens of one row a prefill writes at once; bounds what a sliding group keeps.

    Attributes:
        groups: ``tuple[KVGroup, ...]`` in the order in which the model's layers first show each geometry.
        layer_groups: group index of every layer of the model; a layer that reuses another's keys has its owner's.
        key_pools, value_pools: ``{layer: (num_blocks, block_size, kv_heads, head_dim)}`` of owning layers.
        owners: ``{layer type: last layer that owns keys of this type}``; what KV-shared layers and assistants read.

    Raises:
        ValueError: a size is impossible; names it.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        max_rows: int,
        max_model_len: int,
        num_blocks: int | dict[str, int] | None = None,
        block_size: int | dict[str, int] = 128,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prefill_chunk: int = 512,
    ) -> None:
        super().__init__(layers=[])
        sizes = {"max_rows": max_rows, "max_model_len": max_model_len, "prefill_chunk": prefill_chunk}
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}, it must be a positive integer")
        text = config.get_text_config()
        capacity = Capacity(**sizes)
        self.max_rows, self.max_model_len, self.prefill_chunk = max_rows, max_model_len, prefill_chunk
        self.dtype, self.device = dtype, torch.empty(0, device=device).device  # "npu" becomes npu:0
        self.groups, self.layer_groups = plan_groups(text, capacity, num_blocks, block_size)
        self.owners = {
            layer_type: layer
            for layer, (layer_type, mode) in enumerate(zip(text.layer_types, text.kv_sharing_modes, strict=True))
            if mode != "reuse"
        }
        self.key_pools: dict[int, Tensor] = {}
        self.value_pools: dict[int, Tensor] = {}
        for group in self.groups:
            shape = (group.num_blocks, group.block_size, group.kv_heads, group.head_dim)
            for layer in group.layers:
                # Zeros, not garbage: masked reads touch unwritten tails, and 0 * NaN is NaN.
                self.key_pools[layer] = torch.zeros(shape, dtype=dtype, device=self.device)
                self.value_pools[layer] = torch.zeros(shape, dtype=dtype, device=self.device)
        self._free = [list(range(g.num_blocks - 1, g.null_blocks - 1, -1)) for g in self.groups]
        self._shown: tuple[tuple[int, ...], tuple[Tensor, ...]] | None = None
        self._tables = [torch.zeros(max_rows, capacity.width(g.block_size), dtype=torch.int32) for g in self.groups]
        self._rows: dict[int, _Row] = {}
        self.padded_rows = capacity.padded_rows
        self.host_padding_lens, self.padding_tables = self._padding(capacity)
        self.padding_lens = self.host_padding_lens.to(self.device, copy=True)
        paddings = self.padding_lens, self.host_padding_lens, *self.padding_tables
        for tensor in (*self.key_pools.values(), *self.value_pools.values(), *paddings):
            torch._dynamo.mark_static_address(tensor, guard=False)
            # Another cache in this process must not make its sizes symbolic. Not through mark_static: while another
            # thread compiles, that takes the call for one inside the trace and marks nothing.
            tensor._dynamo_static_indices = set(range(tensor.dim()))  # type: ignore[attr-defined]
            tensor._has_dynamo_dim_marking = True  # type: ignore[attr-defined]

    def _padding(self, capacity: Capacity) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Lengths (on the CPU) and tables of padded rows. A length of at least 1 gives every query, a draft's too, a
        finite key."""
        smallest = min(g.block_size for g in self.groups)
        lens = torch.zeros(self.padded_rows, dtype=torch.int32)
        tables = [torch.zeros(self.padded_rows, capacity.width(g.block_size), dtype=torch.int32) for g in self.groups]
        for group, table in zip(self.groups, tables, strict=True):
            for row in range(self.padded_rows):
                start, blocks = null_row(row, group.block_size, smallest)
                lens[row] = start
                columns = torch.arange(table.shape[1]) % len(blocks)
                table[row] = blocks.start + columns
        return lens, tuple(table.to(self.device) for table in tables)

    # ---- transformers' Cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values ``(batch, kv_heads, q_len, head_dim)`` of an owning layer; return its pools.

        Raises:
            ValueError: the model was called without the paged context of step.py, or the layer owns no pool.
        """
        paged = kwargs.get("kwargs", {}).get("paged")
        if paged is None:
            raise ValueError(
                "PagedKVCache needs block tables with every call: use gemma_npu_compile.generate or DraftVerifyStep "
                "instead of passing it to a model directly"
            )
        if layer_idx not in self.key_pools:
            raise ValueError(f"layer {layer_idx} reuses another layer's keys and must not write to a cache")
        keys, values = self.key_pools[layer_idx], self.value_pools[layer_idx]
        heads, head_dim = keys.shape[2:]
        flat_keys = key_states.transpose(1, 2).reshape(-1, heads, head_dim)
        flat_values = value_states.transpose(1, 2).reshape(-1, heads, head_dim)
        store_kv(flat_keys, flat_values, keys, values, paged.slots[self.layer_groups[layer_idx]])
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Length of the longest row."""
        return max((row.length for row in self._rows.values()), default=0)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.max_model_len

    def __len__(self) -> int:
        return len(self.layer_groups)

    @property
    def is_compileable(self) -> bool:
        return True

    def reset(self) -> None:
        """Release every row. The pools keep their addresses and their (finite) contents."""
        for row in list(self._rows):
            self.release(row)

    # ---- rows

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows in use, in the order of their allocation."""
        return tuple(self._rows)

    def length(self, row: int) -> int:
        """Tokens row ``row`` has in the cache."""
        return self._row(row).length

    def free_blocks(self, group: int) -> int:
        """Blocks of a group that no row holds."""
        return len(self._free[group])

    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(t.nbytes for t in (*self.key_pools.values(), *self.value_pools.values()))

    def _row(self, row: int) -> _Row:
        if row not in self._rows:
            raise ValueError(f"row {row} is not allocated; rows in use: {list(self._rows)}")
        return self._rows[row]

    def allocate(self, length: int = 0) -> int:
        """Take a free row with room for ``length`` tokens and return its number.

        Raises:
            OutOfBlocksError: no row or too few blocks are free; nothing was taken.
        """
        row = next((r for r in range(self.max_rows) if r not in self._rows), None)
        if row is None:
            raise OutOfBlocksError(f"all {self.max_rows} rows are in use (max_rows={self.max_rows}): release one first")
        self._rows[row] = _Row(0, [{} for _ in self.groups])
        try:
            self.extend(row, length)
        except (OutOfBlocksError, ValueError):
            del self._rows[row]
            raise
        return row

    def extend(self, row: int, length: int) -> None:
        """Give ``row`` blocks for positions ``0 .. length - 1`` (in sliding groups: those still inside the window).

        Raises:
            OutOfBlocksError: a group has too few free blocks; no group was changed.
            ValueError: ``length`` exceeds what a block table can hold.
        """
        state = self._row(row)
        if not 0 <= length <= self.max_model_len + MAX_QUERY_LEN - 1:
            raise ValueError(
                f"row {row} cannot hold {length} tokens: max_model_len is {self.max_model_len} (and a verification may "
                f"write {MAX_QUERY_LEN - 1} more)"
            )
        wanted = []
        for group, blocks, free in zip(self.groups, state.blocks, self._free, strict=True):
            first = group.first_read(state.length)
            new = [b for b in range(first, -(-length // group.block_size)) if b not in blocks]
            if len(new) > len(free):
                raise OutOfBlocksError(
                    f"KV group {group.name!r} has {len(free)} free blocks, row {row} needs {len(new)} more to hold "
                    f"{length} tokens (num_blocks={group.num_blocks - group.null_blocks}, "
                    f"block_size={group.block_size})"
                )
            wanted.append(new)
        for new, blocks, free, table in zip(wanted, state.blocks, self._free, self._tables, strict=True):
            for logical in new:
                blocks[logical] = free.pop()
                table[row, logical] = blocks[logical]
                self._shown = None

    def set_length(self, row: int, length: int) -> None:
        """Declare that ``row`` holds ``length`` tokens; blocks that left a sliding window are given back.

        A shorter length is a rollback: the cache's contents stay, readers mask by length.

        Raises:
            ValueError: the row has no blocks for ``length``, or a rollback goes behind a block that was given back.
        """
        state = self._row(row)
        if length < 0:
            raise ValueError(f"row {row} cannot have length {length}: it must not be negative")
        for group, blocks in zip(self.groups, state.blocks, strict=True):
            needed = range(group.first_read(length), -(-length // group.block_size))
            lost = [logical for logical in needed if logical not in blocks]
            if lost:
                why = (
                    "was given back when it left the window" if lost[0] < min(blocks, default=0) else "was not extended"
                )
                raise ValueError(
                    f"row {row} cannot have length {length}: block {lost[0]} of KV group {group.name!r} {why} "
                    f"(its length is {state.length})"
                )
        state.length = length
        for group, blocks, free, table in zip(self.groups, state.blocks, self._free, self._tables, strict=True):
            for logical in [b for b in blocks if b < group.first_kept(length)]:
                free.append(blocks.pop(logical))
                table[row, logical] = 0
                self._shown = None

    def release(self, row: int) -> None:
        """Give back everything ``row`` holds."""
        state = self._row(row)
        for blocks, free, table in zip(state.blocks, self._free, self._tables, strict=True):
            free.extend(reversed(list(blocks.values())))
            table[row] = 0
        self._shown = None
        del self._rows[row]

    def _send(self, table: Tensor) -> Tensor:
        """A copy on the cache's device that nobody waits for."""
        if self.device.type == "npu":
            table = table.pin_memory()  # its block is kept until the copy is done
        return table.to(self.device, non_blocking=True)

    def block_tables(self, rows: Sequence[int]) -> tuple[Tensor, ...]:
        """One ``(len(rows), width)`` int32 table per group, on the cache's device; entries without a block are 0.

        Block 0 is a null block: finite, and read by nobody unmasked. The tensors are not changed afterwards; as long as
        no block is given or taken, the same rows get the same tensors, so that most steps copy nothing to the device.
        """
        wanted = tuple(row for row in rows if self._row(row))
        if self._shown is None or self._shown[0] != wanted:
            index = torch.tensor(wanted, dtype=torch.long)
            self._shown = wanted, tuple(self._send(table[index]) for table in self._tables)
        return self._shown[1]
