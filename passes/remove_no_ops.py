"""Remove operators that return what they are given, and results nobody reads."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gemma_npu_compile.passes.fx import is_view, root, written_roots
from gemma_npu_compile.passes.result import PassResult

aten = torch.ops.aten


def _same_meta(node: Node) -> bool:
    """Whether the result has the shape, strides, dtype and device of the first argument."""
    given, result = node.args[0], node.meta.get("val")
    if not isinstance(given, Node) or not isinstance(given.meta.get("val"), Tensor) or not isinstance(result, Tensor):
        return False
    fake = given.meta["val"]
    same = fake.dtype == result.dtype and fake.device == result.device and fake.dim() == result.dim()
    # Equal expressions, not equal values: a guard must not come from here.
    return same and all(
        str(a) == str(b) for a, b in zip((*fake.shape, *fake.stride()), (*result.shape, *result.stride()), strict=True)
    )


def _times_one(node: Node) -> bool:
    factor: Any = node.args[1]
    return isinstance(factor, (int, float)) and factor == 1


_CANDIDATES: dict[Any, Callable[[Node], bool]] = {
    # attention_scaling of a default rotary embedding is 1.0
    aten.mul.Tensor: _times_one,
    aten.div.Tensor: _times_one,
    aten._to_copy.default: lambda node: True,
    aten.slice.Tensor: lambda node: True,
    aten.expand.default: lambda node: True,
    aten.view.default: lambda node: True,
    aten.alias.default: lambda node: True,
}


def remove_no_ops(gm: GraphModule) -> PassResult:
    """Drop multiplications by one and conversions, slices, views and expansions to what is already there.

    A copy of a value that the graph writes to stays: it holds the old contents, or takes the new ones.
    """
    result = PassResult()
    graph = gm.graph
    written = written_roots(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _CANDIDATES:
            continue
        if not _CANDIDATES[node.target](node) or not _same_meta(node):
            continue
        given: Any = node.args[0]
        if not is_view(node) and (root(given) in written or node in written):
            result.left["it copies a value the graph writes to"] += 1
            continue
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
        result.changed += 1
    before = len(graph.nodes)
    graph.eliminate_dead_code()
    result.changed += before - len(graph.nodes)
    return result
