"""``gemma_npu::host_mirror``: a fact about an input, stated in the graph: where the host can read its numbers.

A captured task's host parameters follow from lengths that lie on the device; reading them there would make every replay
wait for the one before. The caller knows them anyway, and hands them over as an operand like any other.
"""

import torch
from torch import Tensor

from gemma_npu_compile.ops.library import NAMESPACE, define


def _check(values: Tensor, host: Tensor) -> None:
    if host.device.type != "cpu":
        raise ValueError(f"host_mirror: host is on {host.device}, it must be on the CPU")
    if host.dtype != values.dtype or host.dim() != values.dim():
        raise ValueError(
            f"host_mirror: host is {tuple(host.shape)} {host.dtype}, values {tuple(values.shape)} {values.dtype}"
        )


def _run(values: Tensor, host: Tensor, *, out: Tensor | None = None) -> Tensor:
    return values.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(values)


define("host_mirror(Tensor values, Tensor host) -> Tensor", check=_check, run=_run)


def host_mirror(values: Tensor, host: Tensor) -> Tensor:
    """Return ``values`` unchanged, and state that ``host`` holds them for the host to read.

    Args:
        values: lengths, an input of the compiled function.
        host: the same shape and dtype, on the CPU, also an input. It may hold more than ``values`` where lengths are
            only read in buckets (``kv_lens="device"``): a step that is not read yet is counted as fully accepted.

    Raises:
        ValueError: ``host`` is not on the CPU, or dtypes or numbers of dimensions differ.
    """
    return getattr(torch.ops, NAMESPACE).host_mirror(values, host)
