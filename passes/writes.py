"""Functional writes to inputs: how a new value came from the old one, and who still reads the old one."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.fx import Node

from gemma_npu_compile.passes.fx import is_view


@dataclass
class Write:
    """One functional write: ``old`` goes into ``node``, ``new`` is what later nodes read."""

    node: Node
    old: Node
    new: Node


def first_base(op: torch._ops.OpOverload) -> int:
    """Index of the first new base in what a functional custom operator returns; no result counts as one None."""
    return max(1, len(op._schema.returns))


def _custom_writes(node: Node) -> tuple[list[Write], str | None]:
    """Writes of an ``auto_functionalized_v2`` node: ``(result..., new base 0, new base 1, ...)``."""
    op = node.args[0]
    returns = first_base(op)  # type: ignore[arg-type]
    names = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]  # type: ignore[union-attr]
    for name in names:
        if any(f"_{name}_{part}" in node.kwargs for part in ("size", "slice_dim", "alias")):
            return [], f"{op} writes to a view of its argument {name}"
    gets = {user.args[1]: user for user in node.users}
    bases = node.kwargs["_all_bases"]
    writes = [Write(node, base, gets[returns + i]) for i, base in enumerate(bases) if returns + i in gets]  # type: ignore
    return writes, None


def in_place_form(node: Node) -> torch._ops.OpOverload | None:
    """``index_copy_`` for ``index_copy``: the overload with the same arguments that writes to the first."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return None
    namespace, name = node.target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name + "_", None)
    form = getattr(packet, node.target._overloadname, None)
    if form is None or [a.name for a in form._schema.arguments] != [a.name for a in node.target._schema.arguments]:
        return None
    return form


def chain(copy: Node) -> tuple[list[Write], str | None]:
    """Writes that lead from the input ``copy`` restores to the value it copies, oldest first."""
    target, current = copy.args[0], copy.args[1]
    writes: list[Write] = []
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
        elif isinstance(source, Node) and in_place_form(current) is not None and _same_shape(source, current):
            writes.append(Write(current, source, current))
        else:
            return [], f"{current.target} has no in-place form"
        current = writes[-1].old
    return writes[::-1], None


def _readers(node: Node, through_view: bool = False) -> Iterator[tuple[Node, bool]]:
    """Users of a value, and whether they see it through a view."""
    for user in node.users:
        yield user, through_view
        if is_view(user):
            yield from _readers(user, True)


def read_later(writes: list[Write], copy: Node, order: dict[Node, int]) -> Node | None:
    """A node that reads contents while or after they are replaced, if any."""
    for write in writes:
        for user, through_view in _readers(write.old):
            late = order[user] > order[write.node] and user is not copy
            if late or (user is write.node and through_view):
                return user
    return None


def _same_shape(old: Node, new: Node) -> bool:
    a, b = old.meta.get("val"), new.meta.get("val")
    return (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and (a.dtype, str(a.shape), str(a.stride())) == (b.dtype, str(b.shape), str(b.stride()))
    )
