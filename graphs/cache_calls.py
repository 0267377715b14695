"""Calls of a model with a KV cache that no capture is made of: a prefill, and a cache that grows.

Prompts have any length and come once, a step has one and comes a thousand times: a capture of a prompt is memory spent
on one call. A cache that grows has another shape in every call, so each would need a capture of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gemma_npu_compile.graphs.inputs import Dim, Input, Values, evaluate
from gemma_npu_compile.passes.fx import is_view, placeholders

aten = torch.ops.aten
_COPIES = {aten.clone.default, aten._to_copy.default}


@dataclass(frozen=True)
class CacheCalls:
    """What a graph says about its calls.

    Attributes:
        query_len: tokens a row; None for a model that is given embeddings.
        first: the call makes its cache: it returns new keys and values, and reads none.
        grows: why no call is captured, when keys have another length in every call.
    """

    query_len: Dim | None
    first: bool
    grows: str | None

    def prefill(self, values: Values, longest: int) -> bool:
        """Whether a call is a prefill: it makes its cache, or brings more than ``longest`` tokens a row."""
        return self.first or (self.query_len is not None and evaluate(self.query_len, values) > longest)


def _source(node: object) -> Node | None:
    """The value behind views, slices and copies."""
    while isinstance(node, Node) and (is_view(node) or node.target in _COPIES):
        node = node.args[0]
    return node if isinstance(node, Node) else None


def _is_cache(node: object) -> bool:
    """Whether a value has the form of keys or values: ``(rows, heads, tokens, head_dim)``, floating."""
    fake = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(fake, Tensor) or fake.dim() != 4:
        return False
    return fake.is_floating_point() and isinstance(fake.shape[1], int) and isinstance(fake.shape[3], int)


_MASKING = {aten.add.Tensor, aten.where.self, aten.masked_fill.Scalar, aten.logical_not.default}


def _is_mask(node: Node) -> bool:
    """Whether an input is added to scores, or given to attention as its mask: it has the form of keys, and is none."""
    queue, seen = [node], {node}
    while queue:
        value = queue.pop()
        for user in value.users:
            if user.target in _MASKING:
                return True
            schema = getattr(user.target, "_schema", None)
            names = [] if schema is None else [each.name for each in schema.arguments]
            taken = [*zip(names, user.args, strict=False), *user.kwargs.items()]
            if any(arg is value and "mask" in name for name, arg in taken):
                return True
            if user not in seen and (is_view(user) or user.target in _COPIES):
                seen.add(user)
                queue.append(user)
    return False


def _grown_from(result: Node) -> Node | None:
    """The input that ``result`` is with tokens appended, if it is one."""
    joined = _source(result)
    if joined is None or joined.target is not aten.cat.default or len(joined.args) < 2 or joined.args[1] not in (2, -2):
        return None
    start = _source(joined.args[0][0])  # type: ignore[index]
    if start is None or start.op != "placeholder" or not _is_cache(start):
        return None
    before, after = start.meta["val"].shape[2], result.meta["val"].shape[2]
    return start if str(before) != str(after) else None


def cache_calls(gm: GraphModule, inputs: Sequence[Input]) -> CacheCalls | None:
    """Read a final graph; None unless it reads, writes or returns a KV cache."""
    tokens = next((item.shape[1] for item in inputs if item.role == "token" and len(item.shape) == 2), None)
    (returned,) = gm.graph.find_nodes(op="output")[0].args
    results = [each for each in returned if _is_cache(each)]  # type: ignore[union-attr]
    moving = {item.source for item in inputs if item.buffer is not None}
    given = [node for node in placeholders(gm) if _is_cache(node) and node.meta.get("source") in moving]
    given = [node for node in given if not _is_mask(node)]
    longer = [found for each in results if (found := _grown_from(each)) in given]
    anew = [node for node in given if not isinstance(node.meta["val"].shape[2], int)]
    writes = any(item.role == "cache" and len(item.shape) >= 3 for item in inputs)
    if longer and tokens is not None:
        what = f"{longer[0].meta['label']} comes back longer than it went in"  # type: ignore[union-attr]
    elif len(anew) >= 2:
        what = f"{anew[0].meta['label']} has any number of tokens"
    elif tokens is not None and (writes or len(results) >= 2):
        return CacheCalls(tokens, not writes and not given, None)
    else:
        return None
    return CacheCalls(
        tokens,
        False,
        f"the KV cache grows ({what}): no capture would serve a second call. A static cache "
        "(cache_implementation='static') is captured",
    )
