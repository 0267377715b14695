"""``gemma_npu::paged_attention``: attention over a paged KV cache, its metadata as operands."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from gemma_npu_compile.ops.attention_npu import paged_attention_npu
from gemma_npu_compile.ops.attention_rows import check_counts, check_reach, equal_count
from gemma_npu_compile.ops.library import NAMESPACE, define

LAYOUTS = ("TND", "BNSD")


def _check(
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
) -> None:
    where = f"paged_attention of layer {layer!r}"
    if layout not in LAYOUTS:
        raise ValueError(f"{where}: layout is {layout!r}, it must be one of {', '.join(LAYOUTS)}")
    if query.dim() != len(layout):
        raise ValueError(f"{where}: a {layout} query has {len(layout)} dimensions, got shape {tuple(query.shape)}")
    if key_cache.dim() != 4 or value_cache.shape != key_cache.shape:
        raise ValueError(
            f"{where}: the caches must both be (blocks, block_size, kv_heads, head_dim), got {tuple(key_cache.shape)} "
            f"and {tuple(value_cache.shape)}"
        )
    if query.shape[-1] != key_cache.shape[3]:
        raise ValueError(f"{where}: query heads are {query.shape[-1]} wide, the cache's {key_cache.shape[3]}")
    heads = query.shape[1]
    if heads % key_cache.shape[2]:
        raise ValueError(f"{where}: {heads} query heads are not a multiple of {key_cache.shape[2]} kv heads")
    if not query.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(f"{where}: dtypes differ: {query.dtype}, {key_cache.dtype}, {value_cache.dtype}")
    if block_table.dim() != 2 or kv_lens.dim() != 1:
        raise ValueError(
            f"{where}: block_table must be (rows, blocks) and kv_lens (rows,), got {tuple(block_table.shape)} and "
            f"{tuple(kv_lens.shape)}"
        )
    if window is not None and window < 1:
        raise ValueError(f"{where}: window is {window}, it must be positive, or None for all keys")
    rows = block_table.shape[0]
    if kv_lens.shape[0] != rows:
        raise ValueError(f"{where}: the block table has {rows} rows, kv_lens {kv_lens.shape[0]}")
    if query_lens is not None and tuple(query_lens.shape) != (rows,):
        raise ValueError(f"{where}: query_lens must be ({rows},), one count per row, got {tuple(query_lens.shape)}")
    if layout == "BNSD" and (query.shape[0] != rows or query_lens is not None):
        raise ValueError(f"{where}: a BNSD query has one entry per row of the block table ({rows}) and no query_lens")


_workspaces = threading.local()
_CHUNK = 1 << 20
"""Bytes of keys fetched at a time: what is multiplied next should still be in the processor's cache."""

Fetch = Callable[[int, int, int], Tensor]
"""``fetch(start, stop, length)``: the first ``length`` keys (or values) of rows ``start .. stop - 1`` in float32, as
``(kv_heads, stop - start, length, head_dim)``. The memory is the next fetch's too."""


def _workspace(name: str, size: int, dtype: torch.dtype) -> Tensor:
    """Memory that one kernel call uses and the next overwrites: fresh megabytes cost more than copying into them."""
    kept: Tensor | None = getattr(_workspaces, name, None)
    if kept is None or kept.numel() < size:
        with torch.inference_mode(False):  # it outlives the mode of this call
            kept = torch.empty(size, dtype=dtype)
        setattr(_workspaces, name, kept)
    return kept[:size]


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    """Blocks (first axis) of a contiguous cache, in float32, in a workspace; flat."""
    flat = cache.view(cache.shape[0], -1)
    count, size = blocks.shape[0], flat.shape[1]
    # Whole blocks are contiguous: index_select copies them several times faster than advanced indexing.
    space = _workspace(f"gather_{flat.dtype}", count * size, flat.dtype)
    torch.index_select(flat, 0, blocks, out=space.view(count, size))
    return space if flat.dtype == torch.float32 else _workspace("gather", count * size, torch.float32).copy_(space)


def fetch_blocks(cache: Tensor, block_table: Tensor, heads_first: bool = False) -> Fetch:
    """Keys of a paged cache.

    Args:
        cache: ``(blocks, block_size, kv_heads, head_dim)``; ``(blocks, kv_heads, block_size, head_dim)`` when
            ``heads_first``. Contiguous.
        block_table: ``(rows, width)`` int32 or int64.
    """
    kv_heads, block_size = cache.shape[1:3] if heads_first else (cache.shape[2], cache.shape[1])

    def fetch(start: int, stop: int, length: int) -> Tensor:
        blocks = block_table[start:stop, : -(-length // block_size)]
        if not heads_first:
            keys = _gather(cache, blocks.flatten()).view(stop - start, -1, kv_heads, cache.shape[3])
            return keys[:, :length].permute(2, 0, 1, 3)
        parts = blocks * kv_heads + torch.arange(kv_heads, dtype=blocks.dtype)[:, None, None]
        return _gather(cache.flatten(0, 1), parts.flatten()).view(kv_heads, stop - start, -1, cache.shape[3])[
            :, :, :length
        ]

    return fetch


def _batches(lengths: Sequence[int], bytes_per_key: int) -> Iterator[tuple[int, int, int]]:
    """``(start, stop, length)`` of neighbouring rows of equal length, few enough for the processor's cache."""
    start = 0
    for length, rows in groupby(lengths):
        end = start + len(list(rows))
        step = max(1, _CHUNK // (bytes_per_key * max(1, length)))
        for first in range(start, end, step) if length > 0 else ():
            yield first, min(first + step, end), length
        start = end


def attend(
    query: Tensor,
    keys: Fetch,
    values: Fetch,
    lengths: Sequence[int],
    scale: float,
    hidden: Tensor | None,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Attention in float32 with one rounding, the core of every attention kernel here.

    Args:
        query: ``(rows, kv_heads, heads / kv_heads, q_len, head_dim)``; query heads that share keys lie side by side.
        lengths: keys that may be read, row by row. Rows of another length are another batch: a long row does not make
            the short ones read more.
        hidden: ``(rows, q_len, at least the longest length)`` bool, True where a query does not see a key; None when
            all keys are seen.
        out: shape of ``query``; a query that sees no key gets zeros.
        lse: ``(rows, kv_heads, heads / kv_heads, q_len)`` float32 for the logarithm of the sum of exponentials.
    """
    rows, kv_heads, per_kv, q_len, head_dim = query.shape
    shape = (rows, kv_heads, per_kv * q_len)
    width = max(lengths, default=0)
    if width <= 0:
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return
    batches = list(_batches(lengths, 4 * kv_heads * head_dim))
    # Query heads that share a kv head become rows of one matrix: GQA without repeating keys. One product per kv head
    # reads the keys where they lie; a product over all of them would first copy them to another layout.
    grouped = query.reshape(*shape, head_dim).float()
    if scale != 1.0:
        grouped = grouped * scale
    scores = _workspace("scores", rows * kv_heads * per_kv * q_len * width, torch.float32).view(*shape, width)
    if min(lengths) < width:
        scores.fill_(-torch.inf)
    for start, stop, length in batches:
        for head, found in enumerate(keys(start, stop, length)):
            torch.bmm(grouped[start:stop, head], found.transpose(1, 2), out=scores[start:stop, head, :, :length])
    if hidden is not None:
        scores.view(rows, kv_heads, per_kv, q_len, width).masked_fill_(hidden[:, None, None, :, :width], -torch.inf)
    if lse is not None:
        lse.copy_(torch.logsumexp(scores, -1).view(lse.shape))
    weights = torch.softmax(scores, -1, out=scores)
    # Heads of a group and their queries must lie at one distance to be written in place.
    straight = q_len == 1 or per_kv == 1 or out.stride(2) == q_len * out.stride(3)
    direct = straight and out.dtype == torch.float32
    context = out.view(*shape, head_dim) if direct else torch.empty(*shape, head_dim)
    for start, stop, length in batches:
        for head, found in enumerate(values(start, stop, length)):
            torch.bmm(weights[start:stop, head, :, :length], found, out=context[start:stop, head])
    if not direct:
        out.copy_(context.view(query.shape))
    # A softmax over nothing is NaN, and one number of each query tells.
    if math.isnan(weights[:, 0, :q_len, 0].sum().item()):
        for row, length in enumerate(lengths):
            if length <= 0:
                out[row].zero_()
            elif hidden is not None:
                out[row].masked_fill_(hidden[row, :, :length].all(-1)[:, None], 0)


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """``(rows, q_len, heads, head_dim)`` as :func:`attend` wants it; a view."""
    return x.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    """Attention of ``query`` (rows, q_len, heads, head_dim) into ``out``; only blocks a query can see are read."""
    rows, q_len = query.shape[:2]
    block_size, kv_heads = key_cache.shape[1:3]
    width = block_table.shape[1]
    if window is None:
        first = torch.zeros_like(kv_lens)
        span = -(-int(kv_lens.max()) // block_size)
    else:
        first = (kv_lens - (window + q_len - 1)).clamp(min=0) // block_size
        span = (window + q_len - 2) // block_size + 2
    span = max(1, min(span, width))
    columns = first[:, None] + torch.arange(span)
    blocks = block_table.gather(1, columns.clamp(max=width - 1).long())

    # A clamped column repeats the last block, but its positions lie past every length and are masked.
    key_positions = (first * block_size)[:, None] + torch.arange(span * block_size)
    query_positions = (kv_lens - q_len)[:, None] + torch.arange(q_len)
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    keys, values = fetch_blocks(key_cache, blocks), fetch_blocks(value_cache, blocks)
    lengths = [span * block_size] * rows
    attend(by_kv_head(query, kv_heads), keys, values, lengths, scale, hidden, by_kv_head(out, kv_heads))


def _run(
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
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    rows, width = block_table.shape
    if query.numel() == 0:
        return out
    check_reach(layer, int(kv_lens.max()) if rows else 0, width, key_cache.shape[1])
    cached = key_cache, value_cache
    if layout == "BNSD":
        _attend(query.transpose(1, 2), *cached, block_table, kv_lens, scale, window, out.transpose(1, 2))
        return out
    tokens = query.shape[0]
    if query_lens is None:
        rectangle = (rows, equal_count(layer, rows, tokens))
        _attend(
            query.unflatten(0, rectangle), *cached, block_table, kv_lens, scale, window, out.unflatten(0, rectangle)
        )
        return out
    lengths = query_lens.tolist()
    check_counts(layer, lengths, rows, tokens)
    start = 0
    for row, length in enumerate(lengths):
        if length:
            table, lens, chunk = block_table[row : row + 1], kv_lens[row : row + 1], slice(start, start + length)
            _attend(query[None, chunk], *cached, table, lens, scale, window, out[None, chunk])
        start += length
    return out


define(
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor kv_lens, "
    "float scale, int? window=None, str layout='TND', str layer='', Tensor? query_lens=None) -> Tensor",
    check=_check,
    run=_run,
    device=paged_attention_npu,
)


def paged_attention(
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
) -> Tensor:
    """Attention of each row's newest tokens over its paged keys and values.

    The last query of row ``b`` sits at position ``kv_lens[b] - 1`` and sees ``kv_lens[b]`` keys; each earlier query
    sees one fewer. With a window, a query sees at most the ``window`` newest of them. Softmax and sums are float32.

    Args:
        query: ``(tokens, heads, head_dim)`` for ``"TND"``, rows one after the other; ``(rows, heads, q_len, head_dim)``
            for ``"BNSD"``. float32, bfloat16 or float16.
        key_cache, value_cache: ``(blocks, block_size, kv_heads, head_dim)``, dtype of ``query``; ``heads`` is a
            multiple of ``kv_heads``.
        block_table: ``(rows, width)`` int32; entry ``i`` of a row is the block of positions ``i * block_size ...``.
            Entries past a row's length may be read and are masked: they must name blocks with finite contents.
        kv_lens: ``(rows,)`` int32.
        scale: factor of the scores (Gemma 4 uses 1.0).
        window: keys a query sees at most; None for all.
        layer: where the node comes from, ``"<phase>/<model>.layers.<i>"``; carried for plans, reports and errors.
        query_lens: ``(rows,)`` integer counts of a ragged TND query (prefill); None when every row has the same count.

    Returns:
        Tensor of the shape and dtype of ``query``, contiguous. A query that sees no key gives zeros.

    Raises:
        ValueError: shapes, dtypes, layout or counts do not fit; names the layer.
    """
    op = getattr(torch.ops, NAMESPACE).paged_attention
    return op(query, key_cache, value_cache, block_table, kv_lens, scale, window, layout, layer, query_lens)
