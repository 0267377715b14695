"""Sampling that keeps the target's distribution, as plain tensor arithmetic that a graph can hold.

The token at a position is drawn from what the target says there, with a number that depends on the request's seed and
on the position alone. The drafts are the assistant's best tokens, and a draft is accepted when the draw equals it. That
is speculative rejection sampling: with one certain draft, "accept with probability p(draft), else draw from p without
it" and "draw from p, and accept if it is the draft" are the same. It also means that a request's tokens depend neither
on the drafts nor on its neighbours: with any assistant, or none, the same seed gives the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Sampling:
    """How a request draws its tokens; the filters are those of transformers, in its order.

    Attributes:
        temperature: divides the logits; 0 is greedy decoding.
        top_k: only tokens at least as likely as the k-th; 0 for all.
        top_p: only the likeliest tokens that together have this probability; 1 for all.
        seed: 0 to 2**64 - 1. The same seed and prompt give the same tokens.

    Raises:
        ValueError: a number is out of range; names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0, 1e4, "a number in 0..10000 (0 is greedy)")
        _in_range("top_p", self.top_p, 0, 1, "a number in 0..1")
        for name, top in (("top_k", 2**31 - 1), ("seed", 2**64 - 1)):
            value = getattr(self, name)
            if not isinstance(value, int):
                raise ValueError(f"{name} is {value!r}, it must be an integer in 0..{top}")
            _in_range(name, value, 0, top, f"an integer in 0..{top}")


def _in_range(name: str, value: Any, low: float, high: float, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, it must be {what}")


class Draws(NamedTuple):
    """How the rows of a step choose their tokens; inputs of the step. Zeros everywhere are a greedy row.

    Attributes:
        filters: ``(rows, 2)`` float32: temperature, and ``1 - top_p``.
        keys: ``(rows, 3)`` int64: top_k, and the two 32-bit words the seed is spread over.
    """

    filters: Tensor
    keys: Tensor


def draws(rows: Sequence[Sampling | None], device: torch.device) -> Draws | None:
    """The step's inputs for ``rows``, None for a greedy one; None when all are greedy."""
    if all(each is None or each.temperature == 0 for each in rows):
        return None
    greedy = Sampling(temperature=0.0)
    given = [each or greedy for each in rows]
    filters = torch.tensor([[each.temperature, 1 - each.top_p] for each in given], dtype=torch.float32)
    keys = torch.tensor([[each.top_k, *_words(each.seed)] for each in given], dtype=torch.int64)
    return Draws(filters.to(device), keys.to(device))


def _words(seed: int) -> tuple[int, int]:
    """Two 32-bit words in which every bit depends on every bit of the seed (splitmix64)."""
    mixed = (seed + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    mixed ^= mixed >> 31
    return mixed & _WORD, mixed >> 32


def _mix(word: Tensor) -> Tensor:
    """A hash of 32-bit words held in int64 (lowbias32). No product leaves 64 bits: factors are taken modulo 2**32."""
    # Divisions, not shifts: torch_npu copies the number of a shift to the device, also inside a capture.
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        word = torch.bitwise_xor(word, word.floor_divide(2**shift))
        word = torch.bitwise_and(word * factor, _WORD)
    return torch.bitwise_xor(word, word.floor_divide(2**16))


def uniforms(words: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1), a multiple of 2**-24 each, from the key of a row and a position; no generator, no state.

    Args:
        words: ``(rows, 2)`` int64.
        positions: ``(rows, n)`` int64.

    Returns:
        ``(rows, n)`` float32.
    """
    spread = _mix(torch.bitwise_and(positions * 0x9E3779B1 + words[:, :1], _WORD))
    hashed = _mix(torch.bitwise_xor(spread, words[:, 1:]))
    return hashed.floor_divide(2**8).float() * 2.0**-24


def sample(logits: Tensor, positions: Tensor, how: Draws) -> Tensor:
    """Draw a token for every position.

    Args:
        logits: ``(rows, n, vocab)``.
        positions: ``(rows, n)`` int64, where the tokens will stand in their rows.
        how: of the rows.

    Returns:
        ``(rows, n)`` int64; the argmax in rows of temperature 0.
    """
    vocab = logits.shape[-1]
    temperature, cut = how.filters[:, None, :1], how.filters[:, None, 1:]
    top_k = how.keys[:, None, :1].expand(-1, logits.shape[1], -1)
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)
    values, order = scaled.sort(dim=-1)
    limit = torch.where(top_k == 0, vocab, top_k.clamp(max=vocab))
    values = values.masked_fill(values < values.gather(-1, vocab - limit), -torch.inf)
    # Ascending, so that the small probabilities add up before the large ones swallow them.
    cumulative = values.softmax(-1).cumsum(-1)
    kept = cumulative > cut
    below = cumulative.masked_fill(kept, 0.0)[..., :-1].amax(-1, keepdim=True)  # the likeliest token always stays
    top = cumulative[..., -1:]
    threshold = below + uniforms(how.keys[:, 1:], positions).unsqueeze(-1) * (top - below)
    index = (cumulative <= threshold).sum(-1, keepdim=True).clamp(max=vocab - 1)
    return torch.where(greedy, logits.argmax(-1, keepdim=True), order.gather(-1, index)).squeeze(-1)
