"""Read a sliding layer through a block table clipped to its window.

A window of W keys lies in a fixed number of blocks, wherever a row has got to. With the table clipped to those blocks
the layer's keys have a fixed length for ever: nothing about it is a host parameter, and nothing outside is read.
"""

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gemma_npu_compile.capabilities import Platform
from gemma_npu_compile.passes.fx import argument, arguments, call, copy_trace, root, written_roots
from gemma_npu_compile.passes.result import PassResult
from gemma_npu_compile.passes.sites import attention_nodes, query_len, row_count

aten = torch.ops.aten


def window_blocks(window: int, q_len: int, block_size: int) -> int:
    """Blocks that hold every key ``q_len`` neighbouring queries see, wherever in a block the first of them lies."""
    return -(-(window + q_len - 2) // block_size) + 1


def _clip(graph: Graph, table: Node, lens: Node, reach: int, span: int, block_size: int) -> tuple[Node, Node]:
    """``(rows, span)`` columns of the table with every visible key, each once, and lengths from the first on."""
    width = table.meta["val"].shape[1]
    oldest = call(graph, aten.clamp.default, call(graph, aten.sub.Tensor, lens, reach), 0)
    block = call(graph, aten.floor_divide.default, oldest, block_size)
    # No column behind the table: there the clip begins earlier, at a block whose keys are masked.
    first = call(graph, aten.clamp.default, block, None, width - span)
    steps = call(graph, aten.arange.default, span, dtype=torch.int64, device=table.meta["val"].device)
    columns = call(graph, aten.add.Tensor, call(graph, aten.unsqueeze.default, first, 1), steps)
    clipped = call(graph, aten.gather.default, table, 1, columns)
    local = call(graph, aten.sub.Tensor, lens, call(graph, aten.mul.Tensor, first, block_size))
    return clipped, local


def clip_to_window(gm: GraphModule, *, platform: Platform | None = None) -> PassResult:
    """Clip the block table of every attention node with a window; once per group and phase.

    The table's first column becomes the block of the oldest key the row's first query sees (at the end of the table one
    before it), and the row's length counts from there. Inputs that share one buffer (layers of one group) share the
    clipped table.

    Args:
        platform: the CPU's kernels take lengths from memory and read no block outside of a window: nothing to clip.
    """
    result = PassResult()
    graph = gm.graph
    clips: dict[Any, tuple[Node, Node]] = {}
    written = written_roots(graph)
    for node in attention_nodes(gm):
        window, table, lens = (argument(node, name) for name in ("window", "block_table", "kv_lens"))
        if window is None:
            continue
        if platform is not None and platform.name == "cpu":
            result.left["the platform's kernel reads no further than the window"] += 1
            continue
        if argument(node, "query_lens") is not None or (isinstance(row_count(node), int) and row_count(node) == 0):
            result.left["ragged queries, or no rows"] += 1
            continue
        block_size = int(argument(node, "key_cache").meta["val"].shape[1])
        q_len, width = query_len(node), table.meta["val"].shape[1]
        span = window_blocks(window, q_len, block_size)
        if not isinstance(width, int) or span >= width:
            reason = "no wider than the window" if isinstance(width, int) else "of symbolic width"
            result.left[f"the table is {reason}"] += 1
            continue
        shared = table.meta["source"] if table.op == "placeholder" and "source" in table.meta else table
        changing = written & {root(lens), root(table)}  # what the graph writes to is another value each time
        key = (shared, lens, window + q_len, block_size, node if changing else None)
        if key not in clips:
            with graph.inserting_before(node):
                clips[key] = _clip(graph, table, lens, window + q_len - 1, span, block_size)
            copy_trace(clips[key][0], node)
        clipped, local = clips[key]
        new = {**arguments(node), "block_table": clipped, "kv_lens": local}
        node.args, node.kwargs = tuple(new.values()), {}
        result.changed += 1
    return result
