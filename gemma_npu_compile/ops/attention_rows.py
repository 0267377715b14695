"""What every kernel of ``gemma_npu::paged_attention`` asks of the lengths and counts of its rows."""

from collections.abc import Sequence


def check_reach(layer: str, longest: int, width: int, block_size: int) -> None:
    """Raise ValueError, naming the layer, when a row is longer than its block table reaches."""
    room = width * block_size
    if longest > room:
        raise ValueError(
            f"paged_attention of layer {layer!r}: kv_lens has {longest}, the table's {width} blocks of {block_size} "
            f"hold {room}"
        )


def check_counts(layer: str, counts: Sequence[int], rows: int, tokens: int) -> None:
    """Raise ValueError, naming the layer, unless there is a count per row and they add up to all tokens."""
    if len(counts) != rows or min(counts, default=0) < 0 or sum(counts) != tokens:
        raise ValueError(
            f"paged_attention of layer {layer!r}: query_lens {list(counts)} must be {rows} counts adding up to {tokens}"
        )


def equal_count(layer: str, rows: int, tokens: int) -> int:
    """Queries of each row when all have equally many; ValueError, naming the layer, when they cannot have."""
    if rows == 0 or tokens % rows:
        raise ValueError(f"paged_attention of layer {layer!r}: {tokens} queries do not divide into {rows} rows")
    return tokens // rows
