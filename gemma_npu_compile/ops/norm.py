"""``gemma_npu::rms_norm`` and ``gemma_npu::add_rms_norm``: root mean square normalisation, alone and behind a residual.

A Gemma 4 layer normalises six to seven times; written in ATen operators each is five launches, eight in half precision.
"""

import torch
from torch import Tensor

from gemma_npu_compile.ops.library import NAMESPACE, define, empty_like


def _check_norm(name: str, x: Tensor, weight: Tensor | None) -> None:
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"{name}: x must be floating point (..., width), got {x.dtype} {tuple(x.shape)}")
    if weight is None:
        return
    if tuple(weight.shape) != (x.shape[-1],):
        raise ValueError(
            f"{name}: weight of x {tuple(x.shape)} must be ({x.shape[-1]},), got {tuple(weight.shape)}; None for none"
        )
    if not weight.is_floating_point():
        raise ValueError(f"{name}: weight must be floating point, got {weight.dtype}")


def _check(x: Tensor, weight: Tensor | None, eps: float) -> None:
    _check_norm("rms_norm", x, weight)


def _norm(x: Tensor, weight: Tensor | None, eps: float, *, out: Tensor | None = None) -> Tensor:
    out = empty_like(x) if out is None else out
    exact = x.dtype == torch.float32
    wide = x if exact else x.float()
    # In place where possible: at these sizes a call and its allocation cost more than the arithmetic. The steps are
    # those of the model, so float32 results are the model's bit for bit; F.rms_norm is the same and a fifth slower.
    scale = torch.mul(wide, wide).mean(-1, True).add_(eps).rsqrt_()
    result = torch.mul(wide, scale, out=out) if exact else wide.mul_(scale)
    if weight is not None:
        result.mul_(weight)
    return out if exact else out.copy_(result)


def _check_add(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> None:
    _check_norm("add_rms_norm", x, weight)
    if residual.dtype != x.dtype or tuple(residual.shape) != tuple(x.shape):
        raise ValueError(
            f"add_rms_norm: residual must be {x.dtype} {tuple(x.shape)} as x is, got {residual.dtype} "
            f"{tuple(residual.shape)}"
        )


def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    normed, total = (empty_like(x), empty_like(x)) if out is None else out
    torch.add(x, residual, out=total)
    return _norm(total, weight, eps, out=normed), total


define("rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor", check=_check, run=_norm)
define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps) -> (Tensor, Tensor)",
    check=_check_add,
    run=_add_norm,
    fake=lambda x, residual, weight, eps: (empty_like(x), empty_like(x)),
)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """``x * (mean(x^2) + eps) ** -0.5 * weight`` over the last axis, in float32, one rounding to the dtype of ``x``.

    This is transformers' ``Gemma4RMSNorm``: the weight is multiplied before the rounding, not after it as in Llama.

    Args:
        x: ``(..., width)``, floating point.
        weight: ``(width,)``, floating point, multiplied in float32 whatever its dtype; None for none.
        eps: added to the mean of squares.

    Returns:
        Tensor of the shape and dtype of ``x``, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    return getattr(torch.ops, NAMESPACE).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """``x + residual``, rounded to their dtype, and :func:`rms_norm` of that sum.

    Args:
        x, residual: ``(..., width)``, equal in shape and dtype.
        weight, eps: as for :func:`rms_norm`.

    Returns:
        ``(normed, sum)``, both of the shape and dtype of ``x``, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    return getattr(torch.ops, NAMESPACE).add_rms_norm(x, residual, weight, eps)
