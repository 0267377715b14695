"""KV groups: which layers of a model share a cache geometry, and how large their pools are."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

MAX_QUERY_LEN = 17
"""Longest verification a cache is prepared for: the last token and 16 drafts."""


@dataclass(frozen=True)
class KVGroup:
    """Layers with one cache geometry, and so one block table.

    Attributes:
        name: ``"<layer type>"``, with a number when two geometries share a layer type.
        layers: the layers that own a pool, in model order.
        window: keys a query sees at most; None for full attention.
        num_blocks: blocks of each pool, null blocks included.
        null_blocks: block ids ``0 .. null_blocks - 1`` belong to padded rows and to nobody else.
    """

    index: int
    name: str
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int | None
    block_size: int
    num_blocks: int
    null_blocks: int

    def first_read(self, length: int) -> int:
        """The oldest logical block a step at ``length`` tokens reads: window + 1 keys, for the assistant."""
        oldest = 0 if self.window is None else length - self.window - 1
        return max(0, oldest) // self.block_size

    def first_kept(self, length: int) -> int:
        """The oldest logical block a row of ``length`` tokens keeps: enough for a rollback of a whole verification."""
        oldest = 0 if self.window is None else length - self.window - MAX_QUERY_LEN
        return max(0, oldest) // self.block_size

    def most_blocks(self, length: int, ahead: int) -> int:
        """Blocks a row holds at its fullest on its way to ``length`` tokens, written at most ``ahead`` at once."""
        whole = -(-length // self.block_size)
        if self.window is None:
            return whole
        return min(whole, -(-(self.window + MAX_QUERY_LEN + ahead) // self.block_size) + 1)


@dataclass(frozen=True)
class Capacity:
    """What a cache is sized for: rows at once, positions of a row, tokens a prefill writes to a row at once."""

    max_rows: int
    max_model_len: int
    prefill_chunk: int

    @property
    def padded_rows(self) -> int:
        """Padded rows a cache prepares; one row runs padded to two."""
        return max(2, self.max_rows)

    def width(self, block_size: int) -> int:
        """Columns of a block table: a verification writes MAX_QUERY_LEN - 1 positions past the last one kept."""
        return -(-(self.max_model_len + MAX_QUERY_LEN) // block_size)

    def blocks_per_row(self, block_size: int, window: int | None) -> int:
        """Blocks of one request at its longest: a sliding group keeps the window and what one call may write."""
        width = self.width(block_size)
        if window is None:
            return width
        kept = window + MAX_QUERY_LEN + max(self.prefill_chunk, MAX_QUERY_LEN)
        return min(width, -(-kept // block_size) + 1)


def null_row(row: int, block_size: int, smallest: int) -> tuple[int, range]:
    """First position and block ids of padded row ``row``: it writes MAX_QUERY_LEN slots nobody else has.

    Args:
        smallest: the smallest block size of all groups, since a row has one position in all of them. Small blocks hold
            one padded row in several blocks, large ones several rows in one block.
    """
    per_block = (smallest - 1) // MAX_QUERY_LEN
    if per_block:
        return 1 + row % per_block * MAX_QUERY_LEN, range(row // per_block, row // per_block + 1)
    blocks = -(-(1 + MAX_QUERY_LEN) // block_size)
    return 1, range(row * blocks, (row + 1) * blocks)


def _per_group(name: str, value: int | dict[str, int] | None, group: str) -> int | None:
    found = value.get(group) if isinstance(value, dict) else value
    if found is not None and (isinstance(found, bool) or not isinstance(found, int) or found < 1):
        raise ValueError(f"{name} of group {group!r} is {found!r}, it must be a positive integer")
    return found


def plan_groups(
    text: PreTrainedConfig,
    capacity: Capacity,
    num_blocks: int | dict[str, int] | None,
    block_size: int | dict[str, int],
) -> tuple[tuple[KVGroup, ...], tuple[int, ...]]:
    """KV groups in the order in which layers first show their geometry, and the group index of every layer.

    Raises:
        ValueError: a size is impossible, a group name is unknown, or a layer reuses keys nobody owns.
    """
    modes = text.kv_sharing_modes
    geometries: dict[tuple[Any, ...], list[int]] = {}
    keys = []
    for layer, layer_type in enumerate(text.layer_types):
        config = text.per_layer_config[layer]
        window = text.sliding_window if layer_type == "sliding_attention" else None
        keys.append((layer_type, config.num_key_value_heads, config.head_dim, window))
        if modes[layer] != "reuse":
            geometries.setdefault(keys[-1], []).append(layer)
    if not geometries:
        raise ValueError("every layer of this config reuses another layer's keys: a cache is built from the target's")
    missing = [layer for layer, key in enumerate(keys) if key not in geometries]
    if missing:
        raise ValueError(f"layer {missing[0]} reuses keys of a geometry no layer owns: {keys[missing[0]]}")

    names: list[str] = []
    for layer_type, *_ in geometries:
        same = sum(name.startswith(layer_type) for name in names)
        names.append(layer_type if not same else f"{layer_type}_{same + 1}")
    for kind, value in (("num_blocks", num_blocks), ("block_size", block_size)):
        unknown = [name for name in value if name not in names] if isinstance(value, dict) else []
        if unknown:
            raise ValueError(f"{kind} names the unknown group {unknown[0]!r}; this config's groups are {names}")

    sizes = []
    for name in names:
        size = _per_group("block_size", block_size, name)
        if size is None:
            raise ValueError(f"block_size has no entry for group {name!r}")
        if size % 16:
            raise ValueError(f"block_size of group {name!r} is {size!r}, it must be a multiple of 16")
        sizes.append(size)
    groups = []
    for index, ((_, kv_heads, head_dim, window), layers) in enumerate(geometries.items()):
        name, size = names[index], sizes[index]
        blocks = _per_group("num_blocks", num_blocks, name)
        if blocks is None:
            blocks = capacity.max_rows * capacity.blocks_per_row(size, window)
        null = null_row(capacity.padded_rows - 1, size, min(sizes))[1].stop
        groups.append(KVGroup(index, name, tuple(layers), kv_heads, head_dim, window, size, blocks + null, null))
    order = {key: index for index, key in enumerate(geometries)}
    return tuple(groups), tuple(order[key] for key in keys)
