"""The tables of a dump, folded, as plain rows: the page and the Markdown index show the same."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from gemma_npu_compile.dump.listing import together

Row = tuple[str, ...]
Facts = dict[str, Any]

PASSES = ("pass", "changed", "nodes", "launches", "ms", "left alone, and why")
ATTENTION = (
    "where",
    "nodes",
    "layout",
    "heads",
    "head size",
    "window",
    "scale",
    "KV group",
    "block table",
    "lengths from",
    "host length",
)
INPUTS = ("input", "role", "shape", "dtype", "address", "bytes", "stable buffer")
CAPTURES = ("rows", "calls of", "padded rows", "intermediates")
HOST = ("list", "computed from", "tasks that read it", "bucket", "capacity")


def size(nbytes: int | None) -> str:
    """Bytes for people."""
    if nbytes is None:
        return ""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def _fold(rows: Iterable[tuple[str, Row]]) -> list[tuple[list[str], Row]]:
    """Rows that say the same of several names, once, in the order of their first name."""
    alike: dict[Row, list[str]] = {}
    for name, row in rows:
        alike.setdefault(row, []).append(name)
    return [(names, row) for row, names in alike.items()]


def passes(facts: Facts) -> list[Row]:
    """One row per pass that ran."""
    return [
        (
            p["name"],
            str(p["changed"]),
            str(p["nodes"]),
            str(p["launches"]),
            f"{p['seconds'] * 1e3:.1f}",
            "; ".join(f"{count} x {reason}" for reason, count in p["left"].items()),
        )
        for p in facts["passes"]
    ]


def attention(facts: Facts) -> list[Row]:
    """Attention nodes, those that differ in their layer only together."""
    described = (
        (
            f"{a['phase']}/{a['layer']}",
            (
                a["layout"],
                str(a["heads"]),
                str(a["head_dim"]),
                "all keys" if a["window"] is None else str(a["window"]),
                f"{a['scale']:g}",
                str(a["group"]),
                f"block_table.{a['group']}" if a["group"] else a["block_table"],
                a["kv_len_source"],
                a["lengths"],
            ),
        )
        for a in facts["attention"]
    )
    return [(together(names), str(len(names)), *row) for names, row in _fold(described)]


def inputs(facts: Facts) -> list[Row]:
    """Inputs of the graph: what moves between calls first, then what lies at a fixed address."""
    order = {"buffer": 0, "host": 1, "fixed": 2, "unread": 3}
    listed = sorted(facts["inputs"], key=lambda i: (order[i["address"]], i["role"] == "parameter"))
    described = (
        (
            i["label"],
            (
                i["role"] + (" of one attention node" if i["layer"] else ""),
                f"[{', '.join(map(str, i['shape']))}]",
                i["dtype"] or "int",
                i["address"],
                "" if i["bytes"] is None else size(i["bytes"]),
                i["buffer"] or "",
            ),
        )
        for i in listed
    )
    rows = []
    for names, (role, *rest) in _fold(described):
        count = f" ({len(names)})" if len(names) > 1 else ""
        rows.append((_names(names) + count, role, *rest))
    return rows


def _names(names: Sequence[str]) -> str:
    """Names that differ in one number as one; a long list is cut."""
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    parts = [together(family) for family in families.values()]
    return ", ".join(parts[:12]) + (f" and {len(parts) - 12} more" if len(parts) > 12 else "")


def captures(facts: Facts) -> list[Row]:
    """Capture sizes: which calls each serves and what its intermediates take."""
    rows: list[Row] = []
    for each in facts["captures"]:
        low, high = each["from_rows"], each["rows"]
        calls = f"{low} to {high} rows" if low < high else f"{high} rows"
        padded = f"up to {high - low}" if high > low else "none"
        rows.append((str(high), calls, padded, size(each["intermediate_bytes"])))
    return rows


def memory(facts: Facts) -> list[Row]:
    """Bytes by purpose."""
    names = {
        "parameters": "parameters and buffers of the models (fixed addresses)",
        "caches": "KV pools (fixed addresses, written in place)",
        "intermediates": "intermediates, one pool for all capture sizes",
        "stable_inputs": "stable inputs, copied into at each replay",
    }
    return [(names[key], size(value)) for key, value in facts["memory"].items() if value is not None]


def host_parameters(facts: Facts) -> list[Row]:
    """Host lists, and who reads them."""
    return [
        (
            h["name"],
            ", ".join(h["inputs"]),
            together(h["tasks"]),
            "exact" if h["bucket"] is None else f"multiples of {h['bucket']}, coarser as rows grow",
            str(h["capacity"]),
        )
        for h in facts["host_parameters"]
    ]


def outcomes(facts: Facts) -> list[str]:
    """What went other than planned: recompilation, fallbacks, sizes that cannot be captured."""
    found: list[str] = []
    quiet = not facts.get("fallbacks") and not facts.get("recompile") and not facts.get("error")
    if quiet:
        found.append("No fallbacks, no recompilation.")
    if facts.get("error"):
        found.append(f"The compilation did not finish: {facts['error']}")
    if facts.get("recompile"):
        found.append("Recompiled: the same code had been compiled before.")
    if facts.get("no_captures"):
        found.append(f"One capture per input size: {facts['no_captures']}.")
    if facts.get("checked"):
        found.append(f"{facts['checked']} captures were checked by a replay with other contents before they were used.")
    if facts.get("unchecked"):
        found.append(f"Captures were not checked by a replay: {facts['unchecked']}.")
    if facts.get("one_row"):
        found.append(f"One row runs beside a padded one: {facts['one_row']}.")
    for reason, count in facts.get("fallbacks", {}).items():
        found.append(f"Fell back {count} times: {reason}.")
    return found
