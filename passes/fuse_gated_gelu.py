"""One operator for a gated GELU: the activation between Gemma's gate and up projections, dense or per expert."""

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

import gemma_npu_compile.ops  # noqa: F401  (registers the dialect)
from gemma_npu_compile.passes.fx import argument, call, copy_trace, is_last, root, same_layout, written_roots
from gemma_npu_compile.passes.result import PassResult

aten = torch.ops.aten
gemma_npu = torch.ops.gemma_npu


def half(node: Any) -> tuple[Node, int] | None:
    """The value whose last axis ``node`` shows one half of, and which: 0 the first, 1 the second."""
    source = node.args[0] if isinstance(node, Node) and node.args else None
    if not isinstance(source, Node):
        return None
    base: Any
    width = node.meta["val"].shape[-1] if isinstance(node.meta.get("val"), torch.Tensor) else None
    if node.target is operator.getitem and source.target in (aten.split.Tensor, aten.split_with_sizes.default):
        base, dim = source.args[0], argument(source, "dim")
        which = node.args[1] if len(source.meta["val"]) == 2 else None
    elif node.target is aten.slice.Tensor and argument(node, "step") == 1 and isinstance(width, int):
        base, dim = source, argument(node, "dim")
        which = {0: 0, width: 1, -width: 1}.get(argument(node, "start") or 0)
    else:
        return None
    if which is None or width is None or not is_last(dim, base) or base.meta["val"].shape[-1] != 2 * width:
        return None
    return base, which


def _match(gelu: Node, written: set[Node]) -> tuple[Node, Node] | str:
    """The product around ``gelu`` and its other factor, or why there is none."""
    if argument(gelu, "approximate") != "tanh":
        return "gelu without the tanh approximation"
    if len(gelu.users) != 1:
        return "gelu is read elsewhere"
    (product,) = gelu.users
    if product.target is not aten.mul.Tensor or product.args[0] is product.args[1]:
        return "gelu is not multiplied by a second tensor"
    gate, up = gelu.args[0], product.args[1] if product.args[0] is gelu else product.args[0]
    if not isinstance(gate, Node) or not isinstance(up, Node):
        return "gelu is not multiplied by a second tensor"
    a, b = gate.meta["val"], up.meta["val"]
    if a.dtype != b.dtype or str(tuple(a.shape)) != str(tuple(b.shape)):
        return "gate and up differ in shape or dtype"
    if a.dtype == torch.float64:
        return "computed in float64, the operator computes in float32"
    if {root(gate), root(up)} & written:
        return "it reads a value the graph writes to"
    return product, up


def fuse_gated_gelu(gm: GraphModule) -> PassResult:
    """Rewrite ``gelu(gate, approximate="tanh") * up``; halves of one tensor, gate first, become ``geglu`` of it.

    float32 arithmetic stays what it was. bfloat16 and float16 results are rounded once, not after the GELU as well.
    """
    result = PassResult()
    graph = gm.graph
    written = written_roots(graph)
    for gelu in graph.find_nodes(op="call_function", target=aten.gelu.default):
        found = _match(gelu, written)
        if isinstance(found, str):
            result.left[found] += 1
            continue
        product, up = found
        gate = gelu.args[0]
        first, second = half(gate), half(up)
        with graph.inserting_before(product):
            if first is not None and second is not None and second == (first[0], 1) and first[1] == 0:
                fused = call(graph, gemma_npu.geglu.default, first[0])
            else:
                fused = call(graph, gemma_npu.gelu_mul.default, gate, up)
        if not same_layout(fused, product):
            graph.erase_node(fused)
            result.left["the product is not laid out contiguously"] += 1
            continue
        copy_trace(fused, product)
        product.replace_all_uses_with(fused)
        graph.erase_node(product)
        result.changed += 1
    if result.changed:
        graph.eliminate_dead_code()
    return result
