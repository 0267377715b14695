"""When a request ends: its limit, its end tokens, and transformers' stopping criteria, token by token."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation.stopping_criteria import ConfidenceCriteria, MaxTimeCriteria, StopStringCriteria


def check_criterion(criterion: object) -> None:
    """Raise ValueError unless ``criterion`` can be asked after each token of one row, without scores."""
    if not isinstance(criterion, StoppingCriteria) or isinstance(criterion, ConfidenceCriteria):
        raise ValueError(
            f"stopping criterion {type(criterion).__name__} is not supported: a criterion is a transformers "
            "StoppingCriteria that is asked after each token of a row, without scores"
        )


def stop_string_criterion(
    stop_strings: str | Sequence[str], tokenizer: PreTrainedTokenizerBase | None
) -> StopStringCriteria:
    """transformers' own criterion: the token that completes a stop string is the last one, and stays whole.

    Raises:
        ValueError: there is no tokenizer, or a stop string is no text.
    """
    if tokenizer is None:
        raise ValueError(f"stop_strings={stop_strings!r} needs the tokenizer of the model: pass tokenizer=")
    strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    if not strings or any(not isinstance(each, str) or not each for each in strings):
        raise ValueError(f"stop_strings is {stop_strings!r}, it must be a text or a list of texts, none empty")
    return StopStringCriteria(tokenizer, strings)


class Stopping:
    """Cuts a row's new tokens where the row ends.

    Args:
        limit: new tokens at most.
        eos: end tokens; the one that ends a row stays.
        criteria: asked after each token with ids ``(1, prompt + new)`` and no scores.
    """

    def __init__(self, limit: int, eos: Sequence[int] = (), criteria: Sequence[StoppingCriteria] = ()) -> None:
        for criterion in criteria:
            check_criterion(criterion)
        self.limit, self.eos, self.criteria = limit, frozenset(eos), tuple(criteria)

    def take(self, prompt: torch.Tensor, before: Sequence[int], tokens: Sequence[int]) -> tuple[list[int], str | None]:
        """The tokens that count, and why the row ends with them (``"eos"``, ``"stop"``, ``"length"``) or None.

        Args:
            prompt: ``(length,)`` int64 on the CPU.
            before: new tokens taken earlier.
            tokens: what a step added.
        """
        taken: list[int] = []
        for token in tokens[: self.limit - len(before)]:
            taken.append(token)
            if token in self.eos:
                return taken, "eos"
            if self.criteria and self._stops(prompt, [*before, *taken]):
                return taken, "stop"
        return taken, "length" if len(before) + len(taken) >= self.limit else None

    def _stops(self, prompt: torch.Tensor, new: list[int]) -> bool:
        ids = torch.cat([prompt, torch.tensor(new)])[None]
        return any(bool(torch.as_tensor(c(ids, None)).all()) for c in self.criteria)  # type: ignore[arg-type]


def time_criterion(max_time: float) -> MaxTimeCriteria:
    """Ends a row at its first token after ``max_time`` seconds.

    Raises:
        ValueError: it is no positive number.
    """
    if isinstance(max_time, bool) or not isinstance(max_time, (int, float)) or max_time <= 0:
        raise ValueError(f"max_time is {max_time!r}, it must be a positive number of seconds")
    return MaxTimeCriteria(max_time)
