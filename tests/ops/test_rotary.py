"""``rotary`` must be the rotation transformers applies, or every draft and every key is slightly wrong.

The tables come from transformers' own embedding module: the partial rotation of full-attention layers is the real one.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding, apply_rotary_pos_emb

from gemma_npu_compile.ops import rotary, rotary_qk
from gemma_npu_compile.ops.library import KERNELS

OPS = torch.ops.gemma_npu
CONFIG = Gemma4TextConfig(
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    head_dim=16,
    global_head_dim=32,
    hidden_size=64,
)
EMBEDDING = Gemma4TextRotaryEmbedding(CONFIG)
WIDTHS = {"sliding_attention": 16, "full_attention": 32}
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 0.015, torch.float16: 0.015}


def tables(kind: str, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin ``(tokens, head_dim)`` of positions 3, 10, 17, ..."""
    cos, sin = EMBEDDING(torch.empty(0, dtype=dtype), torch.arange(tokens)[None] * 7 + 3, kind)
    return cos[0].clone(), sin[0].clone()


def states(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    kind=st.sampled_from(list(WIDTHS)),
    dtype=st.sampled_from(list(TOLERANCES)),
    tokens=st.integers(0, 9),
    heads=st.integers(1, 5),
    seed=st.integers(0, 999),
)
def test_equals_transformers(kind: str, dtype: torch.dtype, tokens: int, heads: int, seed: int) -> None:
    x = states(tokens, heads, WIDTHS[kind], dtype=dtype, seed=seed)
    cos, sin = tables(kind, tokens, dtype)
    before = x.clone()
    result = rotary(x, cos, sin)
    exact = apply_rotary_pos_emb(x.float(), cos.float(), sin.float(), unsqueeze_dim=1)
    assert (result.dtype, result.shape) == (dtype, x.shape)
    torch.testing.assert_close(result.float(), exact, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    # One rounding, not one per product: within half a unit in the last place of the exact result.
    assert torch.equal(result, exact.to(dtype)) or dtype == torch.float32
    theirs = apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=1)
    torch.testing.assert_close(result, theirs, rtol=TOLERANCES[dtype], atol=2 * TOLERANCES[dtype])
    assert torch.equal(x, before)


def test_leading_batch_dimensions() -> None:
    x, (cos, sin) = states(2, 3, 4, 16), tables("sliding_attention", 6)
    flat = rotary(x.view(6, 4, 16), cos, sin)
    batched = rotary(x, cos.view(2, 3, 16), sin.view(2, 3, 16))
    assert torch.equal(batched, flat.view(2, 3, 4, 16))


def test_partial_rotary_tail_is_left_alone() -> None:
    """A quarter of a full-attention head turns; the rest (cos 1, sin 0) keeps its bits."""
    cos, sin = tables("full_attention", 5)
    still = (sin == 0).all(0)
    assert still.sum() == 24
    for dtype in TOLERANCES:
        x = states(5, 3, 32, dtype=dtype)
        result = rotary(x, cos.to(dtype), sin.to(dtype))
        assert torch.equal(result[..., still], x[..., still])
        assert (result[..., ~still] != x[..., ~still]).float().mean() > 0.9


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("heads", [(4, 1), (4, 4), (1, 3)])
def test_joint_form_equals_rotary_twice(heads: tuple[int, int], dtype: torch.dtype) -> None:
    query, key = (states(5, count, 16, dtype=dtype, seed=seed) for seed, count in enumerate(heads))
    cos, sin = tables("sliding_attention", 5, dtype)
    turned_query, turned_key = rotary_qk(query, key, cos, sin)
    assert torch.equal(turned_query, rotary(query, cos, sin))
    assert torch.equal(turned_key, rotary(key, cos, sin))


@pytest.mark.parametrize("form", ["rotary", "rotary_qk"])
def test_result_of_a_strided_input_is_contiguous(form: str) -> None:
    strided, (cos, sin) = states(3, 5, 16).transpose(0, 1), tables("sliding_attention", 5)
    arguments = (strided, cos, sin) if form == "rotary" else (strided, strided[:, :1], cos, sin)
    torch.library.opcheck(getattr(OPS, form).default, arguments, test_utils=("test_faketensor",))


def test_strided_input_gives_the_same_numbers() -> None:
    strided, (cos, sin) = states(3, 5, 16).transpose(0, 1), tables("sliding_attention", 5)
    assert torch.equal(rotary(strided, cos, sin), rotary(strided.contiguous(), cos, sin))


def test_out_writes_to_the_given_address() -> None:
    x, (cos, sin) = states(5, 3, 16, dtype=torch.bfloat16), tables("sliding_attention", 5, torch.bfloat16)
    out = torch.full_like(x, torch.nan)
    returned = KERNELS[OPS.rotary.default].run(x, cos, sin, out=out)
    assert returned.data_ptr() == out.data_ptr()
    assert torch.equal(out, rotary(x, cos, sin))


BAD_ARGUMENTS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]], str]] = {
    "odd head_dim": (lambda x, cos, sin: (x[..., :15], cos[..., :15], sin[..., :15]), r"\(5, 3, 15\)"),
    "vector": (lambda x, cos, sin: (x[0, 0], cos[0], sin[0]), r"\(16,\)"),
    "cos width": (lambda x, cos, sin: (x, cos[:, :8], sin), r"\(5, 8\)"),
    "sin width": (lambda x, cos, sin: (x, cos, sin[:, :8]), r"\(5, 8\)"),
    "broadcast tokens": (lambda x, cos, sin: (x, cos[:1], sin[:1]), r"\(1, 16\)"),
    "tables with heads": (lambda x, cos, sin: (x, cos[:, None], sin[:, None]), r"\(5, 1, 16\)"),
}


@pytest.mark.parametrize("fake", [False, True], ids=["cpu", "fake"])
@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments(name: str, fake: bool) -> None:
    change, message = BAD_ARGUMENTS[name]
    arguments = change(states(5, 3, 16), *tables("sliding_attention", 5))
    if fake:
        mode = FakeTensorMode()
        arguments = tuple(mode.from_tensor(t) for t in arguments)
    with pytest.raises(ValueError, match=f"rotary.*{message}"):
        rotary(*arguments)
    x, *rest = arguments
    with pytest.raises(ValueError, match="rotary"):
        rotary_qk(x, x, *rest)


def test_joint_form_checks_the_key_too() -> None:
    cos, sin = tables("sliding_attention", 5)
    with pytest.raises(ValueError, match=r"\(4, 1, 16\)"):
        rotary_qk(states(5, 3, 16), states(4, 1, 16), cos, sin)


@pytest.mark.parametrize("name", ["default", "qk"])
def test_opcheck(name: str) -> None:
    x, (cos, sin) = states(5, 3, 16), tables("sliding_attention", 5)
    utils = ("test_schema", "test_faketensor")
    if name == "qk":
        torch.library.opcheck(OPS.rotary_qk.default, (x, states(5, 1, 16), cos, sin), test_utils=utils)
    else:
        torch.library.opcheck(OPS.rotary.default, (x, cos, sin), test_utils=utils)


def test_traces_once_for_any_number_of_tokens(fresh_dynamo: None) -> None:
    compiled = torch.compile(rotary_qk, backend="eager", fullgraph=True, dynamic=True)
    query, key, (cos, sin) = states(7, 4, 16), states(7, 2, 16), tables("sliding_attention", 7)
    compiled(query, key, cos, sin)
    with torch.compiler.set_stance("fail_on_recompile"):
        result = compiled(query[:5], key[:5], cos[:5], sin[:5])
    assert torch.equal(result[0], rotary(query[:5], cos[:5], sin[:5]))
    assert torch.equal(result[1], rotary(key[:5], cos[:5], sin[:5]))
