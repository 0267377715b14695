"""Move what ``gemma_npu::host_mirror`` states from the graph to the input it is about, and drop the node."""

import torch
from torch.fx import GraphModule, Node

import gemma_npu_compile.ops  # noqa: F401  (registers the dialect)
from gemma_npu_compile.passes.result import PassResult


def declare_host_mirrors(gm: GraphModule) -> PassResult:
    """Set ``meta["mirror"]`` of each mirrored input to the input the host reads instead, and remove the nodes."""
    result = PassResult()
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.gemma_npu.host_mirror.default):
        values, host = node.args
        if not all(isinstance(each, Node) and each.op == "placeholder" for each in (values, host)):
            result.left["the lengths or their mirror are computed in the graph"] += 1
            continue
        values.meta["mirror"] = host
        node.replace_all_uses_with(values)
        gm.graph.erase_node(node)
        result.changed += 1
    return result
