"""From a final graph to a callable: choose a size, check, load, replay, slice; fall back with a reason."""

import logging
import threading
import time
from typing import Any

import torch
from torch.fx import GraphModule

from gemma_npu_compile.errors import CaptureError, ReplayError
from gemma_npu_compile.graphs.buffers import StableBuffers
from gemma_npu_compile.graphs.plan import Plan, Values, evaluate
from gemma_npu_compile.graphs.runtime import Captured, HostRuntime, Runtime
from gemma_npu_compile.graphs.sizes import capture_sizes, size_for
from gemma_npu_compile.options import Options
from gemma_npu_compile.report import GraphReport

log = logging.getLogger(__name__)

Key = tuple[int, ...]


class GraphRunner:
    """Callable that replays captures of one graph.

    When padded rows are declared, all sizes are captured at the first call, largest first, and share stable buffers.
    Otherwise each new set of input sizes is captured when it comes, up to ``max_captures``. Calls are serialised, and
    results are copied out of the pool, so that no later replay changes what a caller holds.

    Args:
        gm: the final graph.
        plan: of ``gm``.
        options: capture or not, sizes, what a fallback does.
        report: counts captures, replays, fallbacks.

    Raises:
        CompileError: a requested capture size is impossible for this graph.
    """

    def __init__(self, gm: GraphModule, plan: Plan, options: Options, report: GraphReport) -> None:
        self.gm, self.plan, self.options, self.report = gm, plan, options, report
        self.sizes = capture_sizes(options.capture_sizes, plan.max_rows) if plan.max_rows is not None else ()
        self._lock = threading.Lock()
        self._runtime: Runtime = HostRuntime()
        self._buffers: dict[Key, StableBuffers] = {}
        self._graphs: dict[Key, Captured] = {}
        self._refused: str | None = None
        self._addresses: list[tuple[int, int, str]] | None = None
        self._warned: set[str] = set()

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run the graph on the arguments of the compiled function.

        Raises:
            ReplayError: an input does not fit, or a static input has moved; nothing was run.
            CaptureError: this call would fall back and ``on_fallback="error"``.
        """
        values = self.plan.values(args)
        sized = dict(values)
        with self._lock, torch.no_grad():
            if self.plan.rows is not None:
                rows = values[self.plan.rows]
                if rows == 0:
                    return [output.empty(values) for output in self.plan.outputs]
                size = size_for(rows, self.sizes)
                if size is None:
                    return self._fall_back(f"{rows} rows exceed the largest capture size {max(self.sizes)}", args)
                sized[self.plan.rows] = size
            self._check_addresses(args)
            reason = self._cannot_capture(sized)
            if reason is not None:
                return self._fall_back(reason, args)
            if self.plan.rows is None and not self.options.capture:
                self.report.eager_calls += 1
                return self._run_uncaptured(args)
            results = self._run(args, values, sized)
            if results is None:
                return self._fall_back(str(self._refused), args)
            return [o.hand_out(r, values) for o, r in zip(self.plan.outputs, results, strict=True)]

    def _run(self, args: list[Any], values: Values, sized: Values) -> list[Any] | None:
        """Results at the captured size, or None when the capture failed."""
        buffers = self._buffers_for(args, sized)
        buffers.check(args)
        key = self._key(sized)
        if self.options.capture and key not in self._graphs:
            self._capture(args, buffers, sized)
            if self._refused is not None:
                self._buffers.clear()
                return None
        rows = None if self.plan.rows is None else values[self.plan.rows]
        buffers.load(args, rows, None if rows is None else sized[self.plan.rows])  # type: ignore[index]
        if not self.options.capture:
            self.report.eager_calls += 1
            return list(self.gm(*self._arguments(args, buffers, sized)))
        graph = self._graphs[key]
        graph.replay()
        self.report.replays += 1
        return graph.outputs

    # ---- capture

    def _cannot_capture(self, sized: Values) -> str | None:
        """Why a call of these sizes runs uncaptured, decided before anything is allocated for it."""
        if not self.options.capture or self._key(sized) in self._graphs:
            return None
        if self._refused is None and self.plan.rows is None and len(self._graphs) >= self.options.max_captures:
            return f"more than {self.options.max_captures} input sizes (max_captures)"
        return self._refused

    def _key(self, sized: Values) -> Key:
        return tuple(sized[symbol] for symbol in self.plan.symbols)

    def _buffers_for(self, args: list[Any], sized: Values) -> StableBuffers:
        """Padded captures share the buffers of the largest size; others have their own."""
        key = () if self.plan.rows is not None else self._key(sized)
        if key not in self._buffers:
            self._buffers[key] = StableBuffers(self.plan.inputs, args, self.sizes[-1] if self.sizes else None)
        return self._buffers[key]

    def _arguments(self, args: list[Any], buffers: StableBuffers, sized: Values) -> list[Any]:
        """What the graph is captured with: static inputs, stable buffers, host integers."""
        rows = None if self.plan.rows is None else sized[self.plan.rows]
        found = []
        for item in self.plan.inputs:
            if item.dtype is None and item.shape:
                found.append(evaluate(item.shape[0], sized))
            else:
                found.append(args[item.source] if item.buffer is None else buffers.view(item, rows))
        return found

    def _capture(self, args: list[Any], buffers: StableBuffers, sized: Values) -> None:
        """Capture every size (padded rows), or the sizes of this call. A failure is kept as the reason to fall back."""
        start = time.perf_counter()
        if self.plan.rows is None:
            wanted = [sized]
        else:
            wanted = [{**sized, self.plan.rows: size} for size in reversed(self.sizes)]
        graphs: dict[Key, Captured] = {}
        try:
            for each in wanted:
                name = "capture" if self.plan.rows is None else f"capture of {each[self.plan.rows]} rows"
                arguments = self._arguments(args, buffers, each)
                graphs[self._key(each)] = self._runtime.capture(self.gm, arguments, each, name)
        except CaptureError as error:
            self._refused = str(error)
            return
        self._graphs.update(graphs)
        report = self.report
        report.captures += len(graphs)
        report.sizes.extend(each[self.plan.rows] for each in wanted if self.plan.rows is not None)
        report.seconds["capture"] = report.seconds.get("capture", 0.0) + time.perf_counter() - start
        report.pool_bytes = self._runtime.nbytes
        report.buffer_bytes = sum(b.nbytes for b in self._buffers.values())
        log.info("%s: %d captures, rows %s, pool %d bytes", report.name, len(graphs), report.sizes, report.pool_bytes)

    # ---- around a replay

    def _check_addresses(self, args: list[Any]) -> None:
        """The first call fixes the addresses of static inputs."""
        if self._addresses is None:
            static = [i for i in self.plan.inputs if i.static and i.role != "unused"]
            self._addresses = [(i.source, args[i.source].data_ptr(), i.label) for i in static]
        for source, address, label in self._addresses:
            if args[source].data_ptr() != address:
                raise ReplayError(
                    f"static input {label} is at {args[source].data_ptr():#x}, it was captured at {address:#x}: "
                    "a captured graph reads the captured address; nothing was run"
                )

    def _fall_back(self, reason: str, args: list[Any]) -> list[Any]:
        if self.options.on_fallback == "error":
            raise CaptureError(f"{reason} (on_fallback='error')")
        self.report.fallbacks[reason] += 1
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning("running uncaptured: %s", reason)
        return self._run_uncaptured(args)

    def _run_uncaptured(self, args: list[Any]) -> list[Any]:
        return list(self.gm(*[args[i.source] for i in self.plan.inputs]))

    def free(self) -> None:
        """Drop captures, buffers and the pool; a later call captures anew. May be called again."""
        with self._lock:
            self._graphs.clear()
            self._refused = None
            self._addresses = None
            self._buffers.clear()
            self._runtime.free()
