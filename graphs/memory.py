"""One memory pool for all captured sizes, and where each intermediate of a graph lies in it."""

from collections.abc import Iterable

import torch
from torch import Tensor

ALIGNMENT = 64


class Pool:
    """Blocks of host memory that captured graphs share. Only one of them runs at a time, and none keeps results in it.

    The largest size is captured first, so one block serves all; a later, larger capture gets a block of its own because
    the addresses of the earlier ones are frozen.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def take(self, nbytes: int) -> Tensor:
        """A block of at least ``nbytes`` (uint8)."""
        for block in self._blocks:
            if block.nbytes >= nbytes:
                return block
        self._blocks.append(torch.zeros(max(nbytes, ALIGNMENT), dtype=torch.uint8))
        return self._blocks[-1]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def free(self) -> None:
        self._blocks.clear()


class Layout:
    """First-fit offsets for buffers whose lifetimes are known; ``peak`` is the block they need."""

    def __init__(self) -> None:
        self._live: list[tuple[int, int]] = []  # (start, end), sorted
        self.peak = 0

    def place(self, nbytes: int) -> int:
        """Offset of a new buffer, clear of all live ones."""
        need = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        offset = 0
        for index, (start, end) in enumerate(self._live):
            if start - offset >= need:
                self._live.insert(index, (offset, offset + need))
                break
            offset = end
        else:
            self._live.append((offset, offset + need))
        self.peak = max(self.peak, offset + need)
        return offset

    def release(self, offsets: Iterable[int]) -> None:
        """End the life of the buffers at ``offsets``."""
        gone = set(offsets)
        self._live = [span for span in self._live if span[0] not in gone]
