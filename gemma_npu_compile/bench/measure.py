"""Timing and comparing: alternating rounds in one process, medians, ratios of rows that mean the same."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median
from typing import Any, Protocol

from torch import Tensor

from gemma_npu_compile.bench.machine import forget_peak, resident_mb

MIN_ROUNDS = 7
HIDDEN_TOLERANCE = 0.05
"""Largest difference of final hidden states between peers, relative to their largest element: bfloat16 has 8 bits."""

FIELDS = ("step_ms", "tokens_per_second", "compile_s", "capture_s", "peak_rss_mb", "host_overhead_us")
"""What is measured of each subject; None where it has no such thing."""

COMPARED = {
    "eager": ("step_ms", "tokens_per_second"),
    "inductor": ("step_ms", "tokens_per_second", "compile_s"),
    "hf_assisted": ("step_ms", "tokens_per_second"),
    "hf_plain": ("tokens_per_second",),
}
"""What may be divided: a plain step yields one token, a draft-plus-verify step several; only Inductor compiles."""


class Unavailable(Exception):  # noqa: N818  (not an error: a peer that does not take part)
    """A peer cannot run a scenario; says why."""


@dataclass
class Round:
    """What one subject did in one round.

    Attributes:
        seconds: wall time of each step, prefill not counted.
        tokens: new tokens row by row, those that are compared.
        counted: tokens of all rows that ``seconds`` paid for.
        lengths: tokens in the cache at the start of each step, row by row.
        hidden: ``(steps, rows, hidden)`` final hidden states, where they are compared.
    """

    seconds: list[float]
    tokens: list[list[int]]
    counted: int
    lengths: list[list[int]] = field(default_factory=list)
    hidden: Tensor | None = None


class Subject(Protocol):
    """Something that runs a scenario."""

    def first(self) -> float | None:
        """Run the first step; seconds from its call to its result where it compiles, else None."""
        ...

    def round(self) -> Round:
        """Run one round from the scenario's start."""
        ...

    def facts(self) -> dict[str, Any]:
        """More fields of the results, asked for after all rounds."""
        ...


@dataclass
class Measured:
    """All rounds of one subject."""

    subject: Subject | None = None
    reason: str | None = None
    compile_s: float | None = None
    peak_rss_mb: float | None = None
    rounds: list[Round] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The fields of :data:`FIELDS`, and whether there is anything to see."""
        answer: dict[str, Any] = {"available": self.reason is None, "reason": self.reason, **dict.fromkeys(FIELDS)}
        if self.subject is None or self.reason is not None:
            return answer
        answer["compile_s"], answer["peak_rss_mb"] = self.compile_s, self.peak_rss_mb
        answer["step_ms"] = median(1e3 * sum(r.seconds) / len(r.seconds) for r in self.rounds)
        answer["tokens_per_second"] = median(r.counted / sum(r.seconds) for r in self.rounds)
        return {**answer, **self.subject.facts()}


def prepare(makers: Mapping[str, Callable[[], Subject]]) -> dict[str, Measured]:
    """Make every subject, let it compile, run one round that is not timed. What fails is a reason, except in ours.

    ``peak_rss_mb`` is the memory of the process before any subject, and what this one added at its fullest.
    """
    before = resident_mb()
    found: dict[str, Measured] = {}
    for name, make in makers.items():
        found[name] = measured = Measured()
        start, known = resident_mb(), forget_peak()
        try:
            measured.subject = make()
            measured.compile_s = measured.subject.first()
            measured.rounds.append(measured.subject.round())
        except Unavailable as why:
            measured.reason = str(why)
        except Exception as error:
            if name == "ours":
                raise
            text = str(error).strip()
            measured.reason = f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
        peak = resident_mb(peak=True)
        if known and before is not None and start is not None and peak is not None:
            measured.peak_rss_mb = before + peak - start
    return found


def run_rounds(found: Mapping[str, Measured], rounds: int, after: Callable[[int], None] = lambda done: None) -> None:
    """Rounds of all subjects by turns; who begins moves on by one each time. Replaces the untimed ones."""
    running = [measured for measured in found.values() if measured.reason is None]
    timed: list[list[Round]] = [[] for _ in running]
    for turn in range(rounds):
        for place in range(len(running)):
            index = (turn + place) % len(running)
            subject = running[index].subject
            assert subject is not None
            timed[index].append(subject.round())
        after(turn + 1)
    for measured, results in zip(running, timed, strict=True):
        measured.rounds = results


def differences(
    found: Mapping[str, Measured],
    reference: Sequence[Sequence[int]] | None,
    excused: Callable[[int, int, int, int], bool] = lambda row, position, expected, found: False,
) -> list[str]:
    """What differs in tokens (from ``reference``, else from the first subject's) or in hidden states.

    Args:
        excused: ``(row, position, expected token, found token)``, the first difference of a row: whether it is a tie.
    """
    wrong: list[str] = []
    first = next((r for m in found.values() if m.reason is None for r in m.rounds), None)
    expected = reference if reference is not None else first.tokens if first is not None else []
    for name, measured in found.items():
        for number, each in enumerate(measured.rounds if measured.reason is None else ()):
            for row, position, wanted, got in _first_differences(expected, each.tokens):
                if not excused(row, position, wanted, got):
                    wrong.append(f"{name}: round {number}, row {row}, token {position} is {got}, not {wanted}")
            gap = None if first is None else _gap(first, each)
            if gap is not None and not gap <= HIDDEN_TOLERANCE:  # NaN differs too
                wrong.append(f"{name}: round {number}, hidden states differ by {gap:.3g} of their largest element")
    return wrong


def _gap(first: Round, other: Round) -> float | None:
    """Largest difference of hidden states, relative to their largest element; None where they are not compared."""
    if first.hidden is None or other.hidden is None:
        return None
    expected, found = first.hidden.float(), other.hidden.float()
    return float((found - expected).abs().max() / expected.abs().max())


def hidden_gap(found: Mapping[str, Measured]) -> float | None:
    """The largest difference of hidden states between ours and a peer; None where there is nothing to compare."""
    first = found["ours"].rounds[0]
    others = [r for name, m in found.items() if name != "ours" and m.reason is None for r in m.rounds]
    gaps = [gap for gap in (_gap(first, each) for each in others) if gap is not None]
    return max(gaps, default=None)


def _first_differences(
    expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, int, int]]:
    """``(row, position, expected, found)`` of each row's first difference; -1 for a token that is not there."""
    for row in range(max(len(expected), len(found))):
        left = expected[row] if row < len(expected) else ()
        right = found[row] if row < len(found) else ()
        for position, pair in enumerate(zip_longest(left, right, fillvalue=-1)):
            if pair[0] != pair[1]:
                yield row, position, *pair
                break


def ratios(ours: Mapping[str, Any], peers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Ours over each peer's, for the fields that mean the same in both; None for the others."""
    found: dict[str, dict[str, float | None]] = {}
    for name, peer in peers.items():
        found[name] = {}
        for field_ in ("step_ms", "compile_s", "tokens_per_second"):
            both = ours[field_], peer[field_]
            fit = field_ in COMPARED[name] and peer["available"] and both[0] is not None and both[1]
            found[name][field_] = both[0] / both[1] if fit else None
    return found
