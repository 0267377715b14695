"""Lower plain ``scaled_dot_product_attention`` over dense keys to the platform's fused attention.

Models that were never written for Ascend call it, with their keys repeated for every query head and a mask that says
what is visible. The fused operator reads the keys un-repeated, wants contiguous BNSD operands and a mask that says what
is hidden, and has a causal mode of its own.
"""

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

import gemma_npu_compile.ops.npu  # noqa: F401  (the operators, where torch_npu is absent)
from gemma_npu_compile.capabilities import AttentionCall, Platform
from gemma_npu_compile.passes.attention_masks import causal_mask
from gemma_npu_compile.passes.fx import (
    argument,
    call,
    copy_trace,
    is_packed,
    is_view,
    known_len,
    order_of,
    packed,
    root,
    size_of,
    value,
    written_args,
)
from gemma_npu_compile.passes.result import PassResult

aten = torch.ops.aten
FUSED = "npu_fused_infer_attention_score"
_ALONE = aten.scaled_dot_product_attention.default
"""SDPA as it is written: one result. Its traced forms return the log-sum-exp and more besides."""
_MASKS: dict[Any, str] = {
    _ALONE: "attn_mask",
    aten._scaled_dot_product_flash_attention_for_cpu.default: "attn_mask",
    aten._scaled_dot_product_fused_attention_overrideable.default: "attn_bias",
}
"""SDPA as traces have it, and what each form calls its mask."""

_FILLS: dict[Any, int] = {aten.scalar_tensor.default: 0, aten.full.default: 1, aten.full_like.default: 1}
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_HALVES = (torch.float16, torch.bfloat16)


class _Left(Exception):  # noqa: N818  (no error: a reason)
    """Why a node stays; raised before anything is changed."""


def _sizes(node: Node) -> list[str]:
    """Sizes as expressions: compared as text, they add no guard."""
    return [str(each) for each in value(node).shape]


def _memory(node: Node) -> Node:
    """The value whose memory a node shows, through views and through operators that return what they wrote to."""
    node = root(node)
    while node.op == "call_function" and (written := written_args(node)):
        node = root(written[0])
    return node


def _result(node: Node) -> torch.Tensor:
    """The fake result of an SDPA node, without the log-sum-exp."""
    return value(node) if node.target is _ALONE else value(node)[0]


def _constant(node: Any) -> float | None:
    """The number a tensor is filled with, where its node says so."""
    target = node.target if isinstance(node, Node) else None
    given = 0.0 if target in _ZEROS else node.args[_FILLS[target]] if target in _FILLS else node
    return float(given) if isinstance(given, (int, float)) else None


def _additive(mask: Node) -> tuple[Node, float | None, float | None] | None:
    """Condition of an additive mask, what it holds where the condition holds, and elsewhere."""
    args: Any = mask.args
    if mask.target is aten.where.self:
        found = args[0], _constant(args[1]), _constant(args[2])
    elif mask.target is aten.masked_fill.Scalar:
        found = args[1], _constant(args[2]), _constant(args[0])
    else:
        return None
    return found if _sizes(found[0]) == _sizes(mask) else None


def _unrepeated(node: Node) -> tuple[Node, Node, int]:
    """Keys before ``unsqueeze -> expand -> (clone ->) view`` along heads, where that began, and the repeats."""
    alone = node, node, 1
    wide: Any = node.args[0] if node.target in _RESHAPES else node
    wide = wide.args[0] if wide.target is aten.clone.default else wide
    narrow: Any = wide.args[0] if wide.target is aten.expand.default else node
    if narrow is node or narrow.target not in (*_RESHAPES, aten.unsqueeze.default) or value(narrow).dim() != 5:
        return alone
    source, repeats = narrow.args[0], value(wide).shape[2]
    if not isinstance(repeats, int) or value(source).dim() != 4:
        return alone
    rows, heads, *rest = _sizes(source)
    flat = [rows, str(value(source).shape[1] * repeats), *rest]
    grouped = _sizes(narrow) == [rows, heads, "1", *rest] and _sizes(wide) == [rows, heads, str(repeats), *rest]
    return (source, wide, repeats) if grouped and _sizes(node) == flat else alone


class _Lowering:
    """One graph's rewrites; masks that several layers share are made once."""

    def __init__(self, gm: GraphModule, platform: Platform) -> None:
        self.gm, self.graph, self.platform = gm, gm.graph, platform
        self._order = order_of(gm.graph)
        self._writes: dict[Node, list[int]] = {}
        for node, position in self._order.items():
            for written in written_args(node):
                self._writes.setdefault(_memory(written), []).append(position)
        self._made: dict[Any, Node] = {}

    def _keys(self, node: Node) -> tuple[Node, Node]:
        """Keys and values, un-repeated when both are repeated alike."""
        given = argument(node, "key"), argument(node, "value")
        found = [_unrepeated(each) for each in given]
        for source, since, repeats in found:
            # The repetition is a copy: a write after it and before the attention would become visible.
            written = self._writes.get(_memory(source), ())
            if repeats != found[0][2] or any(self._order[since] < at < self._order[node] for at in written):
                return given
        return found[0][0], found[1][0]

    def _limits(self, node: Node, query: Any, key: Any, val: Any) -> Iterator[tuple[bool, str]]:
        """What the operator cannot say, one after the other: whether it holds, and the reason to leave the node."""
        mask, causal, result = argument(node, _MASKS[node.target]), argument(node, "is_causal"), _result(node)
        others = [user for user in node.users if user.args[1:] != (0,)] if node.target is not _ALONE else []
        width = query.shape[-1]
        verdict = self.platform.operator(FUSED, width if isinstance(width, int) else 16)
        yield not verdict.legal, verdict.rule
        yield argument(node, "dropout_p") != 0, "dropout"
        yield any(user.users for user in others), "the log-sum-exp is read"
        yield not query.dim() == key.dim() == val.dim() == 4, "operands that are not (B, N, S, D)"
        yield [str(n) for n in key.shape] != [str(n) for n in val.shape], "keys and values of different shapes"
        yield str(query.shape[0]) != str(key.shape[0]), "keys of another batch size"
        yield not all(isinstance(n, int) for n in (query.shape[1], key.shape[1], key.shape[3])), "symbolic heads"
        yield query.shape[1] % key.shape[1] != 0, "heads that broadcast"
        # float32 is the emulation's exception, made where numbers are compared; a device refuses it.
        floats = (*_HALVES, torch.float32) if query.device.type == "cpu" else _HALVES
        yield query.dtype not in floats, f"{query.dtype} operands"
        yield "0" in {str(n) for n in (*query.shape, *key.shape)}, "empty operands"
        yield known_len(query.shape[2]) is None, "a number of queries that may be one or more"
        yield mask is not None and causal, "a mask and is_causal"
        # Causal is aligned to the top left here: one query sees the first key alone, and the operator ignores that.
        yield causal and known_len(query.shape[2]) == 1 and str(key.shape[2]) != "1", "is_causal over one query"
        if mask is not None:
            yield value(mask).dim() not in (2, 4), "a mask that is not (queries, keys) or (B, 1, queries, keys)"
            yield _sizes(mask)[1:-2] not in ([], ["1"]), "a mask for each head"
        yield not is_packed(result) and not is_packed(result.transpose(1, 2)), "a result with strides of its own"

    def _hidden(self, mask: Node) -> Node:
        """True where hidden, from a bool mask of what is visible or an additive one that provably holds 0 and -inf."""
        boolean = value(mask).dtype == torch.bool
        condition, *fills = (None if boolean else _additive(mask)) or (mask, None, None)
        inner: Any = mask.args[0] if mask.args else None
        if _memory(condition) in self._writes:
            raise _Left("a mask the graph writes to")
        if boolean or fills == [0.0, -math.inf]:
            if condition not in self._made:
                self._made[condition] = call(self.graph, aten.logical_not.default, condition)
            return self._made[condition]
        if fills == [-math.inf, 0.0]:
            return condition
        if mask.target is aten._to_copy.default and value(inner).dtype.is_floating_point:
            return self._hidden(inner)
        if mask.op == "call_function" and is_view(mask) and isinstance(value(inner), torch.Tensor):
            hidden = self._hidden(inner)
            hidden = packed(self.graph, hidden) if mask.target in _RESHAPES else hidden
            return call(self.graph, mask.target, hidden, *mask.args[1:])
        raise _Left("an additive mask")

    def _mask(self, mask: Node, query: Node, key: Node) -> Node:
        """``(B or 1, 1, queries, keys)`` bool, contiguous, True where hidden."""
        wide = hidden = self._hidden(mask)
        wanted = [_sizes(query)[2], _sizes(key)[2]]
        name = hidden, *wanted
        if name not in self._made:
            while value(wide).dim() < 4:
                wide = call(self.graph, aten.unsqueeze.default, wide, 0)
            if _sizes(wide)[2:] != wanted:
                rows, *rest = (size_of(self.graph, *at) for at in ((wide, 0), (query, 2), (key, 2)))
                wide = call(self.graph, aten.expand.default, wide, [rows, 1, *rest])
            self._made[name] = packed(self.graph, wide)
        return self._made[name]

    def replace(self, node: Node) -> None:
        """Put the fused operator in the place of a node.

        Raises:
            _Left: why the node stays.
        """
        graph, query, (key, val) = self.graph, argument(node, "query"), self._keys(node)
        fake, mask, scale = value(query), argument(node, _MASKS[node.target]), argument(node, "scale")
        for holds, reason in self._limits(node, fake, value(key), value(val)):
            if holds:
                raise _Left(reason)
        _, heads, queries, width = fake.shape
        q_len, kv_heads = known_len(queries) or 0, value(key).shape[1]
        form = "full" if mask is not None else "causal" if argument(node, "is_causal") and q_len > 1 else "none"
        facts = AttentionCall(
            layout="BNSD", head_dim=width, q_len=q_len, heads=heads, kv_heads=kv_heads, block_size=None, mask=form
        )
        verdict = self.platform.judge(facts)
        if not verdict.legal:
            raise _Left(verdict.rule)
        options: dict[str, Any] = {"num_heads": heads, "num_key_value_heads": kv_heads, "input_layout": "BNSD"}
        options["scale"] = width**-0.5 if scale is None else scale
        with graph.inserting_before(node):
            if form == "full":
                options["atten_mask"] = self._mask(mask, query, key)
                if q_len > 1:  # a query that sees nothing gives zeros, as SDPA does
                    options["inner_precise"] = 2
            elif form == "causal":
                options |= {"atten_mask": causal_mask(self.gm, fake), "sparse_mode": 2}
            first = packed(graph, query), packed(graph, key)
            operands = *first, first[1] if val is key else packed(graph, val)
            fused = call(graph, torch.ops.npu.npu_fused_infer_attention_score.default, *operands, **options)
            out = call(graph, operator.getitem, fused, 0)
            if not is_packed(_result(node)):  # (B, S, N, D) in memory: views behind it rely on that
                swapped = call(graph, aten.transpose.int, out, 1, 2)
                out = call(graph, aten.transpose.int, packed(graph, swapped), 1, 2)
        copy_trace(fused, node)
        parts = [] if node.target is _ALONE else list(node.users)
        for user in [part for part in parts if part.args[1] == 0] or [node]:
            user.replace_all_uses_with(out)
        for each in (*parts, node):
            graph.erase_node(each)


def sdpa_to_fia(gm: GraphModule, *, platform: Platform) -> PassResult:
    """Rewrite dense SDPA to ``npu_fused_infer_attention_score`` (BNSD) where ``platform`` has it and allows the call.

    Repeated keys (GQA) are read un-repeated; scale, masks and ``is_causal`` are carried. What the operator cannot say
    stays as it is, with its reason: SDPA itself still works.
    """
    result = PassResult()
    lowering = _Lowering(gm, platform)
    for node in [n for n in gm.graph.nodes if n.op == "call_function" and n.target in _MASKS]:
        try:
            lowering.replace(node)
        except _Left as left:
            result.left[str(left)] += 1
            continue
        result.changed += 1
    if result.changed:
        gm.graph.eliminate_dead_code()
    return result
