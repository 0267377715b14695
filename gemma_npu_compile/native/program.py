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
    *("copy.1", "copy.2", "copy.4", "copy.8", "copy.f32.bf16", "copy.bf16.f32"),
    "take",
    *("argmax.f32", "argmax.bf16"),
    *("tanh.f32", "tanh.bf16"),
    "sines",
    "integers",
    *("gather.1", "gather.2", "gather.4", "gather.8"),
)
INDEX = {name: index for index, name in enumerate(_NAMES)}
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
"""Bytes of work in a unit, the least a thread takes: enough to be worth telling another thread about."""


@dataclass(frozen=True)
class Command:
    """One kernel call, or several that belong together: words, number of calls, floats of scratch memory they need."""

    words: tuple[int, ...]
    calls: int = 1
    scratch: int = 0


def bits(number: float) -> int:
    """A double as a word."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def kernel_of(name: str, *dtypes: torch.dtype) -> int | None:
    return INDEX.get(".".join([name, *(_SHORT.get(dtype, "?") for dtype in dtypes)]))


def command(kernel: int, *words: int, work: int, most: int = 64) -> Command:
    """``work`` in bytes, cut into at most ``most`` units; how it is cut never changes a result."""
    return Command((kernel, len(words), max(1, min(most, work // UNIT)), *words))


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
    kernel = kernel_of("linear", x.dtype)
    rows, width = x.shape
    fits = x.dtype == weight.dtype and x.stride(1) == 1 and out.stride(1) == 1 and weight.is_contiguous()
    if kernel is None or not fits or width % LANES or not 0 < rows <= MOST_ROWS:
        return None
    sizes = rows, weight.shape[0], width, out.stride(0), x.stride(0)
    work = weight.nbytes * -(-rows // 4)  # four rows cost what reading the weight once costs
    most = min(64, weight.shape[0] // 48)  # every unit lays out x anew, which costs as much as two columns
    return command(kernel, out.data_ptr(), x.data_ptr(), weight.data_ptr(), *sizes, work=work, most=most)


def _weight(x: Tensor, weight: Tensor | None) -> tuple[torch.dtype, int] | None:
    if weight is None:
        return x.dtype, 0
    return (weight.dtype, weight.data_ptr()) if weight.is_contiguous() else None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, out: Tensor) -> Command | None:
    rows, factor = rows_of(x), _weight(x, weight)
    if rows is None or factor is None or not out.is_contiguous():
        return None
    kernel, width = kernel_of("rms_norm", x.dtype, factor[0]), x.shape[-1]
    if kernel is None or not x.numel():
        return None
    addresses = out.data_ptr(), x.data_ptr(), factor[1]
    return command(kernel, *addresses, x.numel() // width, width, bits(eps), *rows, work=x.nbytes)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, out: tuple[Tensor, Tensor]
) -> Command | None:
    rows, others, factor = rows_of(x), rows_of(residual), _weight(x, weight)
    if rows is None or others is None or rows[:3] != others[:3] or factor is None:
        return None
    kernel, width = kernel_of("add_rms_norm", x.dtype, factor[0]), x.shape[-1]
    if kernel is None or not x.numel() or not (out[0].is_contiguous() and out[1].is_contiguous()):
        return None
    addresses = out[0].data_ptr(), out[1].data_ptr(), x.data_ptr(), residual.data_ptr(), factor[1]
    return command(kernel, *addresses, x.numel() // width, width, bits(eps), *rows, *others[3:], work=2 * x.nbytes)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Command | None:
    kernel, width = kernel_of("rotary", x.dtype, cos.dtype), x.shape[-1]
    rows, tables, others = rows_of(x), rows_of(cos), rows_of(sin)
    if kernel is None or rows is None or tables is None or others is None or cos.dtype != sin.dtype:
        return None
    if tables[:3] != others[:3] or width % (2 * LANES) or not x.numel() or not out.is_contiguous():
        return None
    heads = x.shape[-2]
    addresses = out.data_ptr(), x.data_ptr(), cos.data_ptr(), sin.data_ptr()
    words = x.numel() // width // heads, heads, width, *rows, *tables, *others[3:]
    return command(kernel, *addresses, *words, work=2 * x.nbytes)


def gelu_mul(gate: Tensor, up: Tensor, out: Tensor) -> Command | None:
    kernel, width = kernel_of("gelu_mul", gate.dtype), gate.shape[-1]
    rows, others = rows_of(gate), rows_of(up)
    if kernel is None or rows is None or others is None or rows[:3] != others[:3] or width % LANES:
        return None
    if not gate.numel() or not out.is_contiguous():
        return None
    addresses = out.data_ptr(), gate.data_ptr(), up.data_ptr()
    return command(kernel, *addresses, gate.numel() // width, width, *rows, *others[3:], work=8 * gate.nbytes)


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> Command | None:
    kernel = kernel_of("store_kv", slots.dtype)
    inner = key.shape[1] * key.shape[2]
    packed = all(x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2]) for x in (key, value))
    caches = key_cache.is_contiguous() and value_cache.is_contiguous()
    if kernel is None or not packed or not caches or not slots.is_contiguous() or not key.numel():
        return None
    size = key.element_size()
    addresses = [each.data_ptr() for each in (key, value, key_cache, value_cache, slots)]
    room = key_cache.shape[0] * key_cache.shape[1]
    steps = inner * size, key.stride(0) * size, value.stride(0) * size
    return command(kernel, *addresses, key.shape[0], room, *steps, work=key.nbytes)


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None = None,
    layout: str = "TND",
    layer: str = "",
    query_lens: Tensor | None = None,
    *,
    out: Tensor,
) -> Command | None:
    """Arguments of the operator; all rows with equally many queries."""
    if query_lens is not None:
        return None
    rows, kernels = block_table.shape[0], [kernel_of(name, query.dtype) for name in ("attention", "combine")]
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
    units = max(1, min(256, rows * kv_heads * chunks)), max(1, min(64, query.nbytes * 8 // UNIT))
    calls = [[kernel, len(words), unit, *words] for kernel, unit in zip(kernels, units, strict=True)]
    scratch = rows * kv_heads * chunks * (heads // kv_heads * queries) * (width + 2)
    return Command(tuple(word for each in calls for word in each), 2, scratch)  # type: ignore[misc]


def tanh(x: Tensor, out: Tensor) -> Command | None:
    kernel, rows = kernel_of("tanh", x.dtype), rows_of(x) if x.dim() else None
    if kernel is None or rows is None or not out.is_contiguous() or not x.numel() or x.shape[-1] % LANES:
        return None
    sizes = x.numel() // x.shape[-1], x.shape[-1]
    return command(kernel, out.data_ptr(), x.data_ptr(), *sizes, *rows, work=8 * x.nbytes)


def sines(quarters: int, x: Tensor, out: Tensor) -> Command | None:
    """sin(x + quarters * pi / 2)."""
    if x.dtype != torch.float32 or not x.is_contiguous() or not out.is_contiguous() or not x.numel():
        return None
    return command(INDEX["sines"], out.data_ptr(), x.data_ptr(), x.numel(), quarters, work=16 * x.nbytes)


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
