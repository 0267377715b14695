"""Stable buffers: the memory a captured graph reads its per-call inputs from."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gemma_npu_compile.errors import ReplayError
from gemma_npu_compile.graphs.plan import Input, Plan


def _name(item: Input) -> str:
    if item.layer is not None:
        return f"the block table of layer {item.layer} ({item.phase}, group {item.group})"
    return f"input {item.label}"


def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first; one launch for all of a dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for into, source in pairs:
        targets, sources = groups.setdefault((into.dtype, into.device), ([], []))
        targets.append(into)
        sources.append(source)
    for targets, sources in groups.values():
        torch._foreach_copy_(targets, sources)


def not_the_padded(plan: Plan, args: list[Any], results: Iterable[Any]) -> list[Any]:
    """Results of an uncaptured run: what row_padding returns is a copy, and the graph has it no more."""
    padded = {args[item.source].untyped_storage().data_ptr() for item in plan.inputs if item.padding is not None}
    return [
        each.clone() if isinstance(each, Tensor) and each.untyped_storage().data_ptr() in padded else each
        for each in results
    ]


def _part(buffer: Tensor, rows: tuple[int, int], start: int, end: int) -> Tensor:
    """Rows ``start .. end - 1`` of a buffer with ``rows`` as in :class:`Input`."""
    axis, block = rows
    return buffer.narrow(axis, block * start, block * (end - start))


def _padding(item: Input, args: list[Any], buffer: Tensor, rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Rows ``rows .. size - 1`` of a buffer, and what they hold: the declared padding, or the call's first row."""
    if item.padding is not None:
        return buffer[rows:size], args[item.padding][rows:size]
    assert item.rows is not None
    axis, block = item.rows
    padded = _part(buffer, item.rows, rows, size).unflatten(axis, (size - rows, block))
    return padded, args[item.source].narrow(axis, 0, block).unsqueeze(axis).expand_as(padded)


class StableBuffers:
    """One buffer per buffer name of a plan, in the largest shape; smaller captures use its first rows.

    ``load`` copies a call's inputs to the front and fills the rows behind them, so nothing of an earlier call is left
    in a row the graph reads: from the declared padding, or with the call's first row over and over. That row is known
    to be fit for the graph: an index in it is in range, and no division meets a zero it would not meet anyway.

    Args:
        inputs: of the plan; those with one buffer name share it.
        args: arguments of a call, for shapes, dtypes and devices.
        rows: rows of the largest capture; None when shapes are those of ``args``.
    """

    def __init__(self, inputs: tuple[Input, ...], args: list[Any], rows: int | None) -> None:
        # Of inputs that share a buffer, the one bound to a layer speaks for it in errors.
        by_layer = sorted(inputs, key=lambda item: item.layer is not None)
        self.inputs = tuple({i.buffer: i for i in by_layer if i.buffer is not None}.values())
        self.buffers: dict[str, Tensor] = {}
        for item in self.inputs:
            arg = args[item.source]
            shape = list(arg.shape)
            if rows is not None and item.rows is not None:
                shape[item.rows[0]] = item.rows[1] * rows
            self.buffers[str(item.buffer)] = torch.zeros(shape, dtype=arg.dtype, device=arg.device)
        self._views: dict[tuple[str | None, int | None], Tensor] = {}

    def view(self, item: Input, rows: int | None) -> Tensor:
        """What a capture of ``rows`` rows reads for ``item``."""
        key = item.buffer, None if item.rows is None else rows
        if key not in self._views:
            buffer = self.buffers[str(item.buffer)]
            whole = rows is None or item.rows is None
            self._views[key] = buffer if whole else _part(buffer, item.rows, 0, rows)  # type: ignore[arg-type]
        return self._views[key]

    def check(self, args: list[Any], rows: int | None = None) -> None:
        """Refuse inputs that do not fit their buffer; ``rows`` are those of the call, where that is known.

        Raises:
            ReplayError: names the input (and the layer, for a block table), its captured and its given width.
        """
        for item in self.inputs:
            arg, buffer = args[item.source], self.buffers[str(item.buffer)]
            seen = self._views.get((item.buffer, None if item.rows is None else rows))
            if seen is not None and arg.shape == seen.shape and arg.dtype == seen.dtype:  # as in most calls
                continue
            shape = arg.shape
            if item.rows is not None:
                shape = arg.shape[: item.rows[0]] + buffer.shape[item.rows[0] :][:1] + arg.shape[item.rows[0] + 1 :]
            if shape == buffer.shape and arg.dtype == buffer.dtype:
                continue
            if item.role == "block_table" and arg.dim() == buffer.dim():
                raise ReplayError(
                    f"{_name(item)} is {arg.shape[1]} blocks wide, it was captured {buffer.shape[1]} wide; "
                    "nothing was run"
                )
            raise ReplayError(
                f"{_name(item)} is {tuple(arg.shape)} {arg.dtype}, it was captured as (rows, "
                f"{', '.join(map(str, buffer.shape[1:]))}) {buffer.dtype}; nothing was run"
            )

    def load(self, args: list[Any], rows: int | None, size: int | None) -> int:
        """Copy a call's inputs, and the padding of rows ``rows .. size - 1``. Returns the bytes copied."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for item in self.inputs:
            arg, buffer = args[item.source], self.buffers[str(item.buffer)]
            if rows is None or size is None or item.rows is None:
                pairs.append((buffer, arg))
                continue
            pairs.append((self.view(item, rows), arg))
            if rows < size:
                pairs.append(_padding(item, args, buffer, rows, size))
        copy_all(pairs)
        return sum(buffer.nbytes for buffer, _ in pairs)

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.buffers.values())
