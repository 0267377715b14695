"""``Request``: one prompt in a session, and how it chooses and stops."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor

from gemma_npu_compile.engine import Adjust
from gemma_npu_compile.sampling import Sampling
from gemma_npu_compile.stats import Acceptance
from gemma_npu_compile.stopping import Stopping


@dataclass(eq=False)
class Request:
    """One prompt in a :class:`Session`.

    Attributes:
        prompt: ``(length,)`` int64, on the CPU.
        sampling: None for a greedy request.
        tokens: new tokens so far, the end token included.
        acceptance: of its draft rounds.
        finish_reason: None while it waits or runs; then ``"eos"``, ``"stop"`` (a stop string or another criterion),
            ``"length"``, ``"cancelled"`` or ``"error"`` (a criterion raised).
    """

    prompt: Tensor
    stopping: Stopping = field(repr=False)
    acceptance: Acceptance
    sampling: Sampling | None = None
    processors: "Processors | None" = field(default=None, repr=False)
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    needs: tuple[int, ...] = field(default=(), repr=False)  # blocks reserved in each KV group
    row: int | None = field(default=None, repr=False)  # in the cache

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def adjusts(self) -> bool:
        """Whether logits processors have a say in its next tokens."""
        return self.processors is not None and len(self.tokens) < self.processors.until


def check_processor(processor: object) -> None:
    """Raise ValueError unless ``processor`` can be asked about drafts that may not hold."""
    stateful = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
    if not isinstance(processor, LogitsProcessor) or isinstance(processor, stateful):
        raise ValueError(
            f"logits processor {type(processor).__name__} is not supported: it must be a transformers LogitsProcessor "
            "that is a function of ids and scores, since it also sees drafts that do not hold"
        )


class Processors:
    """transformers' logits processors, applied at each verified position of a row.

    Behind draft ``j`` they see the prompt, the tokens so far and the drafts up to ``j``, as they would in plain
    decoding if those drafts hold; where one does not, what they said behind it is dropped. So a processor must be a
    function of ids and scores alone.

    Raises:
        ValueError: one is no processor, or keeps a state from call to call; names it.
    """

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        for each in processors:
            check_processor(each)
        self._processors = tuple(processors)
        # Once a row is long enough, a minimal length says nothing more.
        lengths = [getattr(each, "min_new_tokens", None) for each in processors]
        known = all(type(each) is MinNewTokensLengthLogitsProcessor for each in processors)
        self.until: float = max((n for n in lengths if n is not None), default=0) if known else float("inf")

    def __call__(self, prefix: Tensor, drafts: Tensor, logits: Tensor) -> Tensor:
        """Processed logits of one row.

        Args:
            prefix: ``(length,)`` int64, prompt and new tokens.
            drafts: ``(n - 1,)`` int64.
            logits: ``(n, vocab)``.

        Returns:
            ``(n, vocab)`` float32.
        """
        ids = torch.cat([prefix, drafts])
        rows = []
        for position, scores in enumerate(logits.float().unbind()):
            seen, scores = ids[None, : len(prefix) + position], scores[None]
            for processor in self._processors:
                scores = processor(seen, scores)
            rows.append(scores)
        return torch.cat(rows)


def adjustment(requests: Sequence[Request]) -> Adjust | None:
    """What the processors of these requests, in the order of a step's rows, make of its logits; None when none acts."""
    if not any(request.adjusts for request in requests):
        return None

    def adjust(logits: Tensor, drafts: Tensor) -> Tensor:
        adjusted = logits.to(torch.float32, copy=True)
        for index, request in enumerate(requests):
            if request.adjusts and request.processors is not None:
                prefix = torch.cat([request.prompt, torch.tensor(request.tokens, dtype=torch.int64)])
                adjusted[index] = request.processors(prefix.to(logits.device), drafts[index], adjusted[index])
        return adjusted

    return adjust


def check_count(name: str, value: Any, smallest: int) -> None:
    """Raise ValueError, naming the argument, unless it is an integer of at least ``smallest``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ValueError(f"{name} is {value!r}, it must be an integer, {smallest} or more")


def prompt_tensor(prompt_ids: Sequence[int] | Tensor, vocab: int) -> Tensor:
    """Token ids as ``(length,)`` int64 on the CPU.

    Raises:
        ValueError: there is no token, or something that is none of a vocabulary of ``vocab`` tokens.
    """
    prompt = torch.as_tensor(prompt_ids).detach().cpu()
    if prompt.dim() != 1 or not len(prompt):
        raise ValueError(f"prompt_ids is {tuple(prompt.shape)}, it must be 1-d with at least one token")
    if prompt.is_floating_point() or prompt.is_complex() or prompt.dtype is torch.bool:
        raise ValueError(f"prompt_ids is {prompt.dtype}, it must hold integers")
    prompt = prompt.long()
    low, high = (int(each) for each in prompt.aminmax())
    if low < 0 or high >= vocab:
        raise ValueError(f"prompt_ids has token {low if low < 0 else high}, the model's tokens are 0..{vocab - 1}")
    return prompt


def eos_list(value: int | Sequence[int] | Tensor | None) -> list[int]:
    """End tokens, in the order given.

    Raises:
        ValueError: one is no token id.
    """
    if value is None:
        return []
    given = value.flatten().tolist() if isinstance(value, Tensor) else value
    given = [given] if isinstance(given, int) else list(given)
    for token in given:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(f"eos_token_id is {value!r}, it must be a token id or a list of them")
    return given
