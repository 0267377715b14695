"""Find where numbers part: the step as plain PyTorch, its trace, the graph after each pass, and captured.

All of them run on one state. Blocks that no table reaches are poisoned (NaN), so that whoever reads one is seen. The
first stage that differs is named, and in it the first node: both graphs are run side by side and compared in the order
of the graph, which finds it in one run where a bisection needs many.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from gemma_npu_compile.backend import Backend, name_inputs
from gemma_npu_compile.capabilities import Platform, platform
from gemma_npu_compile.graphs.plan import make_plan
from gemma_npu_compile.graphs.runner import GraphRunner
from gemma_npu_compile.ops.npu import emulate
from gemma_npu_compile.options import Options
from gemma_npu_compile.passes import PASSES, run_passes
from gemma_npu_compile.passes.fx import placeholders, where, written_roots
from gemma_npu_compile.passes.sites import label
from gemma_npu_compile.report import GraphReport

TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (0.1, 0.15), torch.float16: (0.02, 0.03)}
"""Relative and absolute: what reordered sums leave; half precision rounds every intermediate."""


@dataclass
class Fault:
    """Where numbers part.

    Attributes:
        stage: ``"trace"``, the name of a pass, or ``"captured"``; ``"step"`` when plain PyTorch reads poison.
        what: the result or cache that differs.
        error: largest absolute difference, NaN where one side is not a number.
        node: the first node that differs, with its source line; None where nodes cannot be compared.
        candidates: nodes the pass made that feed it.
    """

    stage: str
    what: str
    error: float
    node: str | None = None
    candidates: list[str] = field(default_factory=list)


@dataclass
class Result:
    """Largest difference of every stage that was run, in order; ``fault`` is in the last one, if any."""

    stages: dict[str, float] = field(default_factory=dict)
    fault: Fault | None = None


class Traced(Backend):
    """Keeps the graph AOT hands over and the arguments of its call, and runs it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.graph: GraphModule | None = None
        self.static: set[int] = set()
        self.args: list[Any] = []

    def _observed(self) -> bool:
        return True

    def _rewrite(self, gm: GraphModule, static: set[int], labels: list[tuple[str, bool]], *rest: Any) -> None:
        name_inputs(gm, labels, static)
        self.static = static

    def _run(self, gm: GraphModule, *rest: Any) -> Any:
        self.graph = gm

        def run(args: list[Any]) -> Any:
            self.args = list(args)
            return gm(*fresh(args, written(gm)))

        return run


def copied(gm: GraphModule) -> GraphModule:
    """A graph of its own over the same parameters; node names stay."""
    graph, known = Graph(), {}  # type: ignore[var-annotated]
    graph.output(graph.graph_copy(gm.graph, known))
    for old, new in known.items():
        new.meta = copy.copy(old.meta)
    return GraphModule(gm, graph)


def written(gm: GraphModule) -> set[int]:
    """Arguments the graph writes to, by index."""
    found = {n.meta["source"] for n in written_roots(gm.graph) if n.op == "placeholder"}
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        found |= {n.meta["source"] for n in node.args[:1] if isinstance(n, Node) and n.op == "placeholder"}
    return found


def fresh(args: Sequence[Any], indices: set[int]) -> list[Any]:
    """The arguments with copies of those that are written to."""
    return [arg.clone() if index in indices else arg for index, arg in enumerate(args)]


def _given(gm: GraphModule, args: Sequence[Any]) -> Iterator[Any]:
    """Arguments per placeholder: what a call gives, and what follows from it."""
    for node in placeholders(gm):
        extra = node.meta.get("host") or node.meta.get("merged")
        yield args[node.meta["source"]] if extra is None else extra([args[s] for s in extra.sources])


def values_of(gm: GraphModule, args: Sequence[Any], wanted: set[str]) -> dict[str, Tensor]:
    """Run a graph and keep the values of the nodes named, as they were when they were made."""
    inputs, env, kept = _given(gm, args), {}, {}
    last = {arg: node for node in gm.graph.nodes for arg in node.all_input_nodes}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(inputs)
        elif node.op == "get_attr":
            env[node] = getattr(gm, node.target)
        elif node.op == "call_function":
            given, named = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*given, **named)
            if node.name in wanted and isinstance(env[node], Tensor):
                kept[node.name] = env[node].clone()
        for arg in node.all_input_nodes:
            if last[arg] is node and arg.op == "call_function":
                env.pop(arg, None)
    return kept


def difference(a: Any, b: Any, tolerance: tuple[float, float]) -> tuple[bool, float]:
    """Whether two values agree, and their largest absolute difference. NaN agrees with NaN only."""
    if not isinstance(a, Tensor):
        return a == b, 0.0
    if a.shape != b.shape or a.dtype != b.dtype:
        return False, float("nan")
    if not a.is_floating_point():
        same = bool((a == b).all())
        return same, 0.0 if same else float((a.long() - b.long()).abs().max())
    left, right = a.double(), b.double()
    gap = (left - right).abs()
    error = (
        float("nan")
        if bool((left.isnan() != right.isnan()).any())
        else float(gap.nan_to_num().max())
        if len(gap.flatten())
        else 0.0
    )
    rtol, atol = tolerance
    return bool(torch.isclose(left, right, rtol=rtol, atol=atol, equal_nan=True).all()), error


class Checker:
    """Runs one traced graph through its stages on one set of arguments.

    Args:
        gm: as AOT hands it over, placeholders with their source and label.
        static: argument indices whose addresses do not change.
        args: of a call.
        options: of the backend.
        tolerance: relative and absolute.
        scratch: first block of each cache, by argument index, that is nobody's scratch; a capture runs padded rows,
            which write below it.
    """

    def __init__(
        self,
        gm: GraphModule,
        static: set[int],
        args: list[Any],
        options: Options,
        tolerance: tuple[float, float],
        scratch: dict[int, int],
    ) -> None:
        self._gm, self._static, self._args, self._options = gm, static, args, options
        self._tolerance, self._scratch = tolerance, scratch
        self.written = sorted(written(gm))
        self.labels = {n.meta["source"]: label(n) for n in placeholders(gm)}
        self._platform: Platform = platform(options.platform or "ascend910b", options.capabilities)
        self.reference = self._run(copied(gm))

    def _run(self, gm: Any) -> tuple[list[Any], list[Tensor]]:
        args = fresh(self._args, set(self.written))
        with emulate(self._platform), torch.no_grad():
            results = gm(args) if isinstance(gm, GraphRunner) else list(gm(*_given(gm, args)))
        return results, [args[index] for index in self.written]

    def compare(self, results: tuple[list[Any], list[Tensor]], captured: bool = False) -> tuple[str | None, float]:
        """What differs first from the reference, if anything, and the largest difference."""
        worst, found = 0.0, None
        names = [f"result {i}" for i in range(len(results[0]))] + [self.labels[i] for i in self.written]
        first = [0] * len(results[0]) + [self._scratch.get(i, 0) if captured else 0 for i in self.written]
        pairs = zip(self.reference[0] + self.reference[1], results[0] + results[1], strict=True)
        for name, start, (a, b) in zip(names, first, pairs, strict=True):
            whole = isinstance(a, Tensor) and a.dim() and start
            same, error = (
                difference(a[start:], b[start:], self._tolerance) if whole else difference(a, b, self._tolerance)
            )
            exact = isinstance(a, Tensor) and a.is_floating_point()
            worst = max(worst, error) if exact and error == error else error if exact else worst
            if not same and found is None:
                found = name
        return found, worst

    def _passes(self, gm: GraphModule, names: Sequence[str], after: Callable[[str, GraphModule], None] | None) -> None:
        o = self._options
        with emulate(self._platform):
            run_passes(
                gm,
                platform=self._platform,
                kv_lens=o.kv_lens,
                verify_attention=o.verify_attention,
                skip_softcap=o.skip_softcap,
                merge_weights=o.merge_weights,
                disable=[name for name in PASSES if name not in names or name in o.disable_passes],
                after=after,
            )

    def run(self, bisect: bool = False) -> Result:
        """Run the passes and a captured call until something differs."""
        result, gm = Result(), copied(self._gm)

        class Found(Exception):  # noqa: N818
            pass

        def after(name: str, graph: GraphModule) -> None:
            what, result.stages[name] = self.compare(self._run(graph))
            if what is not None:
                result.fault = Fault(name, what, result.stages[name])
                raise Found

        try:
            self._passes(gm, list(PASSES), after)
        except Found:
            if bisect and result.fault is not None:
                self._first_node(result.fault)
            return result
        if self._options.capture:
            plan = make_plan(gm, self._static)
            runner = GraphRunner(gm, plan, self._options, GraphReport("check"), self._platform)
            what, result.stages["captured"] = self.compare(self._run(runner), captured=True)
            if what is not None:
                result.fault = Fault("captured", what, result.stages["captured"])
            runner.free()
        return result

    def _first_node(self, fault: Fault) -> None:
        """Name the first node of the pass's graph whose value is not that of the graph before it."""
        order = list(PASSES)
        before, after = copied(self._gm), copied(self._gm)
        self._passes(before, order[: order.index(fault.stage)], None)
        self._passes(after, order[: order.index(fault.stage) + 1], None)
        known = {node.name: node for node in before.graph.nodes if node.op == "call_function"}
        shared = [n for n in after.graph.nodes if n.op == "call_function" and n.name in known]
        names = {node.name for node in shared}
        runs = []
        for gm in (before, after):
            with emulate(self._platform), torch.no_grad():
                runs.append(values_of(gm, fresh(self._args, set(self.written)), names))
        for node in shared:
            if node.name not in runs[0] or node.name not in runs[1]:
                continue
            same, _ = difference(runs[0][node.name], runs[1][node.name], self._tolerance)
            if not same:
                fault.node = where(node)
                fault.candidates = [where(each) for each in self._made(node, names)]
                return
        made = [n for n in after.graph.nodes if n.op == "call_function" and n.name not in names]
        fault.candidates = [where(each) for each in made[:8]]

    @staticmethod
    def _made(node: Node, shared: set[str]) -> list[Node]:
        """New nodes ``node`` is computed from, up to those both graphs have."""
        found: dict[Node, None] = {}
        stack = list(node.all_input_nodes)
        while stack:
            each = stack.pop()
            if each.op == "call_function" and each.name not in shared and each not in found:
                found[each] = None
                stack.extend(each.all_input_nodes)
        return list(found)[:8]
