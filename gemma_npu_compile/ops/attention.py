"""``gemma_npu::paged_attention``: attention over a paged KV cache, its metadata as operands."""

import threading

import torch
from torch import Tensor

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


def _workspace(name: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Memory that one kernel call uses and the next overwrites: fresh megabytes cost more than copying into them."""
    size = shape[0] * shape[1]
    kept: Tensor | None = getattr(_workspaces, name, None)
    if kept is None or kept.numel() < size:
        with torch.inference_mode(False):  # it outlives the mode of this call
            kept = torch.empty(size, dtype=dtype)
        setattr(_workspaces, name, kept)
    return kept[:size].view(shape)


def _gather(cache: Tensor, blocks: Tensor, name: str) -> Tensor:
    """Whole blocks of a cache, in float32, in a workspace: ``(len(blocks), elements of a block)``."""
    flat = cache.view(cache.shape[0], -1)
    shape = (blocks.shape[0], flat.shape[1])
    # Whole blocks are contiguous: index_select copies them several times faster than advanced indexing.
    taken = torch.index_select(flat, 0, blocks, out=_workspace(f"{name}_{flat.dtype}", shape, flat.dtype))
    return taken if flat.dtype == torch.float32 else _workspace(name, shape, torch.float32).copy_(taken)


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attention of ``query`` (rows, q_len, heads, head_dim) in float32; only blocks a query can see are read."""
    rows, q_len, heads, head_dim = query.shape
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
    blocks = block_table.gather(1, columns.clamp(max=width - 1).long()).flatten()
    keys = _gather(key_cache, blocks, "keys").view(rows, -1, kv_heads, head_dim)
    values = _gather(value_cache, blocks, "values").view(rows, -1, kv_heads, head_dim)

    # A clamped column repeats the last block, but its positions lie past every length and are masked.
    key_positions = (first * block_size)[:, None] + torch.arange(span * block_size)
    query_positions = (kv_lens - q_len)[:, None] + torch.arange(q_len)
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window

    # Query heads that share a kv head become rows of one matrix: GQA without repeating keys. One product per kv head
    # reads the keys where they lie; a product over all of them would first copy them to another layout.
    per_kv = heads // kv_heads
    grouped = query.view(rows, q_len, kv_heads, per_kv, head_dim).permute(2, 0, 3, 1, 4).float()
    grouped = grouped.reshape(kv_heads, rows, per_kv * q_len, head_dim)
    scores = torch.empty(kv_heads, rows, per_kv * q_len, keys.shape[1])
    for head in range(kv_heads):
        torch.bmm(grouped[head], keys[:, :, head].transpose(1, 2), out=scores[head])
    visible = scores.view(kv_heads, rows, per_kv, q_len, -1).mul_(scale)
    visible.masked_fill_(hidden[:, None], -torch.inf)
    # A query that sees no key gives zeros, not NaN: the maximum is kept finite and so is the sum.
    peak = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    context = torch.empty_like(grouped)
    for head in range(kv_heads):
        torch.bmm(weights[head], values[:, :, head], out=context[head])
    context = (context / total).view(kv_heads, rows, per_kv, q_len, head_dim)
    return context.permute(1, 3, 0, 2, 4).reshape(rows, q_len, heads, head_dim)


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
    longest, room = (int(kv_lens.max()) if rows else 0), width * key_cache.shape[1]
    if longest > room:
        raise ValueError(
            f"paged_attention of layer {layer!r}: kv_lens has {longest}, the table's {width} blocks of "
            f"{key_cache.shape[1]} hold {room}"
        )
    if layout == "BNSD":
        result = _attend(
            query.transpose(1, 2).contiguous(), key_cache, value_cache, block_table, kv_lens, scale, window
        )
        return out.copy_(result.transpose(1, 2))
    tokens, heads, head_dim = query.shape
    query = query.contiguous()
    if query_lens is None:
        if rows == 0 or tokens % rows:
            raise ValueError(f"paged_attention of layer {layer!r}: {tokens} queries do not divide into {rows} rows")
        rectangular = query.view(rows, tokens // rows, heads, head_dim)
        result = _attend(rectangular, key_cache, value_cache, block_table, kv_lens, scale, window)
        return out.copy_(result.reshape(tokens, heads, head_dim))
    lengths = query_lens.tolist()
    if len(lengths) != rows or min(lengths, default=0) < 0 or sum(lengths) != tokens:
        raise ValueError(
            f"paged_attention of layer {layer!r}: query_lens {lengths} must be {rows} counts adding up to {tokens}"
        )
    start = 0
    for row, length in enumerate(lengths):
        if length:
            chunk = query[None, start : start + length]
            table, lens = block_table[row : row + 1], kv_lens[row : row + 1]
            out[start : start + length] = _attend(chunk, key_cache, value_cache, table, lens, scale, window)[0]
        start += length
    return out


define(
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor kv_lens, "
    "float scale, int? window=None, str layout='TND', str layer='', Tensor? query_lens=None) -> Tensor",
    check=_check,
    run=_run,
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
