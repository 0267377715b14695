"""Write what the compiler did to a folder people can read: the graph after each pass, the plan, an index."""

import contextlib
import html
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from gemma_npu_compile.graphs.plan import Plan
from gemma_npu_compile.report import GraphReport

PARTS = ("graphs", "index.html", "index.md", "plan.json")


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Inputs and attention nodes of a plan, JSON-ready; symbolic sizes as text."""
    return {
        "inputs": [
            {
                "name": item.name,
                "label": item.label,
                "role": item.role,
                "layer": item.layer,
                "phase": item.phase,
                "group": item.group,
                "shape": [size if isinstance(size, int) else str(size) for size in item.shape],
                "dtype": None if item.dtype is None else str(item.dtype).removeprefix("torch."),
                "buffer": item.buffer,
            }
            for item in plan.inputs
        ],
        "attention": [
            {
                "layer": node.layer,
                "phase": node.phase,
                "layout": node.layout,
                "head_dim": node.head_dim,
                "window": node.window,
                "scale": node.scale,
                "group": node.group,
                "block_table": node.block_table,
                "kv_len_source": node.kv_len_source,
                "lengths": node.lengths,
            }
            for node in plan.attention
        ],
        "host_parameters": [
            {
                "name": host.name,
                "inputs": [item.label for item in plan.inputs if item.source in host.sources and item.layer is None],
                "tasks": list(host.sites),
                "bucket": host.block_size,
                "capacity": host.capacity,
            }
            for host in plan.host
        ],
    }


class GraphDump:
    """Files of one graph: ``00_traced.py``, ``NN_<pass>.py``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.report: GraphReport | None = None
        self._count = 0
        directory.mkdir(parents=True)

    def write(self, name: str, gm: GraphModule) -> None:
        """Write the graph as readable Python."""
        code = gm.print_readable(print_output=False)
        path = self.directory / f"{self._count:02d}_{name}.py"
        path.write_text(f'"""Graph {self.directory.name} after {name}."""\n\n{code}\n', encoding="utf-8")
        self._count += 1

    def to_dict(self) -> dict[str, Any]:
        """This graph's entry of ``plan.json``."""
        report = self.report
        if report is None or report.plan is None:
            return {"inputs": [], "attention": [], "host_parameters": [], "passes": [], "sizes": []}
        passes = [p.to_dict() for p in report.passes]
        return {**plan_to_dict(report.plan), "passes": passes, "sizes": sorted(report.sizes)}

    def markdown(self) -> Iterator[str]:
        """This graph's part of ``index.md``."""
        report = self.report
        yield f"## Graph {self.directory.name}"
        if report is None or report.plan is None:
            yield "\nThe compilation did not finish; the last file shows the graph it stopped at."
            return
        yield f"\n{report.nodes} nodes, captured rows {sorted(report.sizes)}\n"
        yield "| pass | changed | nodes | launches | ms | left |"
        yield "|---|---:|---:|---:|---:|---|"
        for p in report.passes:
            left = "; ".join(f"{count} x {reason}" for reason, count in p.left.items())
            nodes = f"{p.nodes_before} -> {p.nodes_after} | {p.launches_after}"
            yield f"| {p.name} | {p.changed} | {nodes} | {p.seconds * 1e3:.1f} | {left} |"
        yield "\n| phase | layer | layout | head size | window | scale | group | block table | lengths from |"
        yield "|---|---|---|---:|---:|---:|---|---|---|"
        for a in report.plan.attention:
            window = "all" if a.window is None else a.window
            yield (
                f"| {a.phase} | {a.layer} | {a.layout} | {a.head_dim} | {window} | {a.scale:g} | {a.group} | "
                f"`{a.block_table}` | `{a.kv_len_source}` |"
            )
        yield "\n| input | role | shape | dtype | buffer |"
        yield "|---|---|---|---|---|"
        for item in report.plan.inputs:
            if item.role not in ("parameter", "unused"):
                shape = ", ".join(map(str, item.shape))
                yield f"| `{item.label}` ({item.name}) | {item.role} | {shape} | {item.dtype} | {item.buffer or ''} |"
        yield ""


class Dump:
    """A folder under construction; it appears under its name only when it is complete.

    Args:
        directory: where to write; must not exist, or be empty, unless ``force``.
        force: replace the files of an earlier dump; other files stay.

    Raises:
        ValueError: the directory has contents and ``force`` is not given, or it is a file.
    """

    def __init__(self, directory: Path, force: bool = False) -> None:
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"{directory} is a file, a dump is a directory")
        if directory.is_dir() and any(directory.iterdir()) and not force:
            raise ValueError(f"{directory} is not empty: choose another directory or use --force")
        self.directory = directory
        directory.parent.mkdir(parents=True, exist_ok=True)
        self._work = Path(tempfile.mkdtemp(prefix=".dump-", dir=directory.parent))
        self.graphs: list[GraphDump] = []

    def graph(self) -> GraphDump:
        """Start the next graph."""
        self.graphs.append(GraphDump(self._work / "graphs" / str(len(self.graphs))))
        return self.graphs[-1]

    def finish(self) -> None:
        """Write index and plan, and move everything to its place."""
        plan = {"graphs": [graph.to_dict() for graph in self.graphs]}
        (self._work / "plan.json").write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
        lines = ["# What gemma_npu compiled", ""]
        for graph in self.graphs:
            lines.extend(graph.markdown())
            files = sorted(path.name for path in graph.directory.iterdir())
            lines += ["Files: " + ", ".join(f"[{f}](graphs/{graph.directory.name}/{f})" for f in files), ""]
        text = "\n".join(lines)
        (self._work / "index.md").write_text(text + "\n", encoding="utf-8")
        page = f"<!doctype html><meta charset=utf-8><title>gemma_npu dump</title><pre>{html.escape(text)}</pre>\n"
        (self._work / "index.html").write_text(page, encoding="utf-8")
        self.directory.mkdir(exist_ok=True)
        for name in PARTS:
            old = self.directory / name
            if old.is_dir():
                shutil.rmtree(old)
            elif old.exists():
                old.unlink()
            if (self._work / name).exists():
                shutil.move(self._work / name, old)
        self.discard()

    def discard(self) -> None:
        """Remove what is under construction."""
        shutil.rmtree(self._work, ignore_errors=True)


_active = threading.local()


def current() -> Dump | None:
    """The dump this thread writes to, if any."""
    return getattr(_active, "dump", None)


@contextlib.contextmanager
def dump_to(directory: Path, force: bool = False) -> Iterator[Dump]:
    """Dump every graph this thread compiles inside the block; nothing is left behind if the block fails."""
    dump, before = Dump(directory, force), current()
    _active.dump = dump
    try:
        yield dump
        dump.finish()
    finally:
        _active.dump = before
        dump.discard()
