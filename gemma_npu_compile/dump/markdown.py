"""``index.md``: the dump without a browser."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gemma_npu_compile.dump import tables
from gemma_npu_compile.dump.listing import together

if TYPE_CHECKING:
    from gemma_npu_compile.dump.folder import GraphDump


def _table(header: Sequence[str], rows: Sequence[tables.Row]) -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def _graph(graph: "GraphDump", facts: tables.Facts) -> Iterator[str]:
    yield f"## Graph {graph.name}"
    yield ""
    yield "Files: " + ", ".join(f"[{name}](graphs/{graph.name}/{name})" for name in graph.files)
    yield ""
    for line in tables.outcomes(facts):
        yield f"* {line}"
    if graph.report is None:
        return
    yield ""
    yield f"![from the trace to the captures](graphs/{graph.name}.svg)"
    yield ""
    yield f"{facts['nodes']} nodes for {facts['platform']}; captured rows {facts['sizes']}."
    yield "\n### Passes"
    yield from _table(tables.PASSES, tables.passes(facts))
    yield "### Attention"
    yield from _table(tables.ATTENTION, tables.attention(facts))
    yield "### Inputs"
    yield from _table(tables.INPUTS, tables.inputs(facts))
    yield "### Captures and memory"
    yield from _table(tables.CAPTURES, tables.captures(facts))
    yield from _table(("memory", "bytes"), tables.memory(facts))
    yield "### Host parameters"
    yield from _table(tables.HOST, tables.host_parameters(facts))
    yield "### The graph, folded"
    for each in graph.folded:
        yield f"\n{together(each.paths)} ({len(each.paths)} alike, {len(each.lines)} nodes each)\n"
        yield "```"
        yield from each.lines
        yield "```"
    yield "\n### What each pass changed"
    for name, changes in graph.changes.items():
        yield f"\n#### {name}"
        for change in changes:
            yield f"\n{together(change.paths)}\n"
            yield "```diff"
            yield from change.diff
            yield "```"


def markdown(about: Mapping[str, str], graphs: Sequence["GraphDump"], facts: Sequence[tables.Facts]) -> str:
    """The whole index."""
    lines = ["# What gemma_npu compiled", ""]
    lines += [f"* {name}: {value}" for name, value in about.items()]
    lines.append("")
    for graph, each in zip(graphs, facts, strict=True):
        lines += _graph(graph, each)
    return "\n".join(lines) + "\n"
