"""One operator per rotary embedding: ``x * cos + cat(-x2, x1) * sin`` becomes ``rotary(x, cos, sin)``.

The operator wants heads next to last, ``(..., heads, head_dim)``, as Gemma 4 has them when it rotates. Models that
rotate ``(batch, heads, q_len, head_dim)`` get the same operator between two transpositions, which are views.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

import gemma_npu_compile.ops  # noqa: F401  (registers the dialect)
from gemma_npu_compile.passes.fuse_gated_gelu import half
from gemma_npu_compile.passes.fx import argument, call, copy_trace, is_last, root, same_layout, written_roots
from gemma_npu_compile.passes.result import PassResult

aten = torch.ops.aten
gemma_npu = torch.ops.gemma_npu


@dataclass(frozen=True)
class _Rotation:
    """``result`` is ``x`` rotated; the tables lack axis ``heads`` of ``x``, which is negative."""

    x: Node
    cos: Node
    sin: Node
    heads: int
    result: Node


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target


def _turned(cat: Node) -> Node | str | None:
    """The value whose halves ``cat`` swaps and negates; why it is another; None when it is no candidate."""
    parts: Any = cat.args[0]
    signs = [_is(part, aten.neg.default) for part in parts]
    if len(parts) != 2 or not any(signs) or not is_last(argument(cat, "dim"), cat):
        return None
    first, second = (half(part.args[0] if sign else part) for part, sign in zip(parts, signs, strict=True))
    if first is None or second is None or first[0] is not second[0]:
        return "not the halves of one value"
    if (signs, first[1], second[1]) != ([True, False], 1, 0):
        return "other halves or signs than cat(-x2, x1)"
    return first[0]


def _table(product: Node, factor: Node) -> tuple[Node, int] | None:
    """The table behind the other factor of a product, and the axis it is expanded at, counted from the end."""
    other = next((arg for arg in product.args if arg is not factor), None)
    if not isinstance(other, Node) or other.target is not aten.unsqueeze.default:
        return None
    dim, rank = other.args[1], other.meta["val"].dim()
    return other.args[0], dim if dim < 0 else dim - rank  # type: ignore[operator, return-value]


def _partial(x: Node, result: Node) -> bool:
    """Whether ``x`` was cut from a wider value and the result is put back beside the rest."""
    source: Any = x.args[0] if x.args else None
    part = any(_is(source, op) for op in (aten.split.Tensor, aten.split_with_sizes.default))
    cut = part or (_is(x, aten.slice.Tensor) and is_last(argument(x, "dim"), x))
    return cut and any(_is(user, aten.cat.default) and is_last(argument(user, "dim"), user) for user in result.users)


def _match(cat: Node, x: Node, written: set[Node]) -> _Rotation | str:
    """The rotation around the swapped halves, or why it is none."""
    turned = next(iter(cat.users), None)
    result = next(iter(turned.users), None) if _is(turned, aten.mul.Tensor) else None  # type: ignore[union-attr]
    if not _is(result, aten.add.Tensor) or argument(result, "alpha") != 1:  # type: ignore[arg-type]
        return "not a sum of two products"
    straight: Any = next((term for term in result.args if term is not turned), None)  # type: ignore[union-attr]
    if not _is(straight, aten.mul.Tensor) or x not in straight.args:
        return "not a sum of two products"
    if any(len(node.users) != 1 for node in (cat, turned, straight)):  # type: ignore[union-attr]
        return "an intermediate is read elsewhere"
    if _partial(x, result):  # type: ignore[arg-type]
        return "partial rotary embedding of a slice"
    cos, sin = _table(straight, x), _table(turned, cat)  # type: ignore[arg-type]
    if cos is None or sin is None or cos[1] != sin[1] or cos[1] not in (-2, -3):
        return "cos and sin are not expanded over the heads"
    fake, heads = x.meta["val"], cos[1]
    shape = [str(size) for size in fake.shape]
    del shape[heads]
    if any([str(size) for size in table.meta["val"].shape] != shape for table in (cos[0], sin[0])):
        return "cos and sin are broadcast over rows or positions"
    if fake.dtype == torch.float64 or result.meta["val"].dtype != fake.dtype:  # type: ignore[union-attr]
        return f"{fake.dtype} in, {result.meta['val'].dtype} out"  # type: ignore[union-attr]
    if {root(x), root(cos[0]), root(sin[0])} & written:
        return "it reads a value the graph writes to"
    return _Rotation(x, cos[0], sin[0], heads, result)  # type: ignore[arg-type]


def _rewrite(graph: Graph, found: _Rotation, left: Counter[str]) -> bool:
    with graph.inserting_before(found.result):
        if found.heads == -2:
            new = [call(graph, gemma_npu.rotary.default, found.x, found.cos, found.sin)]
        else:
            new = [call(graph, aten.transpose.int, found.x, -3, -2)]
            new += [call(graph, gemma_npu.rotary.default, new[0], found.cos, found.sin)]
            new += [call(graph, aten.transpose.int, new[1], -3, -2)]
        if not same_layout(new[-1], found.result):
            new += [call(graph, aten.clone.default, new[-1], memory_format=torch.contiguous_format)]
    if not same_layout(new[-1], found.result):
        for node in reversed(new):
            graph.erase_node(node)
        left["the result is laid out in no order the operator gives"] += 1
        return False
    for node in new:
        copy_trace(node, found.result)
    found.result.replace_all_uses_with(new[-1])
    graph.erase_node(found.result)
    return True


def fuse_rotary(gm: GraphModule) -> PassResult:
    """Rewrite rotary embeddings, full and partial (a tail of cos 1 and sin 0), to ``gemma_npu::rotary``.

    float32 results stay bit for bit. bfloat16 and float16 results are rounded once, not after each product as well.
    """
    result = PassResult()
    written = written_roots(gm.graph)
    for cat in gm.graph.find_nodes(op="call_function", target=aten.cat.default):
        x = _turned(cat)
        if x is None:
            continue
        found = _match(cat, x, written) if isinstance(x, Node) else x
        if isinstance(found, str):
            result.left[found] += 1
        else:
            result.changed += _rewrite(gm.graph, found, result.left)
    if result.changed:
        gm.graph.eliminate_dead_code()
    return result
