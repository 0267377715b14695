"""A dump folder under construction: what a compilation writes to it, and how it gets to its place in one piece."""

import atexit
import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from gemma_npu_compile.dump.facts import graph_facts
from gemma_npu_compile.dump.listing import Change, Folded, Listing
from gemma_npu_compile.dump.markdown import markdown
from gemma_npu_compile.dump.page import page
from gemma_npu_compile.dump.pictures import picture
from gemma_npu_compile.dump.repro import write_repro
from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.options import Options
from gemma_npu_compile.report import GraphReport

log = logging.getLogger(__name__)

VARIABLE = "GEMMA_NPU_DUMP"
"""Environment: a directory any program that compiles with this backend dumps to."""

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
            "one_row": report.one_row,
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
        self._lock = threading.Lock()

    def graph(self) -> GraphDump:
        """Start the next graph."""
        with self._lock:
            self.graphs.append(GraphDump(self._work / "graphs" / str(len(self.graphs))))
            return self.graphs[-1]

    def fail(self, gm: GraphModule, inputs: Sequence[Any], options: Options, error: Exception) -> None:
        """A compilation failed: leave a script that repeats it, and say in the error where it is."""
        unfinished = [graph for graph in self.graphs if graph.report is None and graph.error is None]
        graph = unfinished[-1] if unfinished else self.graph()
        graph.error = " ".join(str(error).split())
        path = write_repro(graph.directory, gm, inputs, options, error)
        graph.files.append(path.name)
        final = self.directory / "graphs" / graph.name / path.name
        if isinstance(error, CompileError):
            error.args = (f"{error} (repeat it with: python {final})",)
        else:
            error.add_note(f"repeat it with: python {final}")  # Dynamo wraps the error, and shows no notes
            log.error("%s: %s: repeat it with: python %s", type(error).__name__, graph.error, final)
        self.update()

    def update(self) -> None:
        """Another graph is there; a dump that appears in one piece waits for :meth:`finish`."""

    def _index(self) -> None:
        """Write index, plan and pictures."""
        facts = [graph.to_dict() for graph in self.graphs]
        plan = {"about": self.about, "graphs": facts}
        texts = {self._work / "plan.json": json.dumps(plan, indent=1) + "\n"}
        for graph, each in zip(self.graphs, facts, strict=True):
            if graph.report is not None:
                texts[graph.directory.with_suffix(".svg")] = picture(each)
        texts[self._work / "index.md"] = markdown(self.about, self.graphs, facts)
        texts[self._work / "index.html"] = page(self.about, self.graphs, facts)
        for path, text in texts.items():
            part = path.with_name(f".{path.name}.part")
            part.write_text(text, encoding="utf-8")
            part.replace(path)

    def finish(self) -> None:
        """Write index and plan, and move everything to its place."""
        self._index()
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


class ProcessDump(Dump):
    """The dump of a whole program (``GEMMA_NPU_DUMP=DIR``): written in place, whole after every graph and at exit.

    A directory that another process has taken, or that holds an earlier dump, gets a folder with the process's number.
    """

    def __init__(self, directory: Path) -> None:
        try:
            (directory / "graphs").mkdir(parents=True)
        except FileExistsError:
            directory = directory / str(os.getpid())
            (directory / "graphs").mkdir(parents=True)
            log.warning("%s: there is a dump already, this process writes to %s", VARIABLE, directory)
        self.directory, self._work, self.graphs = directory, directory, []
        self.about = {"program": " ".join(sys.argv), "process": str(os.getpid())}
        self._lock = threading.Lock()
        atexit.register(self.update)

    def update(self) -> None:
        with self._lock:
            self._index()


_active = threading.local()
_process: dict[str, ProcessDump] = {}
_claim = threading.Lock()


def current() -> Dump | None:
    """The dump this thread writes to, if any; else the program's."""
    own: Dump | None = getattr(_active, "dump", None)
    directory = os.environ.get(VARIABLE)
    if own is not None or not directory:
        return own
    with _claim:
        if directory not in _process:
            _process[directory] = ProcessDump(Path(directory))
        return _process[directory]


@contextlib.contextmanager
def dump_to(directory: Path, force: bool = False, about: Mapping[str, str] | None = None) -> Iterator[Dump]:
    """Dump every graph this thread compiles inside the block. If it fails, the graphs until then are dumped.

    Raises:
        ValueError: the directory cannot be used.
    """
    dump, before = Dump(directory, force, about), getattr(_active, "dump", None)
    _active.dump = dump
    try:
        yield dump
        dump.finish()
    except BaseException:
        if dump.graphs:
            dump.finish()
        raise
    finally:
        _active.dump = before
        dump.discard()
