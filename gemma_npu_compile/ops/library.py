"""One ``torch.library.Library`` for the dialect, and the one way to define an operator with its out form.

The out form exists because a captured graph writes every result to a fixed address (graphs/host.py).
"""

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "gemma_npu"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def define(signature: str, *, cpu: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define ``gemma_npu::<signature>`` with a CPU kernel and a fake kernel.

    Args:
        signature: schema without namespace, for example ``"rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor"``.
        cpu: kernel for CPU tensors.
        fake: kernel for fake and meta tensors; it checks what can be checked without data.
    """
    name = signature.split("(", 1)[0]
    LIBRARY.define(signature)
    LIBRARY.impl(name, cpu, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)


def define_functional(signature: str, *, cpu: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]) -> None:
    """Define an operator with one tensor result together with its ``.out`` overload.

    ``cpu`` takes the operator's arguments and an optional ``out`` tensor of the result's shape and dtype; it writes to
    ``out`` when given one, and allocates otherwise.
    """
    name, rest = signature.split("(", 1)
    arguments = rest.rsplit(")", 1)[0]
    define(signature, cpu=cpu, fake=fake)
    star = "" if "*," in arguments else "*, "
    LIBRARY.define(f"{name}.out({arguments}, {star}Tensor(a!) out) -> Tensor(a!)", tags=(torch.Tag.out,))
    LIBRARY.impl(f"{name}.out", cpu, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}.out", lambda *args, out, **kwargs: out, lib=LIBRARY)
