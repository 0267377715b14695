"""``gemma_npu::rotary`` (one tensor) and ``gemma_npu::rotary_qk`` (query and key jointly).

Serving engines use the joint form; on a layer that owns no keys half of its work is thrown away, which is why the
query-only form exists.
"""

import torch
from torch import Tensor

from gemma_npu_compile.ops.library import NAMESPACE, define, empty_like


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    if x.dim() < 2 or x.shape[-1] % 2:
        raise ValueError(f"rotary: x must be (..., heads, even head_dim), got {tuple(x.shape)}")
    expected = (*x.shape[:-2], x.shape[-1])
    if tuple(cos.shape) != expected or tuple(sin.shape) != expected:
        raise ValueError(
            f"rotary: cos and sin of x {tuple(x.shape)} must be {expected}, got {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}"
        )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor | None = None) -> Tensor:
    wide = x.float()
    left, right = wide.chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    result = wide * cos.float().unsqueeze(-2) + turned * sin.float().unsqueeze(-2)
    return result.to(x.dtype).contiguous() if out is None else out.copy_(result)


def _check_qk(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    _check(query, cos, sin)
    _check(key, cos, sin)


def _rotate_qk(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    to = (None, None) if out is None else out
    return _rotate(query, cos, sin, out=to[0]), _rotate(key, cos, sin, out=to[1])


define("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor", check=_check, run=_rotate)
define(
    "rotary_qk(Tensor query, Tensor key, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    check=_check_qk,
    run=_rotate_qk,
    fake=lambda query, key, cos, sin: (empty_like(query), empty_like(key)),
)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves: ``x * cos + cat(-x2, x1) * sin``, computed in float32, one rounding to the dtype of ``x``.

    Args:
        x: ``(..., heads, head_dim)``.
        cos, sin: ``(..., head_dim)``. A partial rotary embedding has a tail of cos 1 and sin 0.

    Returns:
        Tensor of the shape and dtype of ``x``.

    Raises:
        ValueError: shapes do not fit.
    """
    return getattr(torch.ops, NAMESPACE).rotary(x, cos, sin)


def rotary_qk(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`rotary` of ``query`` and of ``key`` (which may have fewer heads) with the same tables."""
    return getattr(torch.ops, NAMESPACE).rotary_qk(query, key, cos, sin)
