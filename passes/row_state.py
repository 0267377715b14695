"""Where a tensor keeps its rows: the state the row analysis gives to every value of a graph."""

from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from gemma_npu_compile.passes.fx import arguments, tensors


@dataclass(frozen=True)
class Rows:
    """A tensor whose ``axis`` has ``block`` entries for each row, one row after the other.

    What belongs to a row depends on this row's inputs, on values without rows, and, if ``numbered``, on the row's own
    number; never on another row or on how many there are. ``counts``: entry ``i`` is the number ``i``.
    """

    axis: int
    block: int = 1
    numbered: bool = False
    counts: bool = False

    def at(self, axis: int, block: int | None = None) -> "Rows":
        """The same contents with the rows on another axis."""
        return replace(self, axis=axis, block=self.block if block is None else block)

    def values(self) -> "Rows":
        """Contents computed from these: no longer the row numbers themselves."""
        return replace(self, counts=False)


State = Rows | None  # None: no rows, the same however many there are


class MixedRowsError(Exception):
    """A node whose result for one row depends on other rows, or of which that is not known."""


@dataclass(frozen=True)
class Call:
    """One operator call, as a rule sees it.

    Attributes:
        states: of tensor arguments, by schema name; a list for a list of tensors.
        symbol: the number of rows.
    """

    node: Node
    args: dict[str, Any]
    states: dict[str, Any]
    symbol: sympy.Symbol

    @classmethod
    def of(cls, node: Node, env: dict[Node, Any], symbol: sympy.Symbol) -> "Call":
        args = arguments(node)

        def state(arg: Any) -> Any:
            if isinstance(arg, (list, tuple)):
                return [state(each) for each in arg]
            return env.get(arg) if isinstance(arg, Node) else None

        return cls(node, args, {name: state(arg) for name, arg in args.items()}, symbol)

    def shape(self, name: str) -> tuple[Any, ...]:
        return tuple(expression(size) for size in self.args[name].meta["val"].shape)

    @property
    def result(self) -> Tensor:
        """The fake result, or the first of several."""
        return tensors(self.node.meta["val"])[0]

    def dim(self, name: str, of: str = "self") -> int:
        """An axis argument, counted from the front."""
        return int(self.args[name]) % max(1, len(self.shape(of)))

    def refuse(self, why: str) -> MixedRowsError:
        return MixedRowsError(why)

    def counted(self, size: Any) -> int | None:
        """``c`` for a size of ``c`` entries a row; None for one without rows."""
        return entries(expression(size), self.symbol)


def expression(size: Any) -> Any:
    """A size, or a node that stands for one, as an int or a sympy expression."""
    if isinstance(size, Node):
        size = size.meta["val"]
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


def depends(value: Any, symbol: sympy.Symbol) -> bool:
    """Whether a number depends on how many rows there are."""
    found = expression(value)
    return isinstance(found, sympy.Basic) and symbol in found.free_symbols


def entries(size: Any, symbol: sympy.Symbol) -> int | None:
    """``c`` for a size of ``c * symbol``; None for a size without rows.

    Raises:
        MixedRowsError: the size depends on the number of rows in another way.
    """
    if not depends(size, symbol):
        return None
    count = sympy.simplify(size / symbol)
    if not count.is_Integer or count <= 0:
        raise MixedRowsError(f"a size of {size} is not a number of entries for each row")
    return int(count)
