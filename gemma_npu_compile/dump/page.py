"""``index.html``: one page without scripts or anything from outside, in the reader's light or dark scheme."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from gemma_npu_compile.dump import tables
from gemma_npu_compile.dump.listing import Change, together
from gemma_npu_compile.dump.pictures import picture

if TYPE_CHECKING:
    from gemma_npu_compile.dump.folder import GraphDump

_STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1c2430;--dim:#5b6676;--line:#d8dee7;--soft:#f4f6f9;--link:#2458a6;
--add:#1d6b3a;--addback:#e6f5ea;--del:#9b2c2c;--delback:#fbeaea;--bar:#dbe6f6}
@media (prefers-color-scheme:dark){:root{--back:#12161c;--text:#e3e8ef;--dim:#9aa6b6;--line:#2c3541;--soft:#1a2029;
--link:#8db8f5;--add:#8fdba8;--addback:#12301d;--del:#f0a3a3;--delback:#381a1c;--bar:#243a5a}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:74rem;padding:1.5rem 1.25rem 4rem;background:var(--back);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:1.6rem;margin:.2rem 0 .6rem}h2{font-size:1.3rem;margin:2.5rem 0 .5rem;padding-top:.8rem;
border-top:1px solid var(--line)}h3{font-size:1.05rem;margin:2rem 0 .5rem}
a{color:var(--link)}code,pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.about{color:var(--dim);margin:.2rem 0}.about b{color:var(--text);font-weight:600}
nav{display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:.6rem 0}
.scroll{overflow-x:auto;margin:.4rem 0}
table{border-collapse:collapse;width:100%;font-size:.92em}
th{text-align:left;color:var(--dim);font-weight:600;white-space:nowrap}
th,td{padding:.28rem .9rem .28rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td{font-variant-numeric:tabular-nums}
td.name{font:12.5px/1.6 ui-monospace,Menlo,Consolas,monospace;white-space:nowrap}
td.long{white-space:normal;overflow-wrap:anywhere;min-width:14rem}
td.why{color:var(--dim);min-width:16rem}th.n,td.n{text-align:right;white-space:nowrap}tr.quiet td{color:var(--dim)}
.picture{overflow-x:auto}.picture svg{min-width:720px;width:100%;height:auto;display:block}
details{margin:.35rem 0;border:1px solid var(--line);border-radius:6px}
details>summary{cursor:pointer;padding:.4rem .7rem}details[open]>summary{border-bottom:1px solid var(--line)}
details details{margin:.5rem .7rem}summary .dim{color:var(--dim)}
pre{margin:0;padding:.6rem .7rem;overflow-x:auto;background:var(--soft);border-radius:0 0 6px 6px}
pre .a,pre .d,pre .h{display:block;margin:0 -.7rem;padding:0 .7rem;min-width:max-content}
pre .a{color:var(--add);background:var(--addback)}pre .d{color:var(--del);background:var(--delback)}
pre .h{color:var(--dim)}
ul{margin:.4rem 0;padding-left:1.2rem}
"""

_NUMBERS = {"changed", "nodes", "launches", "ms", "heads", "head size", "window", "scale", "bytes", "rows", "capacity"}
_LONG = {"where", "input", "tasks that read it"}
_NAMES = {"block table", "stable buffer", "lengths from", "list", "shape", "computed from"}


def _kind(column: str) -> str:
    if column in _NUMBERS:
        return ' class="n"'
    if column in _LONG:
        return ' class="name long"'
    if column in _NAMES:
        return ' class="name"'
    return ' class="why"' if column.startswith("left") else ""


def _table(header: Sequence[str], rows: Sequence[tables.Row], quiet: Sequence[bool] = ()) -> Iterator[str]:
    """A table; cells that start with ``<`` are markup already."""
    if not rows:
        yield '<p class="about">none</p>'
        return
    yield '<div class="scroll"><table><thead><tr>'
    yield from (f"<th{_kind(column) if column in _NUMBERS else ''}>{escape(column)}</th>" for column in header)
    yield "</tr></thead><tbody>"
    for index, row in enumerate(rows):
        yield '<tr class="quiet">' if quiet and quiet[index] else "<tr>"
        for column, cell in zip(header, row, strict=True):
            yield f"<td{_kind(column)}>{cell if cell.startswith('<') else escape(cell)}</td>"
        yield "</tr>"
    yield "</tbody></table></div>"


def _passes(graph: "GraphDump", facts: tables.Facts) -> Iterator[str]:
    rows = []
    files = {name.removesuffix(".py").partition("_")[2]: name for name in graph.files}
    for name, changed, *rest in tables.passes(facts):
        link = f'<code><a href="graphs/{graph.name}/{files[name]}">{escape(name)}</a></code>'
        if name in graph.changes:
            changed = f'<a href="#g{graph.name}-{name}">{changed}</a>'
        rows.append((link, changed, *rest))
    quiet = [p["changed"] == 0 and not p["left"] for p in facts["passes"]]
    yield from _table(tables.PASSES, rows, quiet)
    yield f'<p class="about">The trace itself: <a href="graphs/{graph.name}/{graph.files[0]}">{graph.files[0]}</a>.</p>'


def _folded(graph: "GraphDump") -> Iterator[str]:
    for each in graph.folded:
        alike = f"{len(each.paths)} alike, " if len(each.paths) > 1 else ""
        yield f"<details><summary><code>{escape(together(each.paths))}</code> "
        yield f'<span class="dim">{alike}{len(each.lines)} nodes</span></summary>'
        yield f"<pre>{escape(chr(10).join(each.lines))}</pre></details>"


def _diff(change: Change) -> Iterator[str]:
    kinds = {"+": "a", "-": "d", "@": "h"}
    counts = [sum(line.startswith(sign) for line in change.diff) for sign in "-+"]
    alike = f"{len(change.paths)} alike, " if len(change.paths) > 1 else ""
    yield f"<details><summary><code>{escape(together(change.paths))}</code> "
    yield f'<span class="dim">{alike}-{counts[0]} +{counts[1]} nodes each</span></summary><pre>'
    for line in change.diff:
        kind = kinds.get(line[:1])
        yield f'<span class="{kind}">{escape(line)}</span>' if kind else f"{escape(line)}\n"
    yield "</pre></details>"


def _changes(graph: "GraphDump") -> Iterator[str]:
    for name, changes in graph.changes.items():
        yield f"<details><summary><code>{escape(name)}</code> "
        places = sum(len(change.paths) for change in changes)
        yield f'<span class="dim">{places} places</span></summary><div id="g{graph.name}-{escape(name)}">'
        for change in changes:
            yield from _diff(change)
        yield "</div></details>"


def _graph(graph: "GraphDump", facts: tables.Facts) -> Iterator[str]:
    yield f'<h2 id="g{graph.name}">Graph {escape(graph.name)}</h2>'
    yield f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in tables.outcomes(facts))}</ul>"
    if graph.report is None:
        links = (f'<a href="graphs/{graph.name}/{name}">{name}</a>' for name in graph.files)
        yield f"<p>The graph as far as it came: {', '.join(links)}</p>"
        return
    yield f'<div class="picture">{picture(facts)}</div>'
    yield "<h3>Passes</h3>"
    yield from _passes(graph, facts)
    yield "<h3>Attention</h3>"
    yield from _table(tables.ATTENTION, tables.attention(facts))
    yield "<h3>Inputs</h3>"
    yield from _table(tables.INPUTS, tables.inputs(facts))
    yield "<h3>Capture sizes</h3>"
    yield from _table(tables.CAPTURES, tables.captures(facts))
    yield "<h3>Memory</h3>"
    yield from _table(("what", "bytes"), tables.memory(facts))
    yield "<h3>Host parameters</h3>"
    yield from _table(tables.HOST, tables.host_parameters(facts))
    yield "<h3>The graph, equal layers folded</h3>"
    yield from _folded(graph)
    yield "<h3>What each pass changed</h3>"
    yield from _changes(graph)


def page(about: Mapping[str, str], graphs: Sequence["GraphDump"], facts: Sequence[tables.Facts]) -> str:
    """The whole page."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>gemma_npu dump</title><style>{_STYLE}</style></head><body><h1>What gemma_npu compiled</h1>",
    ]
    parts += [f'<p class="about">{escape(name)}: <b>{escape(value)}</b></p>' for name, value in about.items()]
    links = (f'<a href="#g{g.name}">Graph {g.name}</a>' for g in graphs)
    parts.append(f'<nav>{"".join(links)}<a href="index.md">index.md</a><a href="plan.json">plan.json</a></nav>')
    for graph, each in zip(graphs, facts, strict=True):
        parts += _graph(graph, each)
    parts.append("</body></html>\n")
    return "".join(parts)
