"""Keep writes to inputs in place.

AOT autograd makes a graph functional: a cache write becomes an operator that returns a new cache, and a copy of the
whole cache back at the end. On a KV cache that is gigabytes per step, so the write is put back where it was, whenever
nobody reads the old contents after it.
"""

from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.fx import Graph, GraphModule, Node

from gemma_npu_compile.passes.fx import copy_trace, order_of
from gemma_npu_compile.passes.result import PassResult
from gemma_npu_compile.passes.writes import Write, chain, first_base, in_place_form, read_later

aten = torch.ops.aten


def _write_back(graph: Graph, node: Node) -> None:
    """Replace a functional custom write by the operator itself."""
    op, bases = node.args[0], node.kwargs["_all_bases"]
    kwargs = {k: v for k, v in node.kwargs.items() if not k.startswith("_")}
    for argument in op._schema.arguments:  # type: ignore[union-attr]
        index = node.kwargs.get(f"_{argument.name}_base_index")
        if index is not None:
            kwargs[argument.name] = bases[index]  # type: ignore[index,call-overload]
    with graph.inserting_before(node):
        call = graph.call_function(op, (), kwargs)  # type: ignore[arg-type]
    copy_trace(call, node)
    call.meta["val"] = None
    returns = first_base(op)  # type: ignore[arg-type]
    single = len(op._schema.returns) == 1  # type: ignore[union-attr]
    for user in list(node.users):
        position: Any = user.args[1]
        if position >= returns:
            user.replace_all_uses_with(bases[position - returns])  # type: ignore
        elif single:
            call.meta["val"] = user.meta.get("val")
            user.replace_all_uses_with(call)
        else:
            user.args = (call, position)
            continue
        graph.erase_node(user)
    graph.erase_node(node)


def keep_writes_in_place(gm: GraphModule) -> PassResult:
    """Turn functional writes to inputs, and the copies that restore them, into in-place writes.

    A write is left functional, with the reason, when old contents are read after it or when it is not a whole-tensor
    write of an input.
    """
    result = PassResult()
    graph = gm.graph
    order = order_of(graph)
    copies = [n for n in graph.nodes if n.target is aten.copy_.default and n.args[0].op == "placeholder"]
    done: dict[Node, list[Write]] = {}
    blocked: dict[Node, str] = {}
    for copy in copies:
        writes, reason = chain(copy)
        if reason is None and (reader := read_later(writes, copy, order)) is not None:
            reason = f"the old contents are read after the write, by {reader.target}"
        if reason is None:
            done[copy] = writes
        else:
            result.left[reason] += 1
            blocked.update((write.node, reason) for write in writes)
    # One custom operator may write several inputs: it goes back only if all of them may.
    shared = {w.node for writes in done.values() for w in writes} & set(blocked)
    functional = dict.fromkeys(w.node for ws in done.values() if not any(w.node in shared for w in ws) for w in ws)
    for copy, writes in done.items():
        if any(w.node in shared for w in writes):
            result.left["another input of the same operator stays functional"] += 1
            continue
        copy.replace_all_uses_with(copy.args[0])  # type: ignore[arg-type]
        graph.erase_node(copy)
    for node in functional:
        if node.target is auto_functionalized_v2:
            _write_back(graph, node)
        else:
            node.target = in_place_form(node)  # type: ignore[assignment]
            node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user, node=node: user is not node)  # type: ignore
        result.changed += 1
    return result


def functional_writes(gm: GraphModule) -> list[Node]:
    """Nodes that still copy an input as a whole: restoring copies and functional custom writes."""
    return [
        n
        for n in gm.graph.nodes
        if n.target is auto_functionalized_v2 or (n.target is aten.copy_.default and n.args[0].op == "placeholder")
    ]
