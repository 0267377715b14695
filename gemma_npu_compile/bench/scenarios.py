"""What is measured: a pair, a batch, a context, and what a round of it does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemma_npu_compile.options import nearest

NEW_TOKENS = 64
"""Tokens each row of a tiny scenario gets in a round, the first from its prefill, which is not timed."""

PATTERN = (3, 2, 3, 0, 3, 1, 3, 3)
"""Drafts accepted in the steps of a medium round: forced, the same for every row and peer."""


@dataclass(frozen=True)
class Scenario:
    """One line of the results.

    Attributes:
        pair: ``"tiny"``, the bundled trained pair in float32, or ``"medium"``, random weights in bfloat16.
        batch: rows.
        context: tokens in the cache at the first step; None: those of the prompts.
        steps: of a round, where acceptance is forced.
    """

    name: str
    pair: str
    batch: int
    context: int | None = None
    steps: int = 8


_TINY = [Scenario(f"tiny-b{batch}", "tiny", batch) for batch in (1, 4, 8)]
_MEDIUM = [
    Scenario(f"medium-b{batch}-c{context}", "medium", batch, context, 8 if context == 512 else 4)
    for context in (512, 4096, 16384)
    for batch in (1, 8)
]
SCENARIOS = {scenario.name: scenario for scenario in (*_TINY, *_MEDIUM)}
GROUPS = {"tiny": tuple(s.name for s in _TINY), "medium": tuple(s.name for s in _MEDIUM)}
DEFAULT = ("tiny-b1",)


def select(names: Sequence[str]) -> list[Scenario]:
    """The scenarios of names and groups, each once, in the order of their first mention.

    Raises:
        ValueError: a name is unknown; suggests the nearest.
    """
    found: dict[str, Scenario] = {}
    for name in names or DEFAULT:
        if name not in SCENARIOS and name not in GROUPS:
            known = [*GROUPS, *SCENARIOS]
            raise ValueError(f"--scenario is {name!r}{nearest(name, known)}, it must be one of {', '.join(known)}")
        for each in GROUPS.get(name, (name,)):
            found[each] = SCENARIOS[each]
    return list(found.values())


def load(pair: str) -> tuple[Any, Any, Any]:
    """Target, assistant, and the tokenizer of the bundled pair (None for random weights)."""
    if pair == "medium":
        from gemma_npu_compile.bench.pairs import medium_pair

        return *medium_pair(), None
    from gemma_npu_compile.loading import load_pair
    from gemma_npu_compile.tiny_pair import ASSISTANT_DIR, TARGET_DIR

    loaded = load_pair(TARGET_DIR, ASSISTANT_DIR, "float32", "cpu")
    return loaded.target, loaded.assistant, loaded.tokenizer
