"""The fused operators against their formulas; prints, as JSON, the names of those that differ."""

from __future__ import annotations

import json

import torch
import torch_npu

DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def _close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return torch.allclose(found.cpu().float(), expected.float(), rtol=tolerance, atol=tolerance)


def _norms(dtype: torch.dtype, tolerance: float) -> dict[str, bool]:
    x, y, gamma = torch.randn(3, 5, 64), torch.randn(3, 5, 64), torch.rand(64) + 0.5
    x, y, gamma = x.to(dtype), y.to(dtype), gamma.to(dtype)
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    found, found_rstd = torch_npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-6)
    total = x + y
    expected = total.float() * torch.rsqrt(total.float().square().mean(-1, keepdim=True) + 1e-6) * gamma.float()
    added, _, kept = torch_npu.npu_add_rms_norm(x.npu(), y.npu(), gamma.npu(), 1e-6)
    return {
        "rms_norm": _close(found, x.float() * rstd * gamma.float(), tolerance),
        "rms_norm_rstd": _close(found_rstd, rstd, 1e-5),
        "rms_norm_float_gamma": dtype == torch.float32
        or _close(torch_npu.npu_rms_norm(x.npu(), gamma.float().npu())[0], x.float() * rstd * gamma.float(), tolerance),
        "add_rms_norm": _close(added, expected, tolerance),
        "add_rms_norm_sum": bool((kept.cpu() == total).all()),
    }


def _rotary(dtype: torch.dtype, tolerance: float) -> dict[str, bool]:
    x = torch.randn(2, 4, 3, 32).to(dtype)  # BNSD
    angle = torch.randn(2, 1, 3, 32)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    half = torch.cat([-x[..., 16:], x[..., :16]], dim=-1)
    pairs = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    operands = x.npu(), cos.npu(), sin.npu()
    return {
        "rotary_half": _close(torch_npu.npu_rotary_mul(*operands), x * cos + half * sin, tolerance),
        "rotary_interleave": _close(
            torch_npu.npu_rotary_mul(*operands, "interleave"), x * cos + pairs * sin, tolerance
        ),
    }


def _geglu(dtype: torch.dtype, tolerance: float) -> dict[str, bool]:
    x = torch.randn(5, 64).to(dtype)
    left, right = x.float().chunk(2, dim=-1)
    gelu = torch.nn.functional.gelu
    return {
        "geglu": _close(torch_npu.npu_geglu(x.npu())[0], left * gelu(right, approximate="tanh"), tolerance),
        "geglu_left": _close(
            torch_npu.npu_geglu(x.npu(), activate_left=True)[0], gelu(left, approximate="tanh") * right, tolerance
        ),
        "geglu_erf": _close(torch_npu.npu_geglu(x.npu(), -1, 0)[0], left * gelu(right), tolerance),
    }


def _scatter(dtype: torch.dtype) -> dict[str, bool]:
    key, value = torch.randn(5, 2, 16).to(dtype), torch.randn(5, 2, 16).to(dtype)
    caches = [torch.randn(4, 8, 2, 16).to(dtype) for _ in range(2)]
    slots = torch.tensor([3, 31, 0, 8, 17], dtype=torch.int32)
    found = [cache.npu() for cache in caches]
    addresses = [each.data_ptr() for each in found]
    torch_npu.npu_scatter_pa_kv_cache(key.npu(), value.npu(), *found, slots.npu(), cache_mode="Norm")
    for cache, tokens in zip(caches, (key, value), strict=True):
        cache.view(-1, 2, 16)[slots.long()] = tokens
    return {
        "scatter_key": torch.equal(found[0].cpu(), caches[0]),
        "scatter_value": torch.equal(found[1].cpu(), caches[1]),
        "scatter_in_place": addresses == [each.data_ptr() for each in found],
    }


def main() -> None:
    """Compare all of them in three types."""
    torch.manual_seed(0)
    results = {}
    for dtype, tolerance in DTYPES.items():
        for part in (_norms(dtype, tolerance), _rotary(dtype, tolerance), _geglu(dtype, tolerance), _scatter(dtype)):
            results.update({f"{name}-{dtype}": holds for name, holds in part.items()})
    print(json.dumps({"cases": len(results), "wrong": [name for name, holds in results.items() if not holds]}))


if __name__ == "__main__":
    main()
