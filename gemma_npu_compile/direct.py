"""Calling a compiled step without asking Dynamo's guards again.

Guards look at some hundred modules, parameters and configuration values in every call: on a small model that takes as
long as the step. An engine calls one function with arguments it makes itself, so it can learn from one call which of
the runner's arguments are its own, and compare the rest, cheaply, with what they were.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gemma_npu_compile.graphs.runner import GraphRunner
from gemma_npu_compile.native.objects import Values
from gemma_npu_compile.step import StepOutput


class TappedRunner(GraphRunner):
    """A runner whose next call can be watched."""

    tap: list[tuple[list[Any], list[Any]]] | None = None

    def __call__(self, args: list[Any]) -> list[Any]:
        given = list(args)
        results = super().__call__(args)
        if self.tap is not None:
            self.tap.append((given, results))
        return results


def _held(step: nn.Module) -> Values:
    """All weights of a step, and its own attributes: every call asks whether they are still the same objects."""
    kept = [d for module in step.modules() for d in (module._parameters, module._buffers) if d]
    return Values([*kept, vars(step)])  # type: ignore[list-item]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _positions(runner: GraphRunner, given: list[Any], leaves: Sequence[Tensor]) -> dict[int, int] | None:
    """Which argument of the runner is which of ``leaves``; None where that is not certain. Row counts are -1."""
    places = {_place(leaf): index for index, leaf in enumerate(leaves)}
    if len(places) < len(leaves):
        return None
    static = {item.source for item in runner.plan.inputs if item.static}
    sizes = {item.source: item.shape for item in runner.plan.inputs if item.dtype is None}
    found: dict[int, int] = {}
    for source, arg in enumerate(given):
        if isinstance(arg, Tensor):
            if source not in static and _place(arg) in places:
                found[source] = places[_place(arg)]
        elif sizes.get(source) == (runner.plan.rows,):
            found[source] = -1
        else:
            return None
    copied = {item.source for item in runner.plan.inputs if item.buffer is not None}
    return found if copied <= found.keys() else None


class DirectCall:
    """The step as one runner call.

    Args:
        step: whose weights and attributes must stay what they are.
        runner: that ran it.
        given, results: the runner's arguments and results in one call ...
        leaves, output: ... and the step's, tensors in the order of its parameters.

    Attributes:
        possible: whether every argument and result was recognised; otherwise call the compiled function.
    """

    def __init__(
        self,
        step: nn.Module,
        runner: GraphRunner,
        given: list[Any],
        results: list[Any],
        leaves: Sequence[Tensor],
        output: StepOutput,
    ) -> None:
        self._runner, self._template = weakref.ref(runner), list(given)
        self._device = runner.plan.device.type
        self._held = _held(step)
        positions = _positions(runner, given, leaves) if runner.plan.rows is not None else None
        outputs = [next((i for i, r in enumerate(results) if r is each), None) for each in output]
        self._outputs = [index for index in outputs if index is not None]
        self._positions = positions or {}
        self.possible = positions is not None and len(self._outputs) == len(outputs)
        for source in self._positions:
            self._template[source] = None  # not to keep a caller's tensors

    @property
    def gone(self) -> bool:
        """Whether Dynamo has dropped the compiled code."""
        return self._runner() is None

    def holds(self) -> bool:
        """Whether a call of the compiled function would come to the same: nothing was replaced, no mode is on."""
        return (
            self.possible
            and not self.gone
            and not torch.is_autocast_enabled("cpu")
            and not torch.is_autocast_enabled(self._device)
            and not torch._C._len_torch_dispatch_stack()
            and not torch._C._len_torch_function_stack()
            and self._held.still()
        )

    def takes(self, rows: int) -> bool:
        """Whether the runner has seen that so many rows can go past Dynamo, which traces one row apart."""
        runner = self._runner()
        return rows > 1 or (runner is not None and 1 in runner.report.sizes)

    def __call__(self, leaves: Sequence[Tensor]) -> StepOutput:
        """Run the step on ``leaves``; raises as the runner does."""
        runner = self._runner()
        assert runner is not None, "ask holds() first"
        args = list(self._template)
        for source, index in self._positions.items():
            args[source] = leaves[index] if index >= 0 else leaves[0].shape[0]
        results = runner(args)
        return StepOutput(*(results[index] for index in self._outputs))
