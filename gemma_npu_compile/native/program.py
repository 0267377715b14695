"""Commands for the native kernels, and programs of them.

A command is a row of 64-bit words that kernels.cpp reads: addresses, sizes, strides in elements, bits of a double. The
functions here turn tensors into words; each returns None where a kernel does not take the tensors it is given, and the
caller computes with ATen. What a command names must outlive it: a captured graph owns its tensors.
"""

import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemma_npu_compile.native.build import library

_NAMES = (
    *("linear.f32", "linear.bf16"),
    *("rms_norm.f32.f32", "rms_norm.bf16.bf16", "rms_norm.bf16.f32"),
    *("add_rms_norm.f32.f32", "add_rms_norm.bf16.bf16", "add_rms_norm.bf16.f32"),
    *("rotary.f32.f32", "rotary.bf16.bf16", "rotary.bf16.f32"),
    *("gelu_mul.f32", "gelu_mul.bf16"),
    *("store_kv.i32", "store_kv.i64"),
    *("attention.f32", "attention.bf16", "combine.f32", "combine.bf16"),
    *(f"{name}.{dtype}" for name in ("add", "sub", "mul", "div") for dtype in ("f32", "bf16")),
    *("copy.1", "copy.2", "copy.4", "copy.8"),
    "take",
    *("argmax.f32", "argmax.bf16"),
    *("tanh.f32", "tanh.bf16"),
    "sines",
    "integers",
    *("gather.1", "gather.2", "gather.4", "gather.8"),
)
_INDEX = {name: index for index, name in enumerate(_NAMES)}
"""Kernels in the order of kernels.cpp."""

_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}
LANES = 8
MOST_ROWS = 64
"""Rows up to which a product is bound by reading its weight; beyond them a blocked matrix product is faster."""

_ERRORS: dict[int, tuple[type[Exception], str]] = {
    1: (IndexError, "a block table names a block the cache does not have"),
    2: (IndexError, "a slot lies outside of the cache"),
    3: (ValueError, "a row is longer than its block table reaches"),
    4: (IndexError, "an index is out of range"),
}


UNIT = 1 << 16
"""Bytes of work a thread takes at a time: enough to be worth telling another thread about."""


@dataclass(frozen=True)
class Command:
    """One kernel call, or several that belong together: words, number of calls, floats of scratch memory they need."""

    words: tuple[int, ...]
    calls: int = 1
    scratch: int = 0


def bits(number: float) -> int:
    """A double as a word."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _kernel(name: str, *dtypes: torch.dtype) -> int | None:
    return _INDEX.get(".".join([name, *(_SHORT.get(dtype, "?") for dtype in dtypes)]))


def _command(kernel: int, *words: int, work: int) -> Command:
    """``work`` in bytes; how it is cut never changes a result."""
    return Command((kernel, len(words), min(64, max(1, work // UNIT)), *words))


def rows_of(x: Tensor, axes: int = 1) -> tuple[int, ...] | None:
    """Three sizes and three strides of what lies in front of the last ``axes`` axes; None when it takes more, or when
    the last axis is not contiguous."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        return None
    merged: list[tuple[int, int]] = []  # size and stride, outermost first
    for size, stride in zip(x.shape[: x.dim() - axes], x.stride()[: x.dim() - axes], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if len(merged) > 3:
        return None
    merged = [(1, 0)] * (3 - len(merged)) + merged
    return (*(size for size, _ in merged), *(stride for _, stride in merged))


def linear(x: Tensor, weight: Tensor, out: Tensor) -> Command | None:
    kernel = _kernel("linear", x.dtype)
    rows, width = x.shape
    fits = x.dtype == weight.dtype and x.stride(1) == 1 and out.stride(1) == 1 and weight.is_contiguous()
    if kernel is None or not fits or width % LANES or not 0 < rows <= MOST_ROWS:
        return None
    sizes = rows, weight.shape[0], width, out.stride(0), x.stride(0)
    work = weight.nbytes * -(-rows // 4)  # four rows cost what reading the weight once costs
    return _command(kernel, out.data_ptr(), x.data_ptr(), weight.data_ptr(), *sizes, work=work)


def _weight(x: Tensor, weight: Tensor | None) -> tuple[torch.dtype, int] | None:
    if weight is None:
        return x.dtype, 0
    return (weight.dtype, weight.data_ptr()) if weight.is_contiguous() else None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, out: Tensor) -> Command | None:
    rows, factor = rows_of(x), _weight(x, weight)
    if rows is None or factor is None or not out.is_contiguous():
        return None
    kernel, width = _kernel("rms_norm", x.dtype, factor[0]), x.shape[-1]
    if kernel is None or not x.numel():
        return None
    addresses = out.data_ptr(), x.data_ptr(), factor[1]
    return _command(kernel, *addresses, x.numel() // width, width, bits(eps), *rows, work=x.nbytes)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, out: tuple[Tensor, Tensor]
) -> Command | None:
    rows, others, factor = rows_of(x), rows_of(residual), _weight(x, weight)
    if rows is None or others is None or rows[:3] != others[:3] or factor is None:
        return None
    kernel, width = _kernel("add_rms_norm", x.dtype, factor[0]), x.shape[-1]
    if kernel is None or not x.numel() or not (out[0].is_contiguous() and out[1].is_contiguous()):
        return None
    addresses = out[0].data_ptr(), out[1].data_ptr(), x.data_ptr(), residual.data_ptr(), factor[1]
    return _command(kernel, *addresses, x.numel() // width, width, bits(eps), *rows, *others[3:], work=2 * x.nbytes)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Command | None:
    kernel, width = _kernel("rotary", x.dtype, cos.dtype), x.shape[-1]
    rows, tables, others = rows_of(x), rows_of(cos), rows_of(sin)
    if kernel is None or rows is None or tables is None or others is None or cos.dtype != sin.dtype:
        return None
    if tables[:3] != others[:3] or width % (2 * LANES) or not x.numel() or not out.is_contiguous():
        return None
    heads = x.shape[-2]
    addresses = out.data_ptr(), x.data_ptr(), cos.data_ptr(), sin.data_ptr()
    words = x.numel() // width // heads, heads, width, *rows, *tables, *others[3:]
    return _command(kernel, *addresses, *words, work=2 * x.nbytes)


def gelu_mul(gate: Tensor, up: Tensor, out: Tensor) -> Command | None:
    kernel, width = _kernel("gelu_mul", gate.dtype), gate.shape[-1]
    rows, others = rows_of(gate), rows_of(up)
    if kernel is None or rows is None or others is None or rows[:3] != others[:3] or width % LANES:
        return None
    if not gate.numel() or not out.is_contiguous():
        return None
    addresses = out.data_ptr(), gate.data_ptr(), up.data_ptr()
    return _command(kernel, *addresses, gate.numel() // width, width, *rows, *others[3:], work=8 * gate.nbytes)


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> Command | None:
    kernel = _kernel("store_kv", slots.dtype)
    inner = key.shape[1] * key.shape[2]
    packed = all(x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2]) for x in (key, value))
    caches = key_cache.is_contiguous() and value_cache.is_contiguous()
    if kernel is None or not packed or not caches or not slots.is_contiguous() or not key.numel():
        return None
    size = key.element_size()
    addresses = [each.data_ptr() for each in (key, value, key_cache, value_cache, slots)]
    room = key_cache.shape[0] * key_cache.shape[1]
    steps = inner * size, key.stride(0) * size, value.stride(0) * size
    return _command(kernel, *addresses, key.shape[0], room, *steps, work=key.nbytes)


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None,
    layout: str,
    out: Tensor,
) -> Command | None:
    """``query`` and ``out`` in ``layout``, all rows with equally many queries."""
    rows, kernels = block_table.shape[0], [_kernel(name, query.dtype) for name in ("attention", "combine")]
    if layout == "TND":
        if not rows or query.shape[0] % rows:
            return None
        query, out = (x.unflatten(0, (rows, -1)) for x in (query, out))
    else:
        query, out = query.transpose(1, 2), out.transpose(1, 2)
    _, queries, heads, width = query.shape
    blocks, block, kv_heads, _ = key_cache.shape
    tensors = query, out, key_cache, value_cache
    if None in kernels or any(x.stride(-1) != 1 for x in tensors) or width % LANES or not query.numel():
        return None
    if not (key_cache.is_contiguous() and value_cache.is_contiguous() and kv_lens.is_contiguous()):
        return None
    if block_table.dtype != torch.int32 or kv_lens.dtype != torch.int32 or block_table.stride(1) != 1:
        return None
    chunk = int(library().gemma_npu_chunk())
    keys = block_table.shape[1] * block
    if window is not None:
        keys = min(keys, window + queries - 1 + chunk)
    chunks = -(-keys // chunk)
    addresses = [each.data_ptr() for each in (out, query, key_cache, value_cache, block_table, kv_lens)]
    sizes = rows, queries, heads, kv_heads, width, block, blocks, block_table.shape[1], window or 0, bits(scale), chunks
    strides = block_table.stride(0), *query.stride()[:3], *out.stride()[:3]
    words = [*addresses, *sizes, *strides]
    units = min(256, rows * kv_heads * chunks), max(1, min(64, query.nbytes * 8 // UNIT))
    calls = [[kernel, len(words), unit, *words] for kernel, unit in zip(kernels, units, strict=True)]
    scratch = rows * kv_heads * chunks * (heads // kv_heads * queries) * (width + 2)
    return Command(tuple(word for each in calls for word in each), 2, scratch)  # type: ignore[misc]


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
    kernel = _kernel(name, left.dtype)
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
    return _command(kernel, out.data_ptr(), left.data_ptr(), other, bits(number), *words, work=2 * out.nbytes)


def copy(source: Tensor, out: Tensor) -> Command | None:
    """``out`` becomes ``source``, of the same dtype, broadcast to its shape."""
    axes = four(out, source) if source.dtype == out.dtype and out.numel() else None
    kernel = _INDEX.get(f"copy.{out.element_size()}")
    if axes is None or kernel is None or source.is_complex():
        return None
    words = (word for axis in axes for word in axis)
    return _command(kernel, out.data_ptr(), source.data_ptr(), *words, work=out.nbytes)


def take(table: Tensor, index: Tensor, out: Tensor) -> Command | None:
    """Rows of ``table`` (first axis) chosen by ``index`` int64 of any shape."""
    good = table.is_contiguous() and index.is_contiguous() and out.is_contiguous() and index.dtype == torch.int64
    if not good or not out.numel() or table.dtype != out.dtype:
        return None
    row = table[0].numel() * table.element_size()
    addresses = out.data_ptr(), table.data_ptr(), index.data_ptr()
    return _command(_INDEX["take"], *addresses, index.numel(), table.shape[0], row, work=out.nbytes)


def argmax(x: Tensor, out: Tensor) -> Command | None:
    """Over the last axis."""
    kernel, rows = _kernel("argmax", x.dtype), rows_of(x)
    if kernel is None or rows is None or not out.is_contiguous() or not x.numel():
        return None
    return _command(kernel, out.data_ptr(), x.data_ptr(), out.numel(), x.shape[-1], *rows, work=x.nbytes)


def tanh(x: Tensor, out: Tensor) -> Command | None:
    kernel, rows = _kernel("tanh", x.dtype), rows_of(x) if x.dim() else None
    if kernel is None or rows is None or not out.is_contiguous() or not x.numel() or x.shape[-1] % LANES:
        return None
    sizes = x.numel() // x.shape[-1], x.shape[-1]
    return _command(kernel, out.data_ptr(), x.data_ptr(), *sizes, *rows, work=8 * x.nbytes)


def sines(quarters: int, x: Tensor, out: Tensor) -> Command | None:
    """sin(x + quarters * pi / 2)."""
    if x.dtype != torch.float32 or not x.is_contiguous() or not out.is_contiguous() or not x.numel():
        return None
    return _command(_INDEX["sines"], out.data_ptr(), x.data_ptr(), x.numel(), quarters, work=16 * x.nbytes)


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
    return _command(_INDEX["integers"], *addresses, number, *words, *types, INTEGER.index(name), work=8 * out.nbytes)


def gather(source: Tensor, dim: int, index: Tensor, out: Tensor) -> Command | None:
    kernel = _INDEX.get(f"gather.{out.element_size()}")
    if kernel is None or index.dtype != torch.int64 or not 0 < out.dim() <= 4 or not out.numel():
        return None
    dim %= out.dim()
    ones = [1] * (4 - out.dim())
    strides = [0 if axis == dim else stride for axis, stride in enumerate(source.stride())]
    words = [*ones, *out.shape, *ones, *out.stride(), *ones, *index.stride(), *ones, *strides]
    addresses = out.data_ptr(), source.data_ptr(), index.data_ptr()
    return _command(kernel, *addresses, source.shape[dim], source.stride(dim), *words, work=out.nbytes)


class Program:
    """Commands that run in order in one call.

    Args:
        commands: what to run.
        names: of the nodes they stand for, for errors; one per command.
    """

    def __init__(self, commands: Sequence[Command], names: Sequence[str] | None = None) -> None:
        named = zip(names or [""] * len(commands), commands, strict=True)
        self._names = [name for name, command in named for _ in range(command.calls)]
        self._words = array("q", [word for command in commands for word in command.words])
        self._address, _ = self._words.buffer_info()
        self._count = sum(command.calls for command in commands)
        self._scratch = max((command.scratch for command in commands), default=0)
        self._run = library().gemma_npu_run

    def __call__(self) -> None:
        """Run the commands on as many threads as torch has been given.

        Raises:
            IndexError, ValueError: a table, slot, index or length does not fit; names the node. What was computed
                before stays.
        """
        status = self._run(self._address, self._count, self._scratch, _threads())
        if status:
            kind, message = _ERRORS[status >> 32]
            index = (status & 0xFFFFFFFF) - 1
            raise kind(f"{self._names[index]}: {message}" if self._names[index] else message)


_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads() -> int:
    return min(torch.get_num_threads(), _CORES)  # a thread without a core of its own would be waited for
