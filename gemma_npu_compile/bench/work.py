"""What the subjects of a scenario are given: rows to start from, and how one step leads to the next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gemma_npu_compile.bench.pairs import fill_cache
from gemma_npu_compile.engine import Engine
from gemma_npu_compile.state import State

DRAFTS = 3


@dataclass
class Step:
    """One step as a runner returns it: the next state, each row's new tokens, wall time in seconds."""

    state: State
    new: list[list[int]]
    seconds: float


class Work(Protocol):
    """A scenario with its pair."""

    target: PreTrainedModel
    assistant: PreTrainedModel
    drafts: int
    batch: int
    model_len: int

    def begin(self, engine: Engine) -> State:
        """Rows at the scenario's start; called at the start of every round, not timed."""
        ...

    def more(self, steps: Sequence[Step]) -> bool:
        """Whether the round goes on behind these steps."""
        ...

    def follow(self, engine: Engine, step: Step, number: int) -> State:
        """The state for the step behind ``step``, the ``number``-th of the round (the first is 0)."""
        ...

    def tokens(self, start: State, steps: Sequence[Step]) -> list[list[int]]:
        """What is compared."""
        ...


class TextWork:
    """Prompts that are decoded until each row has ``new_tokens`` tokens, as acceptance has it.

    Args:
        prompts: token ids, one list per row.
        new_tokens: of each row; the first is its prefill's.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        assistant: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        drafts: int = DRAFTS,
    ) -> None:
        self.target, self.assistant, self.drafts = target, assistant, drafts
        self.prompts, self.new_tokens, self.batch = prompts, new_tokens, len(prompts)
        self.model_len = max(map(len, prompts)) + (1 + drafts) * (new_tokens + 1)  # rows that are done run on
        # Ends of text would make rows unequal: nobody stops at one.
        target.generation_config.eos_token_id = None  # type: ignore[union-attr]
        assistant.generation_config.num_assistant_tokens = drafts  # type: ignore[union-attr]
        assistant.generation_config.num_assistant_tokens_schedule = "constant"  # type: ignore[union-attr]

    def begin(self, engine: Engine) -> State:
        engine.cache.reset()
        return engine.prefill([torch.tensor(prompt) for prompt in self.prompts])

    def more(self, steps: Sequence[Step]) -> bool:
        decoded = [sum(len(step.new[row]) for step in steps) for row in range(self.batch)]
        return min(decoded) < self.new_tokens - 1

    def follow(self, engine: Engine, step: Step, number: int) -> State:
        state = step.state
        for row, length in zip(state.rows, state.lengths, strict=True):
            engine.cache.set_length(row, length)
        return state

    def tokens(self, start: State, steps: Sequence[Step]) -> list[list[int]]:
        rows = [
            [first, *(t for step in steps for t in step.new[row])] for row, first in enumerate(start.token.tolist())
        ]
        return [row[: self.new_tokens] for row in rows]


class ForcedWork:
    """Random weights: synthetic cache contents, and steps whose inputs and lengths are given, not what came out.

    Every step gets a seeded token and hidden state per row, at a length that grows by ``pattern`` whatever was
    accepted: the work is the same for everybody, and one differing token does not change what follows.

    Args:
        context: tokens of each row in the cache at the first step.
        pattern: drafts accepted in each step of a round.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        assistant: PreTrainedModel,
        batch: int,
        context: int,
        pattern: Sequence[int],
        drafts: int = DRAFTS,
        seed: int = 0,
    ) -> None:
        self.target, self.assistant, self.drafts = target, assistant, drafts
        self.batch, self.context, self.pattern, self.seed = batch, context, tuple(pattern), seed
        self.grown = [sum(n + 1 for n in self.pattern[:i]) for i in range(len(self.pattern) + 1)]
        self.model_len = context + self.grown[-1] + 1 + drafts
        config = target.config.get_text_config()
        generator = torch.Generator().manual_seed(seed)
        shape = len(self.pattern), batch
        self.inputs = torch.randint(1, config.vocab_size, shape, generator=generator)
        self.hidden = torch.randn(*shape, config.hidden_size, generator=generator).to(target.dtype)

    def begin(self, engine: Engine) -> State:
        rows = list(engine.cache.rows)
        if not rows:
            rows = fill_cache(engine.cache, self.batch, self.context, self.grown[-1] + 1 + self.drafts, self.seed)
        return self._state(rows, 0)

    def _state(self, rows: list[int], number: int) -> State:
        length = self.context + self.grown[number]
        seq_len = torch.full((self.batch,), length, dtype=torch.int32)
        return State(rows, self.inputs[number], self.hidden[number], seq_len, [length] * self.batch)

    def more(self, steps: Sequence[Step]) -> bool:
        return len(steps) < len(self.pattern)

    def follow(self, engine: Engine, step: Step, number: int) -> State:
        return self._state(step.state.rows, number + 1) if number + 1 < len(self.pattern) else step.state

    def tokens(self, start: State, steps: Sequence[Step]) -> list[list[int]]:
        return [[t for step in steps for t in step.new[row]] for row in range(self.batch)]


def hidden_states(steps: Sequence[Step]) -> Tensor:
    """``(steps, rows, hidden)``."""
    return torch.stack([step.state.hidden.clone() for step in steps])


def text_work(pair: tuple[Any, Any, Any], batch: int, new_tokens: int) -> TextWork:
    """The bundled pair on its coding prompts, from the first on and round again."""
    from gemma_npu_compile.tiny_pair import CODING_PROMPTS

    target, assistant, tokenizer = pair
    texts = [CODING_PROMPTS[row % len(CODING_PROMPTS)] for row in range(batch)]
    return TextWork(target, assistant, [tokenizer(text)["input_ids"] for text in texts], new_tokens)
