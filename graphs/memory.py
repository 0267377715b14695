"""One memory pool for all captured sizes, and where each intermediate of a graph lies in it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from gemma_npu_compile.errors import CaptureError
from gemma_npu_compile.graphs.plan import Values, dim
from gemma_npu_compile.passes.fx import is_view, tensors, where

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


@dataclass(frozen=True)
class Spec:
    """A tensor of one captured size; ``nbytes`` is the span of its strides."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class Sizes:
    """The numbers symbolic sizes stand for in one capture.

    Args:
        values: value of each symbol.
        name: of the capture, for errors.
    """

    def __init__(self, values: Values, name: str = "graph") -> None:
        self._values, self._name = values, name
        self._known: dict[sympy.Expr, int] = {}

    def number(self, size: Any, node: Node) -> int:
        """``size`` of ``node`` as an integer.

        Raises:
            CaptureError: it is known only from data.
        """
        expr = dim(size)
        if isinstance(expr, int):
            return expr
        if expr not in self._known:
            result = expr.xreplace(self._values)
            if isinstance(result, sympy.Expr) and not result.is_number:
                raise CaptureError(f"{self._name}: {where(node)} has a size known only from data ({expr})")
            self._known[expr] = int(result)
        return self._known[expr]

    def spec(self, fake: Tensor, node: Node) -> Spec:
        """The tensor a fake value of ``node`` stands for."""
        size = tuple(self.number(s, node) for s in fake.shape)
        stride = tuple(self.number(s, node) for s in fake.stride())
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
        return Spec(size, stride, fake.dtype, span * fake.element_size())


def fakes(node: Node) -> list[Tensor]:
    """The fake tensors a node results in."""
    return tensors(node.meta.get("val"))


def _allocates(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and not is_view(node) and not target._schema.is_mutable


def plan_memory(nodes: Sequence[Node], sizes: Sizes) -> tuple[dict[Node, list[tuple[int, Spec]]], int]:
    """An offset for every result, reused after the last node that reads it directly or through a view.

    Returns:
        offset and tensor of each result of the nodes that allocate, and the bytes of the block they lie in.

    Raises:
        CaptureError: a size is known only from data; names the node.
    """
    owners: dict[Node, set[Node]] = {}
    last: dict[Node, Node] = {}
    for node in nodes:
        used = {o for arg in node.all_input_nodes for o in owners.get(arg, ())}
        if node.op == "call_function" and _allocates(node):
            owners[node] = {node}
            last[node] = node
        else:
            owners[node] = used  # a view, a tuple element, or a written argument
        for owner in used:
            last[owner] = node
    dying: dict[Node, list[Node]] = {}
    for owner, node in last.items():
        dying.setdefault(node, []).append(owner)
    layout = Layout()
    offsets: dict[Node, list[tuple[int, Spec]]] = {}
    for node in nodes:
        if node in last:
            specs = [sizes.spec(fake, node) for fake in fakes(node)]
            offsets[node] = [(layout.place(spec.nbytes), spec) for spec in specs]
        if node.op != "output":  # results outlive the graph
            for owner in dying.get(node, ()):
                layout.release(offset for offset, _ in offsets[owner])
    return offsets, layout.peak
