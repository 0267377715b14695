"""The runtime's invariants over random replays: addresses, stale rows, tables by group, lengths, refusals.

Every replay has other rows, of other lengths, in other blocks. Blocks no table reaches are poisoned. What a captured
graph answers is compared with the step as plain PyTorch on the same state.
"""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.check import TOLERANCES, difference
from gemma_npu_compile.check_step import StepState, call, fill, pools, random_state, run_eager, step_inputs
from gemma_npu_compile.errors import ReplayError
from gemma_npu_compile.graphs.plan import Input
from gemma_npu_compile.graphs.runner import GraphRunner
from gemma_npu_compile.options import Options
from gemma_npu_compile.step import DraftVerifyStep, mark_rows


@dataclass(frozen=True)
class Violation:
    """An invariant that did not hold in one replay."""

    replay: int
    invariant: str
    what: str


class _Watched(GraphRunner):
    """Keeps the arguments of the last call."""

    last: list[Any]

    def __call__(self, args: list[Any]) -> list[Any]:
        self.last = list(args)
        return super().__call__(args)


class ReplayChecker:
    """Replays a step and looks at what the runtime does.

    Args:
        step: on a cache without rows.
        options: of the backend; captures are needed.

    Raises:
        ValueError: the options capture nothing.
    """

    def __init__(self, step: DraftVerifyStep, options: Options) -> None:
        if not options.capture:
            raise ValueError("replay-check needs captured graphs: leave out --eager")
        self.step, self.cache = step, step.cache
        self._runners: list[_Watched] = []
        self._violations: list[Violation] = []
        self._replay = 0

        def runner(*args: Any) -> GraphRunner:
            self._runners.append(_Watched(*args))
            return self._runners[-1]

        given = {name: getattr(options, name) for name in options.__dataclass_fields__}
        self._compiled = torch.compile(  # type: ignore[call-overload]
            step, backend=Backend(runner=runner), fullgraph=True, options=given, isolate_recompiles=True
        )

    def run(self, replays: int, seed: int) -> list[Violation]:
        """Check ``replays`` random replays, and that a table that does not fit is refused."""
        source = random.Random(seed)
        self._violations, addresses = [], None
        for self._replay in range(replays):
            self.cache.reset()
            state = self._random(source)
            inputs = step_inputs(self.step, state, seed + self._replay)
            fill(self.cache, state.tables, seed + self._replay)
            self._step(inputs)
            if len(self._runners) != 1:
                self._fault("one graph", f"{len(self._runners)} graphs were compiled, every number of rows is one")
                break
            seen = self._addresses()
            if addresses is not None and seen != addresses:
                moved = [name for name in seen if addresses.get(name, seen[name]) != seen[name]]
                self._fault("addresses", f"{', '.join(moved)} moved: a captured graph reads the captured address")
            addresses = {**(addresses or {}), **seen}
            self._buffers(inputs)
        if self._runners:
            self._refusals()
        self.cache.reset()
        return self._violations

    def _random(self, source: random.Random) -> StepState:
        count = source.randint(2, self.cache.max_rows)
        longest = self.cache.max_model_len
        lengths = [source.choice((1, source.randint(1, longest), source.randint(1, longest))) for _ in range(count)]
        return random_state(self.step, lengths, source.randrange(2**31))

    def _fault(self, invariant: str, what: str) -> None:
        self._violations.append(Violation(self._replay, invariant, what))

    def _step(self, inputs: tuple[Any, ...]) -> None:
        """A captured call against plain PyTorch: results and caches."""
        wanted, after = run_eager(self.step, inputs)
        mark_rows(*inputs)
        with torch.no_grad():
            found = call(self._compiled, inputs)
        limits = TOLERANCES[self.cache.dtype]
        for name, a, b in zip(wanted._fields, wanted, found, strict=True):
            if not difference(a, b, limits)[0]:
                self._fault("results", f"{name} is not what plain PyTorch computes")
        for (layer, null), a, b in zip(self._pools(), after, pools(self.cache), strict=True):
            if not difference(a[null:], b[null:], limits)[0]:
                self._fault("caches", f"the cache of layer {layer} is not what plain PyTorch leaves")

    def _pools(self) -> list[tuple[int, int]]:
        """Layer and null blocks of each pool, in the order of :func:`pools`."""
        null = {layer: group.null_blocks for group in self.cache.groups for layer in group.layers}
        return [(layer, null[layer]) for each in (self.cache.key_pools, self.cache.value_pools) for layer in each]

    def _addresses(self) -> dict[str, int]:
        """Where stable buffers and the results of each capture lie."""
        (runner,) = self._runners
        found: dict[str, int] = {}
        for binding in runner._bindings:
            for buffers in binding.buffers.values():
                found |= {f"the stable buffer {name}": tensor.data_ptr() for name, tensor in buffers.buffers.items()}
            for key, graph in binding.graphs.items():
                for index, output in enumerate(graph.outputs):
                    if isinstance(output, Tensor):
                        found[f"result {index} of the capture of {key[0]} rows"] = output.data_ptr()
        return found

    def _buffers(self, inputs: tuple[Any, ...]) -> None:
        """Stable buffers hold this call's rows, padding behind them, and each layer's own group's table."""
        (runner,) = self._runners
        binding = runner._bindings[-1]
        (buffers,) = binding.buffers.values()
        token, hidden, seq_len, tables, _ = inputs
        rows = len(token)
        size = next(each for each in runner.sizes if each >= rows)
        given = {"token": token, "lengths": seq_len, "other": hidden}
        paddings = {"token": self.step.token_padding, "lengths": self.cache.padding_lens}
        paddings["other"] = self.step.hidden_padding
        named = {item.name: item for item in runner.plan.inputs}
        for item in buffers.inputs:
            if item.role in given:
                self._rows(item, buffers.view(item, size), given[item.role], paddings[item.role][rows:size], rows)
        for node in runner.plan.attention:
            item = named[node.block_table]
            group = self._group(node.layer)
            where = f"{node.phase}/{node.layer}"
            if not torch.equal(buffers.view(item, size)[:rows], tables[group]):
                name = self.cache.groups[group].name
                self._fault("tables", f"{where} reads {item.buffer}, which is not the table of KV group {name}")
            elif not torch.equal(buffers.view(item, size)[rows:], self.cache.padding_tables[group][rows:size]):
                self._fault("stale rows", f"{where}: rows {rows} to {size - 1} of {item.buffer} are not padding")

    def _rows(self, item: Input, held: Tensor, given: Tensor, padding: Tensor, rows: int) -> None:
        if not torch.equal(held[:rows], given):
            self._fault("lengths" if item.role == "lengths" else "inputs", f"{item.label} is not what was given")
        if not torch.equal(held[rows:], padding):
            self._fault("stale rows", f"{item.label}: rows {rows} to {len(held) - 1} are not padding")

    def _group(self, layer: str) -> int:
        """KV group whose cache the layer reads."""
        model, _, index = layer.partition(".layers.")
        if model == "assistant":
            return self.step.draft_groups[int(index)]
        return self.cache.layer_groups[int(index)]

    def _refusals(self) -> None:
        """A wider table is refused, by name, before anything is run."""
        (runner,) = self._runners
        for index, group in enumerate(self.cache.groups):
            args = list(runner.last)
            source = next(i.source for i in runner.plan.inputs if i.group == f"g{index}" and i.role == "block_table")
            args[source] = torch.nn.functional.pad(args[source], (0, 1))
            before = [pool.clone() for pool in pools(self.cache)]
            try:
                runner(args)
                self._fault("refusals", f"a table of KV group {group.name} wider than captured was accepted")
            except ReplayError:
                pass
            except RuntimeError as error:
                self._fault("refusals", f"a wider table of KV group {group.name} failed without a name: {error}")
            same = (difference(a, b, (0.0, 0.0))[0] for a, b in zip(before, pools(self.cache), strict=True))
            if not all(same):
                self._fault("refusals", f"the refusal of a wider table of KV group {group.name} came after a write")
