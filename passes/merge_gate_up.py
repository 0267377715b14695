"""Compute gate and up projections as one product of a merged weight.

Two products of one input become one, and the gated GELU reads its two halves where they lie, which is the form the
platform's operator takes. The merged weight is a second copy of both, so this is an option; its bytes are reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gemma_npu_compile.passes.fx import add_input, argument, call, copy_trace
from gemma_npu_compile.passes.result import PassResult

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class MergedWeight:
    """A weight the runtime makes of others: their rows one after the other.

    Attributes:
        name: of the placeholder that stands for it.
        sources: argument indices of the weights.
    """

    name: str
    sources: tuple[int, ...]

    def __call__(self, weights: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        return torch.cat(list(weights), out=out)


def _product(node: Any) -> tuple[Node, Node, Node] | None:
    """Input, weight and product of a projection without bias, seen through a view only it has."""
    if isinstance(node, Node) and node.target in _VIEWS and len(node.users) == 1:
        node = node.args[0]
    if not isinstance(node, Node) or node.target is not aten.mm.default or len(node.users) != 1:
        return None
    x, turned = node.args
    if not isinstance(turned, Node) or turned.target is not aten.t.default:
        return None
    weight = turned.args[0]
    return (x, weight, node) if isinstance(weight, Node) and weight.op == "placeholder" else None  # type: ignore


def merge_gate_up(gm: GraphModule, *, merge_weights: bool) -> PassResult:
    """Replace ``gelu_mul(x @ gate.T, x @ up.T)`` by ``geglu(x @ cat(gate, up).T)``.

    Args:
        merge_weights: the option; without it the nodes are left.
    """
    result = PassResult()
    graph = gm.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.gemma_npu.gelu_mul.default):
        gate, up = _product(argument(node, "gate")), _product(argument(node, "up"))
        if gate is None or up is None or gate[0] is not up[0]:
            result.left["gate and up are not products of one input with two weights"] += 1
            continue
        if not merge_weights:
            result.left["merge_weights is off"] += 1
            continue
        (x, *_), weights = gate, (gate[1], up[1])
        fakes = [weight.meta["val"] for weight in weights]
        merged = add_input(gm, f"merged_{weights[0].name}_{weights[1].name}")
        merged.meta["val"] = fakes[0].new_empty(sum(fake.shape[0] for fake in fakes), fakes[0].shape[1])
        merged.meta["merged"] = MergedWeight(merged.name, tuple(weight.meta["source"] for weight in weights))
        with graph.inserting_before(node):
            product = call(graph, aten.mm.default, x, call(graph, aten.t.default, merged))
            sizes = [-1] if argument(node, "gate") is gate[2] else argument(node, "gate").args[1][:-1]
            shape = [*sizes, merged.meta["val"].shape[0]]
            wide = call(graph, aten.view.default, product, shape)
            new = call(graph, torch.ops.gemma_npu.geglu.default, wide)
        copy_trace(product, gate[2])
        copy_trace(new, node)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        result.changed += 1
    if result.changed:
        graph.eliminate_dead_code()
    return result
