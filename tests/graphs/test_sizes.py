"""Sizes decide how much padding costs and whether a full batch is captured at all; the ceiling must not be missing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.graphs.sizes import capture_sizes, size_for
from gemma_npu_compile.options import Options


@pytest.mark.parametrize(
    ("requested", "ceiling", "smallest", "expected"),
    [
        (None, 8, 2, (2, 4, 8)),
        (None, 8, 1, (1, 2, 4, 8)),
        (None, 6, 2, (2, 4, 6)),
        (None, 2, 2, (2,)),
        (None, 2, 1, (1, 2)),
        (None, 1, 2, (1,)),
        (None, 9, 2, (2, 4, 8, 9)),
        ((3,), 8, 2, (3, 8)),
        ((1, 3), 8, 2, (2, 3, 8)),
        ((1, 3), 8, 1, (1, 3, 8)),
        ((3,), 8, 1, (3, 8)),
        ((5, 3, 5), 5, 2, (3, 5)),
        ((), 5, 2, (5,)),
    ],
)
def test_sizes(requested: tuple[int, ...] | None, ceiling: int, smallest: int, expected: tuple[int, ...]) -> None:
    assert capture_sizes(requested, ceiling, smallest) == expected


@given(st.none() | st.lists(st.integers(2, 64), max_size=5), st.integers(1, 64))
def test_the_ceiling_is_a_size_and_sizes_ascend(requested: list[int] | None, ceiling: int) -> None:
    if requested and max(requested) > ceiling:
        with pytest.raises(CompileError, match=f"has {max(requested)} rows, .* at most {ceiling}"):
            capture_sizes(requested, ceiling)
        return
    sizes = capture_sizes(requested, ceiling)
    assert sizes[-1] == ceiling
    assert list(sizes) == sorted(set(sizes))
    assert set(requested or ()) <= set(sizes)
    for rows in range(1, ceiling + 1):
        size = size_for(rows, sizes)
        assert size is not None
        assert size >= rows
        assert all(other < rows or other >= size for other in sizes)
    assert size_for(ceiling + 1, sizes) is None


def test_default_sizes_waste_less_than_half() -> None:
    sizes = capture_sizes(None, 48)
    assert all(size_for(rows, sizes) < 2 * rows for rows in range(2, 49))  # type: ignore[operator]


def test_options_keep_what_is_asked_for() -> None:
    assert Options(capture_sizes=[4, 1, 4]).capture_sizes == (1, 4)  # type: ignore[arg-type]
