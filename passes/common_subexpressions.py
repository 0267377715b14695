"""Compute each value once.

The draft position is constant, so rotary tables, positions and masks of all draft iterations are the same values; the
trace computes them once per iteration, and the verification's tables once per layer type and model.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from gemma_npu_compile.passes.fx import is_view, root, written_args, written_roots
from gemma_npu_compile.passes.result import PassResult


def _pure(node: Node) -> bool:
    target = node.target
    if node.op != "call_function":
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return not isinstance(target, torch._ops.HigherOrderOperator)  # host arithmetic and tuple elements
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _key(arg: Any, writes: dict[Node, int]) -> Any:
    """A hashable stand-in for an argument; tensors that are written in place carry how often that happened."""
    if isinstance(arg, Node):
        return ("node", arg, writes.get(root(arg), 0))
    if isinstance(arg, (list, tuple)):
        return ("list", *(_key(each, writes) for each in arg))
    if isinstance(arg, dict):
        return ("dict", *((name, _key(each, writes)) for name, each in sorted(arg.items())))
    if isinstance(arg, slice):
        return ("slice", arg.start, arg.stop, arg.step)
    return (type(arg), arg)  # 1 and 1.0 and True differ


def eliminate_common_subexpressions(gm: GraphModule) -> PassResult:
    """Replace a pure node by an earlier one with the same operator, arguments and contents of written inputs."""
    result = PassResult()
    graph = gm.graph
    written = written_roots(graph)
    writes: dict[Node, int] = {}
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        target = node.target
        if node.op == "call_function" and isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            for each in {root(arg) for arg in written_args(node)}:
                writes[each] = writes.get(each, 0) + 1
            continue
        # A fresh tensor that is written later is memory, not a value.
        if not _pure(node) or (node in written and not is_view(node)):
            continue
        try:
            key = (target, _key(node.args, writes), _key(node.kwargs, writes))
            known = seen.setdefault(key, node)
        except TypeError:
            result.left["an argument cannot be compared"] += 1
            continue
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)
            result.changed += 1
    return result
