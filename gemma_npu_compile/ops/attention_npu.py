"""``gemma_npu::paged_attention`` on a device: prefill, plain decoding and fallbacks, outside of captures.

Nothing here is captured, so lengths may go through the host: they are read once per step and then remembered. Rows with
equally many queries become one BNSD call, the layout that every head size has on every SoC.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gemma_npu_compile.ops.attention_rows import check_counts, check_reach, equal_count

_ON_HOST = WeakTensorKeyDictionary()


def on_host(counts: Tensor) -> list[int]:
    """Contents of a small integer tensor; read once, however many layers ask."""
    if counts.is_inference():  # has no version to tell a change by
        return counts.tolist()
    known = _ON_HOST.get(counts)
    if known is None or known[0] != counts._version:
        known = counts._version, counts.tolist()
        _ON_HOST[counts] = known
    return known[1]


@lru_cache(maxsize=8)
def _causal_mask(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


def _one_query_mask(kv_lens: Tensor, window: int, keys: int) -> Tensor:
    """``(rows, 1, 1, keys)``: one query ignores the operator's band, so it is spelled out."""
    distance = kv_lens.view(-1, 1, 1, 1) - torch.arange(1, keys + 1, dtype=kv_lens.dtype, device=kv_lens.device)
    return torch.logical_or(distance < 0, distance >= window)


def _gathered(cache: Tensor, table: Tensor) -> Tensor:
    """The blocks of a table as (rows, kv_heads, keys, head_dim)."""
    rows = cache.index_select(0, table.flatten()).view(table.shape[0], -1, *cache.shape[2:])
    return rows.transpose(1, 2).contiguous()


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lens: list[int], scale: float, window: int | None
) -> Tensor:
    """Attention of a BNSD query; a window reads its own blocks only.

    Several queries read gathered keys: whether a device takes them paged depends on the SoC, the head size and the
    block size, and here a copy costs little beside the products.
    """
    q_len, block_size = query.shape[2], keys.shape[1]
    if window is not None:
        reach = window + q_len - 1
        first = [max(0, length - reach) // block_size for length in lens]
        span = min(-(-(reach - 1) // block_size) + 1, table.shape[1])
        columns = [[min(start + i, table.shape[1] - 1) for i in range(span)] for start in first]
        table = table.gather(1, torch.tensor(columns, device=table.device))
        lens = [length - start * block_size for length, start in zip(lens, first, strict=True)]
    options = {}
    if q_len > 1:
        table = table[:, : -(-max(lens) // block_size)]
        caches = _gathered(keys, table), _gathered(values, table)
        options = {"atten_mask": _causal_mask(query.device), "sparse_mode": 3 if window is None else 4}
        if window is not None:
            options.update(pre_tokens=window - 1, next_tokens=0)
    else:
        caches = keys.flatten(2), values.flatten(2)
        options = {"block_table": table.contiguous(), "block_size": block_size}
        if window is not None:
            counts = torch.tensor(lens, dtype=torch.int32, device=query.device)
            options["atten_mask"] = _one_query_mask(counts, window, table.shape[1] * block_size)
    return torch.ops.npu.npu_fused_infer_attention_score(
        query.contiguous(),
        *caches,
        actual_seq_lengths_kv=lens,
        num_heads=query.shape[1],
        num_key_value_heads=keys.shape[2],
        scale=scale,
        input_layout="BNSD",
        **options,
    )[0]


def paged_attention_npu(
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
    """The device kernel of :func:`gemma_npu_compile.ops.paged_attention`; same arguments, result and errors.

    Raises:
        ValueError: lengths exceed the table, or counts do not add up; names the layer.
    """
    rows, width = block_table.shape
    if query.numel() == 0:
        return torch.empty_like(query, memory_format=torch.contiguous_format)
    lens = on_host(kv_lens)
    check_reach(layer, max(lens, default=0), width, key_cache.shape[1])
    if layout == "BNSD":
        return _attend(query, key_cache, value_cache, block_table, lens, scale, window)
    tokens = query.shape[0]
    if query_lens is None:
        counts = [equal_count(layer, rows, tokens)] * rows
    else:
        counts = on_host(query_lens)
        check_counts(layer, counts, rows, tokens)
    chunks = query.split(counts)
    results: list[Tensor] = list(chunks)
    for count in set(counts) - {0}:
        members = [row for row in range(rows) if counts[row] == count]
        packed = torch.stack([chunks[row] for row in members]).transpose(1, 2)
        table = block_table if len(members) == rows else torch.stack([block_table[row] for row in members])
        found = _attend(packed, key_cache, value_cache, table, [lens[row] for row in members], scale, window)
        for row, result in zip(members, found.transpose(1, 2), strict=True):
            results[row] = result
    return torch.cat(results)
