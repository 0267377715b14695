"""One ``torch.library.Library`` for the dialect, and the one way to define an operator.

A kernel comes in two halves. ``check`` looks at shapes, dtypes and host numbers: eager calls and traces run it every
time, a capture once, because it freezes them. ``run`` computes, and writes to given memory when it is handed ``out``:
a captured graph has a fixed address for every result (graphs/host.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gemma_npu_compile.native.program import Command

NAMESPACE = "gemma_npu"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")


@dataclass(frozen=True)
class Kernel:
    """A CPU kernel a capture can record without the dispatcher in between.

    Attributes:
        check: takes the operator's arguments; raises ValueError when they do not fit. Reads no tensor contents.
        run: takes the operator's arguments and, for an operator with results, ``out``: None to allocate, or the
            tensor (a tuple of tensors for several results) to write to.
        fake: the operator's results for its arguments, without contents.
        command: takes what ``run`` takes, ``out`` always; the native command that does the same, or None where there
            is none for these tensors (native/program.py).
    """

    check: Callable[..., None]
    run: Callable[..., Any]
    fake: Callable[..., Any]
    command: Callable[..., Command | None] | None = None


KERNELS: dict[torch._ops.OpOverload, Kernel] = {}
"""Kernels by operator; of the dialect, and of emulated platform operators."""


def implement(
    library: torch.library.Library,
    op: torch._ops.OpOverload,
    kernel: Kernel,
    device: Callable[..., Any] | None = None,
) -> None:
    """Register ``kernel`` and its fake for an operator whose schema ``library`` defined.

    Args:
        device: the kernel for NPU tensors, where there is one; called after ``kernel.check``.
    """

    def checked(compute: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            kernel.check(*args, **kwargs)
            return compute(*args, **kwargs)

        return run

    def trace(*args: Any, **kwargs: Any) -> Any:
        kernel.check(*args, **kwargs)
        return kernel.fake(*args, **kwargs)

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
    define_in(LIBRARY, signature, Kernel(check, run, fake), device or run)


def define_in(
    library: torch.library.Library, signature: str, kernel: Kernel, device: Callable[..., Any] | None = None
) -> None:
    """Define an operator of the namespace of ``library``, with its kernel."""
    library.define(signature)
    op = getattr(getattr(torch.ops, library.ns), signature.split("(", 1)[0]).default
    implement(library, op, kernel, device)
