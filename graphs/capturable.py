"""What no capture can record, on any platform; found before anything is allocated."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from gemma_npu_compile.errors import CaptureError
from gemma_npu_compile.passes.fx import where

aten = torch.ops.aten

SYNCS = {
    aten._local_scalar_dense.default: "reads a number from the device (.item())",
    aten.item.default: "reads a number from the device (.item())",
    aten.is_nonzero.default: "reads a truth value from the device",
    aten.equal.default: "reads a comparison from the device",
    aten.nonzero.default: "has a result size that depends on data",
    aten.masked_select.default: "has a result size that depends on data",
    aten._unique2.default: "has a result size that depends on data",
    aten.repeat_interleave.Tensor: "has a result size that depends on data",
}


def refuse_uncapturable(nodes: Sequence[Node], name: str) -> None:
    """Raise for the first node a capture cannot record: a host synchronisation, or what is no operator.

    Args:
        name: of the capture, for the error.

    Raises:
        CaptureError: names the capture and the node.
    """
    for node in nodes:
        if node.op in ("call_module", "call_method"):
            raise CaptureError(f"{name}: node {where(node)} is a {node.op}, which a capture cannot record")
        if node.op != "call_function":
            continue
        target: Any = node.target
        why = SYNCS.get(target)
        if why is None and torch.Tag.data_dependent_output in getattr(target, "tags", ()):
            why = "has a result that depends on data the host must read"
        if why is not None:
            raise CaptureError(f"{name}: {where(node)} {why}; this cannot be captured")
        if not isinstance(target, torch._ops.OpOverload):
            tensors = any(isinstance(arg.meta.get("val"), Tensor) for arg in node.all_input_nodes)
            if tensors and target is not operator.getitem:
                raise CaptureError(f"{name}: {where(node)} is not an operator; a capture cannot record it")
        elif target._schema.is_mutable and any(r.alias_info is None for r in target._schema.returns):
            raise CaptureError(f"{name}: {where(node)} writes to an argument and returns a new result")


def refuse_other_devices(nodes: Sequence[Node], args: Sequence[Any], device: torch.device, name: str) -> None:
    """Raise for the first tensor among ``args`` (of the placeholders, which stand first) that is not on ``device``.

    Raises:
        CaptureError: names the capture, the input and both devices.
    """
    for node, arg in zip(nodes, args, strict=False):
        if isinstance(arg, Tensor) and node.users and arg.device != device:
            raise CaptureError(
                f"{name}: input {node.meta.get('label', node.name)} is on {arg.device}, the graph on {device}: a "
                "capture would freeze what it holds now"
            )
