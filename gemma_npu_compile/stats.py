"""Acceptance and timing of a generation."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from gemma_npu_compile.report import CompileReport


@dataclass
class Acceptance:
    """How often drafts were accepted, by position.

    Attributes:
        drafts: draft rounds whose result was used, counted per row.
        accepted_per_pos: rounds in which at least the first ``i + 1`` drafts were accepted. A round counts whole, also
            when a limit or an end token cut its tokens.
    """

    accepted_per_pos: list[int]
    drafts: int = 0

    def add(self, accepted: int) -> None:
        """Count one round of one row that accepted ``accepted`` drafts."""
        self.drafts += 1
        for position in range(accepted):
            self.accepted_per_pos[position] += 1

    def merge(self, other: "Acceptance") -> None:
        """Add another generation's counts (same number of drafts)."""
        self.drafts += other.drafts
        self.accepted_per_pos = [a + b for a, b in zip(self.accepted_per_pos, other.accepted_per_pos, strict=True)]

    @property
    def rate_per_pos(self) -> list[float]:
        """Fractions 0..1."""
        return [count / self.drafts if self.drafts else 0.0 for count in self.accepted_per_pos]

    def to_dict(self) -> dict[str, Any]:
        """The ``acceptance`` object of the CLI; ``accepted_per_step`` leaves the bonus token out."""
        rates = self.rate_per_pos
        return {
            "drafts": self.drafts,
            "accepted_per_pos": list(self.accepted_per_pos),
            "rate_per_pos": rates,
            "aggregate": sum(rates) / len(rates) if rates else 0.0,
            "accepted_per_step": sum(rates),
        }


@dataclass
class Stats:
    """What one :func:`generate` call or one :class:`Session` did.

    Attributes:
        acceptance: over all rows.
        per_row: the same per row of a generate() call, in the order of the inputs; a session's requests hold their own.
        requests: finished ones, cancelled ones included.
        new_tokens: emitted tokens of all rows.
        decoded_tokens: those that steps produced; prefill chooses each row's first.
        prefill_seconds, decode_seconds: wall time without compilation.
        step_seconds: wall time of the latest 4096 steps.
        report: of the compiled step; shared by all calls that used the same engine.
    """

    acceptance: Acceptance
    per_row: list[Acceptance] = field(default_factory=list)
    requests: int = 0
    new_tokens: int = 0
    decoded_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=4096))
    report: CompileReport = field(default_factory=CompileReport)

    @property
    def useless(self) -> str | None:
        """Why the assistant may be another target's: its first drafts are hardly ever accepted. None when they are."""
        rates, drafts = self.acceptance.rate_per_pos, self.acceptance.drafts
        if not rates or drafts < 16 or rates[0] >= 0.05:
            return None
        return (
            f"the assistant's first draft was accepted in {100 * rates[0]:.1f} % of {drafts} rounds: is it the "
            "assistant of this target?"
        )

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens over decode time: no compilation, no prefill. 0.0 when nothing was decoded."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def step_ms(self) -> float:
        """Median step in milliseconds; 0.0 without steps."""
        return median(self.step_seconds) * 1e3 if self.step_seconds else 0.0


def merge_acceptance(parts: Sequence[Acceptance], num_draft_tokens: int) -> Acceptance:
    """Pooled counts of several generations."""
    total = Acceptance([0] * num_draft_tokens)
    for part in parts:
        total.merge(part)
    return total
