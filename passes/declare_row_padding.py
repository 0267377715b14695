"""Move what ``gemma_npu::row_padding`` states from the graph to the input it is about, and drop the node."""

import torch
from torch.fx import GraphModule, Node

import gemma_npu_compile.ops  # noqa: F401  (registers the dialect)
from gemma_npu_compile.passes.fx import written_roots
from gemma_npu_compile.passes.result import PassResult


def declare_row_padding(gm: GraphModule) -> PassResult:
    """Set ``meta["padding"]`` of each padded input to the input that holds its padded rows, and remove the nodes."""
    result, written = PassResult(), written_roots(gm.graph)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.gemma_npu.row_padding.default):
        rows, padding = node.args
        reason = None
        if not (isinstance(rows, Node) and rows.op == "placeholder"):
            reason = "the padded tensor is computed in the graph"
        elif not (isinstance(padding, Node) and padding.op == "placeholder"):
            reason = "the padding is computed in the graph"
        elif rows in written:
            reason = "the graph writes to the input"  # what was padded are its contents before
        elif rows.meta.get("padding", padding) is not padding:
            reason = "the input already has another padding"
        if reason is not None:
            result.left[reason] += 1
            continue
        rows.meta["padding"] = padding
        node.replace_all_uses_with(rows)
        gm.graph.erase_node(node)
        result.changed += 1
    return result
