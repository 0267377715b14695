"""Take the argmax of logits before their soft cap.

``cap * tanh(logits / cap)`` rises with the logits, so the best token is the same, except where the cap rounds two
different logits to one value: then the argmax takes the first of them, without the cap the larger. So it is an option.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from gemma_npu_compile.passes.result import PassResult

aten = torch.ops.aten


def _uncapped(node: Any) -> Node | None:
    """The logits behind ``cap * tanh(logits / cap)``."""
    if not isinstance(node, Node) or node.target is not aten.mul.Tensor:
        return None
    tanh, cap = node.args
    if not isinstance(tanh, Node) or tanh.target is not aten.tanh.default or not isinstance(cap, (int, float)):
        return None
    scaled = tanh.args[0]
    divided = isinstance(scaled, Node) and scaled.target is aten.div.Tensor and scaled.args[1] == cap
    return scaled.args[0] if divided and cap > 0 else None  # type: ignore[union-attr,return-value]


def drop_softcap(gm: GraphModule, *, skip_softcap: bool) -> PassResult:
    """Let every ``argmax`` over soft-capped logits read the logits themselves.

    Args:
        skip_softcap: the option; without it the nodes are left.
    """
    result = PassResult()
    for node in gm.graph.find_nodes(op="call_function", target=aten.argmax.default):
        logits = _uncapped(node.args[0])
        if logits is None:
            continue
        if not skip_softcap:
            result.left["skip_softcap is off"] += 1
            continue
        node.update_arg(0, logits)
        result.changed += 1
    if result.changed:
        gm.graph.eliminate_dead_code()
    return result
