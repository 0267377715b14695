"""Rows in flight, and the results of a launch on their way to the host."""

import dataclasses
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass
class State:
    """Rows in flight: their cache rows and the inputs of their next step.

    Attributes:
        rows: cache row of each entry.
        token, hidden, seq_len: as in :meth:`DraftVerifyStep.forward`.
        lengths: ``seq_len`` on the host; while a step's results are unread, the largest it can be.
    """

    rows: list[int]
    token: Tensor
    hidden: Tensor
    seq_len: Tensor
    lengths: list[int]

    def select(self, keep: Sequence[int]) -> "State":
        """The entries at the positions ``keep``."""
        index = torch.tensor(keep, dtype=torch.long, device=self.token.device)
        rows, lengths = [self.rows[i] for i in keep], [self.lengths[i] for i in keep]
        return State(rows, self.token[index], self.hidden[index], self.seq_len[index], lengths)

    def join(self, other: "State") -> "State":
        """These entries and those of ``other`` behind them."""
        return State(
            [*self.rows, *other.rows],
            torch.cat([self.token, other.token]),
            torch.cat([self.hidden, other.hidden]),
            torch.cat([self.seq_len, other.seq_len]),
            [*self.lengths, *other.lengths],
        )


class LengthsOnHost:
    """Makes int32 tensors ``(rows,)`` of lengths, the same one for each number of rows: a call that has returned has
    read it. A new tensor takes longer than what the step does with it.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[array[int], Tensor]] = {}

    def __call__(self, lengths: list[int]) -> Tensor:
        now = array("i", lengths)
        if not now:
            return torch.empty(0, dtype=torch.int32)
        if len(now) not in self._kept:
            self._kept[len(now)] = now, torch.frombuffer(now, dtype=torch.int32)
        numbers, tensor = self._kept[len(now)]
        numbers[:] = now
        return tensor


class Results:
    """Tokens on their way to the host. The copy is queued at once, behind what was launched and before what follows."""

    def __init__(self, tokens: Tensor, accepted: Tensor | None) -> None:
        """Args: ``tokens`` ``(rows, n)`` and ``accepted`` ``(rows,)`` int64; without it, a row has all its tokens."""
        self._tokens, self._accepted = tokens, accepted
        self._event: torch.Event | None = None
        if tokens.device.type != "cpu":
            packed = tokens if accepted is None else torch.cat([tokens, accepted.unsqueeze(1)], dim=1)
            host = torch.empty_like(packed, device="cpu", pin_memory=True)
            host.copy_(packed, non_blocking=True)
            self._tokens, self._accepted = (host, None) if accepted is None else (host[:, :-1], host[:, -1])
            self._event = torch.Event(tokens.device)
            self._event.record()

    def read(self) -> tuple[list[list[int]], list[int]]:
        """Each row's new tokens, and how many drafts it accepted (0 for a prefill); waits for this launch alone."""
        if self._event is not None:
            self._event.synchronize()
        rows = self._tokens.tolist()
        if self._accepted is None:
            return rows, [0] * len(rows)
        accepted = self._accepted.tolist()
        return [row[: n + 1] for row, n in zip(rows, accepted, strict=True)], accepted
