"""What changed between two dumps, from their ``plan.json`` files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gemma_npu_compile.dump.tables import size

Facts = dict[str, Any]


def load(directory: Path) -> list[Facts]:
    """The graphs of a dump.

    Raises:
        ValueError: the directory holds no dump.
    """
    path = directory / "plan.json"
    try:
        graphs: list[Facts] = json.loads(path.read_text(encoding="utf-8"))["graphs"]
    except FileNotFoundError:
        raise ValueError(f"{directory} is not a dump: it has no plan.json") from None
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{path} is not a dump's plan: it has no graphs") from None
    return graphs


def _show(value: Any) -> str:
    return "none" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _values(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Entries that came, went or have another value."""
    for key in dict.fromkeys((*before, *after)):
        if key not in before:
            yield f"{what} {key}: new, {_show(after[key])}"
        elif key not in after:
            yield f"{what} {key}: gone, was {_show(before[key])}"
        elif before[key] != after[key]:
            yield f"{what} {key}: {_show(before[key])} -> {_show(after[key])}"


def _records(
    what: str, before: Mapping[str, Facts], after: Mapping[str, Facts], fields: Sequence[str]
) -> Iterator[str]:
    """Records that came, went, or differ in one of ``fields``."""
    for key in dict.fromkeys((*before, *after)):
        if key not in before or key not in after:
            yield f"{what} {key}: {'new' if key not in before else 'gone'}"
            continue
        old, new = before[key], after[key]
        for name in fields:
            if old.get(name) != new.get(name):
                yield f"{what} {key}: {name} {_show(old.get(name))} -> {_show(new.get(name))}"


def _passes(before: Facts, after: Facts) -> Iterator[str]:
    old, new = ({p["name"]: p for p in each["passes"]} for each in (before, after))
    yield from _records("pass", old, new, ("changed", "nodes", "launches", "left"))


def _attention(before: Facts, after: Facts) -> Iterator[str]:
    old, new = ({f"{a['phase']}/{a['layer']}": a for a in each["attention"]} for each in (before, after))
    fields = ("layout", "heads", "head_dim", "window", "scale", "group", "block_table", "kv_len_source", "lengths")
    yield from _records("attention", old, new, fields)


def _inputs(before: Facts, after: Facts) -> Iterator[str]:
    old, new = (
        {f"{i['label']} {i['phase']}/{i['layer']}" if i["layer"] else i["label"]: i for i in each["inputs"]}
        for each in (before, after)
    )
    yield from _records("input", old, new, ("role", "group", "shape", "dtype", "address", "buffer"))


def _sizes(before: Facts, after: Facts) -> Iterator[str]:
    old, new = before["sizes"], after["sizes"]
    if old != new:
        yield f"captured rows: {_show(old)} -> {_show(new)}"
    memory = ({key: size(value) for key, value in each.get("memory", {}).items()} for each in (before, after))
    yield from _values("memory", *memory)


def compare(before: Sequence[Facts], after: Sequence[Facts]) -> list[dict[str, Any]]:
    """Differences graph by graph: ``[{"graph": n, "what": section, "lines": [...]}]``; empty when there are none.

    Times and counts of replays are no differences.
    """
    found = []
    for number in range(max(len(before), len(after))):
        if number >= min(len(before), len(after)):
            where = "second" if number >= len(before) else "first"
            found.append({"graph": number, "what": "graphs", "lines": [f"only in the {where} dump"]})
            continue
        old, new = before[number], after[number]
        sections: dict[str, Iterator[str]] = {
            "platform": _values("compiled for", {"platform": old.get("platform")}, {"platform": new.get("platform")}),
            "passes": _passes(old, new),
            "nodes": _values("nodes of kind", old.get("kinds", {}), new.get("kinds", {})),
            "attention": _attention(old, new),
            "inputs": _inputs(old, new),
            "sizes and memory": _sizes(old, new),
            "host parameters": _records(
                "host list",
                {h["name"]: h for h in old["host_parameters"]},
                {h["name"]: h for h in new["host_parameters"]},
                ("inputs", "tasks", "bucket", "capacity"),
            ),
            "fallbacks": _values("fallback", old.get("fallbacks", {}), new.get("fallbacks", {})),
        }
        for what, lines in sections.items():
            listed = list(lines)
            if listed:
                found.append({"graph": number, "what": what, "lines": listed})
    return found
