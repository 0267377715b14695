"""Which captures belong to the objects of a call: a capture reads its static inputs where they lay."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gemma_npu_compile.errors import ReplayError
from gemma_npu_compile.graphs.buffers import StableBuffers
from gemma_npu_compile.graphs.extras import MergedWeights
from gemma_npu_compile.graphs.plan import Plan
from gemma_npu_compile.graphs.runtime import Captured
from gemma_npu_compile.native.objects import Addresses

Key = tuple[int, ...]
"""Values of a plan's symbols."""

MAX_BINDINGS = 4
"""Objects (models, caches) one compiled graph keeps captures for; the least recently used makes room."""


@dataclass
class Binding:
    """Captures of one set of static addresses: one model with one cache."""

    addresses: Addresses
    merged: MergedWeights
    buffers: dict[Key, StableBuffers] = field(default_factory=dict)
    graphs: dict[Key, Captured] = field(default_factory=dict)
    refused: dict[Key, str] = field(default_factory=dict)


class Bindings(list[Binding]):
    """All of one graph, the least recently used first.

    Dynamo runs one compiled graph for every object of a class: another model, or another cache, gets captures of its
    own. One static input that moved while the others of its kind stayed is a mistake and refused.

    Attributes:
        misses: calls in a row that brought an object not seen before.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.misses = 0
        self._plan = plan
        self._static = [item for item in plan.inputs if item.static and item.role != "unused"]
        self._sources = [item.source for item in self._static]

    def of(self, args: list[Any]) -> Binding:
        """The captures of the objects these arguments belong to; new ones for an object not seen before.

        Raises:
            ReplayError: a static input has moved; names it.
        """
        for index in range(len(self) - 1, -1, -1):
            if self[index].addresses.still(args):
                self.misses = 0
                if index + 1 < len(self):
                    self.append(self.pop(index))
                return self[-1]
        addresses = Addresses(args, self._sources)
        for known in self:
            self._refuse_half_moved(known.addresses.values, addresses.values)
        self.misses += 1
        self.append(Binding(addresses, MergedWeights(self._plan)))
        del self[:-MAX_BINDINGS]
        return self[-1]

    def _refuse_half_moved(self, known: Sequence[int], given: Sequence[int]) -> None:
        """Another object has all its caches, or all its weights, elsewhere; one moved among others is a mistake."""
        pairs = [each for each in zip(self._static, known, given, strict=True) if not each[0].given]
        for role in dict.fromkeys(item.role for item, *_ in pairs):
            moved = [(item, before, now) for item, before, now in pairs if item.role == role and before != now]
            if moved and len(moved) < sum(item.role == role for item, *_ in pairs):
                item, before, now = moved[0]
                raise ReplayError(
                    f"static input {item.label} is at {now:#x}, it was captured at {before:#x}: a captured graph reads "
                    "the captured address; nothing was run"
                )
