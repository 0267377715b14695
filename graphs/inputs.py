"""Inputs of a graph: what each one is, and its shape in terms of the graph's symbols."""

import functools
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

Dim: TypeAlias = int | sympy.Expr
Values: TypeAlias = dict[sympy.Symbol, int]


def dim(size: Any) -> Dim:
    """A size of a fake tensor as an int, or as the sympy expression behind it."""
    return size if isinstance(size, int) else size.node.expr


def evaluate(size: Dim, values: Values) -> int:
    """``size`` with every symbol replaced by its value."""
    return size if isinstance(size, int) else int(size.xreplace(values))


@dataclass(frozen=True)
class Input:
    """One placeholder of the final graph.

    Attributes:
        name: the placeholder; unique.
        label: what the user calls it: Dynamo's source expression where there is one.
        source: index among the arguments of the compiled function; several inputs may share one.
        role: ``parameter`` (weights and buffers), ``cache`` (written in place), ``fixed`` (read where it lies, and held
            by no module: a cache another model writes), ``padding`` (contents of padded rows),
            ``block_table``, ``lengths``, ``host`` (lengths on the CPU), ``token``, ``size`` (a host integer),
            ``unused`` or ``other``.
        static: the address is frozen at capture; otherwise contents are copied into a stable buffer.
        shape: ints, or sympy expressions of the graph's symbols.
        padding: source index of the tensor that holds this input's padded rows.
        rows: axis of the rows and entries a row; of inputs that can be padded (with declared padding the first, and 1).
        given: part of an object that is an argument of the call: it may be another one in the next call.
        layer, phase: of an attention node's own block table.
        group: of a block table, also of the one slots are computed from.
    """

    name: str
    label: str
    source: int
    role: str
    static: bool
    shape: tuple[Dim, ...]
    dtype: torch.dtype | None
    padding: int | None = None
    rows: tuple[int, int] | None = None
    given: bool = False
    layer: str | None = None
    phase: str | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        if self.padding is not None and self.rows is None:
            object.__setattr__(self, "rows", (0, 1))

    @functools.cached_property
    def buffer(self) -> str | None:
        """Name of the stable buffer; inputs with one source share it."""
        if self.static or self.role in ("size", "unused", "padding"):
            return None
        return f"block_table.{self.group}" if self.role == "block_table" else f"input.{self.source}"
