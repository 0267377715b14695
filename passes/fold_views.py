"""Remove views of views: a shape is taken from the value it shows, and two exchanged axes go back to their places."""

import torch
from torch.fx import GraphModule, Node

from gemma_npu_compile.passes.fx import is_packed, value
from gemma_npu_compile.passes.result import PassResult

aten = torch.ops.aten
_SHAPES = (aten.view.default, aten._unsafe_view.default)


def _exchanged(node: Node) -> frozenset[int]:
    dims = value(node.args[0]).dim()
    return frozenset(axis % dims for axis in node.args[1:3])  # type: ignore[operator]


def fold_views(gm: GraphModule) -> PassResult:
    """Replace ``view(view(x))`` by one view, and ``transpose(transpose(x))`` of the same axes by ``x``.

    No kernel runs for a view; what remains is the graph people read, and what a replay loop steps over.
    """
    result = PassResult()
    for node in list(gm.graph.nodes):
        inner = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(inner, Node) or inner.op != "call_function":
            continue
        if node.target in _SHAPES and inner.target in _SHAPES:
            if is_packed(value(inner.args[0])):
                node.update_arg(0, inner.args[0])
                result.changed += 1
        elif (
            node.target is aten.transpose.int and inner.target is node.target and _exchanged(node) == _exchanged(inner)
        ):
            node.replace_all_uses_with(inner.args[0])  # type: ignore[arg-type]
            gm.graph.erase_node(node)
            result.changed += 1
    if result.changed:
        gm.graph.eliminate_dead_code()
    return result
