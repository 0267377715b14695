"""``gemma_npu::gelu_mul`` and ``gemma_npu::geglu``: the gated GELU of Gemma's MLP, on two tensors and on one."""

import torch
from torch import Tensor
from torch.nn import functional as F

from gemma_npu_compile.ops.library import NAMESPACE, define


def _check(gate: Tensor, up: Tensor) -> None:
    if not gate.is_floating_point():
        raise ValueError(f"gelu_mul: gate must be floating point, got {gate.dtype}")
    if up.dtype != gate.dtype or tuple(up.shape) != tuple(gate.shape):
        raise ValueError(
            f"gelu_mul: up must be {gate.dtype} {tuple(gate.shape)} as gate is, got {up.dtype} {tuple(up.shape)}"
        )


def _gelu_mul(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if gate.dtype != torch.float32:
        return out.copy_(F.gelu(gate.float(), approximate="tanh").mul_(up))
    F.gelu(gate, approximate="tanh", out=out)  # type: ignore[call-arg]
    return out.mul_(up)


def _check_geglu(gate_up: Tensor) -> None:
    if not gate_up.is_floating_point() or gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(
            f"geglu: gate_up must be floating point (..., 2 * width), got {gate_up.dtype} {tuple(gate_up.shape)}"
        )


def _geglu(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return _gelu_mul(gate, up, out=out)


define("gelu_mul(Tensor gate, Tensor up) -> Tensor", check=_check, run=_gelu_mul)
define(
    "geglu(Tensor gate_up) -> Tensor",
    check=_check_geglu,
    run=_geglu,
    fake=lambda gate_up: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
)


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(gate) * up`` with the tanh approximation, computed in float32, one rounding to the dtype of ``gate``.

    Args:
        gate, up: any shape, floating point, equal in shape and dtype.

    Returns:
        Tensor of the shape and dtype of ``gate``, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    return getattr(torch.ops, NAMESPACE).gelu_mul(gate, up)


def geglu(gate_up: Tensor) -> Tensor:
    """:func:`gelu_mul` of the two halves of the last axis, gate first.

    Args:
        gate_up: ``(..., 2 * width)``, floating point.

    Returns:
        ``(..., width)``, dtype of ``gate_up``, contiguous.

    Raises:
        ValueError: the last axis is odd, or the dtype is not floating point.
    """
    return getattr(torch.ops, NAMESPACE).geglu(gate_up)
