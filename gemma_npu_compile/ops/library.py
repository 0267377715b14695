"""One ``torch.library.Library`` for the dialect, and the one way to define an operator.

A kernel comes in two halves. ``check`` looks at shapes, dtypes and host numbers: eager calls and traces run it every
time, a capture once, because it freezes them. ``run`` computes, and writes to given memory when it is handed ``out``:
a captured graph has a fixed address for every result (graphs/host.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

NAMESPACE = "gemma_npu"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")


@dataclass(frozen=True)
class Kernel:
    """A CPU kernel a capture can record without the dispatcher in between.

    Attributes:
        check: takes the operator's arguments; raises ValueError when they do not fit. Reads no tensor contents.
        run: takes the operator's arguments and, for an operator with results, ``out``: None to allocate, or the
            tensor (a tuple of tensors for several results) to write to.
    """

    check: Callable[..., None]
    run: Callable[..., Any]


KERNELS: dict[torch._ops.OpOverload, Kernel] = {}
"""Kernels by operator; of the dialect, and of emulated platform operators."""


def implement(
    library: torch.library.Library,
    op: torch._ops.OpOverload,
    kernel: Kernel,
    fake: Callable[..., Any],
    device: Callable[..., Any] | None = None,
) -> None:
    """Register ``kernel`` and its fake for an operator whose schema ``library`` defined.

    Args:
        fake: results for fake and meta tensors; called after ``kernel.check``.
        device: the kernel for NPU tensors, where there is one; called after ``kernel.check``.
    """

    def checked(compute: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            kernel.check(*args, **kwargs)
            return compute(*args, **kwargs)

        return run

    def trace(*args: Any, **kwargs: Any) -> Any:
        kernel.check(*args, **kwargs)
        return fake(*args, **kwargs)

    name = op._schema.name
    library.impl(name.split("::")[1], checked(kernel.run), "CPU")
    if device is not None:
        library.impl(name.split("::")[1], checked(device), "PrivateUse1")
    torch.library.register_fake(name, trace, lib=library)
    KERNELS[op] = kernel


def empty_like(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The usual fake: one contiguous result of the first argument's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def define(
    signature: str,
    *,
    check: Callable[..., None],
    run: Callable[..., Any],
    fake: Callable[..., Any] = empty_like,
    device: Callable[..., Any] | None = None,
) -> None:
    """Define ``gemma_npu::<signature>``.

    Args:
        signature: schema without namespace, for example ``"rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor"``.
        check, run: of the :class:`Kernel`.
        fake: results for fake and meta tensors.
        device: the kernel for NPU tensors where ``run``, as a composition of ATen operators, does not serve there too.
    """
    LIBRARY.define(signature)
    op = getattr(getattr(torch.ops, NAMESPACE), signature.split("(", 1)[0]).default
    implement(LIBRARY, op, Kernel(check, run), fake, device or run)
