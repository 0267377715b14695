"""The targets on a CPU with two cores: what was measured, and whether it is met."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]


def _ratio(peer: str, field: str) -> Callable[[Entry], float | None]:
    return lambda entry: entry["ratios"].get(peer, {}).get(field)


def _steady(field: str) -> Callable[[Entry], float | None]:
    return lambda entry: entry["ours"].get("steady", {}).get(field)


def _overhead(entry: Entry) -> float | None:
    return entry["ours"]["host_overhead_us"] / 1e3 / entry["ours"]["step_ms"]


def _gap(entry: Entry) -> float | None:
    return abs(entry["roofline"]["predicted_over_measured"] - 1)


TARGETS: tuple[tuple[str, str, float, bool, Callable[[Entry], float | None]], ...] = (
    ("step against eager", "tiny", 0.25, True, _ratio("eager", "step_ms")),
    ("step against Inductor", "tiny", 0.6, True, _ratio("inductor", "step_ms")),
    ("step against HF assisted", "tiny", 0.15, True, _ratio("hf_assisted", "step_ms")),
    ("step against eager", "medium c512", 0.7, True, _ratio("eager", "step_ms")),
    ("step against Inductor", "medium c512", 0.9, True, _ratio("inductor", "step_ms")),
    ("step against Inductor, unclipped", "medium c16384", 0.35, True, _ratio("inductor", "step_ms")),
    ("call to first replay against Inductor", "tiny", 0.25, True, _ratio("inductor", "compile_s")),
    ("call to first replay against Inductor", "medium", 0.25, True, _ratio("inductor", "compile_s")),
    ("passes, lowering, capture (s)", "tiny", 4, True, lambda entry: entry["ours"]["capture_s"]),
    ("passes, lowering, capture (s)", "medium", 6, True, lambda entry: entry["ours"]["capture_s"]),
    ("behind Dynamo, second process", "", 0.3, True, lambda entry: entry["ours"].get("restart", {}).get("ratio")),
    ("fraction of the copy bandwidth", "medium b1", 0.8, False, lambda entry: entry["roofline"]["fraction"]),
    ("host overhead of the step", "medium", 0.05, True, _overhead),
    ("allocations per replay", "", 0, True, _steady("allocations")),
    ("recompiles", "", 0, True, _steady("recompiles")),
    ("bytes into stable buffers", "b8", 65536, True, _steady("stable_bytes")),
    ("memory over the largest size alone", "", 1.1, True, _steady("memory_ratio")),
    ("cost model, off by", "medium b1", 0.25, True, _gap),
)
"""What, in which scenarios (parts of their names), the limit, whether it is an upper one, where it is found."""


def check(scenarios: Sequence[Entry]) -> list[dict[str, Any]]:
    """One line per target and scenario it speaks of; ``measured`` and ``met`` are None where there is no figure."""
    return [line for target in TARGETS for line in _lines(*target, scenarios)]


def _lines(
    what: str,
    where: str,
    limit: float,
    upper: bool,
    find: Callable[[Entry], float | None],
    scenarios: Sequence[Entry],
) -> Iterator[dict[str, Any]]:
    fitting = [entry for entry in scenarios if set(where.split()) <= set(entry["name"].split("-"))]
    common = {"what": what, "target": f"{'<=' if upper else '>='} {limit:g}"}
    if not fitting:
        yield {**common, "scenario": where.replace(" ", "-"), "measured": None, "met": None}
    for entry in fitting:
        value = find(entry)
        met = None if value is None else value <= limit if upper else value >= limit
        yield {**common, "scenario": entry["name"], "measured": value, "met": met}
