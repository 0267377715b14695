"""The gated GELU is transformers' ``gelu_pytorch_tanh(gate) * up``; halves of one tensor come gate first."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.activations import ACT2FN

from gemma_npu_compile.ops import geglu, gelu_mul
from gemma_npu_compile.ops.library import KERNELS

OPS = torch.ops.gemma_npu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
theirs = ACT2FN["gelu_pytorch_tanh"]


def states(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 2.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def close(result: Tensor, expected: Tensor) -> None:
    """torch takes another float32 kernel for strided input: the last bit may differ there."""
    same = result.dtype != torch.float32
    torch.testing.assert_close(result, expected, rtol=0 if same else 1e-6, atol=0 if same else 1e-7)


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    scale=st.sampled_from([0.01, 2.0, 50.0]),
    seed=st.integers(0, 999),
)
def test_equals_transformers_with_one_rounding(dtype, shape, scale, seed):
    gate, up = (states(*shape, dtype=dtype, seed=seed + i, scale=scale) for i in (0, 1))
    before = gate.clone(), up.clone()
    result = gelu_mul(gate, up)
    assert (result.dtype, result.shape) == (dtype, gate.shape)
    assert torch.equal(result, (theirs(gate.float()) * up.float()).to(dtype))
    assert torch.equal(gate, before[0])
    assert torch.equal(up, before[1])


def test_half_precision_is_rounded_once_not_twice():
    gate, up = states(64, 64, dtype=torch.bfloat16), states(64, 64, dtype=torch.bfloat16, seed=1)
    twice, exact = theirs(gate) * up, theirs(gate.double()) * up.double()
    once = gelu_mul(gate, up)
    assert not torch.equal(once, twice)
    assert (once.double() - exact).abs().sum() < (twice.double() - exact).abs().sum()
    torch.testing.assert_close(once, twice, rtol=2**-7, atol=1e-6)


def test_values_by_hand():
    """gelu is 0 at 0, the identity far right, 0 far left; the tanh form is not the exact one."""
    gate, up = torch.tensor([0.0, 20.0, -20.0, 1.0]), torch.tensor([5.0, 0.5, 3.0, 2.0])
    result = gelu_mul(gate, up)
    assert result[:3].tolist() == [0.0, 10.0, 0.0]
    assert result[3].item() == pytest.approx(2 * 0.8411919906, abs=2e-7)
    assert result[3].item() != pytest.approx(2 * 0.8413447461, abs=1e-5)


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=2).map(tuple),
    width=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_geglu_takes_the_gate_first(dtype, shape, width, seed):
    gate, up = (states(*shape, width, dtype=dtype, seed=seed + i) for i in (0, 1))
    joined = torch.cat([gate, up], dim=-1)
    result = geglu(joined)
    close(result, gelu_mul(gate, up))
    assert result.is_contiguous()
    assert torch.equal(joined, torch.cat([gate, up], dim=-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_writes_to_the_given_address(dtype):
    gate, up = states(5, 8, dtype=dtype), states(5, 8, dtype=dtype, seed=1)
    for op, args in ((OPS.gelu_mul, (gate, up)), (OPS.geglu, (torch.cat([gate, up], dim=-1),))):
        out = torch.full_like(gate, torch.nan)
        assert KERNELS[op.default].run(*args, out=out).data_ptr() == out.data_ptr()
        close(out, gelu_mul(gate, up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_input_gives_the_same_numbers_contiguous(dtype):
    gate, up = states(3, 5, 8, dtype=dtype).transpose(0, 1), states(5, 3, 8, dtype=dtype, seed=1)
    close(gelu_mul(gate, up), gelu_mul(gate.contiguous(), up))
    assert gelu_mul(gate, up).is_contiguous()
    close(geglu(gate), geglu(gate.contiguous()))


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "shape": (lambda: gelu_mul(torch.ones(2, 4), torch.ones(4)), r"gelu_mul: up must be .* \(2, 4\) as gate.*\(4,\)"),
    "dtype": (lambda: gelu_mul(torch.ones(4), torch.ones(4).half()), r"up must be torch\.float32.*torch\.float16"),
    "integers": (lambda: gelu_mul(torch.ones(4).int(), torch.ones(4).int()), r"gate must be floating.*int32"),
    "odd": (lambda: geglu(torch.ones(2, 5)), r"geglu: gate_up must be .*\(\.\.\., 2 \* width\), got .* \(2, 5\)"),
    "scalar": (lambda: geglu(torch.tensor(1.0)), r"geglu: gate_up .* \(\)"),
    "geglu of integers": (lambda: geglu(torch.ones(2, 4).long()), r"geglu: gate_up must be floating.*int64"),
}


@pytest.mark.parametrize("fake", [False, True], ids=["cpu", "fake"])
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name, fake):
    call, message = BAD[name]
    if fake:
        with FakeTensorMode(), pytest.raises(ValueError, match=message):
            call()
    else:
        with pytest.raises(ValueError, match=message):
            call()


def test_opcheck():
    utils = ("test_schema", "test_faketensor")
    for x in (states(5, 3, 8), states(3, 5, 8, dtype=torch.bfloat16).transpose(0, 1)):
        torch.library.opcheck(OPS.gelu_mul.default, (x, x.clone()), test_utils=utils)
        torch.library.opcheck(OPS.geglu.default, (x,), test_utils=utils)


def test_traces_once_for_any_number_of_rows(fresh_dynamo):
    def both(gate: Tensor, up: Tensor) -> Tensor:
        return gelu_mul(gate, up) + geglu(torch.cat([gate, up], dim=-1))

    compiled = torch.compile(both, backend="eager", fullgraph=True, dynamic=True)
    gate, up = states(7, 8), states(7, 8, seed=1)
    compiled(gate, up)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(gate[:5], up[:5]), both(gate[:5], up[:5]))
