"""The platform's operators compute what the dialect's do, from operands in the form they take."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile import ops
from gemma_npu_compile.capabilities import platform
from gemma_npu_compile.ops.npu import emulate
from gemma_npu_compile.passes.lower_operators import lower_operators

A2 = platform("ascend910b")
npu, aten = torch.ops.npu, torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16]


def lowered(fn: Callable[..., Any], *args: Tensor, mode: str = "fake") -> GraphModule:
    gm = make_fx(fn, tracing_mode=mode)(*args)
    result = lower_operators(gm, platform=A2)
    gm.graph.lint()
    gm.recompile()
    assert result.changed
    assert lower_operators(gm, platform=A2).changed == 0
    assert not [n for n in gm.graph.nodes if getattr(n.target, "namespace", "") == "gemma_npu"]
    return gm


def count(gm: GraphModule, target: Any) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=target))


def same(gm: GraphModule, fn: Callable[..., Any], *args: Tensor) -> None:
    with emulate(A2):
        got = gm(*(arg.clone() for arg in args))
    exact = args[0].dtype == torch.float32
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if exact else {"rtol": 0.01, "atol": 0.01}
    torch.testing.assert_close(got, fn(*(arg.clone() for arg in args)), **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_norms(dtype: torch.dtype, mode: str) -> None:
    """With and without weight, and with a sum in front; norms without weight share one buffer of ones."""
    x, residual, weight = (torch.randn(2, 3, 16).to(dtype) for _ in range(3))
    weight = weight[0, 0].clone()

    def fn(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        a = ops.rms_norm(x, weight, 1e-6)
        b = ops.rms_norm(x * 2, None, 1e-5)
        c, total = ops.add_rms_norm(x, residual, None, 1e-6)
        d, _ = ops.add_rms_norm(a, residual, weight, 1e-6)
        return a, b, c, total, d

    gm = lowered(fn, x, residual, weight, mode=mode)
    assert (count(gm, npu.npu_rms_norm.default), count(gm, npu.npu_add_rms_norm.default)) == (2, 2)
    assert [(name, buffer.dtype, buffer.tolist()) for name, buffer in gm.named_buffers()] == [
        (f"ones_16_{str(dtype).removeprefix('torch.')}", dtype, [1.0] * 16)
    ]
    same(gm, fn, x, residual, weight)


def test_a_float32_weight_keeps_the_sum_apart() -> None:
    """The fused operator wants its weight in the dtype of x; the norm alone takes float32 as well."""
    x, residual, weight = torch.randn(4, 16).bfloat16(), torch.randn(4, 16).bfloat16(), torch.randn(16)

    def fn(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return ops.add_rms_norm(x, residual, weight, 1e-6)

    gm = lowered(fn, x, residual, weight)
    assert (count(gm, npu.npu_rms_norm.default), count(gm, npu.npu_add_rms_norm.default)) == (1, 0)
    same(gm, fn, x, residual, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 4, 16), (5, 4, 16)], ids=["batched", "packed"])
def test_rotary(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).to(dtype)
    cos, sin = (torch.randn(*shape[:-2], shape[-1]).to(dtype) for _ in range(2))
    gm = lowered(ops.rotary, x, cos, sin)
    assert count(gm, npu.npu_rotary_mul.default) == 1
    same(gm, ops.rotary, x, cos, sin)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_gelu(dtype: torch.dtype) -> None:
    wide = torch.randn(2, 3, 24).to(dtype)
    gm = lowered(ops.geglu, wide)
    assert count(gm, npu.npu_geglu.default) == 1
    same(gm, ops.geglu, wide)
    gate, up = torch.randn(2, 3, 12).to(dtype), torch.randn(2, 3, 12).to(dtype)
    gm = lowered(ops.gelu_mul, gate, up)
    assert (count(gm, npu.npu_geglu.default), count(gm, aten.gelu.default), count(gm, aten.mul.Tensor)) == (0, 1, 1)
    same(gm, ops.gelu_mul, gate, up)


def test_writes_take_contiguous_keys() -> None:
    """Keys that are a transposed view are copied first; those that lie straight are not."""
    caches = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    key, value, slots = torch.randn(2, 5, 8), torch.randn(5, 2, 8), torch.tensor([3, 11, 0, 7, 5])

    def fn(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> Any:
        ops.store_kv(key.transpose(0, 1), value, key_cache, value_cache, slots)
        return key_cache * 1.0, value_cache * 1.0

    gm = lowered(fn, key, value, *caches, slots)
    (node,) = gm.graph.find_nodes(op="call_function", target=npu.npu_scatter_pa_kv_cache.default)
    assert (node.args[0].target, node.args[1].op, node.kwargs) == (
        aten.clone.default,
        "placeholder",
        {"cache_mode": "Norm"},
    )
    same(gm, fn, key, value, *caches, slots)


def test_the_cpu_and_wide_heads_keep_the_dialect() -> None:
    x, table = torch.randn(2, 1, 4, 896), torch.randn(2, 1, 896)
    gm = make_fx(ops.rotary, tracing_mode="fake")(x, table, table)
    result = lower_operators(gm, platform=A2)
    assert dict(result.left) == {"npu_rotary_mul: the last axis is 896, it must be at most 895": 1}
    result = lower_operators(gm, platform=platform("cpu"))
    assert (result.changed, dict(result.left)) == (0, {"cpu has no npu_rotary_mul": 1})


def test_a_weight_of_another_half_type_is_widened() -> None:
    x, weight = torch.randn(4, 16), torch.randn(16).bfloat16()
    gm = lowered(lambda x, w: ops.rms_norm(x, w, 1e-6), x, weight)
    same(gm, lambda x, w: ops.rms_norm(x, w, 1e-6), x, weight)
    gm = lowered(lambda x, w: ops.add_rms_norm(x, x, w, 1e-6), x, weight)
    same(gm, lambda x, w: ops.add_rms_norm(x, x, w, 1e-6), x, weight)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (ops.rotary, [(2, 2, 3, 4, 16), (2, 2, 3, 16), (2, 2, 3, 16)]),
        (ops.rotary, [(4, 16), (16,), (16,)]),
        (lambda x: ops.add_rms_norm(x, x, None, 1e-6), [(0, 16)]),
    ],
)
def test_what_the_operators_do_not_take_stays(fn: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    gm = make_fx(fn, tracing_mode="fake")(*map(torch.randn, shapes))
    result = lower_operators(gm, platform=A2)
    (reason,) = result.left
    assert result.changed == 0
    assert str(shapes[0]) in reason
