"""Masks of fused attention: which form a call needs, and the nodes that compute it."""

import torch
from torch.fx import Graph, GraphModule, Node

from gemma_npu_compile.passes.fold_constants import constant
from gemma_npu_compile.passes.fx import call

aten = torch.ops.aten


def mask_form(q_len: int, window: int | None, kv_lens: str) -> str:
    """How a call says which keys are visible: ``"none"``, ``"causal"`` (sparse mode 3), ``"full"`` (an explicit mask).

    Device lengths are a mask by definition. Exact host lengths need one only where the operator's own modes do not
    reach: a window, which one query ignores and which a clipped table cuts at whole blocks.
    """
    if kv_lens == "device" or window is not None:
        return "full"
    return "causal" if q_len > 1 else "none"


def visibility_mask(graph: Graph, lens: Node, q_len: int, window: int | None, keys: int) -> Node:
    """``(rows, 1, q_len, keys)`` bool, True where a key is hidden from a query.

    Query ``j`` of a row sits at position ``lens - q_len + j`` and sees the ``window`` newest keys up to itself.
    """
    device = lens.meta["val"].device

    def steps(count: int) -> Node:
        return call(graph, aten.arange.default, count, dtype=torch.int32, device=device)

    start = call(graph, aten.view.default, call(graph, aten.sub.Tensor, lens, q_len), [-1, 1, 1, 1])
    queries = call(graph, aten.add.Tensor, start, call(graph, aten.view.default, steps(q_len), [q_len, 1]))
    positions = steps(keys)
    hidden = call(graph, aten.gt.Tensor, positions, queries)
    if window is None:
        return hidden
    oldest = call(graph, aten.sub.Tensor, queries, window - 1)
    return call(graph, aten.logical_or.default, hidden, call(graph, aten.lt.Tensor, positions, oldest))


def causal_mask(gm: GraphModule, like: torch.Tensor) -> Node:
    """The 2048 x 2048 upper triangle (bool) that the operator's causal modes want, held once by the graph.

    Args:
        like: a fake tensor of the graph, on the mask's device.
    """
    with torch.utils._python_dispatch._disable_current_modes():
        value = torch.ones(2048, 2048, dtype=torch.bool, device=like.device).triu(1)
    return constant(gm, "causal_mask_2048", value, like.new_empty(2048, 2048, dtype=torch.bool))
