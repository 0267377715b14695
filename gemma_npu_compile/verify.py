"""Compare generated tokens with plain greedy decoding, by transformers, of the same target."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel

TIE = 1e-5
"""Relative difference of the two best logits below which a different choice is a tie, not an error."""


@dataclass(frozen=True)
class Verification:
    """Result of :func:`verify`.

    Attributes:
        equal: every row equals plain greedy decoding, up to excused ties.
        ties: rows whose first difference is a tie of the two best logits; they are compared up to it.
        differences: ``(row, position)`` of each row's first difference that is none.
    """

    equal: bool
    ties: int
    differences: tuple[tuple[int, int], ...]


@torch.no_grad()
def plain_greedy(
    model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int, eos: Sequence[int], pad: int | None
) -> list[int]:
    """New tokens of one prompt by ``model.generate``: greedy, batch 1, DynamicCache, nothing of this package."""
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=list(eos) or None, pad_token_id=pad
    )
    ids = torch.tensor([list(prompt)], device=model.device)
    output = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), generation_config=config
    )
    return output[0, len(prompt) :].tolist()


@torch.no_grad()
def is_tie(model: PreTrainedModel, prefix: Sequence[int], tokens: tuple[int, int]) -> bool:
    """Whether ``tokens`` are the two best after ``prefix``, their logits less than :data:`TIE` apart, relatively."""
    ids = torch.tensor([list(prefix)], device=model.device)
    best = model(input_ids=ids, use_cache=False).logits[0, -1].float().topk(2)
    first, second = best.values.tolist()
    return set(best.indices.tolist()) == set(tokens) and first - second < TIE * max(abs(first), abs(second))


def verify(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos: Sequence[int],
    pad: int | None,
) -> Verification:
    """Compare each row of ``outputs`` (new tokens) with plain greedy decoding of its prompt."""
    ties, differences = 0, []
    for row, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
        reference = plain_greedy(model, prompt, max_new_tokens, eos, pad)
        if list(tokens) == reference:
            continue
        pairs = zip(tokens, reference, strict=False)
        shorter = min(len(tokens), len(reference))
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        if position < shorter and is_tie(
            model, [*prompt, *reference[:position]], (tokens[position], reference[position])
        ):
            ties += 1
        else:
            differences.append((row, position))
    return Verification(not differences, ties, tuple(differences))
