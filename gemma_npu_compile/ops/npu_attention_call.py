"""One call of fused attention, v1 and v2 alike, and what an Ascend device refuses about it.

Sources: op-plugin's documents of ``npu_fused_infer_attention_score`` and ``_v2``; capabilities.py for what is legal on
which SoC.
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gemma_npu_compile.capabilities import AttentionCall
from gemma_npu_compile.ops.npu import TILING, AclnnError, emulated

log = logging.getLogger(__name__)

LAYOUTS = ("TND", "BNSD", "BSND", "BSH", "BNSD_BSND")
"""What ``input_layout`` may be here; with two names, that of the query and that of the result."""
KNOWN_LAYOUTS = {*LAYOUTS, "NTD", "NSD", "BSH_BNSD", "BSND_BNSD", "NTD_TND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD"}
KNOWN_LAYOUTS |= {"TND_NTD"}
"""What the operator knows."""
ALL_TOKENS = 2147483647
TRIANGLE = 2048


def steps(cumulative: Sequence[int]) -> list[int]:
    """Counts whose running sums are given."""
    return [cumulative[0], *(b - a for a, b in pairwise(cumulative))] if cumulative else []


@dataclass(frozen=True)
class Call:
    """The operands of one call under one name each.

    Attributes:
        name: of the operator.
        query_lens, kv_lens: as given: cumulative in TND (``kv_lens`` only when dense), per row otherwise.
        heads, kv_heads: ``kv_heads`` 0 stands for ``heads``.
    """

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    query_lens: Sequence[int] | None = None
    kv_lens: Sequence[int] | None = None
    block_table: Tensor | None = None
    mask: Tensor | None = None
    heads: int = 1
    kv_heads: int = 0
    scale: float = 1.0
    pre_tokens: int = ALL_TOKENS
    next_tokens: int = ALL_TOKENS
    layout: str = "BSH"
    sparse_mode: int = 0
    inner_precise: int = 0
    block_size: int = 0
    lse: bool = False

    def error(self, text: str) -> AclnnError:
        """What tiling says."""
        return AclnnError(f"{self.name}: {text}", TILING)

    @property
    def axes(self) -> str:
        """Layout of the query."""
        return self.layout.partition("_")[0]

    @functools.cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """``(rows, q_len, kv_heads, head_dim)``; ``q_len`` is that of the longest row."""
        sizes, kv_heads = self.query.shape, self.kv_heads or self.heads
        if self.axes == "TND":
            counts = steps(self.query_lens or ())
            return len(counts), max(counts, default=0), kv_heads, sizes[2]
        head_dim = sizes[2] // self.heads if self.axes == "BSH" else sizes[3]
        return sizes[0], sizes[self.axes.index("S")], kv_heads, head_dim

    @property
    def query_counts(self) -> list[int]:
        """Queries of each row that count; the rest of a rectangular query is padding on the right."""
        if self.axes == "TND":
            return steps(self.query_lens or ())
        rows, q_len = self.shape[:2]
        return [q_len] * rows if self.query_lens is None or q_len == 1 else _per_row(self.query_lens, rows)

    @property
    def kv_counts(self) -> list[int]:
        """Keys of each row."""
        rows = self.shape[0]
        if self.kv_lens is None:
            return [self.key.shape[2 if self.axes == "BNSD" else 1]] * rows
        if self.axes == "TND" and self.block_table is None:
            return steps(self.kv_lens)
        return _per_row(self.kv_lens, rows)

    @property
    def mode(self) -> int:
        """``sparse_mode`` as the operator takes it: with one query per row it is ignored."""
        return 0 if self.shape[1] == 1 else self.sparse_mode

    @property
    def explicit(self) -> bool:
        """Whether the mask says position by position what is hidden; the triangle of modes 2 to 4 does not."""
        if self.mask is None or self.sparse_mode in (0, 1):
            return self.mask is not None
        # With one query the mode is ignored, a mask of the explicit form is not.
        return self.shape[1] == 1 and not is_triangle(self.mask)


def _per_row(lengths: Sequence[int], rows: int) -> list[int]:
    return list(lengths) * rows if len(lengths) == 1 else list(lengths[:rows])


def is_triangle(mask: Tensor) -> bool:
    """Whether the mask has the shape that sparse modes 2 to 4 want."""
    return mask.shape[-2:] == (TRIANGLE, TRIANGLE) and mask.numel() == TRIANGLE * TRIANGLE


@functools.cache
def _say_float32() -> None:
    log.warning(
        "float32 attention: the operator takes float16 and bfloat16. float32 is the emulation's one exception, because "
        "comparing tokens exactly needs it; a device refuses this call."
    )


def _check_operands(call: Call) -> None:
    query, key, value, axes = call.query, call.key, call.value, call.axes
    if query.dim() != len(axes):
        raise call.error(f"a {axes} query has {len(axes)} dimensions, got {tuple(query.shape)}")
    if not query.dtype == key.dtype == value.dtype:
        raise call.error(f"dtypes differ: query {query.dtype}, key {key.dtype}, value {value.dtype}")
    if query.dtype == torch.float32:
        _say_float32()
    elif query.dtype not in (torch.float16, torch.bfloat16):
        raise call.error(f"query is {query.dtype}, it must be float16 or bfloat16")
    operands = {"query": query, "key": key, "value": value, "atten_mask": call.mask, "block_table": call.block_table}
    for name, operand in operands.items():
        if operand is not None and not operand.is_contiguous():
            raise call.error(f"{name} must be contiguous, its shape {tuple(operand.shape)} has {operand.stride()}")
    if call.heads < 1:
        raise call.error(f"{call.heads} heads, there must be at least one")
    if query.shape[2] % call.heads if axes == "BSH" else query.shape[axes.index("N")] != call.heads:
        raise call.error(f"{call.heads} heads, the {axes} query is {tuple(query.shape)}")
    kv_heads = call.kv_heads or call.heads
    if kv_heads < 0 or call.heads % kv_heads:
        raise call.error(f"{call.heads} query heads are not a multiple of {kv_heads} key and value heads")
    if key.shape != value.shape:
        raise call.error(f"key is {tuple(key.shape)}, value {tuple(value.shape)}; they must be alike")
    if axes == "TND" and (call.query_lens is None or call.kv_lens is None):
        raise call.error("TND needs the actual lengths of query and of key and value")


def _check_platform(call: Call) -> None:
    rows, q_len, kv_heads, head_dim = call.shape
    platform = emulated()
    verdict = platform.judge(
        AttentionCall(
            layout=call.axes,
            head_dim=head_dim,
            q_len=q_len,
            heads=call.heads,
            kv_heads=kv_heads,
            block_size=None if call.block_table is None else call.block_size,
            mask="full" if call.explicit else {2: "causal", 3: "causal", 4: "band"}.get(call.mode, "none"),
        )
    )
    if not verdict.legal:
        raise AclnnError(f"{verdict.rule}; {call.name} on {platform.name} ({verdict.source})", TILING)
    if call.layout == "BNSD_BSND" and q_len == 1:
        raise call.error("input_layout BNSD_BSND needs more than one query per row")
    most = 4096 if call.axes == "TND" else 65536
    if rows > most:
        raise call.error(f"{rows} rows, {call.axes} takes at most {most}")


def _check_keys(call: Call) -> int:
    """Form of the keys; returns how many a row can have."""
    rows, _, kv_heads, head_dim = call.shape
    axes, shape, table, size = call.axes, tuple(call.key.shape), call.block_table, call.block_size
    wide = kv_heads * head_dim
    if table is None:
        axis = {"TND": 0, "BNSD": 2}.get(axes, 1)
        keys = shape[axis] if len(shape) == len(axes) else 0
        form = {
            "TND": (keys, kv_heads, head_dim),
            "BNSD": (rows, kv_heads, keys, head_dim),
            "BSND": (rows, keys, kv_heads, head_dim),
            "BSH": (rows, keys, wide),
        }[axes]
        if shape != form:
            wanted = str(form).replace(f"{keys}", "keys", 1) if axis == 0 else form
            raise call.error(f"dense {axes} keys are {shape}, they must be {wanted}")
        return keys
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != rows:
        raise call.error(f"block_table is {table.dtype} {tuple(table.shape)}, it must be int32 ({rows}, blocks)")
    if call.kv_lens is None:
        raise call.error("paged keys need the actual lengths of key and value")
    forms: dict[str, tuple[int, ...]] = {"BnBsH": (size, wide)}
    if axes in ("BNSD", "TND"):
        forms["BnNBsD"] = (kv_heads, size, head_dim)
    if shape[1:] not in forms.values():
        wanted = " or ".join(f"{name} (blocks, {str(form)[1:]}" for name, form in forms.items())
        raise call.error(f"paged keys of a {axes} query are {shape}, block_size is {size}; they must be {wanted}")
    if size < 1:
        raise call.error(f"block_size is {size}, paged keys need that of the cache")
    if len(shape) == 3 and wide > 65535:
        raise call.error(f"BnBsH keys are {wide} wide, at most 65535; BnNBsD has no such limit")
    return table.shape[1] * size


def _check_lengths(call: Call, capacity: int) -> None:
    rows, q_len = call.shape[:2]
    packed = call.axes == "TND"
    for what, given, most in (("query", call.query_lens, q_len), ("key and value", call.kv_lens, capacity)):
        if given is None:
            continue
        text = f"actual lengths of {what} are {list(given)}"
        cumulative = packed and (what == "query" or call.block_table is None)
        if (packed and len(given) != rows) or (len(given) != 1 and len(given) < rows):
            raise call.error(f"{text}: {len(given)} for {rows} rows")
        if cumulative:
            total = call.query.shape[0] if what == "query" else capacity
            if min(steps(given), default=0) < 0 or (given[-1] if given else 0) != total:
                raise call.error(f"{text}: TND counts cumulatively, up to {total}")
        elif given and (min(given) < 0 or (max(given) > most and not (what == "query" and q_len == 1))):
            raise call.error(f"{text}: each must lie in 0 .. {most}")
    longest = max(call.kv_counts, default=0)
    if q_len == 1 and longest > 262144:
        raise call.error(f"{longest} keys, one query takes at most 262144")


def _check_mask(call: Call, capacity: int) -> None:
    rows, q_len = call.shape[:2]
    mask, mode = call.mask, call.mode
    if call.sparse_mode not in range(5):
        raise call.error(f"sparse_mode is {call.sparse_mode}, only 0 to 4 are emulated")
    if call.inner_precise not in (range(2) if q_len == 1 else range(4)):
        raise call.error(f"inner_precise is {call.inner_precise}, {q_len} queries take 0 to {1 if q_len == 1 else 3}")
    if mask is None:
        if mode != 0:
            raise call.error(f"sparse_mode {mode} needs atten_mask")
        return
    shape = tuple(mask.shape)
    if mask.dtype not in (torch.bool, torch.int8, torch.uint8):
        raise call.error(f"atten_mask is {mask.dtype}, it must be bool, int8 or uint8")
    if not call.explicit:
        if not is_triangle(mask):
            raise call.error(f"atten_mask is {shape}, sparse_mode {call.sparse_mode} takes ({TRIANGLE}, {TRIANGLE})")
        return
    if call.axes == "TND":
        raise call.error(f"TND takes no explicit atten_mask, got {shape} with sparse_mode {call.sparse_mode}")
    batches = {1, rows}
    forms = {(1, q_len), *((each, 1, q_len) for each in batches)}
    forms |= {(each,) for each in batches} if q_len == 1 else {(q_len,)}
    if shape[:-1] not in forms or shape[-1] < capacity:
        raise call.error(
            f"atten_mask is {shape}, it must be ({rows} or 1, 1, {q_len}, keys), (1, {q_len}, keys) or "
            f"({rows if q_len == 1 else q_len}, keys) with at least {capacity} keys"
        )


def check(call: Call) -> None:
    """Refuse what the emulated SoC refuses.

    Raises:
        AclnnError: a limit is broken; names the operand, what it is and what it must be.
    """
    if call.layout not in LAYOUTS:
        raise call.error(f"input_layout {call.layout!r} is not emulated, only {', '.join(LAYOUTS)}")
    _check_operands(call)
    _check_platform(call)
    capacity = _check_keys(call)
    _check_lengths(call, capacity)
    _check_mask(call, capacity)
