"""``rms_norm`` is transformers' Gemma4RMSNorm, to the last bit; ``add_rms_norm`` is that of a rounded sum."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from gemma_npu_compile.ops import add_rms_norm, rms_norm
from gemma_npu_compile.ops.library import KERNELS

OPS = torch.ops.gemma_npu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def states(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def theirs(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """transformers' module with this weight."""
    module = Gemma4RMSNorm(x.shape[-1], eps, with_scale=weight is not None)
    if weight is not None:
        module.weight = torch.nn.Parameter(weight)
    with torch.no_grad():
        return module(x)


cases = given(
    dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16]),
    shape=st.lists(st.integers(0, 4), max_size=3).flatmap(
        lambda lead: st.integers(1, 300).map(lambda width: (*lead, width))
    ),
    eps=st.sampled_from([1e-6, 1e-5, 0.5]),
    scale=st.sampled_from([1e-4, 1.0, 30.0]),
    seed=st.integers(0, 999),
)


@cases
def test_equals_transformers_bit_for_bit(dtype, weight_dtype, shape, eps, scale, seed):
    x = states(*shape, dtype=dtype, seed=seed, scale=scale)
    weight = None if weight_dtype is None else states(shape[-1], dtype=weight_dtype, seed=seed + 1)
    before = x.clone()
    result = rms_norm(x, weight, eps)
    assert (result.dtype, result.shape) == (dtype, x.shape)
    assert torch.equal(result, theirs(x, weight, eps))
    assert torch.equal(x, before)


@cases
def test_sum_is_rounded_and_then_normalised(dtype, weight_dtype, shape, eps, scale, seed):
    x, residual = (states(*shape, dtype=dtype, seed=seed + i, scale=scale) for i in (0, 1))
    weight = None if weight_dtype is None else states(shape[-1], dtype=weight_dtype, seed=seed + 2)
    before = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, eps)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, theirs(x + residual, weight, eps))
    assert (torch.equal(x, before[0]), torch.equal(residual, before[1])) == (True, True)


def test_the_rounding_of_the_sum_shows():
    """256 + 1 is 256 in bfloat16: norm of what the next layer reads, not of an exact sum."""
    x, residual = torch.tensor([[256.0, 2.0]]).bfloat16(), torch.tensor([[1.0, 0.0]]).bfloat16()
    normed, total = add_rms_norm(x, residual, None, 0.0)
    assert total.tolist() == [[256.0, 2.0]]
    exact = torch.tensor([[257.0, 2.0]])
    exact = exact * exact.square().mean().rsqrt()
    assert normed[0, 1].item() == torch.tensor(2.0 * (2 / (256.0**2 + 4)) ** 0.5).bfloat16().item()
    assert normed[0, 1] != exact[0, 1].bfloat16()


def test_the_weight_is_multiplied_before_the_rounding():
    x, weight = states(64, 32, dtype=torch.bfloat16), states(32, dtype=torch.bfloat16, seed=1)
    assert not torch.equal(rms_norm(x, weight), rms_norm(x) * weight), "that is Llama's order"


def test_values_by_hand():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    result = rms_norm(x, torch.tensor([1.0, 10.0]), 0.0 + 3.5)
    torch.testing.assert_close(result, torch.tensor([[0.75, 10.0], [0.0, 0.0]]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_writes_to_the_given_addresses(dtype):
    x, residual, weight = states(5, 8, dtype=dtype), states(5, 8, dtype=dtype, seed=1), states(8, seed=2)
    out, total = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    returned = KERNELS[OPS.rms_norm.default].run(x, weight, 1e-6, out=out)
    assert returned.data_ptr() == out.data_ptr()
    assert torch.equal(out, rms_norm(x, weight))
    out.fill_(torch.nan)
    KERNELS[OPS.add_rms_norm.default].run(x, residual, weight, 1e-6, out=(out, total))
    assert torch.equal(out, rms_norm(x + residual, weight))
    assert torch.equal(total, x + residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_input_gives_the_same_numbers_contiguous(dtype):
    strided = states(3, 5, 4, 16, dtype=dtype).transpose(1, 2)
    assert torch.equal(rms_norm(strided), rms_norm(strided.contiguous()))
    assert rms_norm(strided).is_contiguous()
    assert all(each.is_contiguous() for each in add_rms_norm(strided, strided))


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "scalar": (lambda: rms_norm(torch.tensor(1.0)), r"rms_norm: x must be floating point \(\.\.\., width\).*\(\)"),
    "integers": (lambda: rms_norm(torch.ones(2, 4).long()), r"rms_norm: x must be floating point.*int64 \(2, 4\)"),
    "width": (lambda: rms_norm(torch.ones(2, 4), torch.ones(3)), r"weight of x \(2, 4\) must be \(4,\), got \(3,\)"),
    "rank": (lambda: rms_norm(torch.ones(2, 4), torch.ones(1, 4)), r"must be \(4,\), got \(1, 4\)"),
    "weight dtype": (lambda: rms_norm(torch.ones(2, 4), torch.ones(4).int()), r"weight must be floating.*int32"),
    "residual shape": (lambda: add_rms_norm(torch.ones(2, 4), torch.ones(4)), r"\(2, 4\) as x is, got .* \(4,\)"),
    "residual dtype": (
        lambda: add_rms_norm(torch.ones(2, 4), torch.ones(2, 4).bfloat16()),
        r"residual must be torch\.float32 \(2, 4\) as x is, got torch\.bfloat16",
    ),
    "sum's weight": (lambda: add_rms_norm(torch.ones(2, 4), torch.ones(2, 4), torch.ones(5)), r"add_rms_norm.*\(5,\)"),
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    utils = ("test_schema", "test_faketensor")
    strided = states(3, 5, 4, 16, dtype=dtype).transpose(1, 2)
    for x in (states(5, 16, dtype=dtype), strided):
        torch.library.opcheck(OPS.rms_norm.default, (x, None, 1e-6), test_utils=utils)
        torch.library.opcheck(OPS.rms_norm.default, (x, states(16), 1e-6), test_utils=utils)
        torch.library.opcheck(OPS.add_rms_norm.default, (x, x.clone(), states(16), 1e-6), test_utils=utils)


def test_traces_once_for_any_number_of_rows(fresh_dynamo):
    def both(x: Tensor, weight: Tensor) -> Tensor:
        normed, total = add_rms_norm(rms_norm(x, weight), x, weight)
        return normed + total

    compiled = torch.compile(both, backend="eager", fullgraph=True, dynamic=True)
    x, weight = states(7, 4, 16), states(16, seed=1)
    compiled(x, weight)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(x[:5], weight), both(x[:5], weight))
