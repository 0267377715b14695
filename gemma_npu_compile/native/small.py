"""Commands for small things between products: elementwise arithmetic, integers, copies and lookups."""

import torch
from torch import Tensor

from gemma_npu_compile.native.program import INDEX, Command, bits, command, kernel_of, rows_of


def four(*tensors: Tensor) -> tuple[list[int], ...] | None:
    """Sizes of the first tensor, and strides of all, broadcast to it, as four axes; None when it takes more."""
    shape = tensors[0].shape
    strides = [t.expand(shape).stride() for t in tensors]
    merged: list[list[int]] = []  # size, then a stride per tensor, outermost first
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if merged and all(outer == size * step for outer, step in zip(merged[-1][1:], steps, strict=True)):
            merged[-1] = [merged[-1][0] * size, *steps]
        else:
            merged.append([size, *steps])
    if len(merged) > 4:
        return None
    axes = [[1, *[0] * len(tensors)]] * (4 - len(merged)) + merged
    return tuple([axis[index] for axis in axes] for index in range(1 + len(tensors)))


def binary(name: str, left: Tensor, right: Tensor | float, out: Tensor) -> Command | None:
    """``add``, ``sub``, ``mul`` or ``div`` of tensors of one dtype, or of a tensor and a number."""
    kernel = kernel_of(name, left.dtype)
    if kernel is None or out.dtype != left.dtype or not out.numel():
        return None
    if isinstance(right, Tensor):
        if right.dtype != left.dtype:
            return None
        axes, other, number = four(out, left, right), right.data_ptr(), 0.0
    else:
        axes, other, number = four(out, left, left), 0, float(right)
    if axes is None:
        return None
    words = [word for axis in axes for word in axis]
    return command(kernel, out.data_ptr(), left.data_ptr(), other, bits(number), *words, work=2 * out.nbytes)


def copy(source: Tensor, out: Tensor) -> Command | None:
    """``out`` becomes ``source``, broadcast to its shape; between float32 and bfloat16 it is rounded."""
    kernel = (
        INDEX.get(f"copy.{out.element_size()}")
        if source.dtype == out.dtype
        else kernel_of("copy", out.dtype, source.dtype)
    )
    axes = four(out, source) if kernel is not None and out.numel() else None
    if axes is None or kernel is None or source.is_complex():
        return None
    words = (word for axis in axes for word in axis)
    return command(kernel, out.data_ptr(), source.data_ptr(), *words, work=out.nbytes)


def take(table: Tensor, index: Tensor, out: Tensor) -> Command | None:
    """Rows of ``table`` (first axis) chosen by ``index`` int64 of any shape."""
    good = table.is_contiguous() and index.is_contiguous() and out.is_contiguous() and index.dtype == torch.int64
    if not good or not out.numel() or table.dtype != out.dtype:
        return None
    row = table[0].numel() * table.element_size()
    addresses = out.data_ptr(), table.data_ptr(), index.data_ptr()
    return command(INDEX["take"], *addresses, index.numel(), table.shape[0], row, work=out.nbytes)


def argmax(x: Tensor, out: Tensor) -> Command | None:
    """Over the last axis."""
    kernel, rows = kernel_of("argmax", x.dtype), rows_of(x)
    if kernel is None or rows is None or not out.is_contiguous() or not x.numel():
        return None
    return command(kernel, out.data_ptr(), x.data_ptr(), out.numel(), x.shape[-1], *rows, work=x.nbytes)


_TYPES = {torch.int32: 0, torch.int64: 1, torch.bool: 2, torch.float32: 3}
INTEGER = ("add", "sub", "mul", "floor_divide", "remainder", "eq", "least", "most")


def integers(name: str, left: Tensor, right: Tensor | int, out: Tensor) -> Command | None:
    """Arithmetic on int32, int64 and bool, of any mixture; ``out`` may be float32 too, a conversion. ``least`` and
    ``most`` are the bounds of a clamp."""
    operands = [left, right] if isinstance(right, Tensor) else [left]
    if any(_TYPES.get(x.dtype, 3) == 3 for x in operands) or out.dtype not in _TYPES or not out.numel():
        return None
    if not isinstance(right, Tensor) and (type(right) is not int or (right == 0 and name in INTEGER[3:5])):
        return None
    if isinstance(right, Tensor) and name in INTEGER[3:5]:
        return None  # a zero in it is ATen's to refuse
    axes = four(out, left, operands[-1])
    if axes is None:
        return None
    other, number = (right.data_ptr(), 0) if isinstance(right, Tensor) else (0, right)
    types = [_TYPES[x.dtype] for x in (out, left, operands[-1])]
    words = [word for axis in axes for word in axis]
    addresses = out.data_ptr(), left.data_ptr(), other
    return command(INDEX["integers"], *addresses, number, *words, *types, INTEGER.index(name), work=8 * out.nbytes)


def gather(source: Tensor, dim: int, index: Tensor, out: Tensor) -> Command | None:
    kernel = INDEX.get(f"gather.{out.element_size()}")
    if kernel is None or index.dtype != torch.int64 or not 0 < out.dim() <= 4 or not out.numel():
        return None
    dim %= out.dim()
    ones = [1] * (4 - out.dim())
    strides = [0 if axis == dim else stride for axis, stride in enumerate(source.stride())]
    words = [*ones, *out.shape, *ones, *out.stride(), *ones, *index.stride(), *ones, *strides]
    addresses = out.data_ptr(), source.data_ptr(), index.data_ptr()
    return command(kernel, *addresses, source.shape[dim], source.stride(dim), *words, work=out.nbytes)
