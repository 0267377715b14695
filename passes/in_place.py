"""Keep writes to inputs in place.

AOT autograd makes a graph functional: a cache write becomes an operator that returns a new cache, and a copy of the
whole cache back at the end. On a KV cache that is gigabytes per step, so the write is put back where it was, whenever
nobody reads the old contents after it.
"""

from dataclasses import dataclass

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.fx import Graph, GraphModule, Node

from gemma_npu_compile.passes.fx import copy_trace, order_of
from gemma_npu_compile.passes.result import PassResult

aten = torch.ops.aten


@dataclass
class _Write:
    """One functional write: ``old`` goes into ``node``, ``new`` is what later nodes read."""

    node: Node
    old: Node
    new: Node


def _results(op: torch._ops.OpOverload) -> int:
    """Index of the first new base in what a functional custom operator returns; no result counts as one None."""
    return max(1, len(op._schema.returns))


def _custom_writes(node: Node) -> tuple[list[_Write], str | None]:
    """Writes of an ``auto_functionalized_v2`` node: ``(result..., new base 0, new base 1, ...)``."""
    op = node.args[0]
    returns = _results(op)  # type: ignore[arg-type]
    names = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]  # type: ignore[union-attr]
    for name in names:
        if any(f"_{name}_{part}" in node.kwargs for part in ("size", "slice_dim", "alias")):
            return [], f"{op} writes to a view of its argument {name}"
    gets = {user.args[1]: user for user in node.users}
    bases = node.kwargs["_all_bases"]
    writes = [_Write(node, base, gets[returns + i]) for i, base in enumerate(bases) if returns + i in gets]  # type: ignore
    return writes, None


def _in_place_form(node: Node) -> torch._ops.OpOverload | None:
    """``index_copy_`` for ``index_copy``: the overload with the same arguments that writes to the first."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return None
    namespace, name = node.target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name + "_", None)
    form = getattr(packet, node.target._overloadname, None)
    if form is None or [a.name for a in form._schema.arguments] != [a.name for a in node.target._schema.arguments]:
        return None
    return form


def _chain(copy: Node) -> tuple[list[_Write], str | None]:
    """Writes that lead from the input ``copy`` restores to the value it copies, oldest first."""
    target, current = copy.args[0], copy.args[1]
    writes: list[_Write] = []
    while current is not target:
        if not isinstance(current, Node) or current.op != "call_function":
            return [], "the new contents do not come from the old"
        source = current.args[0] if current.args else None
        if isinstance(source, Node) and source.target is auto_functionalized_v2:
            found, reason = _custom_writes(source)
            write = next((w for w in found if w.new is current), None)
            if write is None:
                return [], reason or "the new contents are a result, not a write"
            writes.append(write)
        elif isinstance(source, Node) and _in_place_form(current) is not None:
            writes.append(_Write(current, source, current))
        else:
            return [], f"{current.target} has no in-place form"
        current = writes[-1].old
    return writes[::-1], None


def _read_later(writes: list[_Write], copy: Node, order: dict[Node, int]) -> Node | None:
    """A node that reads contents after they were replaced, if any."""
    for write in writes:
        for user in write.old.users:
            if user is not write.node and user is not copy and order[user] > order[write.node]:
                return user
    return None


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
    returns = _results(op)  # type: ignore[arg-type]
    for user in list(node.users):
        if user.args[1] >= returns:  # type: ignore[operator]
            user.replace_all_uses_with(bases[user.args[1] - returns])  # type: ignore
            graph.erase_node(user)
    if not node.users:
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
    done: dict[Node, list[_Write]] = {}
    blocked: dict[Node, str] = {}
    for copy in copies:
        writes, reason = _chain(copy)
        if reason is None and (reader := _read_later(writes, copy, order)) is not None:
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
        graph.erase_node(copy)
    for node in functional:
        if node.target is auto_functionalized_v2:
            _write_back(graph, node)
        else:
            node.target = _in_place_form(node)  # type: ignore[assignment]
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
