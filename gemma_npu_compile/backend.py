"""The backend: options, AOT trace, passes, plan, runner."""

import contextlib
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import get_metrics_context
from torch._guards import CompileContext, TracingContext
from torch.fx import GraphModule

import gemma_npu_compile.ops  # noqa: F401  (registers the dialect)
from gemma_npu_compile.capabilities import Platform, platform
from gemma_npu_compile.collector import paused
from gemma_npu_compile.compile_cache import calling, look_up
from gemma_npu_compile.compile_cache.trace import Trace
from gemma_npu_compile.devices import platform_for
from gemma_npu_compile.dump import current as current_dump
from gemma_npu_compile.dump import observers
from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.graphs.plan import make_plan
from gemma_npu_compile.graphs.recorder import Recorder
from gemma_npu_compile.graphs.runner import GraphRunner
from gemma_npu_compile.native.build import why_no_kernels
from gemma_npu_compile.ops.npu import EMULATED, emulate
from gemma_npu_compile.options import Options
from gemma_npu_compile.passes import run_passes
from gemma_npu_compile.passes.fx import device_among, placeholders
from gemma_npu_compile.passes.pipeline import only_own
from gemma_npu_compile.regions import write_out
from gemma_npu_compile.report import GraphBreak, GraphReport, publish
from gemma_npu_compile.tracing import trace_step

log = logging.getLogger(__name__)


def _refuse_training(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
    raise CompileError(
        "gemma_npu compiles inference only, and an input of this graph requires grad: call it under torch.no_grad() or "
        "torch.inference_mode()"
    )


def _labels(gm: GraphModule) -> list[tuple[str, bool]]:
    """What the user calls each input, Dynamo's source expression; and whether an object of the function holds it."""
    labels = []
    for node in placeholders(gm):
        source = getattr(node.meta.get("grapharg"), "source", None)
        label = node.name if source is None else str(source.name)
        held = source is None or re.search(r"^L\['(?:self|fn)'\]|\._(?:parameters|buffers)\[", label) is not None
        label = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", label)
        label = re.sub(r"^L\['(\w+)'\]", r"\1", label)
        labels.append((re.sub(r"^(?:fn|self)\.", "", label), held))
    return labels


def name_inputs(gm: GraphModule, labels: list[tuple[str, bool]], static: Set[int] = frozenset()) -> None:
    """Give AOT's inputs their argument index, what the user calls them, whether an object holds them, and whether
    their addresses are static."""
    inputs = placeholders(gm)
    if len(labels) != len(inputs):  # AOT merged aliased inputs
        labels = [(node.name, True) for node in inputs]
    for index, (node, (label, held)) in enumerate(zip(inputs, labels, strict=True)):
        node.meta.update(source=index, label=label, held=held, static=index in static)


def _graph_break(gm: GraphModule) -> GraphBreak | None:
    """Why Dynamo ended this graph, if it was not the end of the function."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not reason.user_stack:
        return None
    frame = reason.user_stack[-1]
    return GraphBreak(frame.filename, frame.lineno or 0, frame.line or "", reason.reason.strip().splitlines()[0])


def _recompile_reason() -> str | None:
    """The guard whose failure led to the compilation in progress, as Dynamo reports it."""
    return getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason")


def _wanted(inputs: Sequence[Any], options: Options) -> dict[str, Any]:
    """Arguments of the passes."""
    return {
        "platform": platform(platform_for(device_among(inputs), options.platform), options.capabilities),
        "kv_lens": options.kv_lens,
        "verify_attention": options.verify_attention,
        "skip_softcap": options.skip_softcap,
        "merge_weights": options.merge_weights,
        "disable": options.disable_passes,
    }


def _consulted(wanted: Mapping[str, Any], labels: list[tuple[str, bool]]) -> dict[str, Any]:
    """All that the passes and the plan consult beside the trace, as the compile cache knows it."""
    target: Platform = wanted["platform"]
    kernels = target.name == "cpu" and why_no_kernels() is None
    return {
        **wanted,
        "platform": repr(target),
        "emulated": EMULATED,
        "kernels": kernels,
        "labels": labels,
    }


class Backend:
    """``torch.compile(fn, backend="gemma_npu")``; the entry point of ``torch_dynamo_backends``.

    A compiled graph is inference only. Options come with ``options={...}`` (fields of :class:`Options`); ``mode=`` is
    refused. ``torch._dynamo.reset()`` frees every captured graph.
    """

    __name__ = "gemma_npu"

    def __init__(
        self,
        on_compile: Callable[[GraphReport], None] = lambda report: None,
        runner: Callable[..., Any] = GraphRunner,
        smallest: int = 2,
    ) -> None:
        """``on_compile`` is called with the report of every graph this backend compiles; ``runner`` runs it, with at
        least ``smallest`` rows."""
        self.resets = 0
        self._on_compile, self._runner, self._smallest = on_compile, runner, smallest
        self._runners: weakref.WeakSet[GraphRunner] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._frames: set[int | None] = set()

    @paused()
    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Options | Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        """Compile one Dynamo graph.

        Raises:
            CompileError: (a ValueError) bad options, a mode, gradients, or a graph that contradicts itself.
        """
        if mode is not None:
            raise CompileError(f"mode is {mode!r}: this backend has no modes, use options={{...}}")
        parsed = Options.parse(options)
        write_out(gm)
        labels, recompile, start = _labels(gm), self._is_recompile(), time.perf_counter()
        reason, broken = _recompile_reason() if recompile else None, _graph_break(gm)

        def finish(graph: GraphModule, static: set[int], aot: str | None = None) -> Callable[..., Any]:
            name = f"graph {CompileContext.current_compile_id()}"
            report = GraphReport(name, recompile, reason, broken, aot=aot, smallest=self._smallest)
            report.seconds["aot"] = time.perf_counter() - start
            if ticket.final is None:
                self._rewrite(graph, static, labels, parsed, wanted, report)
                if report.plan is not None:
                    ticket.keep_final(graph, report.plan, report.passes)
            else:
                report.plan, report.passes = ticket.final.plan, list(ticket.final.passes)
                report.nodes, report.seconds["passes"] = len(graph.graph.nodes), 0.0
            report.cache = ticket.state
            runner = self._run(graph, parsed, wanted["platform"], report)
            with self._lock:
                self._runners.add(runner)
            publish(report)
            self._on_compile(report)
            recorder = Recorder(parsed.record, report.plan) if parsed.record and report.plan else None
            return _boxed(runner, recorder)

        def compile_inference(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            context = TracingContext.try_get()
            metadata = context.fw_metadata if context is not None else None
            ticket.keep_aot(graph)
            static = set(metadata.static_input_indices) if metadata is not None else set()
            return finish(graph, static, trace if isinstance(trace, str) else None)

        compiler = aot_autograd(
            fw_compiler=_refuse_training,
            inference_compiler=compile_inference,
            keep_inference_input_mutations=True,
        )
        trace: Trace | str | None = None
        try:
            wanted = _wanted(example_inputs, parsed)
            final = not self._observed() and only_own()
            ticket = look_up(gm, example_inputs, parsed.cache, (lambda: _consulted(wanted, labels)) if final else None)
            if ticket.final is not None:
                return calling(finish(ticket.final.trace.graph, set()), ticket.final.trace)
            trace = ticket.trace or trace_step(gm, example_inputs)
            if isinstance(trace, str):
                return compiler(gm, example_inputs)
            if ticket.trace is None:
                ticket.keep(trace)
            return calling(finish(trace.graph, set(trace.static)), trace)
        except Exception as error:
            dump = current_dump()
            if dump is not None:
                dump.fail(gm, example_inputs, parsed, error)
            raise

    def _is_recompile(self) -> bool:
        """Whether this backend compiled the same code before (a guard failed, or another object runs it)."""
        compile_id = CompileContext.current_compile_id()
        frame = compile_id.frame_id if compile_id is not None else None
        with self._lock:
            known = frame is not None and frame in self._frames
            self._frames.add(frame)
        return known

    def _observed(self) -> bool:
        """Whether the graph is seen on its way through the passes, and not only behind them."""
        return current_dump() is not None

    def _rewrite(
        self,
        gm: GraphModule,
        static: set[int],
        labels: list[tuple[str, bool]],
        options: Options,
        wanted: Mapping[str, Any],
        report: GraphReport,
    ) -> None:
        """Run the passes on a trace, and plan what they make of it."""
        name_inputs(gm, labels, static)
        dump = current_dump()
        files = dump.graph() if dump is not None else None
        after = observers(files)
        after("traced", gm)
        start = time.perf_counter()
        with emulate(wanted["platform"]):
            report.passes = run_passes(gm, **wanted, after=after)
        report.seconds["passes"] = time.perf_counter() - start
        report.nodes = len(gm.graph.nodes)
        report.plan = make_plan(gm, static)
        if dump is not None and files is not None:
            files.finish(gm, report, options, wanted["platform"].name)
            dump.update()

    def _run(self, gm: GraphModule, options: Options, target: Platform, report: GraphReport) -> GraphRunner:
        """What runs a final graph."""
        return self._runner(gm, report.plan, options, report, target)

    def reset(self) -> None:
        """Free every captured graph and its memory. Called by ``torch._dynamo.reset()``; may be called twice."""
        with self._lock:
            runners = list(self._runners)
            self._frames.clear()  # Dynamo counts frames anew
            self.resets += 1
        for runner in runners:
            with contextlib.suppress(ReferenceError):
                runner.free()


def _boxed(runner: GraphRunner, recorder: Recorder | None = None) -> Callable[[list[Any]], list[Any]]:
    """AOT's calling convention: one list of arguments, which the callee may empty."""

    def run(args: list[Any]) -> list[Any]:
        results = runner(args) if recorder is None else recorder.call(runner, args)
        args.clear()
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


backend = Backend()
"""The backend of the entry point."""
