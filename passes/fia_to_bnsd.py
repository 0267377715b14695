"""Give a user's own fused-attention calls that the platform forbids as TND the BNSD layout, node by node.

``npu_fused_infer_attention_score`` and its v2, written by hand or by a model's own attention module. The rewrite needs
what packed queries do not say by themselves: that every request has the same number of them.
"""

import operator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

import gemma_npu_compile.ops.npu  # noqa: F401  (the operators, where torch_npu is absent)
from gemma_npu_compile.capabilities import AttentionCall, Platform
from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.passes.fx import argument, call, copy_trace, known_len, packed, size_of, value, where
from gemma_npu_compile.passes.result import PassResult

aten = torch.ops.aten
ALL_TOKENS = 2147483647
_POSITIONAL = ("query", "key", "value")
_CARRIED = {*_POSITIONAL, "atten_mask", "block_table"}


@dataclass(frozen=True)
class _Names:
    """What one version of the operator calls its arguments."""

    q_lens: str
    kv_lens: str
    heads: str
    lse: str


_VERSIONS = {
    torch.ops.npu.npu_fused_infer_attention_score.default: _Names(
        "actual_seq_lengths", "actual_seq_lengths_kv", "num_heads", "softmax_lse_flag"
    ),
    torch.ops.npu.npu_fused_infer_attention_score_v2.default: _Names(
        "actual_seq_qlen", "actual_seq_kvlen", "num_query_heads", "return_softmax_lse"
    ),
}


def _step(lens: Any) -> Any:
    """The first of cumulative lengths that provably all grow by it, as an argument; None where that is not known."""
    if not isinstance(lens, (list, tuple)) or not lens:
        return None
    alike = (statically_known_true(value(each) == value(lens[0]) * i) for i, each in enumerate(lens, 1))
    return lens[0] if all(alike) else None


def _longest(node: Node, lens: Any) -> int:
    """Queries of the longest request of a TND call; 2 stands for any number above one."""
    ends = [value(each) for each in lens] if isinstance(lens, (list, tuple)) else []
    if ends and all(isinstance(end, int) for end in ends):
        return max(ends[0], *(b - a for a, b in pairwise(ends)), 0)
    return (known_len(argument(node, "query").meta["val"].shape[0] // len(ends)) if ends else None) or 2


def _mask_form(node: Node) -> str:
    mode, before, after = (argument(node, name) for name in ("sparse_mode", "pre_tokens", "next_tokens"))
    if mode in (2, 3, 4):
        return "band" if mode == 4 and (before < ALL_TOKENS or after < 0) else "causal"
    return "none" if argument(node, "atten_mask") is None else "full"


def _facts(node: Node, names: _Names) -> AttentionCall:
    """What the platform is asked about a node as it is."""
    layout = argument(node, "input_layout").partition("_")[0].replace("NTD", "TND")
    heads, shape = argument(node, names.heads), argument(node, "query").meta["val"].shape
    q_len = _longest(node, argument(node, names.q_lens)) if layout == "TND" else known_len(shape[layout.index("S")])
    return AttentionCall(
        layout=layout,
        head_dim=int(shape[-1]) // (heads if layout == "BSH" else 1),
        q_len=2 if q_len is None else q_len,
        heads=heads,
        kv_heads=argument(node, "num_key_value_heads") or heads,
        block_size=argument(node, "block_size") if argument(node, "block_table") is not None else None,
        mask=_mask_form(node),
    )


def _batched(graph: Graph, tensor: Node, rows: int, length: Any) -> Node:
    """``(rows * length, N, D)`` as ``(rows, N, length, D)``, contiguous."""
    heads, width = tensor.meta["val"].shape[1:]
    if length == 1:  # both layouts lie the same in memory
        return packed(graph, call(graph, aten.view.default, tensor, [rows, heads, 1, width]))
    split = call(graph, aten.view.default, tensor, [rows, length, heads, width])
    return packed(graph, call(graph, aten.transpose.int, split, 1, 2))


def _flat(graph: Graph, tensor: Node, tokens: Any) -> Node:
    """``(B, N, S, D)`` as ``(tokens, N, D)``."""
    _, heads, length, width = tensor.meta["val"].shape
    if str(length) != "1":
        tensor = packed(graph, call(graph, aten.transpose.int, tensor, 1, 2))
    return call(graph, aten.view.default, tensor, [tokens, heads, width])


def _band_of_one(node: Node, kv_lens: Any, block_size: int | None) -> Node:
    """``(B, 1, 1, keys)`` bool, True where the band around a row's only (and newest) query hides a key.

    Args:
        kv_lens: keys of each request.
        block_size: of paged keys, which a mask covers to the end of the block table; None for dense ones.
    """
    graph, before, after = node.graph, argument(node, "pre_tokens"), argument(node, "next_tokens")
    keys = kv_lens[0]
    if block_size is not None:
        width = size_of(graph, argument(node, "block_table"), 1)
        keys = width * block_size if isinstance(width, int) else call(graph, operator.mul, width, block_size)
    to: dict[str, Any] = {"dtype": torch.int64, "device": argument(node, "query").meta["val"].device}
    lens = call(graph, aten.stack.default, [call(graph, aten.scalar_tensor.default, each, **to) for each in kv_lens])
    ends = call(graph, aten.view.default, lens, [-1, 1, 1, 1])
    places = call(graph, aten.arange.default, keys, **to)
    hidden = call(graph, aten.lt.Tensor, places, call(graph, aten.sub.Tensor, ends, 1 + before))
    if after >= 0:
        return hidden
    late = call(graph, aten.gt.Tensor, places, call(graph, aten.add.Tensor, ends, after - 1))
    return call(graph, aten.logical_or.default, hidden, late)


def _rewrite(node: Node, names: _Names, facts: AttentionCall, q_step: Any, kv_step: Any) -> None:
    """The node as BNSD, with ``q_step`` queries of each request, and ``kv_step`` keys where they are dense."""
    graph, rows = node.graph, len(argument(node, names.q_lens))
    query, key, val = (argument(node, name) for name in _POSITIONAL)
    options = {k: v for k, v in node.kwargs.items() if k not in (*_POSITIONAL, names.q_lens)}
    options["input_layout"] = "BNSD"
    with graph.inserting_before(node):
        if facts.block_size is None:
            options[names.kv_lens] = [kv_step] * rows
            key, val = (_batched(graph, each, rows, kv_step) for each in (key, val))
        if facts.q_len == 1 and argument(node, "inner_precise"):
            options["inner_precise"] = argument(node, "inner_precise") & 1  # the rest repairs rows of several queries
        if facts.q_len == 1 and facts.mask != "full":  # one query ignores the sparse modes
            for name in ("atten_mask", "sparse_mode", "pre_tokens", "next_tokens"):
                options.pop(name, None)
            if facts.mask == "band":
                options["atten_mask"] = _band_of_one(node, options[names.kv_lens], facts.block_size)
        new = call(graph, node.target, _batched(graph, query, rows, q_step), key, val, **options)
        copy_trace(new, node)
        for user in list(node.users):  # elements of the pair (result, log of the softmax's sum)
            part = call(graph, operator.getitem, new, user.args[1])
            if user.args[1] == 0 or argument(node, names.lse):
                part = _flat(graph, part, size_of(graph, query, 0))
            user.replace_all_uses_with(part)
            graph.erase_node(user)
    graph.erase_node(node)


def _why_not(node: Node, names: _Names, facts: AttentionCall, q_step: Any, kv_step: Any) -> str | None:
    """What keeps a TND node from becoming BNSD; None when nothing does."""
    lens, kv_lens = argument(node, names.q_lens), argument(node, names.kv_lens)
    if q_step is None:
        return f"{names.q_lens} is {lens}: BNSD needs the same number of queries for every request, [q, 2q, ...]"
    if not isinstance(kv_lens, (list, tuple)) or len(kv_lens) != len(lens):
        return f"{names.kv_lens} is {kv_lens}: it must be a list of {len(lens)} lengths, one for each request"
    if facts.block_size is None and kv_step is None:
        return f"{names.kv_lens} is {kv_lens}: dense keys need the same number for every request, [k, 2k, ...]"
    steps = {"query": q_step} if facts.block_size is not None else {"query": q_step, "key": kv_step, "value": kv_step}
    for name, step in steps.items():
        tokens, total = argument(node, name).meta["val"].shape[0], value(step) * len(lens)
        if not statically_known_true(tokens == total):
            return f"the {name} has {tokens} tokens, its lengths end at {total}"
        if known_len(value(step)) is None:
            return f"whether a request has one {name} token or more is not known from {value(step)}"
    for each in node.target._schema.arguments:  # type: ignore[union-attr]
        if each.name not in _CARRIED and isinstance(argument(node, each.name), Node) and "Tensor" in str(each.type):
            return f"operand {each.name} has no BNSD form here"
    if facts.mask == "full":
        shape = [str(each) for each in argument(node, "atten_mask").meta["val"].shape]
        rows, queries = str(len(lens)), str(value(q_step))
        forms = [[rows]] if queries == "1" else [[queries]]
        forms += [["1", queries], ["1", "1", queries], [rows, "1", queries]]
        if shape[:-1] not in forms:
            return f"its atten_mask is ({', '.join(shape)}), BNSD takes ({rows} or 1, 1, {queries}, keys)"
    return None


def fia_to_bnsd(gm: GraphModule, *, platform: Platform) -> PassResult:
    """Rewrite each TND call of ``npu_fused_infer_attention_score`` (v1, v2) that ``platform`` forbids to BNSD.

    Scale, heads, masks, lengths, caches and the log-sum-exp are carried. A window of single queries, which ignore the
    sparse modes in BNSD, becomes an explicit mask.

    Raises:
        CompileError: a call is forbidden and cannot become BNSD; names node, rule and source.
    """
    result = PassResult()
    for node in list(gm.graph.nodes):
        names = _VERSIONS.get(node.target) if node.op == "call_function" else None
        if names is None:
            continue
        if "attention" in node.meta:
            result.left["lowered from the dialect, its layout chosen there"] += 1
            continue
        if argument(node, "query_rope") is not None:
            result.left["rope operands, of which the table does not speak"] += 1
            continue
        if argument(node, names.q_lens) == []:
            result.left["no rows"] += 1
            continue
        facts, layout = _facts(node, names), argument(node, "input_layout")
        verdict = platform.judge(facts)
        if verdict.legal:
            result.left[verdict.rule] += 1
            continue
        modules = list((node.meta.get("nn_module_stack") or {}).values())
        layer = f"layer {modules[-1][0]}: " if modules else ""
        illegal = f"{layer}{where(node)} is illegal on {platform.name}: {layout}: {verdict.rule} ({verdict.source})"
        if layout != "TND":
            raise CompileError(f"{illegal}; only TND is rewritten")
        one = {"band": "full", "causal": "none"}.get(facts.mask, facts.mask) if facts.q_len == 1 else facts.mask
        other = platform.judge(replace(facts, layout="BNSD", mask=one))
        if not other.legal:
            raise CompileError(f"{illegal}; BNSD: {other.rule} ({other.source})")
        steps = _step(argument(node, names.q_lens)), _step(argument(node, names.kv_lens))
        reason = _why_not(node, names, facts, *steps)
        if reason is not None:
            raise CompileError(f"{illegal}; it cannot become BNSD: {reason}")
        _rewrite(node, names, facts, *steps)
        result.changed += 1
    return result
