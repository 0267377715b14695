"""Lower the rest of the dialect (cache writes, rotary, norms, gated GELU) to the platform's fused operators."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

import gemma_npu_compile.ops.npu  # noqa: F401  (the operators, where torch_npu is absent)
from gemma_npu_compile.capabilities import Platform
from gemma_npu_compile.passes.fold_constants import constant
from gemma_npu_compile.passes.fx import argument, call, copy_trace, packed, value
from gemma_npu_compile.passes.result import PassResult

aten = torch.ops.aten
dialect = torch.ops.gemma_npu


def _ones(gm: GraphModule, like: torch.Tensor) -> Node:
    """A weight of ones for a norm without one, held once per size by the graph."""
    size, dtype = int(like.shape[-1]), str(like.dtype).removeprefix("torch.")
    with torch.utils._python_dispatch._disable_current_modes():
        value = torch.ones(size, dtype=like.dtype, device=like.device)
    return constant(gm, f"ones_{size}_{dtype}", value, like.new_empty(size))


def _store(gm: GraphModule, node: Node) -> None:
    key, value, key_cache, value_cache, slots = (
        argument(node, name) for name in ("key", "value", "key_cache", "value_cache", "slots")
    )
    call(
        gm.graph,
        torch.ops.npu.npu_scatter_pa_kv_cache.default,
        packed(gm.graph, key),
        packed(gm.graph, value),
        key_cache,
        value_cache,
        packed(gm.graph, slots),
        cache_mode="Norm",
    )


def _rotary(gm: GraphModule, node: Node) -> Node:
    x, *tables = (argument(node, name) for name in ("x", "cos", "sin"))
    wide = [call(gm.graph, aten.unsqueeze.default, table, -2) for table in tables]
    flat = x.meta["val"].dim() == 3  # tokens, heads, head_dim: one batch entry
    operands = [
        call(gm.graph, aten.unsqueeze.default, each, 0) if flat else each for each in (packed(gm.graph, x), *wide)
    ]
    turned = call(gm.graph, torch.ops.npu.npu_rotary_mul.default, *operands)
    return call(gm.graph, aten.squeeze.dim, turned, 0) if flat else turned


def _weight(gm: GraphModule, node: Node) -> Node:
    """The weight in a dtype the operators take: that of x, or float32."""
    x, weight = argument(node, "x").meta["val"], argument(node, "weight")
    if weight is None:
        return _ones(gm, x)
    if value(weight).dtype in (x.dtype, torch.float32):
        return weight
    return call(gm.graph, aten._to_copy.default, weight, dtype=torch.float32)


def _rms_norm(gm: GraphModule, node: Node) -> Node:
    weight = _weight(gm, node)
    both = call(gm.graph, torch.ops.npu.npu_rms_norm.default, argument(node, "x"), weight, argument(node, "eps"))
    return call(gm.graph, operator.getitem, both, 0)


def _add_rms_norm(gm: GraphModule, node: Node) -> tuple[Node, Node]:
    x, residual, weight = argument(node, "x"), argument(node, "residual"), _weight(gm, node)
    if value(weight).dtype != value(x).dtype:  # the norm alone takes a float32 weight, with the sum it does not
        total = call(gm.graph, aten.add.Tensor, x, residual)
        normed = call(gm.graph, torch.ops.npu.npu_rms_norm.default, total, weight, argument(node, "eps"))
        return call(gm.graph, operator.getitem, normed, 0), total
    operands = x, residual, weight, argument(node, "eps")
    found = call(gm.graph, torch.ops.npu.npu_add_rms_norm.default, *operands)
    return call(gm.graph, operator.getitem, found, 0), call(gm.graph, operator.getitem, found, 2)


def _geglu(gm: GraphModule, node: Node) -> Node:
    both = call(gm.graph, torch.ops.npu.npu_geglu.default, argument(node, "gate_up"), -1, 1, True)
    return call(gm.graph, operator.getitem, both, 0)


def _gelu_mul(gm: GraphModule, node: Node) -> Node:
    """No fused operator takes two tensors: as it was."""
    gate = call(gm.graph, aten.gelu.default, argument(node, "gate"), approximate="tanh")
    return call(gm.graph, aten.mul.Tensor, gate, argument(node, "up"))


_LOWERINGS: dict[str, tuple[str, str, Callable[[GraphModule, Node], Any]]] = {
    "store_kv": ("npu_scatter_pa_kv_cache", "key", _store),
    "rotary": ("npu_rotary_mul", "x", _rotary),
    "rms_norm": ("npu_rms_norm", "x", _rms_norm),
    "add_rms_norm": ("npu_add_rms_norm", "x", _add_rms_norm),
    "geglu": ("npu_geglu", "gate_up", _geglu),
    "gelu_mul": ("npu_geglu", "gate", _gelu_mul),
}
"""By dialect operator: the platform operator, the argument whose last axis is limited, and the rewrite."""


def lower_operators(gm: GraphModule, *, platform: Platform) -> PassResult:
    """Replace dialect operators by ``npu::`` ones where the platform has them.

    float32 numbers are those of the dialect. In half precision the platform may round once more: a rotary's tables to
    the dtype of x, and the GELU before the product where gate and up are two tensors.
    """
    result = PassResult()
    for dialect_name, (name, axis, rewrite) in _LOWERINGS.items():
        for node in gm.graph.find_nodes(op="call_function", target=getattr(dialect, dialect_name).default):
            fake = argument(node, axis).meta["val"]
            verdict = platform.operator(name, int(fake.shape[-1]))
            if not verdict.legal:
                result.left[verdict.rule] += 1
                continue
            if "0" in map(str, fake.shape) or (dialect_name == "rotary" and fake.dim() not in (3, 4)):
                result.left[f"{name} takes no operand of shape {tuple(fake.shape)}"] += 1
                continue
            with gm.graph.inserting_before(node):
                new = rewrite(gm, node)
            if isinstance(new, tuple):
                for user in list(node.users):
                    copy_trace(new[user.args[1]], node)  # type: ignore[index]
                    user.replace_all_uses_with(new[user.args[1]])  # type: ignore[index]
                    gm.graph.erase_node(user)
            elif new is not None:
                copy_trace(new, node)
                node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
            result.changed += 1
    if result.changed:
        gm.graph.eliminate_dead_code()
    return result
