"""Replace round trips through the host by arithmetic on the device.

``tensor.item()`` inside a capture is an error on every platform. Where the number only fills a tensor (the assistant's
ordered embeddings do this) or takes part in arithmetic that fills one, the 0-d tensor can do the same.
"""

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gemma_npu_compile.passes.fx import call, copy_trace
from gemma_npu_compile.passes.result import PassResult

aten = torch.ops.aten

_TENSOR_FORM = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
    torch.sym_float: None,
}


def _as_tensor(gm: GraphModule, number: Any) -> Any:
    """The 0-d tensor that holds a host number computed from ``.item()``; the number itself if it is a constant."""
    if not isinstance(number, Node):
        return number
    if number.target is aten._local_scalar_dense.default:
        return number.args[0]
    if number.target not in _TENSOR_FORM:
        return None
    operands = [_as_tensor(gm, arg) for arg in number.args]
    if any(o is None for o in operands) or not isinstance(operands[0], Node):
        return None
    form = _TENSOR_FORM[number.target]
    if form is None:
        return operands[0]
    # The host computes with doubles; a half would round between two operations.
    wide = [
        call(gm.graph, aten._to_copy.default, o, dtype=torch.float32)
        if isinstance(o, Node) and o.meta["val"].dtype in (torch.float16, torch.bfloat16)
        else o
        for o in operands
    ]
    return call(gm.graph, form, *wide)


def remove_host_syncs(gm: GraphModule) -> PassResult:
    """Turn ``full(size, f(x.item()))`` into an expanded ``f(x)``, and drop the reads that nobody needs any more.

    Supported arithmetic ``f``: add, subtract, multiply, divide by constants, with the tensor on the left. A read that
    still has users is left, with its users' operators as the reason; the capture will refuse it by name.
    """
    result = PassResult()
    graph = gm.graph
    for node in graph.find_nodes(op="call_function", target=aten.full.default):
        fill = node.args[1]
        if not isinstance(fill, Node):
            continue
        with graph.inserting_before(node):
            scalar = _as_tensor(gm, fill)
            if not isinstance(scalar, Node):
                continue
            wanted = node.meta["val"]
            if scalar.meta["val"].dtype != wanted.dtype:
                scalar = call(graph, aten._to_copy.default, scalar, dtype=wanted.dtype)
            expanded = call(graph, aten.expand.default, scalar, node.args[0])
            filled = call(graph, aten.clone.default, expanded, memory_format=torch.contiguous_format)
        copy_trace(filled, node)
        node.replace_all_uses_with(filled)
        graph.erase_node(node)
        result.changed += 1
    # Reads may carry size assertions; erase from the back so that chains of host arithmetic disappear whole.
    for node in reversed(list(graph.nodes)):
        host_number = node.target is aten._local_scalar_dense.default or node.target in _TENSOR_FORM
        if node.op == "call_function" and host_number and not node.users:
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default):
        users = ", ".join(sorted({str(user.target) for user in node.users}))
        result.left[f"the number is used by {users}"] += 1
    return result
