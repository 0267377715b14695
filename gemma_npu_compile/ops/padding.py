"""``gemma_npu::row_padding``: a fact about an input, stated in the graph: what its padded rows hold.

A captured graph has a fixed number of rows. Which block table, length and token a row without a request gets is known
to the cache and to nobody behind it; this node carries it to the runtime, and the plan removes the node.
"""

import torch
from torch import Tensor

from gemma_npu_compile.ops.library import NAMESPACE, define


def _check(rows: Tensor, padding: Tensor) -> None:
    if rows.dim() != padding.dim() or rows.dtype != padding.dtype:
        raise ValueError(
            f"row_padding: the input is {tuple(rows.shape)} {rows.dtype}, its padding {tuple(padding.shape)} "
            f"{padding.dtype}"
        )
    for axis, (given, expected) in enumerate(zip(rows.shape[1:], padding.shape[1:], strict=True), start=1):
        if given != expected:
            raise ValueError(f"row_padding: axis {axis} of the input is {given} wide, its padding {expected}")


def _run(rows: Tensor, padding: Tensor, *, out: Tensor | None = None) -> Tensor:
    return rows.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(rows)


define("row_padding(Tensor rows, Tensor padding) -> Tensor", check=_check, run=_run)


def row_padding(rows: Tensor, padding: Tensor) -> Tensor:
    """Return ``rows`` unchanged, and state that a padded row ``i`` of it holds ``padding[i]``.

    With it the author says that rows do not mix: what a row computes must not depend on how many others there are.

    Args:
        rows: ``(rows, ...)``, an input of the compiled function.
        padding: ``(max_rows, ...)`` of the same dtype and trailing shape. Its first axis bounds the rows a captured
            graph of this function can have; a call with more runs uncaptured.

    Raises:
        ValueError: dtype or trailing shapes differ.
    """
    return getattr(torch.ops, NAMESPACE).row_padding(rows, padding)
