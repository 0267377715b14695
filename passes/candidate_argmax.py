"""Choose the best token among the candidates, without building logits over the whole vocabulary.

Ordered embeddings (the assistants of E2B and E4B) score the tokens of a few clusters, scatter the scores over a tensor
as wide as the vocabulary (262144), and take its argmax. The best of the scores, mapped to its id, is the same token.
"""

import torch
from torch.fx import Graph, GraphModule, Node

from gemma_npu_compile.passes.fx import call, copy_trace, is_last
from gemma_npu_compile.passes.result import PassResult

aten = torch.ops.aten


def _scatter_behind(node: Node) -> tuple[Node | None, list[Node]]:
    """The scatter an argmax reads, and the row selections between, outermost last."""
    selections: list[Node] = []
    current = node.args[0]
    while isinstance(current, Node) and current.target is aten.select.int:
        selections.append(current)
        current = current.args[0]
    found = isinstance(current, Node) and current.target is aten.scatter.src
    return (current if found else None), selections[::-1]  # type: ignore[return-value]


def _selected(graph: Graph, tensor: Node, selections: list[Node]) -> Node:
    for selection in selections:
        tensor = call(graph, aten.select.int, tensor, *selection.args[1:])
    return tensor


def _below_all(background: object, scores: object) -> bool:
    """Whether the background is known to be lower than every score: -inf, the dtype's minimum, or min(scores) - c."""
    if not isinstance(background, Node):
        return False
    if background.target is aten.full.default:
        fill = background.args[1]
        return isinstance(fill, float) and fill <= torch.finfo(background.meta["val"].dtype).min
    current: object = background
    for step in (aten.clone.default, aten.expand.default, aten.sub.Tensor):
        while isinstance(current, Node) and current.target is aten._to_copy.default:
            current = current.args[0]
        if not isinstance(current, Node) or current.target is not step:
            return False
        if step is aten.sub.Tensor and not (isinstance(current.args[1], (int, float)) and current.args[1] > 0):
            return False
        current = current.args[0]
    while isinstance(current, Node) and current.target is aten._to_copy.default:
        current = current.args[0]
    lowest = (aten.min.default, aten.amin.default)
    return isinstance(current, Node) and current.target in lowest and current.args[0] is scores


def _reason(node: Node, scatter: Node, selections: list[Node]) -> str | None:
    """Why this argmax cannot be taken over the candidates."""
    if not _below_all(scatter.args[0], scatter.args[3]):
        return "the scores are scattered over values that need not be lower"
    if len(node.args) < 2 or not is_last(node.args[1], node.args[0]) or (len(node.args) > 2 and node.args[2]):  # type: ignore
        return "the argmax is not over the vocabulary"
    if not is_last(scatter.args[1], scatter) or any(is_last(s.args[1], s.args[0]) for s in selections):  # type: ignore
        return "the scatter is not over the vocabulary"
    return None


def candidate_argmax(gm: GraphModule) -> PassResult:
    """Rewrite ``argmax(scatter(background, ids, scores))`` to the id of the best score.

    The background is lower than every score (transformers fills with their minimum minus one). Of equal scores the
    lowest id wins, as with an argmax over the vocabulary. Logits that are also read otherwise stay as well.
    """
    result = PassResult()
    graph = gm.graph
    for node in graph.find_nodes(op="call_function", target=aten.argmax.default):
        scatter, selections = _scatter_behind(node)
        if scatter is None:
            continue
        reason = _reason(node, scatter, selections)
        if reason is not None:
            result.left[reason] += 1
            continue
        _, _, ids, scores = scatter.args
        with graph.inserting_before(node):
            ids = _selected(graph, ids, selections)  # type: ignore[arg-type]
            scores = _selected(graph, scores, selections)  # type: ignore[arg-type]
            best = call(graph, aten.amax.default, scores, [-1], True)
            tied = call(graph, aten.eq.Tensor, scores, best)
            beyond = int(scatter.meta["val"].shape[-1]) - 1  # no id is larger; with NaN scores it still is an id
            allowed = call(graph, aten.where.ScalarOther, tied, ids, beyond)
            chosen = call(graph, aten.amin.default, allowed, [-1], False)
        copy_trace(chosen, node)
        node.replace_all_uses_with(chosen)
        graph.erase_node(node)
        result.changed += 1
    if result.changed:
        graph.eliminate_dead_code()
    return result
