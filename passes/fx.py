"""Small helpers on FX graphs that several passes share."""

import contextlib
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node


def placeholders(gm: GraphModule) -> list[Node]:
    """Inputs of the graph, in order."""
    return gm.graph.find_nodes(op="placeholder")


def order_of(graph: Graph) -> dict[Node, int]:
    """Position of every node."""
    return {node: index for index, node in enumerate(graph.nodes)}


def value(arg: Any) -> Any:
    """The fake value of a node, or the argument itself."""
    return arg.meta["val"] if isinstance(arg, Node) else arg


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call at the graph's insertion point, with its fake value computed."""
    node = graph.call_function(target, args, kwargs)
    fake_args, fake_kwargs = torch.fx.node.map_arg((args, kwargs), value)
    mode = detect_fake_mode([v for v in torch.utils._pytree.tree_leaves(fake_args) if isinstance(v, torch.Tensor)])
    with mode if mode is not None else contextlib.nullcontext():
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def copy_trace(new: Node, old: Node) -> None:
    """Let ``new`` point at the source line and module ``old`` came from."""
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten"):
        if key in old.meta:
            new.meta.setdefault(key, old.meta[key])


def where(node: Node) -> str:
    """``name (target)`` and the user's source line, for messages."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip()]
    files = [i for i, line in enumerate(lines) if line.startswith("File ")]
    if not files:
        return f"{node.name} ({node.target})"
    last = files[-1]
    code = lines[last + 1] if last + 1 < len(lines) else ""
    return f"{node.name} ({node.target}) at {lines[last].removeprefix('File ')}: {code}"
