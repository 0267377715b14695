"""One operator per RMSNorm, and one for a residual sum and the norm of it.

What is matched is the float32 core ``x * (mean(x^2) + eps) ** -0.5`` (also with rsqrt), then what is around it: a
weight multiplied in float32 (the ``1 + w`` of Gemma 2 and 3 is one), conversions from and to half precision, a sum in
front.
"""

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

import gemma_npu_compile.ops  # noqa: F401  (registers the dialect)
from gemma_npu_compile.passes.fx import argument, call, copy_trace, is_last, root, same_layout, written_roots
from gemma_npu_compile.passes.result import PassResult

aten = torch.ops.aten
gemma_npu = torch.ops.gemma_npu
_WRITTEN = "it reads a value the graph writes to"


@dataclass(frozen=True)
class _Core:
    """``chain``: square, mean, sum with eps, inverse root; ``normed``: ``wide`` times that. All float32."""

    wide: Node
    chain: tuple[Node, ...]
    normed: Node
    eps: float


def _calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.target in targets


def _unconverted(node: Any) -> Any:
    """What ``node`` converts to another floating point type, and changes in no other way; None if it does not."""
    if not _calls(node, aten._to_copy.default) or argument(node, "memory_format") not in (None, torch.preserve_format):
        return None
    given, result = node.args[0].meta["val"], node.meta["val"]
    return node.args[0] if given.device == result.device and given.is_floating_point() else None


def _factor(product: Node, of: Node) -> Any:
    """The other factor of a product of two different values; None if there is none."""
    if not _calls(product, aten.mul.Tensor) or product.args[0] is product.args[1]:
        return None
    return product.args[1] if product.args[0] is of else product.args[0]


def _is_weight(node: Any, x: Node) -> bool:
    fake = node.meta.get("val") if isinstance(node, Node) else None
    vector = isinstance(fake, torch.Tensor) and fake.is_floating_point() and fake.dim() == 1
    return vector and str(fake.shape[0]) == str(x.meta["val"].shape[-1])  # type: ignore[union-attr]


def _core(inverse: Node) -> _Core | str | None:
    """The core around an inverse root; why it is none; or None when it is no candidate."""
    total: Any = inverse.args[0]
    mean: Any = total.args[0] if _calls(total, aten.add.Tensor, aten.add.Scalar) else None
    square: Any = mean.args[0] if _calls(mean, aten.mean.dim) else None
    if not _calls(square, aten.pow.Tensor_Scalar, aten.mul.Tensor):
        return None
    wide, eps = square.args[0], total.args[1]
    dims: Any = argument(mean, "dim") or ()
    if square.args[1] is not wide if square.target is aten.mul.Tensor else square.args[1] != 2:
        return None
    chain = (square, mean, total, inverse)
    if not isinstance(eps, (int, float)) or argument(total, "alpha") != 1:
        return "eps is not a number"
    if len(dims) != 1 or not is_last(dims[0], wide) or not argument(mean, "keepdim"):
        return "the mean is not over the last axis"
    for dtype in (each.meta["val"].dtype for each in (wide, *chain)):
        if dtype != torch.float32:
            return f"computed in {dtype}, the operator computes in float32"
    if any(len(node.users) != 1 for node in chain):
        return "an intermediate is read elsewhere"
    (normed,) = inverse.users
    if _factor(normed, inverse) is not wide:
        return "it scales another value than it measures"
    return _Core(wide, chain, normed, float(eps))


def _ends(core: _Core) -> list[tuple[Node, Any]]:
    """Last nodes of the norms on one core, with their weights. Keys and values may be norms of one projection."""
    factors = [(user, _factor(user, core.normed)) for user in core.normed.users]
    ends = [(u, w) for u, w in factors if _is_weight(w, core.wide) and u.meta["val"].dtype == torch.float32]
    return ends if len(ends) == len(factors) else [*ends, (core.normed, None)]


def _terms(x: Node, own: set[Node], end: Node, written: set[Node]) -> Any:
    """The two terms of the sum ``x`` is, or why they stay a sum (``""`` when there is none)."""
    if not _calls(x, aten.add.Tensor) or not all(isinstance(term, Node) for term in x.args):
        return ""
    facts = {(each.meta["val"].dtype, str(each.meta["val"].shape)) for each in (x, *x.args)}  # type: ignore[union-attr]
    if len(facts) > 1 or argument(x, "alpha") != 1:
        return "residual sum kept: it converts, broadcasts or scales"
    if any(user < end for user in x.users if user not in own):
        return "residual sum kept: it is read before the norm"
    return f"residual sum kept: {_WRITTEN}" if {root(term) for term in x.args} & written else x.args  # type: ignore


def _rewrite(graph: Graph, core: _Core, end: Node, weight: Any, written: set[Node], left: Counter[str]) -> bool:
    """Replace one norm, with the conversions around it and the sum in front where that is the same arithmetic."""
    source, stored, readers = _unconverted(core.wide), _unconverted(weight), list(end.users)
    dtype = source.meta["val"].dtype if source is not None else torch.float32
    narrow = source is not None and all(_unconverted(u) is end and u.meta["val"].dtype == dtype for u in readers)
    x, old = (source, readers) if narrow else (core.wide, [end])
    if narrow and stored is not None and stored.meta["val"].dtype == dtype:
        weight = stored
    if {root(each) for each in (x, weight) if each is not None} & written:
        left[_WRITTEN] += 1
        return False
    own = {core.wide, *core.chain, core.normed} - {x}
    alone = end is core.normed or len(core.normed.users) == 1
    terms = _terms(x, own, end, written) if alone else ""
    summed = not isinstance(terms, str)
    with graph.inserting_before(end):
        if summed:
            pair = call(graph, gemma_npu.add_rms_norm.default, *terms, weight, core.eps)
            new = [call(graph, operator.getitem, pair, 0), call(graph, operator.getitem, pair, 1), pair]
        else:
            new = [call(graph, gemma_npu.rms_norm.default, x, weight, core.eps)]
    if not same_layout(new[0], old[0]) or (summed and not same_layout(new[1], x)):
        for node in new:
            graph.erase_node(node)
        left["the result is not laid out contiguously"] += 1
        return False
    for node in new:
        copy_trace(node, end)
    for node in old:
        node.replace_all_uses_with(new[0])
    if summed:
        x.replace_all_uses_with(new[1], delete_user_cb=lambda user: user not in own)
    elif terms:
        left[terms] += 1
    if narrow and any(_is_weight(_factor(user, new[0]), x) for user in new[0].users):
        left[f"weight kept: it is multiplied after rounding to {dtype}"] += 1
    # At once, or the next norm of the same value would see readers that are dead.
    for node in dict.fromkeys((*old, end, core.normed, *reversed(core.chain), core.wide, x)):
        if not node.users and (node is not x or summed):
            graph.erase_node(node)
    return True


def fuse_rms_norm(gm: GraphModule) -> PassResult:
    """Rewrite RMSNorms to ``rms_norm``, and to ``add_rms_norm`` where the input is a sum nobody reads before.

    The arithmetic stays what it was, roundings included; float32 results are equal bit for bit.
    """
    result = PassResult()
    written = written_roots(gm.graph)
    for node in list(gm.graph.nodes):
        inverse = _calls(node, aten.rsqrt.default) or (_calls(node, aten.pow.Tensor_Scalar) and node.args[1] == -0.5)
        core = _core(node) if inverse else None
        if isinstance(core, str):
            result.left[core] += 1
        elif core is not None:
            for end, weight in _ends(core):
                result.changed += _rewrite(gm.graph, core, end, weight, written, result.left)
    if result.changed:
        gm.graph.eliminate_dead_code()
    return result
