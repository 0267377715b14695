"""Keep constant tensors (``arange``, ``full``) as buffers of the graph instead of making them anew in every replay."""

from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gemma_npu_compile.passes.fx import is_view, placeholders, root, written_roots
from gemma_npu_compile.passes.result import PassResult

aten = torch.ops.aten

_MAKERS = {
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.full.default,
    aten.ones.default,
    aten.zeros.default,
    aten.scalar_tensor.default,
}
LARGEST = 1 << 20
"""Bytes of the largest constant worth keeping."""


def constant(gm: GraphModule, name: str, value: Tensor, fake: Tensor) -> Node:
    """The ``get_attr`` node of a buffer ``name``, made at the first call: one per graph, at its front."""
    if not hasattr(gm, name):
        gm.register_buffer(name, value, persistent=False)
    for node in gm.graph.find_nodes(op="get_attr", target=name):
        return node
    inputs, first = placeholders(gm), next(iter(gm.graph.nodes))
    with gm.graph.inserting_after(inputs[-1]) if inputs else gm.graph.inserting_before(first):
        node = gm.graph.get_attr(name)
    node.meta["val"] = fake
    return node


def fold_constants(gm: GraphModule) -> PassResult:
    """Replace operators that make a tensor from numbers alone by a buffer; equal ones share it.

    A tensor the graph writes to stays (it is memory, not a value), and so does one that is a result of the graph.
    """
    result = PassResult()
    written = written_roots(gm.graph)
    (returned,) = gm.graph.find_nodes(op="output")[0].args
    results = {root(each) for each in torch.utils._pytree.tree_leaves(returned) if isinstance(each, Node)}
    known: dict[Any, Node] = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in _MAKERS or is_view(node):
            continue
        if node.all_input_nodes:
            continue  # sized by the number of rows
        if node in written or node in results:
            result.left["the graph writes to it, or returns it"] += 1
            continue
        fake = node.meta["val"]
        if fake.nbytes > LARGEST:
            result.left[f"larger than {LARGEST} bytes"] += 1
            continue
        key = (node.target, str(node.args), str(sorted(node.kwargs.items(), key=str)))
        if key not in known:
            name = next(n for n in (f"constant_{i}" for i in count()) if not hasattr(gm, n))
            with torch.utils._python_dispatch._disable_current_modes():
                value = node.target(*node.args, **node.kwargs)
            known[key] = constant(gm, name, value, fake)
        node.replace_all_uses_with(known[key])
        gm.graph.erase_node(node)
        result.changed += 1
    return result
