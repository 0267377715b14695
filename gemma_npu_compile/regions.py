"""Regions that Dynamo traced once (``torch.compiler.nested_compile_region``), written out at each of their calls.

The passes and a capture want one flat graph; what regions save is Dynamo's time.
"""

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

CALL = "{call}"
"""In a string argument of a region: the number of the call, from 0 on."""


def write_out(gm: GraphModule) -> None:
    """Replace every call of a region by the region's nodes, in place. A region may call others."""
    calls: dict[str, int] = {}
    for call in gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        name = call.args[0].target
        if name not in calls:
            write_out(getattr(gm, name))
        calls[name] = calls.get(name, -1) + 1
        results = _copy(gm, call, name, str(calls[name]))
        for user in list(call.users):
            assert user.target is operator.getitem, "a region returns a tuple"
            user.replace_all_uses_with(results[user.args[1]])
            gm.graph.erase_node(user)
        gm.graph.erase_node(call)
    for name in calls:
        for node in gm.graph.find_nodes(op="get_attr", target=name):
            gm.graph.erase_node(node)
        delattr(gm, name)
    held = {str(node.target).partition(".")[0] for node in gm.graph.nodes if node.op in ("get_attr", "call_module")}
    for name, child in [*gm._modules.items()]:  # bodies of what is called once, which Dynamo writes out itself
        if isinstance(child, GraphModule) and name not in held:
            delattr(gm, name)
    if calls:
        gm.recompile()


def _copy(gm: GraphModule, call: Node, name: str, number: str) -> Any:
    """The nodes of the region ``name`` in front of its call; its results."""
    body = getattr(gm, name)
    given = iter(call.args[2:])
    nodes: dict[Node, Any] = {}

    def mapped(each: Any) -> Any:
        if isinstance(each, Node):
            return nodes[each]
        return each.replace(CALL, number) if isinstance(each, str) else each

    for node in body.graph.nodes:
        if node.op == "placeholder":
            nodes[node] = next(given)
            continue
        args: Any = map_aggregate(node.args, mapped)
        kwargs: Any = map_aggregate(node.kwargs, mapped)
        if node.op == "output":
            return args[0]
        target = node.target
        if node.op == "get_attr":  # the body of another kind of call
            target = f"{name}_{target}"
            setattr(gm, target, getattr(body, node.target))
        with gm.graph.inserting_before(call):
            made = nodes[node] = gm.graph.create_node(node.op, target, args, kwargs, node.name, node.type)
        made.meta = dict(node.meta)
    raise AssertionError("a graph ends with its output")
