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
from gemma_npu_compile.passes.fx import is_view

aten = torch.ops.aten


@dataclass(frozen=True)
class CacheCalls:
    """What a graph says about its calls.

    Attributes:
        query_len: tokens a row.
        first: the call makes its cache: it returns new keys and values, and reads none.
        grows: why no call is captured, when the cache comes back longer than it went in.
    """

    query_len: Dim
    first: bool
    grows: str | None

    def prefill(self, values: Values, longest: int) -> bool:
        """Whether a call is a prefill: it makes its cache, or brings more than ``longest`` tokens a row."""
        return self.first or evaluate(self.query_len, values) > longest


def _source(node: object) -> Node | None:
    """The value behind views, slices and copies."""
    while isinstance(node, Node) and (is_view(node) or node.target in (aten.clone.default, aten._to_copy.default)):
        node = node.args[0]
    return node if isinstance(node, Node) else None


def _is_cache(node: object) -> bool:
    """Whether a value has the form of keys or values: ``(rows, heads, tokens, head_dim)``, floating."""
    fake = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(fake, Tensor) and fake.dim() == 4 and fake.is_floating_point()


def _longer(result: Node, static: set[int]) -> Node | None:
    """The input that ``result`` is with tokens appended, if it is one."""
    joined = _source(result)
    if joined is None or joined.target is not aten.cat.default or len(joined.args) < 2 or joined.args[1] not in (2, -2):
        return None
    start = _source(joined.args[0][0])  # type: ignore[index]
    if start is None or start.op != "placeholder" or not _is_cache(start) or start.meta["source"] in static:
        return None
    before, after = start.meta["val"].shape[2], result.meta["val"].shape[2]
    return start if str(before) != str(after) else None


def cache_calls(gm: GraphModule, inputs: Sequence[Input], static: set[int]) -> CacheCalls | None:
    """Read a final graph; None unless it takes tokens and reads, writes or returns a KV cache.

    Args:
        static: argument indices of parameters and of other tensors whose addresses do not change.
    """
    tokens = next((item for item in inputs if item.role == "token" and len(item.shape) == 2), None)
    if tokens is None:
        return None
    (returned,) = gm.graph.find_nodes(op="output")[0].args
    results = [each for each in returned if _is_cache(each)]  # type: ignore[union-attr]
    longer = [found for each in results if (found := _longer(each, static)) is not None]
    writes = any(item.role == "cache" and len(item.shape) >= 3 for item in inputs)
    makes = len(results) >= 2 and not longer and not writes
    if not (longer or writes or makes):
        return None
    grows = None
    if longer:
        label = longer[0].meta["label"]
        grows = (
            f"the KV cache grows: {label} comes back longer than it went in, so that every call has shapes of its own "
            "(DynamicCache); a static one, cache_implementation='static', is captured"
        )
    return CacheCalls(tokens.shape[1], makes, grows)
