"""``gemma_npu_cpu::`` operators: the dialect's meaning, computed by the C++ kernels of :mod:`gemma_npu_compile.native`.

They are to a CPU what ``npu::`` operators are to an NPU: what a graph is lowered to. Each takes the arguments of the
dialect operator of its name; where a C++ kernel does not take the tensors of a call, the dialect's kernel computes.
``linear``, which is ``x @ weight.T``, and ``tanh``, ``sin`` and ``cos`` have no counterpart there: ATen computes them
where the kernels do not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gemma_npu_compile.ops.activation
import gemma_npu_compile.ops.attention
import gemma_npu_compile.ops.norm
import gemma_npu_compile.ops.rotary
import gemma_npu_compile.ops.store  # noqa: F401
from gemma_npu_compile.native import program
from gemma_npu_compile.ops.library import KERNELS, Kernel, define_in, empty_like

NAMESPACE = "gemma_npu_cpu"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def _run(command: Callable[..., Any], reference: Kernel, fake: Callable[..., Any], *args: Any, out: Any = None) -> Any:
    made = fake(*args) if out is None else out
    found = command(*args, out=made)
    if found is None:
        return reference.run(*args, out=made)
    program.Program([found])()
    return made


def _define(name: str, command: Callable[..., program.Command | None]) -> None:
    """The operator of the dialect called ``name``, once more, with a C++ kernel."""
    op = getattr(torch.ops.gemma_npu, name).default
    reference, schema = KERNELS[op], str(op._schema).removeprefix("gemma_npu::")
    run = partial(_run, command, reference, reference.fake)
    define_in(LIBRARY, schema, Kernel(reference.check, run, reference.fake, command))


def _geglu(gate_up: Tensor, *, out: Tensor) -> program.Command | None:
    gate, up = gate_up.chunk(2, dim=-1)
    return program.gelu_mul(gate, up, out)


_define("paged_attention", program.attention)
_define("rms_norm", program.rms_norm)
_define("add_rms_norm", program.add_rms_norm)
_define("rotary", program.rotary)
_define("gelu_mul", program.gelu_mul)
_define("geglu", _geglu)


def _store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    found = program.store_kv(key, value, key_cache, value_cache, slots)
    if found is None:
        KERNELS[torch.ops.gemma_npu.store_kv.default].run(key, value, key_cache, value_cache, slots)
    else:
        program.Program([found])()


def _check_linear(x: Tensor, weight: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"linear: x (rows, k) and weight (n, k) of one dtype are needed, got {tuple(x.shape)} {x.dtype} and "
            f"{tuple(weight.shape)} {weight.dtype}"
        )


def _matmul(x: Tensor, weight: Tensor, *, out: Tensor) -> Tensor:
    return torch.mm(x, weight.t(), out=out)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_store = KERNELS[torch.ops.gemma_npu.store_kv.default]
define_in(
    LIBRARY,
    str(torch.ops.gemma_npu.store_kv.default._schema).removeprefix("gemma_npu::"),
    Kernel(_store.check, _store_kv, _store.fake, program.store_kv),
)
define_in(
    LIBRARY,
    "linear(Tensor x, Tensor weight) -> Tensor",
    Kernel(
        _check_linear,
        partial(_run, program.linear, Kernel(_check_linear, _matmul, _product), _product),
        _product,
        program.linear,
    ),
)


def _no_check(x: Tensor) -> None:
    pass


def _unary(name: str, command: Callable[..., program.Command | None]) -> None:
    """An elementwise operator of ATen, once more."""
    op = getattr(torch.ops.aten, name).out

    def reference(x: Tensor, *, out: Tensor) -> Tensor:
        return op(x, out=out)

    run = partial(_run, command, Kernel(_no_check, reference, empty_like), empty_like)
    define_in(LIBRARY, f"{name}(Tensor x) -> Tensor", Kernel(_no_check, run, empty_like, command))


_unary("tanh", program.tanh)
_unary("sin", partial(program.sines, 0))
_unary("cos", partial(program.sines, 1))
