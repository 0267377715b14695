"""What was traced, rewritten and captured, how often it was replayed, and why anything fell back."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemma_npu_compile.graphs.plan import Plan
    from gemma_npu_compile.passes import PassRecord


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo had to stop tracing: the innermost line of the user's call, and the first sentence of the reason."""

    file: str
    line: int
    code: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"file": self.file, "line": self.line, "code": self.code, "reason": self.reason}

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.code}: {self.reason}"


@dataclass
class GraphReport:
    """One compiled graph.

    Attributes:
        recompile: this compilation replaced an earlier one of the same code.
        recompile_reason: the guard that failed, in Dynamo's words.
        graph_break: why the graph ends before the function does; None when it does not.
        cache: what the compile cache did: ``"hit"`` (nothing was traced and no pass ran: ``passes`` are those of the
            process that stored the graph), ``"hit in front of the passes"`` (a trace), ``"stored"``, ``"off"``, or why
            not.
        aot: why AOT traced the graph; None where one run at the level of ATen was enough (tracing.py), or none.
        seconds: wall time of ``aot`` (from the backend's call to the inference graph), ``passes`` and ``capture``.
        captures: captured graphs.
        checked: captures of which a replay with other contents equalled the uncaptured graph before they were used.
        unchecked: why no such replay could be made.
        smallest: rows of the smallest call. Dynamo traces one row apart from many; who goes past it can bring one.
        one_row: why one row is run beside a padded one all the same.
        sizes: rows of each capture of a graph with declared row padding, in the order of capture.
        prefills: calls that ran uncaptured because a prefill does (``max_query_len``).
        fallbacks: calls that ran uncaptured although capture was asked for, by reason.
        host_updates: captured tasks whose host lengths were refreshed before a replay.
        pool_bytes, buffer_bytes: memory of intermediates over all sizes, and of stable inputs.
        merged_bytes: of weights made of others (``merge_weights``).
    """

    name: str
    recompile: bool = False
    recompile_reason: str | None = None
    graph_break: "GraphBreak | None" = None
    cache: str = "off"
    aot: str | None = None
    nodes: int = 0
    passes: "list[PassRecord]" = field(default_factory=list)
    plan: "Plan | None" = None
    seconds: dict[str, float] = field(default_factory=dict)
    captures: int = 0
    checked: int = 0
    unchecked: str | None = None
    smallest: int = 2
    one_row: str | None = None
    sizes: list[int] = field(default_factory=list)
    replays: int = 0
    eager_calls: int = 0
    prefills: int = 0
    host_updates: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    pool_bytes: int = 0
    buffer_bytes: int = 0
    merged_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "name": self.name,
            "recompile": self.recompile,
            "recompile_reason": self.recompile_reason,
            "break": self.graph_break.to_dict() if self.graph_break else None,
            "cache": self.cache,
            "aot": self.aot,
            "nodes": self.nodes,
            "passes": [p.to_dict() for p in self.passes],
            "bindings": [
                {"layer": a.layer, "phase": a.phase, "group": a.group, "block_table": a.block_table}
                for a in (self.plan.attention if self.plan else ())
            ],
            "unpadded": self.plan.unpadded if self.plan else None,
            "seconds": dict(self.seconds),
            "sizes": list(self.sizes),
            "captures": self.captures,
            "checked": self.checked,
            "unchecked": self.unchecked,
            "one_row": self.one_row,
            "replays": self.replays,
            "eager_calls": self.eager_calls,
            "prefills": self.prefills,
            "host_updates": self.host_updates,
            "fallbacks": dict(self.fallbacks),
            "pool_bytes": self.pool_bytes,
            "buffer_bytes": self.buffer_bytes,
            "merged_bytes": self.merged_bytes,
        }

    def lines(self) -> Iterator[str]:
        yield f"{self.name}: {self.nodes} nodes" + (" (recompiled)" if self.recompile else "")
        if self.recompile_reason is not None:
            yield f"  recompiled because of {self.recompile_reason}"
        if self.graph_break is not None:
            yield f"  graph break at {self.graph_break}"
        yield f"  compile cache: {self.cache}"
        if self.aot is not None:
            yield f"  traced by AOT: {self.aot}"
        for record in self.passes:
            yield f"  pass {record}"
        for node in self.plan.attention if self.plan else ():
            window = "all keys" if node.window is None else f"window {node.window}"
            yield (
                f"  attention {node.phase}/{node.layer}: {node.layout}, head size {node.head_dim}, {window}, "
                f"scale {node.scale:g}, {node.group}, lengths {node.lengths}"
            )
        if self.plan is not None and self.plan.unpadded is not None:
            yield f"  one capture per input size: {self.plan.unpadded}"
        megabytes = (self.pool_bytes + self.buffer_bytes + self.merged_bytes) / 2**20
        yield f"  {self.captures} captures, rows {self.sizes}, {megabytes:.1f} MiB"
        yield f"  {self.replays} replays, {self.host_updates} task updates, {self.eager_calls} eager calls"
        if self.prefills:
            yield f"  {self.prefills} prefills, which are not captured"
        if self.one_row is not None:
            yield f"  no capture of one row: {self.one_row}"
        for reason, count in self.fallbacks.items():
            yield f"  fell back {count} times: {reason}"


@dataclass
class CompileReport:
    """All graphs one function, engine, loop or :func:`explain` call compiled.

    Attributes:
        prefills, fallbacks: calls a loop made of a model as it is, beside any graph.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    prefills: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def totals(self) -> dict[str, Any]:
        """The ``graphs`` object of the CLI: captures, replays, sizes, recompiles, fallbacks."""
        fallbacks = Counter(self.fallbacks)
        for graph in self.graphs:
            fallbacks.update(graph.fallbacks)
        return {
            "captures": sum(g.captures for g in self.graphs),
            "replays": sum(g.replays for g in self.graphs),
            "sizes": sorted({size for g in self.graphs for size in g.sizes}),
            "recompiles": sum(g.recompile for g in self.graphs),
            "fallbacks": dict(fallbacks),
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the totals and every graph."""
        prefills = self.prefills + sum(g.prefills for g in self.graphs)
        return {
            **self.totals(),
            "prefills": prefills,
            "breaks": [{"graph": g.name, **g.graph_break.to_dict()} for g in self.graphs if g.graph_break],
            "recompile_reasons": [
                {"graph": g.name, "reason": g.recompile_reason} for g in self.graphs if g.recompile_reason
            ],
            "graphs": [g.to_dict() for g in self.graphs],
        }

    def __str__(self) -> str:
        totals = self.totals()
        head = ", ".join(f"{key} {value}" for key, value in totals.items())
        return "\n".join([f"{len(self.graphs)} graphs: {head}", *(line for g in self.graphs for line in g.lines())])


_collectors = threading.local()


@contextlib.contextmanager
def collect() -> Iterator[CompileReport]:
    """Collect the report of every graph this thread compiles inside the block."""
    report = CompileReport()
    stack: list[CompileReport] = _collectors.__dict__.setdefault("stack", [])
    stack.append(report)
    try:
        yield report
    finally:
        stack.pop()


def publish(graph: GraphReport) -> None:
    """Hand a new graph's report to the collectors of this thread."""
    for report in _collectors.__dict__.get("stack", ()):
        report.graphs.append(graph)


def explain(fn: Callable[..., Any], **options: Any) -> Callable[..., CompileReport]:
    """``explain(fn, **options)(*args)`` compiles ``fn`` with this backend, runs it once and returns the report.

    Args:
        fn: a function or module, which is left as it was; or a loop of ``compile_loop``, which is run as it is.
        options: fields of :class:`Options`.

    Raises:
        ValueError: options for a loop, which has its own.
    """
    import torch

    from gemma_npu_compile.backend import Backend

    own: CompileReport | None = getattr(fn, "report", None) if hasattr(fn, "compile_loop") else None
    if own is not None and options:
        raise ValueError(f"explain: this compile_loop has its options where it was decorated, not {sorted(options)}")

    def run(*args: Any, **kwargs: Any) -> CompileReport:
        with collect() as report:
            if own is not None:
                prefills, fallbacks = own.prefills, Counter(own.fallbacks)
                fn(*args, **kwargs)
                report.prefills, report.fallbacks = own.prefills - prefills, own.fallbacks - fallbacks
                return report
            compiled = torch.compile(fn, backend=Backend(), options=dict(options), isolate_recompiles=True)  # type: ignore
            compiled(*args, **kwargs)
        return report

    return run
