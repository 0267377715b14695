"""What a graph takes behind its inputs: host lists and numbers, computed for every call, and merged weights."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gemma_npu_compile.graphs.plan import Input, Plan, Values
from gemma_npu_compile.passes.host_lengths import HostLengths
from gemma_npu_compile.passes.merge_gate_up import MergedWeight
from gemma_npu_compile.passes.numbers_on_device import HostNumber

Read = Callable[[Input], Tensor]


def _version(weight: Tensor) -> int:
    """Counts in-place changes; inference tensors have no count and are taken as constant."""
    return 0 if weight.is_inference() else weight._version


class MergedWeights:
    """The merged weights of one model; made anew, at the same addresses, when an original was changed or replaced.

    A change through ``.data``, and one of an inference tensor, leaves no trace and is not seen.
    """

    def __init__(self, plan: Plan) -> None:
        self._recipes = [each for each in plan.extras if isinstance(each, MergedWeight)]
        self._tensors: list[Tensor] = []
        self._originals: list[list[Tensor]] = []  # kept: another weight must not come to lie at the address of one
        self._versions: list[tuple[int, int]] = []

    def tensors(self, args: list[Any]) -> list[Tensor]:
        """The merged weights for the weights among ``args``."""
        if not self._recipes:
            return []
        originals = [[args[source] for source in recipe.sources] for recipe in self._recipes]
        versions = [(each.data_ptr(), _version(each)) for given in originals for each in given]
        if versions != self._versions:
            if not self._tensors:
                self._tensors = [recipe(given) for recipe, given in zip(self._recipes, originals, strict=True)]
            else:
                for recipe, given, tensor in zip(self._recipes, originals, self._tensors, strict=True):
                    recipe(given, out=tensor)
            self._originals, self._versions = originals, versions
        return self._tensors

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)


class Extras:
    """Computes a plan's extras for a call."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        inputs = {item.source: item for item in reversed(plan.inputs)}
        self._inputs = [[inputs[source] for source in host.sources] for host in plan.host]
        self._recipes = [each for each in plan.extras if isinstance(each, HostNumber)]
        self._numbers: list[Tensor] = []

    def host_lists(self, read: Read) -> list[list[int]]:
        """Contents of the host lists; ``read`` gives the tensor an input stands for (padded rows included, or not)."""
        pairs = zip(self._plan.host, self._inputs, strict=True)
        return [host([read(item) for item in inputs]) for host, inputs in pairs]

    def numbers(self, values: Values) -> list[Tensor]:
        """The 0-d tensors of the host's numbers, at the same addresses in every call, holding this call's."""
        if not self._numbers:
            self._numbers = [torch.zeros((), dtype=torch.int64, device=each.device) for each in self._recipes]
        for tensor, recipe in zip(self._numbers, self._recipes, strict=True):
            tensor.fill_(recipe(values))
        return self._numbers

    def all(self, read: Read, merged: list[Tensor], values: Values) -> list[Any]:
        """Everything the graph takes behind its inputs, in its order."""
        found: dict[type, Iterator[Any]] = {
            HostLengths: iter(self.host_lists(read)),
            MergedWeight: iter(merged),
            HostNumber: iter(self.numbers(values)),
        }
        return [next(found[type(each)]) for each in self._plan.extras]
