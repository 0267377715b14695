"""KV lengths a captured attention task needs as host integers, and the slice of the graph that computes them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from gemma_npu_compile.passes.fx import root, written_roots

aten = torch.ops.aten

_INTEGER_OPERATORS = {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.floor_divide.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.minimum.default,
    aten.maximum.default,
    aten._to_copy.default,
    aten.alias.default,
    aten.view.default,
    aten.clone.default,
    aten.slice.Tensor,
    aten.select.int,
}


def bucket(length: int, block_size: int) -> int:
    """``length`` rounded up to its bucket, a multiple of ``block_size``.

    Up to eight buckets per doubling: a row reads at most a quarter more keys than it has (or the rest of a block), and
    its host length changes a few times while it grows by thousands of tokens.
    """
    step = block_size
    while step * 8 < length:
        step *= 2
    return -(-length // step) * step


@dataclass(frozen=True)
class HostLengths:
    """One host list: a length per row.

    Attributes:
        name: of the placeholder that stands for the list.
        sources: argument indices of the inputs the lengths are computed from.
        slice: the integer slice of the graph: those inputs to the exact lengths.
        sites: ``"<phase>/<layer>"`` of the tasks that read the list.
        block_size: lengths are rounded up to buckets of it; None for exact ones.
        capacity: keys a row's block table can reach.
    """

    name: str
    sources: tuple[int, ...]
    slice: GraphModule
    sites: tuple[str, ...]
    block_size: int | None
    capacity: int

    def __call__(self, inputs: Sequence[Tensor]) -> list[int]:
        """The list for the inputs named by ``sources`` (read on the host)."""
        lengths: list[int] = self.slice(*inputs).tolist()
        size = self.block_size
        return lengths if size is None else [min(bucket(each, size), self.capacity) for each in lengths]


def integer_slice(lengths: Node) -> tuple[GraphModule, list[Node]] | None:
    """The part of a graph that computes ``lengths`` from its inputs by integer arithmetic, and those inputs.

    None when anything else is involved: a value the graph reads from a cache, a float, a symbolic size, or a tensor the
    graph writes to, whose contents at the attention are not those the host sees before the replay.
    """
    written = written_roots(lengths.graph)
    needed: dict[Node, None] = {}
    stack = [lengths]
    while stack:
        node = stack.pop()
        fake = node.meta.get("val")
        if not isinstance(fake, Tensor) or fake.dtype.is_floating_point or fake.dtype.is_complex:
            return None
        if root(node) in written:
            return None
        if node.op != "placeholder" and (node.op != "call_function" or node.target not in _INTEGER_OPERATORS):
            return None
        needed[node] = None
        stack.extend(each for each in node.all_input_nodes if each not in needed)
    graph = Graph()
    copies: dict[Node, Node] = {}
    ordered = [node for node in lengths.graph.nodes if node in needed]
    for node in ordered:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta.clear()
    graph.output(copies[lengths])
    return GraphModule(torch.nn.Module(), graph), [node for node in ordered if node.op == "placeholder"]
