"""Give attention that is illegal as TND on the platform the BNSD layout, node by node.

Large heads (256, 512) are what Gemma 4 has and what fused attention on Ascend refuses in TND. Which is asked of the
platform's table; heads that are legal as they are stay.
"""

import torch
from torch.fx import Graph, GraphModule, Node

from gemma_npu_compile.capabilities import AttentionCall, Platform
from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.passes.attention_masks import mask_form
from gemma_npu_compile.passes.fx import argument, arguments, call, copy_trace, packed
from gemma_npu_compile.passes.result import PassResult
from gemma_npu_compile.passes.sites import attention_nodes, query_len, row_count

aten = torch.ops.aten


def attention_call(node: Node, kv_lens: str, verify_attention: str = "paged", layout: str = "") -> AttentionCall:
    """What the platform is asked about an attention node of the dialect, as it is or in another layout."""
    query, cache = argument(node, "query").meta["val"], argument(node, "key_cache").meta["val"]
    q_len, layout = query_len(node), layout or argument(node, "layout")
    dense = verify_attention == "dense" and q_len > 1 and layout == "BNSD"
    return AttentionCall(
        layout=layout,
        head_dim=int(query.shape[-1]),
        q_len=q_len,
        heads=int(query.shape[1]),
        kv_heads=int(cache.shape[2]),
        block_size=None if dense else int(cache.shape[1]),
        mask=mask_form(q_len, argument(node, "window"), kv_lens),
    )


def _swapped(graph: Graph, tensor: Node) -> Node:
    """Axes 1 and 2 exchanged, contiguous: fused attention takes no strided inputs."""
    swapped = call(graph, aten.transpose.int, tensor, 1, 2)
    return call(graph, aten.clone.default, swapped, memory_format=torch.contiguous_format)


def _rewrite(gm: GraphModule, node: Node, facts: AttentionCall) -> None:
    """``(T, N, D)`` to ``(B, N, S, D)`` in front, and back behind."""
    graph = gm.graph
    query, table = argument(node, "query"), argument(node, "block_table")
    swap = facts.q_len > 1  # with one query per row both layouts lie the same in memory
    with graph.inserting_before(node):
        rows = call(graph, aten.sym_size.int, table, 0)
        query = packed(graph, query)
        if swap:
            split = call(graph, aten.view.default, query, [rows, facts.q_len, facts.heads, facts.head_dim])
            bnsd = _swapped(graph, split)
        else:
            bnsd = call(graph, aten.view.default, query, [rows, facts.heads, 1, facts.head_dim])
        new = {**arguments(node), "query": bnsd, "layout": "BNSD"}
        attention = call(graph, node.target, *new.values())
        back = _swapped(graph, attention) if swap else attention
        tokens = call(graph, aten.sym_size.int, query, 0)
        flat = call(graph, aten.view.default, back, [tokens, facts.heads, facts.head_dim])
    copy_trace(attention, node)
    node.replace_all_uses_with(flat)
    graph.erase_node(node)


def large_heads_to_bnsd(
    gm: GraphModule, *, platform: Platform, kv_lens: str = "device", verify_attention: str = "paged"
) -> PassResult:
    """Rewrite each TND attention node that ``platform`` forbids to BNSD; carry scale, window, table and lengths.

    Args:
        kv_lens: how the operator will learn the lengths (lower_attention.py): device lengths need an explicit mask,
            which packed queries cannot have.
        verify_attention: whether a verification in BNSD will be lowered to paged or to dense attention.

    Raises:
        CompileError: a node is legal in neither layout; names layer, rule and source.
    """
    result = PassResult()
    for node in attention_nodes(gm):
        if argument(node, "layout") != "TND":
            result.left["already BNSD"] += 1
            continue
        if isinstance(row_count(node), int) and row_count(node) == 0:
            result.left["no rows"] += 1
            continue
        if argument(node, "query_lens") is not None:
            result.left["ragged queries (a prefill, which is not captured)"] += 1
            continue
        facts = attention_call(node, kv_lens, verify_attention)
        verdict = platform.judge(facts)
        if verdict.legal:
            result.left[verdict.rule] += 1
            continue
        other = platform.judge(attention_call(node, kv_lens, verify_attention, "BNSD"))
        if not other.legal:
            raise CompileError(
                f"attention of layer {argument(node, 'layer')} is legal in no layout on {platform.name}: TND: "
                f"{verdict.rule} ({verdict.source}); BNSD: {other.rule} ({other.source})"
            )
        _rewrite(gm, node, facts)
        result.changed += 1
    return result
