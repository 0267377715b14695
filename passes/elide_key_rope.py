"""Rotate queries only where a layer owns no keys, and refuse a layer that writes into another layer's cache.

A KV-shared layer reads its owner's keys. Attention modules that serve both kinds of layer rotate query and key together
and throw the key away, with a placeholder key (no heads, one head, full size) or with a key projected for nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

import gemma_npu_compile.ops  # noqa: F401  (registers the dialect)
from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.passes.fx import argument, call, copy_trace
from gemma_npu_compile.passes.result import PassResult

Single = Callable[[Node], tuple[Any, tuple[Any, ...]]]

JOINT: dict[Any, Single] = {
    torch.ops.gemma_npu.rotary_qk.default: lambda node: (
        torch.ops.gemma_npu.rotary.default,
        (node.args[0], *node.args[2:4]),
    ),
}
"""Joint rotary operators that return ``(query, key)``: the query-only operator and its arguments, from the node."""


def register_joint_rotary(op: torch._ops.OpOverload, single: Single) -> None:
    """Let the pass know a fused operator of your own that returns ``(query, key)``.

    Args:
        op: the joint operator, without side effects.
        single: from a node of ``op``, the operator that computes the query alone, and its arguments.
    """
    JOINT[op] = single


def _module(node: Node) -> str:
    """Path of the innermost module a node was traced in."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else node.name


def _check_owners(gm: GraphModule) -> None:
    """A second write to the same slots of a cache is a reuse layer overwriting its owner."""
    writers: dict[tuple[Any, Any], Node] = {}
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.gemma_npu.store_kv.default):
        place = argument(node, "key_cache"), argument(node, "slots")
        first = writers.setdefault(place, node)
        if first is not node:
            raise CompileError(
                f"{_module(node)} writes into the cache that {_module(first)} owns, at the same slots "
                f"({getattr(place[0], 'meta', {}).get('label', place[0])}): a layer that reuses keys must not write any"
            )


def elide_key_rope(gm: GraphModule) -> PassResult:
    """Replace a joint rotary operator whose key nobody reads by the query-only one, and remove what only fed the key.

    Raises:
        CompileError: two layers write to the same slots of one cache; names both.
    """
    _check_owners(gm)
    result = PassResult()
    graph = gm.graph
    for op, single in JOINT.items():
        for node in graph.find_nodes(op="call_function", target=op):
            parts = {user.args[1]: user for user in node.users}
            key = parts.get(1)
            if key is not None and key.users:
                result.left["the key is read"] += 1
                continue
            target, args = single(node)
            with graph.inserting_before(node):
                query = call(graph, target, *args)
            copy_trace(query, node)
            if 0 in parts:
                parts[0].replace_all_uses_with(query)
            for user in parts.values():
                graph.erase_node(user)
            graph.erase_node(node)
            result.changed += 1
    if result.changed:
        graph.eliminate_dead_code()
    return result
