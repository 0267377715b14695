"""Emulated norms, rotary, gated GELU and cache writes: numbers of the documents, limits of the documents."""

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm, apply_rotary_pos_emb

from gemma_npu_compile.ops import npu, rotary, store_kv
from gemma_npu_compile.ops.library import KERNELS

OPS = torch.ops.npu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def states(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


SCHEMAS = {
    "npu_rms_norm": [("input", None), ("gamma", None), ("epsilon", 1e-06)],
    "npu_add_rms_norm": [("x1", None), ("x2", None), ("gamma", None), ("epsilon", 1e-06)],
    "npu_rotary_mul": [("input", None), ("r1", None), ("r2", None), ("rotary_mode", "half"), ("rotate", None)],
    "npu_geglu": [("input", None), ("dim", -1), ("approximate", 1), ("activate_left", False)],
    "npu_scatter_pa_kv_cache": [
        *((name, None) for name in ("key", "value", "key_cache", "value_cache", "slot_mapping")),
        *((name, None) for name in ("compress_lens", "compress_seq_offsets", "seq_lens")),
        ("cache_mode", "PA_NZ"),
    ],
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_those_of_the_wheel(name: str) -> None:
    schema = getattr(OPS, name).default._schema
    assert [(a.name, a.default_value) for a in schema.arguments] == SCHEMAS[name]
    written = [a.name for a in schema.arguments if a.is_write]
    assert written == (["key_cache", "value_cache"] if "scatter" in name else [])


def test_nothing_is_defined_where_torch_npu_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    before, find = dict(KERNELS), importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: object() if name == "torch_npu" else find(name, *a)
    )
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    spec = importlib.util.spec_from_file_location("npu_beside_torch_npu", npu.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (module.EMULATED, npu.EMULATED) == (False, True)
    assert before == KERNELS


# ---- norms


@given(
    dtype=st.sampled_from(DTYPES),
    lead=st.lists(st.integers(0, 4), max_size=3),
    width=st.integers(1, 40),
    wide_gamma=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rms_norm_equals_transformers(
    dtype: torch.dtype, lead: list[int], width: int, wide_gamma: bool, seed: int
) -> None:
    x = states(*lead, width, dtype=dtype, seed=seed) * 3
    module = Gemma4RMSNorm(width, eps=1e-3)
    module.weight.data = states(width, seed=seed + 1).to(torch.float32 if wide_gamma else dtype)
    before = x.clone()
    y, rstd = OPS.npu_rms_norm(x, module.weight.data, 1e-3)
    assert torch.equal(y, module(x))  # bit for bit: weight in float32, one rounding
    assert (y.dtype, y.shape, rstd.dtype, rstd.shape) == (dtype, x.shape, torch.float32, (*lead, 1))
    exact = 1 / np.sqrt((x.double().numpy() ** 2).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(rstd.numpy(), exact, rtol=1e-5)
    assert torch.equal(x, before)


def test_rms_norm_of_several_axes() -> None:
    """The document's example: x (2, 3, 4, 8) and gamma (4, 8) give an rstd of (2, 3, 1, 1)."""
    x, gamma = states(2, 3, 4, 8), states(4, 8, seed=1)
    y, rstd = OPS.npu_rms_norm(x, gamma)
    exact = x.double() / torch.sqrt((x.double() ** 2).mean((-2, -1), keepdim=True) + 1e-6) * gamma
    assert rstd.shape == (2, 3, 1, 1)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)


@given(dtype=st.sampled_from(DTYPES), rows=st.integers(1, 5), width=st.integers(2, 40), seed=st.integers(0, 99))
def test_add_rms_norm_rounds_the_sum_first(dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    x1, x2 = states(rows, width, dtype=dtype, seed=seed), states(rows, width, dtype=dtype, seed=seed + 1)
    gamma = states(width, dtype=dtype, seed=2)
    y, rstd, total = OPS.npu_add_rms_norm(x1, x2, gamma, 1e-5)
    assert torch.equal(total, x1 + x2)
    expected, factor = OPS.npu_rms_norm(x1 + x2, gamma, 1e-5)
    assert torch.equal(y, expected)
    assert torch.equal(rstd, factor)


def test_an_unrounded_sum_would_be_seen() -> None:
    x1, x2, gamma = (states(8, 64, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    y, _, _ = OPS.npu_add_rms_norm(x1, x2, gamma[0], 1e-5)
    unrounded, _ = OPS.npu_rms_norm(x1.float() + x2.float(), gamma[0].float(), 1e-5)
    assert not torch.equal(y, unrounded.bfloat16())


# ---- rotary

BNSD, TND = (2, 3, 5, 8), (6, 3, 8)
FORMS = {
    # layout: sizes of x, and of tables that are allowed when halves are rotated; the first also when interleaved
    "BNSD": (BNSD, [(1, 1, 5, 8), (2, 1, 5, 8), (2, 3, 5, 8)]),
    "BSND": ((2, 5, 3, 8), [(1, 5, 1, 8), (2, 5, 1, 8), (2, 5, 3, 8)]),
    "SBND": ((5, 2, 3, 8), [(5, 1, 1, 8), (5, 2, 1, 8)]),
    "TND": (TND, [(6, 1, 8), (6, 3, 8)]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", FORMS)
def test_rotary_half_equals_transformers(layout: str, dtype: torch.dtype) -> None:
    size, tables = FORMS[layout]
    x = states(*size, dtype=dtype)
    for table in tables:
        cos, sin = states(*table, dtype=dtype, seed=1), states(*table, dtype=dtype, seed=2)
        result = OPS.npu_rotary_mul(x, cos, sin)
        exact = apply_rotary_pos_emb(*(each.float() for each in (x, cos, sin)), unsqueeze_dim=0)[0]
        assert torch.equal(result, exact.to(dtype))


@pytest.mark.parametrize("layout", FORMS)
def test_rotary_interleaved_turns_neighbours(layout: str) -> None:
    """Neighbours are real and imaginary part of a number that is turned by its angle."""
    size, (table, *others) = FORMS[layout]
    x, angle = states(*size), states(*table[:-1], 4, seed=1)
    cos, sin = (each.repeat_interleave(2, -1) for each in (angle.cos(), angle.sin()))
    turned = torch.view_as_complex(x.double().view(*size[:-1], 4, 2)) * torch.polar(
        torch.ones(()).double(), angle.double()
    )
    result = OPS.npu_rotary_mul(x, cos, sin, "interleave")
    torch.testing.assert_close(result.double(), torch.view_as_real(turned).flatten(-2), rtol=1e-5, atol=1e-6)
    for other in others:
        with pytest.raises(npu.AclnnError, match="161002: npu_rotary_mul: r1 and r2 of"):
            OPS.npu_rotary_mul(x, states(*other), states(*other), "interleave")


def test_rotary_equals_the_dialect_bit_for_bit() -> None:
    x, cos, sin = states(2, 5, 3, 8, dtype=torch.bfloat16), *(states(2, 5, 8, seed=s).bfloat16() for s in (1, 2))
    assert torch.equal(OPS.npu_rotary_mul(x, cos.unsqueeze(-2), sin.unsqueeze(-2)), rotary(x, cos, sin))


def test_rotary_rounds_wide_tables_to_the_dtype_of_x() -> None:
    x, cos, sin = states(2, 5, 3, 8, dtype=torch.bfloat16), states(1, 5, 1, 8, seed=1), states(1, 5, 1, 8, seed=2)
    expected = OPS.npu_rotary_mul(x, cos.bfloat16(), sin.bfloat16())
    assert torch.equal(OPS.npu_rotary_mul(x, cos, sin), expected)
    assert not torch.equal(OPS.npu_rotary_mul(x.float(), cos, sin).bfloat16(), expected)


# ---- gated GELU


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    axis=st.integers(-4, 3),
    approximate=st.sampled_from([0, 1]),
    left=st.booleans(),
)
def test_geglu(dtype: torch.dtype, shape: list[int], axis: int, approximate: int, left: bool) -> None:
    axis = max(-len(shape), min(axis, len(shape) - 1))
    shape[axis] *= 2
    x = states(*shape, dtype=dtype) * 2
    halves = [half.float() for half in x.chunk(2, axis)]
    active, other = halves if left else halves[::-1]
    gelu = F.gelu(active, approximate="tanh" if approximate else "none")
    found = OPS.npu_geglu(x, axis, approximate, left)
    for result, exact in zip(found, (gelu * other, gelu), strict=True):
        assert result.is_contiguous()
        assert torch.equal(result, exact.to(dtype))


def test_geglu_activates_the_right_half_by_default() -> None:
    y, gelu = OPS.npu_geglu(torch.tensor([[2.0, 3.0, -50.0, 50.0]]))
    assert (y.tolist(), gelu.tolist()) == ([[0.0, 150.0]], [[0.0, 50.0]])
    y, gelu = OPS.npu_geglu(torch.tensor([[-50.0, 50.0, 2.0, 3.0]]), activate_left=True)
    assert (y.tolist(), gelu.tolist()) == ([[0.0, 150.0]], [[0.0, 50.0]])


# ---- cache writes


@given(
    slots=st.lists(st.integers(0, 19), unique=True, max_size=20),
    index_type=st.sampled_from([torch.int32, torch.int64]),
    dtype=st.sampled_from(DTYPES),
    mode=st.sampled_from(["Norm", None]),
)
def test_scatter_writes_the_named_slots(
    slots: list[int], index_type: torch.dtype, dtype: torch.dtype, mode: str | None
) -> None:
    pools = [states(5, 4, 2, width, dtype=dtype, seed=width) for width in (8, 6)]
    before, addresses = [pool.clone() for pool in pools], [pool.data_ptr() for pool in pools]
    new = [states(len(slots), 2, width, dtype=dtype, seed=9) + 10 for width in (8, 6)]
    index = torch.tensor(slots, dtype=index_type)
    assert OPS.npu_scatter_pa_kv_cache(*new, *pools, index, cache_mode=mode) is None
    assert [pool.data_ptr() for pool in pools] == addresses
    for pool, old, tokens in zip(pools, before, new, strict=True):
        for slot in range(20):
            written = tokens[slots.index(slot)] if slot in slots else old[slot // 4, slot % 4]
            assert torch.equal(pool[slot // 4, slot % 4], written)


def test_scatter_equals_the_dialect() -> None:
    new, slots = [states(3, 2, 8, seed=s) for s in (1, 2)], torch.tensor([19, 0, 7], dtype=torch.int32)
    mine, theirs = ([states(5, 4, 2, 8, seed=s) for s in (3, 4)] for _ in range(2))
    OPS.npu_scatter_pa_kv_cache(*new, *mine, slots, cache_mode="Norm")
    store_kv(*new, *theirs, slots)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("slot", [-1, 20])
def test_scatter_out_of_range(slot: int) -> None:
    pools = [states(5, 4, 2, 8), states(5, 4, 2, 8, seed=1)]
    before = [pool.clone() for pool in pools]
    with pytest.raises(IndexError):
        OPS.npu_scatter_pa_kv_cache(
            states(2, 2, 8), states(2, 2, 8), *pools, torch.tensor([slot, 3]), cache_mode="Norm"
        )
    assert all(torch.equal(a, b) for a, b in zip(pools, before, strict=True))


# ---- what is refused


def scatter(**changes: Any) -> Any:
    new, cache = torch.zeros(2, 2, 8), torch.zeros(5, 4, 2, 8)
    operands = {"key": new, "value": new, "key_cache": cache, "value_cache": cache.clone()}
    operands |= {"slot_mapping": torch.tensor([1, 3]), "cache_mode": "Norm", **changes}
    positional = [operands.pop(name) for name in ("key", "value", "key_cache", "value_cache", "slot_mapping")]
    return OPS.npu_scatter_pa_kv_cache(*positional, **operands)


X, GAMMA = torch.zeros(2, 4, 8), torch.zeros(8)
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "gamma": (
        lambda: OPS.npu_rms_norm(X, torch.zeros(4)),
        r"gamma \(4,\) must be the last dimensions of x \(2, 4, 8\)",
    ),
    "gamma of a front axis": (lambda: OPS.npu_rms_norm(X, torch.zeros(2, 4)), r"gamma \(2, 4\) must be the last"),
    "more gamma than x": (lambda: OPS.npu_rms_norm(GAMMA, X), r"gamma \(2, 4, 8\) must be the last dimensions"),
    "gamma dtype": (lambda: OPS.npu_rms_norm(X, GAMMA.half()), "gamma is torch.float16 for x of torch.float32"),
    "integers": (lambda: OPS.npu_rms_norm(X.int(), GAMMA), "x is torch.int32"),
    "nine dimensions": (lambda: OPS.npu_rms_norm(torch.zeros([1] * 8 + [8]), GAMMA), "of 1 to 8 dimensions"),
    "add: wide gamma": (lambda: OPS.npu_add_rms_norm(X.half(), X.half(), GAMMA), "must be torch.float16"),
    "add: shapes": (lambda: OPS.npu_add_rms_norm(X, X[:1], GAMMA), r"x2 is torch.float32 \(1, 4, 8\)"),
    "add: dtypes": (lambda: OPS.npu_add_rms_norm(X, X.half(), GAMMA), "x2 is torch.float16"),
    "add: empty": (lambda: OPS.npu_add_rms_norm(X[:0], X[:0], GAMMA), r"x1 \(0, 4, 8\) is empty"),
    "rotary mode": (lambda: OPS.npu_rotary_mul(X, X, X, "quarter"), "rotary_mode is 'quarter'"),
    "rotate": (lambda: OPS.npu_rotary_mul(X, X, X, "half", torch.zeros(8, 8)), "rotate is not emulated"),
    "tables differ": (lambda: OPS.npu_rotary_mul(X, X, X[:, :1]), r"r1 is \(2, 4, 8\), r2 \(2, 1, 8\)"),
    "odd head": (lambda: OPS.npu_rotary_mul(*[torch.zeros(2, 4, 7)] * 3), "the last even and below 896"),
    "wide head": (lambda: OPS.npu_rotary_mul(*[torch.zeros(2, 4, 896)] * 3), "the last even and below 896"),
    "two dimensions": (lambda: OPS.npu_rotary_mul(*[torch.zeros(4, 8)] * 3), "must have 3 or 4 dimensions"),
    "one table for all": (
        lambda: OPS.npu_rotary_mul(torch.zeros(BNSD), *[torch.zeros(1, 1, 1, 8)] * 2),
        r"r1 and r2 of \(1, 1, 1, 8\) do not fit x \(2, 3, 5, 8\)",
    ),
    "tables of a batch alone": (lambda: OPS.npu_rotary_mul(torch.zeros(BNSD), *[torch.zeros(1, 3, 5, 8)] * 2), "fit"),
    "half a table": (lambda: OPS.npu_rotary_mul(X, *[torch.zeros(2, 1, 4)] * 2), r"\(2, 1, 4\) do not fit"),
    "a thousand heads": (
        lambda: OPS.npu_rotary_mul(torch.zeros(2, 1000, 2), *[torch.zeros(2, 1, 2)] * 2),
        "B and N below 1000",
    ),
    "rotary integers": (lambda: OPS.npu_rotary_mul(X.int(), X, X), "must be floating point"),
    "geglu: odd": (lambda: OPS.npu_geglu(torch.zeros(2, 7)), r"dim -1 of x \(2, 7\) must exist and be even"),
    "geglu: axis": (lambda: OPS.npu_geglu(X, 3), r"dim 3 of x"),
    "geglu: approximate": (lambda: OPS.npu_geglu(X, approximate=2), "approximate is 2"),
    "geglu: integers": (lambda: OPS.npu_geglu(X.int()), "x is torch.int32"),
    "NZ": (lambda: scatter(cache_mode="PA_NZ"), "cache_mode 'PA_NZ' is not emulated, only 'Norm'"),
    "compressed": (lambda: scatter(seq_lens=torch.tensor([1, 1])), "seq_lens is not emulated"),
    "flat caches": (lambda: scatter(key_cache=torch.zeros(20, 2, 8)), r"caches \(20, 2, 8\)"),
    "heads of the cache": (lambda: scatter(key_cache=torch.zeros(5, 4, 1, 8)), "must be .blocks, block_size"),
    "caches of different pools": (lambda: scatter(value_cache=torch.zeros(4, 4, 2, 8)), r"and \(4, 4, 2, 8\)"),
    "value heads": (lambda: scatter(value=torch.zeros(2, 1, 8)), r"value \(2, 1, 8\)"),
    "key of 4 dimensions": (lambda: scatter(key=torch.zeros(2, 1, 2, 8)), r"key \(2, 1, 2, 8\)"),
    "fewer slots": (lambda: scatter(slot_mapping=torch.tensor([1])), r"\(1,\) for key \(2, 2, 8\)"),
    "float slots": (lambda: scatter(slot_mapping=torch.zeros(2)), "slot_mapping is torch.float32"),
    "key dtype": (lambda: scatter(key=torch.zeros(2, 2, 8).half()), "dtypes differ: key torch.float16"),
    "strided key": (lambda: scatter(key=torch.zeros(2, 8, 2).transpose(1, 2)), r"key \(2, 2, 8\) must be contiguous"),
    "strided cache": (
        lambda: scatter(value_cache=torch.zeros(4, 5, 2, 8).transpose(0, 1)),
        "value_cache .* must be contiguous",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_device_refuses(name: str) -> None:
    call, message = REFUSALS[name]
    with pytest.raises(npu.AclnnError, match=message) as error:
        call()
    assert str(error.value).startswith("161002: npu_")
    assert error.value.code == 161002


def test_a_code_is_said_once() -> None:
    assert str(npu.AclnnError("561002: as quoted", 561002)) == "561002: as quoted"


# ---- traces and replays

CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "rms_norm": (OPS.npu_rms_norm.default, (states(5, 3, 8), states(8, seed=1), 1e-5)),
    "add_rms_norm": (OPS.npu_add_rms_norm.default, (states(5, 3, 8), states(5, 3, 8, seed=2), states(8, seed=1))),
    "rotary_mul": (OPS.npu_rotary_mul.default, (states(5, 3, 8), states(5, 1, 8, seed=1), states(5, 1, 8, seed=2))),
    "interleaved": (
        OPS.npu_rotary_mul.default,
        (states(5, 3, 8), states(5, 1, 8, seed=1), states(5, 1, 8, seed=2), "interleave"),
    ),
    "geglu": (OPS.npu_geglu.default, (states(5, 3, 8), -1, 1, True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_out_is_written_where_it_lies(name: str, dtype: torch.dtype) -> None:
    op, args = CALLS[name]
    args = tuple(arg.to(dtype) if isinstance(arg, Tensor) else arg for arg in args)
    expected = op(*args)
    single = isinstance(expected, Tensor)
    out = [torch.full_like(each, torch.nan) for each in ([expected] if single else expected)]
    addresses = [each.data_ptr() for each in out]
    KERNELS[op].check(*args)
    returned = KERNELS[op].run(*args, out=out[0] if single else tuple(out))
    assert [each.data_ptr() for each in ([returned] if single else returned)] == addresses
    assert all(torch.equal(a, b) for a, b in zip(out, [expected] if single else expected, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_strided_inputs_and_grad_mode(name: str) -> None:
    """These operators take views, and parameters outside no_grad."""
    op, args = CALLS[name]
    expected = op(*args)

    def strided(arg: Any) -> Any:
        return torch.stack([arg, arg], -1)[..., 0].requires_grad_() if isinstance(arg, Tensor) else arg

    found = op(*map(strided, args))
    for mine, theirs in zip(*((x,) if isinstance(x, Tensor) else x for x in (found, expected)), strict=True):
        assert mine.is_contiguous()
        assert torch.equal(mine.detach(), theirs)


@pytest.mark.parametrize("name", CALLS)
def test_traces_symbolically(name: str) -> None:
    op, args = CALLS[name]
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    graph = make_fx(lambda *xs: op(*xs, *args[len(xs) :]), tracing_mode="symbolic")(*tensors)
    (node,) = graph.graph.find_nodes(op="call_function", target=op)
    value = node.meta["val"]
    real = op(*args)
    for fake, result in zip(*((x,) if isinstance(x, Tensor) else x for x in (value, real)), strict=True):
        assert isinstance(fake.shape[0], torch.SymInt)
        assert (fake.dtype, fake.dim(), fake.shape[-1]) == (result.dtype, result.dim(), result.shape[-1])


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    op, args = CALLS[name]
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def test_scatter_opcheck_and_fake() -> None:
    args = states(3, 2, 8), states(3, 2, 8), states(5, 4, 2, 8), states(5, 4, 2, 8), torch.tensor([19, 0, 7])
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    op = OPS.npu_scatter_pa_kv_cache.default
    torch.library.opcheck(op, args, {"cache_mode": "Norm"}, test_utils=utils)
    mode = FakeTensorMode()
    assert op(*(mode.from_tensor(arg) for arg in args), cache_mode="Norm") is None


def test_fakes_enforce_no_limit() -> None:
    """A trace knows shapes only; limits are the kernel's, as with torch_npu's own meta kernels."""
    with FakeTensorMode():
        assert OPS.npu_rms_norm(torch.zeros(2, 8), torch.zeros(8).half())[0].shape == (2, 8)
        assert OPS.npu_rotary_mul(*[torch.zeros(2, 4, 900)] * 3).shape == (2, 4, 900)
        assert [each.shape for each in OPS.npu_geglu(torch.zeros(2, 8, 3), 1)] == [(2, 4, 3)] * 2
