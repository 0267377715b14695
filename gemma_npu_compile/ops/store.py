"""``gemma_npu::store_kv``: write new keys and values into their slots of a paged cache, in place."""

import torch
from torch import Tensor

from gemma_npu_compile.ops.library import NAMESPACE, define


def _check(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    if key_cache.dim() != 4 or value_cache.shape != key_cache.shape:
        raise ValueError(
            "store_kv: the caches must both be (blocks, block_size, kv_heads, head_dim), got "
            f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if key.shape[1:] != key_cache.shape[2:] or value.shape != key.shape:
        raise ValueError(
            f"store_kv: keys and values must be (tokens, {key_cache.shape[2]}, {key_cache.shape[3]}), got "
            f"{tuple(key.shape)} and {tuple(value.shape)}"
        )
    if slots.dim() != 1 or slots.shape[0] != key.shape[0]:
        raise ValueError(f"store_kv: one slot per token is needed, got {tuple(slots.shape)} for {key.shape[0]} tokens")
    if slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"store_kv: slots must be int32 or int64, got {slots.dtype}")
    if not key.dtype == value.dtype == key_cache.dtype == value_cache.dtype:
        dtypes = ", ".join(str(t.dtype) for t in (key, value, key_cache, value_cache))
        raise ValueError(f"store_kv: keys, values and caches must have one dtype, got {dtypes}")


def _run(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    index = slots.long()
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, index, key)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, index, value)


define(
    "store_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots) -> ()",
    check=_check,
    run=_run,
    fake=lambda *args: None,
)


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write token ``t`` to ``cache.view(-1, kv_heads, head_dim)[slots[t]]``; both caches are changed in place.

    Args:
        key, value: ``(tokens, kv_heads, head_dim)``, dtype of the caches.
        key_cache, value_cache: ``(blocks, block_size, kv_heads, head_dim)``, contiguous.
        slots: ``(tokens,)`` int32 or int64, unique, in ``0 .. blocks * block_size - 1``.

    Raises:
        ValueError: shapes or dtypes do not fit.
        IndexError: a slot is out of range (CPU).
    """
    getattr(torch.ops, NAMESPACE).store_kv(key, value, key_cache, value_cache, slots)


def slot_mapping(block_table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Slots of ``positions`` (rows, n) under ``block_table`` (rows, width): ``(rows * n,)`` int32, traceable.

    Positions must be non-negative and below ``width * block_size``.
    """
    blocks = block_table.gather(1, (positions // block_size).long())
    return (blocks * block_size + positions % block_size).to(torch.int32).flatten()
