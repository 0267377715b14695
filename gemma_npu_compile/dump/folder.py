"""A dump folder under construction: what a compilation writes to it, and how it gets to its place in one piece."""

import contextlib
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from gemma_npu_compile.dump.facts import graph_facts
from gemma_npu_compile.dump.listing import Change, Folded, Listing
from gemma_npu_compile.dump.markdown import markdown
from gemma_npu_compile.dump.page import page
from gemma_npu_compile.dump.pictures import picture
from gemma_npu_compile.options import Options
from gemma_npu_compile.report import GraphReport

PARTS = ("graphs", "index.html", "index.md", "plan.json")


class GraphDump:
    """One graph: its files ``00_traced.py``, ``NN_<pass>.py``, what each pass changed, and what came out.

    Attributes:
        files: names of the files written, in order.
        changes: by pass, for those that changed anything.
        folded: the final graph, empty until it is there.
        error: why the compilation did not finish.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.name = directory, directory.name
        self.report: GraphReport | None = None
        self.error: str | None = None
        self.files: list[str] = []
        self.changes: dict[str, list[Change]] = {}
        self.folded: list[Folded] = []
        self._facts: dict[str, Any] = {}
        self._options, self._platform = Options(), ""
        self._listing: Listing | None = None
        self._code = ""
        self._seen: list[tuple[Any, ...]] = []
        directory.mkdir(parents=True)

    def write(self, name: str, gm: GraphModule) -> None:
        """Write the graph as readable Python, and keep what is different from the graph before."""
        state = [(node, node.target, node.args, node.kwargs) for node in gm.graph.nodes]
        if state != self._seen:  # many passes find nothing to do
            listing = Listing(gm)
            if self._listing is not None:
                self.changes[name] = listing.changes(self._listing)
            self._listing, self._seen = listing, state
            self._code = gm.print_readable(print_output=False)
        file = f"{len(self.files):02d}_{name}.py"
        text = f'"""Graph {self.name} after {name}."""\n\n{self._code}\n'
        (self.directory / file).write_text(text, encoding="utf-8")
        self.files.append(file)

    def finish(self, gm: GraphModule, report: GraphReport, options: Options, platform: str) -> None:
        """Take the final graph; ``report`` goes on counting."""
        assert self._listing is not None
        self.report, self._options, self._platform = report, options, platform
        self.folded = self._listing.fold()
        self._facts = graph_facts(gm, self._listing, report, options)
        self._listing, self._seen, self._code = None, [], ""

    def to_dict(self) -> dict[str, Any]:
        """This graph's entry of ``plan.json``."""
        report = self.report
        if report is None:
            empty = ("inputs", "attention", "host_parameters", "passes", "sizes")
            return {"name": self.name, "error": self.error, **{part: [] for part in empty}}
        planned = [each["rows"] for each in self._facts["captures"]] if self._options.capture else []
        return {
            "name": report.name,
            "platform": self._platform,
            "recompile": report.recompile,
            "error": self.error,
            **self._facts,
            "passes": [p.to_dict() for p in report.passes],
            "nodes": report.nodes,
            "sizes": sorted(report.sizes) or planned,
            "seconds": dict(report.seconds),
            "replays": report.replays,
            "checked": report.checked,
            "unchecked": report.unchecked,
            "eager_calls": report.eager_calls,
            "fallbacks": dict(report.fallbacks),
        }


class Dump:
    """A folder under construction; it appears under its name only when it is complete.

    Args:
        directory: where to write; must not exist, or be empty, unless ``force``.
        force: replace the files of an earlier dump; other files stay.
        about: what was compiled and how, for the pages.

    Raises:
        ValueError: the directory has contents and ``force`` is not given, or it is a file.
    """

    def __init__(self, directory: Path, force: bool = False, about: Mapping[str, str] | None = None) -> None:
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"{directory} is a file, a dump is a directory")
        if directory.is_dir() and any(directory.iterdir()) and not force:
            raise ValueError(f"{directory} is not empty: choose another directory or use --force")
        self.directory, self.about = directory, dict(about or {})
        directory.parent.mkdir(parents=True, exist_ok=True)
        self._work = Path(tempfile.mkdtemp(prefix=".dump-", dir=directory.parent))
        self.graphs: list[GraphDump] = []

    def graph(self) -> GraphDump:
        """Start the next graph."""
        self.graphs.append(GraphDump(self._work / "graphs" / str(len(self.graphs))))
        return self.graphs[-1]

    def finish(self) -> None:
        """Write index and plan, and move everything to its place."""
        facts = [graph.to_dict() for graph in self.graphs]
        plan = {"about": self.about, "graphs": facts}
        (self._work / "plan.json").write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
        for graph, each in zip(self.graphs, facts, strict=True):
            if graph.report is not None:
                graph.directory.with_suffix(".svg").write_text(picture(each), encoding="utf-8")
        (self._work / "index.md").write_text(markdown(self.about, self.graphs, facts), encoding="utf-8")
        (self._work / "index.html").write_text(page(self.about, self.graphs, facts), encoding="utf-8")
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
def dump_to(directory: Path, force: bool = False, about: Mapping[str, str] | None = None) -> Iterator[Dump]:
    """Dump every graph this thread compiles inside the block; nothing is left behind if the block fails."""
    dump, before = Dump(directory, force, about), current()
    _active.dump = dump
    try:
        yield dump
        dump.finish()
    finally:
        _active.dump = before
        dump.discard()
