"""The picture of a graph as one self-contained SVG: from the trace to the captures, kernels after each pass, layers."""

from collections.abc import Iterator
from html import escape
from itertools import groupby
from typing import Any

from gemma_npu_compile.dump import tables

WIDTH = 960
_LABEL = 190  # of the bars and of the layer map
_CELL = 16
_STYLE = """
.gn{font:13px system-ui,sans-serif;fill:#1c2430}.gn .dim{fill:#5b6676}.gn .big{font-weight:600;font-size:15px}
.gn .box{fill:#eef3fb;stroke:#9fb4d1}.gn .bar{fill:#3f6fb5}.gn .line{stroke:#5b6676;fill:none}.gn .tip{fill:#5b6676}
.gn .c0{fill:#3f6fb5}.gn .c1{fill:#c9762b}.gn .c2{fill:#3d8f6e}.gn .c3{fill:#8a5fb0}
@media (prefers-color-scheme:dark){.gn{fill:#e3e8ef}.gn .dim{fill:#9aa6b6}.gn .box{fill:#1d2633;stroke:#45566e}
.gn .bar,.gn .c0{fill:#6f9fe3}.gn .line{stroke:#9aa6b6}.gn .tip{fill:#9aa6b6}.gn .c1{fill:#e39a55}.gn .c2{fill:#63b893}
.gn .c3{fill:#b48bdb}}
"""


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    tip = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{kind}">{tip}</rect>'


def _flow(facts: tables.Facts, y: float) -> Iterator[str]:
    """Four boxes: trace, passes, plan, captures."""
    passes, seconds, inputs = facts["passes"], facts["seconds"], facts["inputs"]
    changed = [p for p in passes if p["changed"]]
    fixed = sum(i["address"] == "fixed" for i in inputs)
    moving = len({i["buffer"] for i in inputs if i["buffer"]})
    rows = ", ".join(map(str, facts["sizes"])) or "none"
    pool = tables.size(facts["memory"]["intermediates"])
    boxes = (
        ("Dynamo + AOT", f"{passes[0]['nodes_before'] if passes else facts['nodes']} nodes", _time(seconds.get("aot"))),
        (f"{len(passes)} passes", f"{len(changed)} changed something", _time(sum(p["seconds"] for p in passes))),
        ("plan", f"{fixed} fixed addresses", f"{moving} stable inputs"),
        ("captures", f"rows {rows}", f"{pool} of intermediates" if pool else ""),
    )
    width, gap = 204, 48
    for index, (title, first, second) in enumerate(boxes):
        x = index * (width + gap)
        yield _rect(x, y, width, 74, "box")
        yield _text(x + 14, y + 24, title, "big")
        yield _text(x + 14, y + 45, first)
        yield _text(x + 14, y + 62, second, "dim")
        if index:
            yield f'<path d="M{x - gap + 8} {y + 37}h{gap - 20}" class="line"/>'
            yield f'<path d="M{x - 12} {y + 32}l8 5l-8 5z" class="tip"/>'


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"


def _bars(facts: tables.Facts, y: float) -> Iterator[tuple[str, float]]:
    """Kernels a run launches behind each pass that changed something; yields the new bottom too."""
    bars = [(p["name"], p["launches"]) for p in facts["passes"] if p["changed"]]
    most = max((launches for _, launches in bars), default=0)
    if not most:
        return
    yield _text(0, y, "kernels one run launches, behind each pass that changed something", "dim"), y + 10
    y += 10
    for name, launches in bars:
        width = (WIDTH - _LABEL - 70) * launches / most
        yield (
            _text(_LABEL - 10, y + 12, name.removeprefix("eliminate_"), "", "end"),
            y,
        )
        yield _rect(_LABEL, y + 2, width, 12, "bar"), y
        yield _text(_LABEL + width + 6, y + 12, str(launches), "dim"), y + 18
        y += 18


def _layers(facts: tables.Facts, y: float) -> Iterator[tuple[str, float]]:
    """A cell for each attention node, coloured by the KV group whose block table it reads."""
    nodes: list[dict[str, Any]] = facts["attention"]
    if not nodes:
        return
    groups = list(dict.fromkeys(str(node["group"]) for node in nodes))
    yield _text(0, y, "attention nodes by phase; the colour is the block table they read", "dim"), y + 10
    y += 10
    across = (WIDTH - _LABEL) // _CELL
    for phase, members in groupby(nodes, key=lambda node: node["phase"]):
        each = list(members)
        yield _text(_LABEL - 10, y + 12, phase, "", "end"), y
        for index, node in enumerate(each):
            kind = f"c{groups.index(str(node['group'])) % 4}"
            keys = "all keys" if node["window"] is None else f"window {node['window']}"
            tip = f"{node['layer']}: {node['layout']}, head size {node['head_dim']}, {keys}, {node['group']}"
            left, down = _LABEL + index % across * _CELL, index // across * _CELL
            yield _rect(left, y + 1 + down, _CELL - 3, _CELL - 3, kind, tip), y
        y += -(-len(each) // across) * _CELL + 4
    y += 8
    x = float(_LABEL)
    for index, group in enumerate(groups):
        first = next(node for node in reversed(nodes) if str(node["group"]) == group)
        keys = "all keys" if first["window"] is None else f"window {first['window']}"
        text = f"{group}: head size {first['head_dim']}, {keys}"
        yield _rect(x, y, 12, 12, f"c{index % 4}"), y
        yield _text(x + 18, y + 11, text), y + 18
        x += 40 + 7 * len(text)


def picture(facts: tables.Facts) -> str:
    """The SVG of a graph's facts; follows the reader's light or dark scheme."""
    parts = list(_flow(facts, 1))
    bottom = 75.0
    for section in (_bars, _layers):
        start = bottom + 32
        for part, y in section(facts, start):
            parts.append(part)
            bottom = max(bottom, y)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gn" viewBox="0 0 {WIDTH} {bottom + 8:g}" role="img" '
        f'aria-label="from the trace to the captures"><style>{_STYLE}</style>{"".join(parts)}</svg>\n'
    )
