"""Which phase of a step a node belongs to, for the ranges a profiler shows."""

import contextlib
from collections.abc import Sequence

import torch
from torch.fx import Node

OTHER = "graph"


def profiled(name: str) -> contextlib.AbstractContextManager[object]:
    """A range of a profiler's trace; nothing where no profiler runs."""
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(name)
    return contextlib.nullcontext()


def _model(node: Node) -> str | None:
    """``assistant`` or ``target``: the part of the step a node's module belongs to."""
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        for model in ("assistant", "target"):
            if f".{model}" in str(path) or f"['{model}']" in str(path):
                return model
    return None


def phase_of(nodes: Sequence[Node]) -> dict[str, str]:
    """Phase by node name: ``draft`` up to the assistant's last node, ``verify`` up to the target's, then ``accept``.

    What is computed for a later phase (a mask, a constant) counts where it runs. A graph without these models has one
    phase, ``graph``.
    """
    last: dict[str, int] = {}
    for index, node in enumerate(nodes):
        model = _model(node)
        if model is not None:
            last[model] = index
    if "target" not in last:
        return {node.name: OTHER for node in nodes}
    drafts = last.get("assistant", -1)
    return {
        node.name: "draft" if index <= drafts else "verify" if index <= last["target"] else "accept"
        for index, node in enumerate(nodes)
    }
