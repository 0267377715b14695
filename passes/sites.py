"""Attention nodes of the dialect: where they come from and what they read."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

import gemma_npu_compile.ops  # noqa: F401  (registers the dialect)
from gemma_npu_compile.passes.fx import argument


@dataclass(frozen=True)
class TableBinding:
    """Where a block-table input belongs.

    Attributes:
        layer: ``"<model>.layers.<i>"``.
        phase: ``"draft.<iteration>"`` or ``"verify"``, or what the caller named its phase.
        group: ``"g<n>"``, numbered in the order of the function's table inputs.
    """

    layer: str
    phase: str
    group: str


@dataclass(frozen=True)
class Attention:
    """One attention call and the inputs it depends on.

    Attributes:
        group, block_table: KV group and name of the input this layer's blocks come from.
        kv_len_source: what the user calls the input the lengths come from; ``kv_len_input`` is its placeholder.
        lengths: how the operator learns them: ``"operand"`` (a tensor), ``"fixed N"`` (a clipped table), or a host
            parameter: ``"bucket"`` or ``"exact"``.
    """

    layer: str
    phase: str
    layout: str
    heads: int
    head_dim: int
    window: int | None
    scale: float
    group: str | None
    block_table: str
    kv_len_source: str
    kv_len_input: str | None = None
    lengths: str = "operand"


def attention_nodes(gm: GraphModule) -> list[Node]:
    """The dialect's attention nodes in graph order."""
    return gm.graph.find_nodes(op="call_function", target=torch.ops.gemma_npu.paged_attention.default)


def site(node: Node) -> tuple[str, str]:
    """Phase and layer of an attention node."""
    phase, _, layer = str(argument(node, "layer")).rpartition("/")
    return phase or "step", layer or node.name


def row_count(node: Node) -> Any:
    """Rows of an attention node: an int, or a symbolic size."""
    return argument(node, "block_table").meta["val"].shape[0]


def query_len(node: Node) -> int:
    """Queries of each row of a node without ragged queries and with at least one row."""
    shape = argument(node, "query").meta["val"].shape
    return int(shape[2] if argument(node, "layout") == "BNSD" else shape[0] // row_count(node))


def origin(node: Any) -> Node | None:
    """The placeholder a value is computed from along first arguments (``seq_len + 4`` comes from ``seq_len``)."""
    while isinstance(node, Node) and node.op == "call_function":
        node = next((a for a in node.args if isinstance(a, Node)), None)
    return node if isinstance(node, Node) and node.op == "placeholder" else None


def label(node: Node) -> str:
    """What the user calls an input."""
    return str(node.meta.get("label", node.name))


def record(node: Node) -> Attention:
    """Facts of a dialect node."""
    query, lens = argument(node, "query").meta["val"], argument(node, "kv_lens")
    source = origin(lens)
    name, binding = node.meta.get("table", (argument(node, "block_table").name, None))
    phase, layer = site(node)
    return Attention(
        layer=layer,
        phase=phase,
        layout=argument(node, "layout"),
        heads=int(query.shape[1]),
        head_dim=int(query.shape[-1]),
        window=argument(node, "window"),
        scale=argument(node, "scale"),
        group=binding.group if binding is not None else None,
        block_table=name,
        kv_len_source=label(source) if source is not None else str(lens),
        kv_len_input=source.name if source is not None else None,
    )
