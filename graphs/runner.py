"""From a final graph to a callable: choose a size, check, load, replay, slice; fall back with a reason."""

import contextlib
import logging
import threading
import time
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter
from torch.utils._python_dispatch import _disable_current_modes

from gemma_npu_compile.capabilities import Platform
from gemma_npu_compile.capabilities import platform as get_platform
from gemma_npu_compile.collector import paused
from gemma_npu_compile.devices import platform_for
from gemma_npu_compile.errors import CaptureError, ReplayError
from gemma_npu_compile.graphs.bindings import Binding, Bindings, Key
from gemma_npu_compile.graphs.buffers import StableBuffers, copy_all, not_the_padded
from gemma_npu_compile.graphs.extras import Extras, Read
from gemma_npu_compile.graphs.phases import profiled
from gemma_npu_compile.graphs.plan import Plan, Values, evaluate
from gemma_npu_compile.graphs.runtime import Captured, Runtime, runtime_for
from gemma_npu_compile.graphs.sizes import capture_sizes, size_for
from gemma_npu_compile.graphs.trust import Scratch, first_difference, load_scratch, run_one_row, why_unchecked
from gemma_npu_compile.modes import without_grad
from gemma_npu_compile.ops.npu import emulate
from gemma_npu_compile.options import Options
from gemma_npu_compile.report import GraphReport

log = logging.getLogger(__name__)


def _outside_modes() -> contextlib.AbstractContextManager[Any]:
    """AOT watches the first call through a dispatch mode that takes out forms for aliasing; other calls have none."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()


_MOVING = (
    "inputs that a capture reads where they lie are elsewhere in every call (beam search moves its caches): no capture "
    "would serve a second call"
)


class GraphRunner:
    """Callable that replays captures of one graph.

    When padded rows are declared, all sizes are captured at the first call, largest first, and share stable buffers.
    Where rows are proven not to mix, a size is captured when it is first needed: the next of ``capture_sizes``, or the
    next power of two. Otherwise each new set of input sizes is captured when it comes, up to ``max_captures``. Calls
    are serialised, and results are copied out of the pool, so that no later replay changes what a caller holds.

    Each model and cache has captures of its own (bindings.py).

    Args:
        gm: the final graph.
        plan: of ``gm``.
        options: capture or not, sizes, what a fallback does.
        report: counts captures, replays, fallbacks.

    Raises:
        CompileError: a requested capture size is impossible for this graph.
    """

    def __init__(
        self, gm: GraphModule, plan: Plan, options: Options, report: GraphReport, platform: Platform | None = None
    ) -> None:
        self.gm, self.plan, self.options, self.report = gm, plan, options, report
        self._platform = platform or get_platform(platform_for(plan.device, options.platform), options.capabilities)
        self._extras = Extras(plan)
        self.sizes = options.capture_sizes or ()
        if plan.max_rows is not None:
            # One row of a graph for many is only safe where a capture of one was checked.
            self.sizes = capture_sizes(options.capture_sizes, plan.max_rows, report.smallest if options.capture else 2)
        self._lock = threading.Lock()
        self._runtime: Runtime = runtime_for(plan.device, options.engine)
        self._unchecked = why_unchecked(gm, plan)
        self._bindings = Bindings(plan)
        self._warned: set[str] = set()

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run the graph on the arguments of the compiled function.

        Raises:
            ReplayError: an input does not fit, or a static input has moved; nothing was run.
            CaptureError: this call would fall back and ``on_fallback="error"``.
        """
        with self._lock:
            return self._answer(args)

    @without_grad
    def _answer(self, args: list[Any]) -> list[Any]:
        values = self.plan.values(args)
        sized = dict(values)
        self._runtime.order()
        calls = self.plan.calls if self.options.capture else None
        if calls is not None and calls.prefill(values, self.options.max_query_len):
            self.report.prefills += 1
            return self._run_uncaptured(args)
        if calls is not None and calls.grows is not None:
            return self._fall_back(calls.grows, args)
        if self.plan.rows is not None:
            rows = values[self.plan.rows]
            if rows == 0:
                return [output.empty(values) for output in self.plan.outputs]
            size = size_for(rows, self.sizes or [max(2, 1 << (rows - 1).bit_length())])
            if size is None:
                return self._fall_back(f"{rows} rows exceed the largest capture size {max(self.sizes)}", args)
            sized[self.plan.rows] = size
        if self.plan.rows is None and not self.options.capture:
            self.report.eager_calls += 1
            return self._run_uncaptured(args)
        binding = self._bindings.of(args)
        if self.options.capture and self._bindings.misses > self.options.max_captures:
            return self._fall_back(_MOVING, args)
        key = self._key(sized)
        if self.options.capture and key not in binding.graphs:
            reason = self._capture(binding, args, values, sized)
            if reason is not None:
                return self._fall_back(reason, args)
            if self._key(sized) not in binding.graphs:  # one row, which turned out to need a padded one beside it
                sized[self.plan.rows] = self.sizes[0]  # type: ignore[index]
        results = self._run(binding, args, values, sized)
        return self._hand_out(results, values, padded=sized != values)

    def _hand_out(self, results: list[Any], values: Values, padded: bool) -> list[Any]:
        """Copies of the results, without padded rows: what a caller holds no later replay changes."""
        pairs = zip(self.plan.outputs, results, strict=True)
        shown = [o.cut(r, values) if padded or o.dtype is None else r for o, r in pairs]  # numbers are those of a call
        if self.plan.device.type == "cpu":
            return [e.clone() if isinstance(e, torch.Tensor) and e.numel() else e for e in shown]
        copies = [torch.empty_like(each) if isinstance(each, torch.Tensor) else each for each in shown]
        copy_all([(c, s) for c, s in zip(copies, shown, strict=True) if isinstance(s, torch.Tensor)])
        return copies

    def _run(self, binding: Binding, args: list[Any], values: Values, sized: Values) -> list[Any]:
        """Results at the captured size."""
        buffers = self._buffers_for(binding, args, sized)
        rows = None if self.plan.rows is None else values[self.plan.rows]
        buffers.check(args, rows)
        buffers.load(args, rows, None if rows is None else sized[self.plan.rows])  # type: ignore[index]
        if not self.options.capture:
            self.report.eager_calls += 1
            with emulate(self._platform):
                return list(self.gm(*self._arguments(binding, args, buffers, sized)))
        graph = binding.graphs[self._key(sized)]
        with _outside_modes():
            with profiled("update"):
                self.report.host_updates += self._update(graph, args, buffers, sized)
            binding.merged.tensors(args)
            self._extras.numbers(values)
            with profiled("replay"):
                graph.replay()
        self.report.replays += 1
        return graph.outputs

    def _update(self, graph: Captured, args: list[Any], buffers: StableBuffers, sized: Values) -> int:
        """Refresh the host lists of a capture from what lies in the buffers; how many tasks were updated."""
        lists = self._extras.host_lists(self._read(args, buffers, sized))
        if not lists:
            return 0
        with emulate(self._platform):  # the tasks check what they will read
            return sum(graph.update(index, contents) for index, contents in enumerate(lists))

    def _read(self, args: list[Any], buffers: StableBuffers, sized: Values) -> Read:
        """What the captured graph reads for an input, padded rows included."""
        rows = None if self.plan.rows is None else sized[self.plan.rows]
        return lambda item: args[item.source] if item.buffer is None else buffers.view(item, rows)

    # ---- capture

    def _key(self, sized: Values) -> Key:
        return tuple(sized[symbol] for symbol in self.plan.symbols)

    def _buffers_for(self, binding: Binding, args: list[Any], sized: Values) -> StableBuffers:
        """Captures with declared padding share the buffers of the largest size; others have their own."""
        key = () if self.plan.max_rows is not None else self._key(sized)
        if key not in binding.buffers:
            binding.buffers[key] = StableBuffers(self.plan.inputs, args, self._largest(sized))
        return binding.buffers[key]

    def _largest(self, sized: Values) -> int | None:
        """Rows of the buffers: of the largest capture where all are made at once, else of this one."""
        if self.plan.rows is None:
            return None
        return self.sizes[-1] if self.plan.max_rows is not None else sized[self.plan.rows]

    def _arguments(self, binding: Binding, args: list[Any], buffers: StableBuffers, sized: Values) -> list[Any]:
        """What the graph is captured with: static inputs, stable buffers, host integers, extras."""
        read = self._read(args, buffers, sized)
        found: list[Any] = []
        for item in self.plan.inputs:
            if item.dtype is None and item.shape:
                found.append(evaluate(item.shape[0], sized))
            else:
                found.append(read(item))
        return found + self._extras.all(read, binding.merged.tensors(args), sized)

    @paused()
    def _capture(self, binding: Binding, args: list[Any], values: Values, sized: Values) -> str | None:
        """Capture every size (padded rows), or the sizes of this call; or say why not, and keep nothing of it."""
        key = self._key(sized)
        if key in binding.refused:
            return binding.refused[key]
        if self.plan.max_rows is None:
            if len(binding.graphs) + len(binding.refused) >= self.options.max_captures:
                return f"more than {self.options.max_captures} input sizes (max_captures)"
            wanted = [sized]
        else:
            wanted = [{**sized, self.plan.rows: size} for size in reversed(self.sizes)]  # type: ignore[dict-item]
        start = time.perf_counter()
        buffers = self._buffers_for(binding, args, sized)
        buffers.check(args)
        # Host lists are frozen at capture: with this call's contents in place they hold for the first replay.
        largest = (None if self.plan.rows is None else values[self.plan.rows], self._largest(sized))
        buffers.load(args, *largest)
        graphs: dict[Key, Captured] = {}
        context = self.gm, self.plan, buffers, args
        try:
            with _outside_modes(), emulate(self._platform):
                for each in wanted:
                    name = "capture" if self.plan.rows is None else f"capture of {each[self.plan.rows]} rows"
                    now = partial(self._arguments, binding, args, buffers, each)  # host lists of what lies there
                    arguments = now()
                    one = self.plan.rows is not None and each[self.plan.rows] == 1 and len(self.sizes) > 1
                    try:
                        if one and self._unchecked is not None:
                            raise CaptureError(self._unchecked)
                        expected = run_one_row(*context, now, each) if one else None
                        graphs[self._key(each)] = self._runtime.capture(self.gm, arguments, each, name)
                        self._check(binding, args, buffers, each, graphs[self._key(each)], name, expected)
                    except CaptureError as error:
                        if not one:
                            raise
                        graphs.pop(self._key(each), None)
                        self.sizes, self.report.one_row = self.sizes[1:], str(error)
                    buffers.load(args, *largest)
                    if self._key(each) in graphs:
                        self._update(graphs[self._key(each)], args, buffers, each)
        except CaptureError as error:
            graphs.clear()
            binding.refused.update((self._key(each), str(error)) for each in wanted)
            del binding.buffers[() if self.plan.max_rows is not None else key]
            return str(error)
        binding.graphs.update(graphs)
        report = self.report
        report.captures += len(graphs)
        report.sizes.extend(
            each[self.plan.rows]
            for each in wanted
            if self.plan.rows is not None and self._key(each) in graphs and each[self.plan.rows] not in report.sizes
        )
        report.seconds["capture"] = report.seconds.get("capture", 0.0) + time.perf_counter() - start
        report.pool_bytes = self._runtime.nbytes
        report.merged_bytes = sum(each.merged.nbytes for each in self._bindings)
        report.buffer_bytes = sum(b.nbytes for each in self._bindings for b in each.buffers.values())
        log.info("%s: %d captures, rows %s, pool %d bytes", report.name, len(graphs), report.sizes, report.pool_bytes)
        return None

    def _check(
        self,
        binding: Binding,
        args: list[Any],
        buffers: StableBuffers,
        sized: Values,
        graph: Captured,
        name: str,
        expected: list[Any] | None,
    ) -> None:
        """Compare a replay with the uncaptured graph before the capture is trusted (graphs/trust.py).

        Args:
            expected: what the uncaptured graph gives for the same contents, where that is known.

        Raises:
            CaptureError: they differ, or a replay fails on the device; names the capture and the output.
        """
        if self._unchecked is not None:
            self.report.unchecked = self._unchecked
            return
        contents = "these inputs"
        if self.plan.rows is not None:
            contents = "other tables and lengths"
            load_scratch(self.plan, buffers, args, sized[self.plan.rows])
        scratch = Scratch(self.plan, args)
        try:
            self._update(graph, args, buffers, sized)
            graph.replay()
            found = [each.clone() if isinstance(each, torch.Tensor) else each for each in graph.outputs]
            scratch.restore()
            if expected is None:
                # Not gm(...): to generate its code takes longer than a few runs of it.
                expected = list(Interpreter(self.gm).run(*self._arguments(binding, args, buffers, sized)))
            wrong = first_difference(found, expected)
        except (ReplayError, RuntimeError) as error:
            raise CaptureError(f"{name}: its first replay, with {contents}, failed: {error}") from None
        finally:
            scratch.restore()
        if wrong is not None:
            raise CaptureError(f"{name}: a replay with {contents} differs from the uncaptured graph in output {wrong}")
        self.report.checked += 1

    # ---- without a capture

    def _fall_back(self, reason: str, args: list[Any]) -> list[Any]:
        if self.options.on_fallback == "error":
            raise CaptureError(f"{reason} (on_fallback='error')")
        self.report.fallbacks[reason] += 1
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning("running uncaptured: %s", reason)
        return self._run_uncaptured(args)

    def _run_uncaptured(self, args: list[Any]) -> list[Any]:
        merged = self._bindings.of(args).merged.tensors(args) if self.plan.extras else []
        extras = self._extras.all(lambda item: args[item.source], merged, self.plan.values(args))
        with emulate(self._platform):
            results = self.gm(*[args[i.source] for i in self.plan.inputs], *extras)
        return not_the_padded(self.plan, args, results)

    def free(self) -> None:
        """Drop captures, buffers and the pool; a later call captures anew. May be called again."""
        with self._lock:
            self._bindings.clear()
            self._runtime.free()
