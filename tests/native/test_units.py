"""However a command's work is cut into units, every number comes out once and the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gemma_npu_compile.ops.native  # noqa: F401
from gemma_npu_compile.native.aten import COMMANDS
from gemma_npu_compile.native.program import Command, Program
from gemma_npu_compile.ops.library import KERNELS

native, aten = torch.ops.gemma_npu_cpu, torch.ops.aten
ROWS, WIDTH = 3, 8 * 37


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def command_of(name: str, dtype: torch.dtype) -> tuple[Command, torch.Tensor, tuple]:
    """A command of a kernel that cuts its rows, what it writes, and what it reads: to be kept as long."""
    x, y = numbers(ROWS, WIDTH + 3, dtype=dtype)[:, :WIDTH], numbers(ROWS, WIDTH, dtype=dtype)
    weight, out = numbers(83, WIDTH, dtype=dtype), torch.empty(ROWS, 83 if name == "linear" else WIDTH, dtype=dtype)
    second = {"linear": (weight,), "gelu_mul": (y,), "mul": (y,), "add": (y[:, :1],), "sub": (y[0],), "div": (0.7,)}
    args = (x, *second.get(name, ()))
    if name in ("gelu_mul", "tanh", "linear"):
        return KERNELS[getattr(native, name).default].command(*args, out=out), out, args
    (command,) = COMMANDS[getattr(aten, name).Tensor](*args, out=out)
    return command, out, args


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gelu_mul", "tanh", "linear", "mul", "add", "sub", "div"])
@given(units=st.integers(2, 200), threads=st.integers(1, 3))
def test_units_change_nothing(name, dtype, units, threads):
    command, out, _read = command_of(name, dtype)
    assert (command.calls, command.words[2]) == (1, 1)
    Program([command])()
    expected = out.clone()
    assert not expected.isnan().any()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        out.fill_(float("nan"))
        Program([Command((*command.words[:2], units, *command.words[3:]))])()
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, expected)


@given(width=st.integers(1, 300), units=st.integers(1, 60))
def test_rows_that_end_within_a_vector(width, units):
    """Nothing is written behind a row, and each number once: one that is added twice to itself would differ."""
    memory = numbers(ROWS, width + 2, dtype=torch.float32)
    before, x, other = memory.clone(), memory[:, :width], memory[:, :1].clone()
    (command,) = COMMANDS[aten.add.Tensor](x, other, out=x)
    Program([Command((*command.words[:2], units, *command.words[3:]))])()
    assert torch.equal(memory[:, width:], before[:, width:])
    assert torch.equal(x, before[:, :width] + before[:, :1])
