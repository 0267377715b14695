"""Native commands for the few ATen operators between a step's products: the same numbers, bit for bit."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gemma_npu_compile.native import small
from gemma_npu_compile.native.program import Command

aten = torch.ops.aten
Commands = tuple[Command, ...]


def _some(*commands: Command | None) -> Commands:
    """All of them, or none where one is missing."""
    return tuple(c for c in commands if c is not None) if None not in commands else ()


def _is_whole(x: Any) -> bool:
    return not x.is_floating_point() if isinstance(x, Tensor) else type(x) is int


def _binary(name: str) -> Callable[..., Commands]:
    def commands(left: Any, right: Any, *, alpha: Any = 1, out: Tensor) -> Commands:
        if alpha != 1 or not isinstance(left, Tensor):
            return ()
        if _is_whole(left) and _is_whole(right):
            return _some(small.integers(name, left, right, out)) if name != "div" else ()
        if not isinstance(right, Tensor) and name in ("add", "sub"):  # ATen rounds these numbers to the tensor's dtype
            right = torch.tensor(right, dtype=left.dtype).item()
        return _some(small.binary(name, left, right, out))

    return commands


def _whole(name: str) -> Callable[..., Commands]:
    def commands(left: Any, right: Any, *, out: Tensor) -> Commands:
        if not isinstance(left, Tensor) or not _is_whole(left) or not _is_whole(right):
            return ()
        return _some(small.integers(name, left, right, out))

    return commands


def _clamp(x: Tensor, min: Any = None, max: Any = None, *, out: Tensor) -> Commands:  # noqa: A002  (ATen's names)
    if not _is_whole(x) or (min is None) == (max is None):
        return ()
    return _some(small.integers("least", x, min, out) if max is None else small.integers("most", x, max, out))


def _gather(source: Tensor, dim: int, index: Tensor, sparse_grad: bool = False, *, out: Tensor) -> Commands:
    return _some(small.gather(source, dim, index, out)) if source.dim() == out.dim() else ()


def _cat(tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor) -> Commands:
    if any(t.dim() != out.dim() or t.dtype != out.dtype for t in tensors):
        return ()
    parts = out.split([t.shape[dim] for t in tensors], dim)
    return _some(*(small.copy(t, part) for t, part in zip(tensors, parts, strict=True) if t.numel()))


def _stack(tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor) -> Commands:
    if any(t.dtype != out.dtype for t in tensors):
        return ()
    return _some(*(small.copy(t, part) for t, part in zip(tensors, out.unbind(dim), strict=True)))


def _embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale: bool = False, sparse: bool = False, *, out: Tensor
) -> Commands:
    return _some(small.take(weight, indices, out))


def _copy(out: Tensor, source: Tensor, non_blocking: bool = False) -> Commands:
    if _is_whole(source) and source.dtype != out.dtype:
        return _some(small.integers("add", source, 0, out))
    return _some(small.copy(source, out))


def _argmax(x: Tensor, dim: int | None = None, keepdim: bool = False, *, out: Tensor) -> Commands:
    if dim is None or dim % x.dim() != x.dim() - 1:
        return ()
    return _some(small.argmax(x, out))


MOST_PLACES = 16
"""Commands an operator may become: with more, one call of ATen is faster."""


def _folded(name: str, x: Tensor, dim: int, into: Sequence[Tensor]) -> Commands:
    """Whole numbers along an axis, each with the result before it; there is a command for every place, so a few."""
    places = x.unbind(dim)
    if not _is_whole(x) or not 0 < len(places) <= MOST_PLACES:
        return ()
    first = small.integers("add", places[0], 0, into[0])
    pairs = zip(into, places[1:], into[1:], strict=False)
    return _some(first, *(small.integers(name, before, each, to) for before, each, to in pairs))


def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None, out: Tensor) -> Commands:
    return _folded("mul", x, dim, out.unbind(dim)) if x.dim() else ()


def _sum(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None, out: Tensor
) -> Commands:
    if not x.dim() or dim is None or len(dim) != 1:
        return ()
    return _folded("add", x, dim[0], [out.squeeze(dim[0]) if keepdim else out] * x.shape[dim[0]])


COMMANDS: dict[Any, Callable[..., Commands]] = {
    aten.add.Tensor: _binary("add"),
    aten.sub.Tensor: _binary("sub"),
    aten.mul.Tensor: _binary("mul"),
    aten.div.Tensor: _binary("div"),
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.embedding.default: _embedding,
    aten.copy_.default: _copy,
    aten.argmax.default: _argmax,
    aten.gather.default: _gather,
    aten.clamp.default: _clamp,
    aten.floor_divide.default: _whole("floor_divide"),
    aten.remainder.Scalar: _whole("remainder"),
    aten.eq.Tensor: _whole("eq"),
    aten.cumprod.default: _cumprod,
    aten.sum.dim_IntList: _sum,
}
"""By operator: commands for its arguments and ``out``; empty where they do not fit."""
