"""What to ask a device, and what its answers say as rows of the capability table."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from gemma_npu_compile.capabilities import AttentionCall, AttentionRule, FusedOperator, Platform

LAYOUTS = ("TND", "BNSD", "BSND", "BSH")
HEAD_DIMS = (64, 128, 192, 256, 512)
MASKS = ("none", "causal", "band", "full")
BLOCK_SIZE = 128
BLOCK_SIZES = {1: (16, 24, 512, 1024), 4: (64, 512, 1024)}
"""Tried besides ``BLOCK_SIZE``, by queries per row, with heads of 128, which every layout takes."""


@dataclass(frozen=True)
class Question:
    """One operator call, to be tried eagerly and captured: an attention call, or an operator and its last axis."""

    attention: AttentionCall | None = None
    operator: str = ""
    last_dim: int = 0

    def to_dict(self) -> dict[str, Any]:
        if self.attention is not None:
            return {"attention": asdict(self.attention)}
        return {"operator": self.operator, "last_dim": self.last_dim}

    def expected(self, target: Platform) -> bool:
        """What the table says."""
        if self.attention is not None:
            return target.judge(self.attention).legal
        return target.operator(self.operator, self.last_dim).legal

    def __str__(self) -> str:
        if self.attention is None:
            return f"{self.operator}, last axis {self.last_dim}"
        call = self.attention
        keys = "dense" if call.block_size is None else f"blocks of {call.block_size}"
        return f"attention {call.layout}, head size {call.head_dim}, {call.q_len} queries, {keys}, mask {call.mask}"


@dataclass
class Answer:
    """What the device said: an error text, empty when the call worked, None when it was not tried."""

    eager: str | None = None
    captured: str | None = None

    @property
    def legal(self) -> bool | None:
        """Whether the call works both ways; None when that is not known."""
        if self.eager or self.captured:
            return False
        return None if None in (self.eager, self.captured) else True

    @property
    def error(self) -> str:
        """What failed, in one line."""
        how, text = ("eager", self.eager) if self.eager else ("captured", self.captured)
        return f"{how}: {' '.join((text or '').split())[:300]}" if text else ""


def _call(layout: str, head_dim: int, q_len: int, block_size: int | None, mask: str) -> Question:
    return Question(AttentionCall(layout, head_dim, q_len, 4, 2, block_size, mask))


def _natural(q_len: int) -> str:
    """The mask a decoding step wants."""
    return "none" if q_len == 1 else "causal"


def _masks(layout: str) -> tuple[str, ...]:
    return MASKS[:3] if layout == "TND" else MASKS  # packed queries have no axis for an explicit mask


def _last_dims(row: FusedOperator) -> tuple[int, ...]:
    """Sizes of the last axis: some the table allows, and the nearest it forbids."""
    if row.dims is not None:
        return (*row.dims, 2 * max(row.dims))
    if row.max_dim is None:
        return (64, 512, 2048)
    most = row.max_dim - row.max_dim % row.multiple
    return (64, most, most + row.multiple)


def questions(target: Platform) -> list[Question]:
    """Everything to ask about a platform, each once."""
    asked: dict[Question, None] = {}
    for layout, head_dim, q_len in product(LAYOUTS, HEAD_DIMS, (1, 4)):
        asked[_call(layout, head_dim, q_len, None, _natural(q_len))] = None
        for mask in _masks(layout):
            asked[_call(layout, head_dim, q_len, BLOCK_SIZE, mask)] = None
    for layout, q_len in product(LAYOUTS, BLOCK_SIZES):
        for size in BLOCK_SIZES[q_len]:
            asked[_call(layout, 128, q_len, size, _natural(q_len))] = None
    for row in target.operators:
        asked.update((Question(operator=row.name, last_dim=each), None) for each in _last_dims(row))
    return list(asked)


@dataclass
class Findings:
    """What a probe found.

    Attributes:
        target: the table it was compared with.
        answers: of every question.
        facts: device, SoC and versions, for the file and for the reader.
    """

    target: Platform
    answers: dict[Question, Answer]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """What a rule of this probe names as its source."""
        return ", ".join(["gemma-npu probe", *(f"{name} {value}" for name, value in self.facts.items() if value)])

    @property
    def differences(self) -> list[Question]:
        """Where the device does not do what the table says."""
        known = ((question, answer.legal) for question, answer in self.answers.items())
        return [each for each, legal in known if legal is not None and legal != each.expected(self.target)]

    @property
    def untried(self) -> list[Question]:
        return [question for question, answer in self.answers.items() if answer.legal is None]

    def _worked(self, layout: str, head_dim: int, q_len: int, sizes: Sequence[int | None], masks: Sequence[str]) -> Any:
        """Pairs of block size and mask that worked, and the error of the first that did not."""
        worked, error = [], ""
        for size, mask in product(sizes, masks):
            answer = self.answers.get(_call(layout, head_dim, q_len, size, mask), Answer())
            if answer.legal:
                worked.append((size, mask))
            error = error or answer.error
        return worked, error

    def _attention_rule(self, layout: str, head_dim: int, q_len: int, paged: bool) -> AttentionRule:
        """A row that says what was found for one head size, and nothing about what was not tried."""
        natural = _natural(q_len)
        size = BLOCK_SIZE if paged else None
        masks = (natural, *(each for each in _masks(layout) if each != natural))
        worked, error = self._worked(layout, head_dim, q_len, (size,), masks if paged else masks[:1])
        common: dict[str, Any] = {"layout": layout, "head_dims": (head_dim,), "paged": paged}
        common |= {"q_len": "1" if q_len == 1 else ">1", "source": self.source}
        if not worked:
            return AttentionRule(False, error=error, **common)
        allowed = {mask for _, mask in worked}
        if not paged:
            allowed |= set(self._masks_of_the_table(layout, head_dim, q_len))
            return AttentionRule(True, masks=tuple(each for each in MASKS if each in allowed), **common)
        multiple, most = self._block_limits(layout, q_len)
        common |= {"block_multiple": multiple, "block_max": most}
        return AttentionRule(True, masks=tuple(each for each in MASKS if each in allowed), **common)

    def _block_limits(self, layout: str, q_len: int) -> tuple[int, int]:
        """The widest multiple and maximum that allow no block size that was refused."""
        tried = BLOCK_SIZES[q_len]
        blocks, _ = self._worked(layout, 128, q_len, tried, (_natural(q_len),))
        sizes = sorted([BLOCK_SIZE, *(each for each, _ in blocks)])
        while True:
            multiple, most = math.gcd(*sizes), max(sizes)
            if all(each in sizes or each % multiple or each > most for each in tried):
                return multiple, most
            sizes.remove(max(sizes) if max(sizes) > BLOCK_SIZE else min(sizes))

    def _masks_of_the_table(self, layout: str, head_dim: int, q_len: int) -> list[str]:
        """Masks of dense calls that the table allows; a probe tries one."""
        calls = {mask: _call(layout, head_dim, q_len, None, mask) for mask in _masks(layout)}
        return [mask for mask, call in calls.items() if call.expected(self.target)]

    def _operator_rule(self, row: FusedOperator) -> FusedOperator | None:
        """A row for an operator that takes other sizes than the table says, or does not work at all."""
        asked = {size: Question(operator=row.name, last_dim=size) for size in _last_dims(row)}
        if not any(each in self.differences for each in asked.values()):
            return None
        worked = tuple(size for size, each in asked.items() if self.answers[each].legal)
        if not worked:
            error = next(self.answers[each].error for each in asked.values() if self.answers[each].error)
            return FusedOperator(row.name, self.source, legal=False, error=error)
        refused = any(self.answers[each].legal is False and each.expected(self.target) for each in asked.values())
        if refused or row.dims is not None:
            return FusedOperator(row.name, self.source, dims=worked)
        return replace(row, source=self.source, max_dim=max(worked))

    def overrides(self) -> dict[str, Any]:
        """The override file: a row where the device differs from the table, and behind it everything that was asked."""
        cells: dict[tuple[str, int, int, bool], None] = {}
        for each in self.differences:
            call = each.attention
            if call is None:
                continue
            of_blocks = call.block_size not in (None, BLOCK_SIZE)  # tried with one head size, true of all
            for head_dim in HEAD_DIMS if of_blocks else (call.head_dim,):
                cells[call.layout, head_dim, call.q_len, call.block_size is not None] = None
        operators = (self._operator_rule(row) for row in self.target.operators)
        return {
            "attention": [_short(self._attention_rule(*cell)) for cell in cells],
            "operators": [_short(row) for row in operators if row is not None],
            "probe": {
                **self.facts,
                "answers": [{**question.to_dict(), **asdict(answer)} for question, answer in self.answers.items()],
            },
        }

    def write(self, path: Path) -> None:
        """Write the override file at once: never half of it."""
        new = path.with_name(f".{path.name}.new")
        new.write_text(json.dumps(self.overrides(), indent=1) + "\n", encoding="utf-8")
        new.replace(path)


def _short(row: AttentionRule | FusedOperator) -> dict[str, Any]:
    """A row without the fields it leaves at their defaults."""
    values = {each.name: (getattr(row, each.name), each.default) for each in fields(row)}
    return {name: value for name, (value, default) in values.items() if value != default}
