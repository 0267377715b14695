"""What a replay does beside its kernels, looked up in the runner of a captured step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch

from gemma_npu_compile.engine import Engine
from gemma_npu_compile.graphs.runner import GraphRunner

STEPS = 15


def _runner(engine: Engine) -> GraphRunner:
    return next(iter(engine._run("greedy").backend._runners))


@contextmanager
def _replays_as(runner: GraphRunner, wrap: Callable[[Any], Callable[[], None]]) -> Iterator[None]:
    """Every capture of the runner replays through ``wrap(capture)`` inside the block."""
    graphs = [graph for binding in runner._bindings for graph in binding.graphs.values()]
    wrapped = [wrap(graph) for graph in graphs]
    for graph, replay in zip(graphs, wrapped, strict=True):
        graph.__dict__["replay"] = replay
    try:
        yield
    finally:
        for graph in graphs:
            del graph.__dict__["replay"]


def host_overhead_us(engine: Engine, step: Callable[[], Any]) -> float:
    """Median time of a step outside its replay: tables, checks, small copies in and out, reading the tokens.

    Args:
        step: runs one step and returns an object with its ``seconds``.
    """
    inside: list[float] = []

    def timed(graph: Any) -> Callable[[], None]:
        replay = graph.replay

        def run() -> None:
            start = perf_counter()
            replay()
            inside.append(perf_counter() - start)

        return run

    found = []
    with _replays_as(_runner(engine), timed):
        for _ in range(STEPS):
            inside.clear()
            whole = step().seconds
            found.append(whole - sum(inside))
    return 1e6 * median(found)


def _recorded(graph: Any) -> Callable[[], None]:
    """A host capture's calls as they are: under a profiler it would replay task by task, in ranges."""

    def run() -> None:
        for kernel, args, kwargs in graph._calls:
            kernel(*args, **kwargs)

    return run


def allocations(engine: Engine, step: Callable[[], Any]) -> int:
    """Blocks torch's CPU allocator hands out during one replay, by its profiler.

    What C++ kernels keep from call to call for their own use is not among them.
    """
    with _replays_as(_runner(engine), _recorded):
        return _allocations(step)


def _allocations(step: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    spans = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == "replay"]
    taken = [e.start_ns() for e in events if e.name() == "[memory]" and e.nbytes() > 0]
    return sum(any(start <= at <= end for start, end in spans) for at in taken)


def stable_bytes(engine: Engine) -> int:
    """Bytes a replay of the largest size copies into stable buffers."""
    runner = _runner(engine)
    buffers = next(iter(runner._bindings[-1].buffers.values()))
    return sum(buffers.view(item, runner.sizes[-1]).nbytes for item in buffers.inputs)


def memory_ratio(engine: Engine) -> float:
    """Memory of intermediates and stable buffers over all capture sizes, against the largest size alone."""
    runner = _runner(engine)
    blocks = runner._runtime._pool._blocks  # type: ignore[attr-defined]
    buffers = sum(b.nbytes for b in runner._bindings[-1].buffers.values())
    return (sum(b.nbytes for b in blocks) + buffers) / (blocks[0].nbytes + buffers)  # the largest is captured first


def steady_facts(engine: Engine, step: Callable[[], Any]) -> dict[str, Any]:
    """Fields of ours beyond those of every subject."""
    (graph,) = engine.report.graphs
    return {
        "capture_s": sum(seconds for name, seconds in graph.seconds.items() if name != "aot"),
        "host_overhead_us": host_overhead_us(engine, step),
        "steady": {
            "allocations": allocations(engine, step),
            "recompiles": engine.report.totals()["recompiles"] + len(engine.report.graphs) - 1,
            "stable_bytes": stable_bytes(engine),
            "memory_ratio": memory_ratio(engine),
            "task_updates": graph.host_updates,
        },
        "seconds": dict(graph.seconds),
        "sizes": list(graph.sizes),
    }
