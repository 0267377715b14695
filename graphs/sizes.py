"""Capture sizes: how many rows the captured graphs have."""

from collections.abc import Sequence

from gemma_npu_compile.errors import CompileError


def capture_sizes(requested: Sequence[int] | None, ceiling: int, smallest: int = 2) -> tuple[int, ...]:
    """Sizes in ascending order; the last one is always ``ceiling``.

    Args:
        requested: sizes asked for; None for powers of two.
        ceiling: rows the graph's inputs were made for.
        smallest: fewer rows never come: torch traces one row apart from many, unless the caller goes past Dynamo.

    Raises:
        CompileError: a requested size exceeds the ceiling.
    """
    if requested is None:
        sizes = [1 << i for i in range(ceiling.bit_length())]
    else:
        sizes = list(requested)
        if sizes and max(sizes) > ceiling:
            raise CompileError(
                f"capture_sizes has {max(sizes)} rows, this graph's inputs were made for at most {ceiling} "
                "(max_rows of the cache)"
            )
    return tuple(sorted({max(size, min(smallest, ceiling)) for size in (*sizes, ceiling)}))


def size_for(rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest size that holds ``rows``, or None when none does."""
    return next((size for size in sizes if size >= rows), None)
