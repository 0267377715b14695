"""Rotary embeddings become one operator; what only looks like one is not touched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm_rotary
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary

from gemma_npu_compile.passes.fuse_rotary import fuse_rotary

aten, ops = torch.ops.aten, torch.ops.gemma_npu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
CONFIG = Gemma4TextConfig(
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    head_dim=16,
    global_head_dim=32,
    hidden_size=64,
)
EMBEDDING = Gemma4TextRotaryEmbedding(CONFIG)
WIDTHS = {"sliding_attention": 16, "full_attention": 32}


def count(gm, *targets) -> int:
    return sum(len(gm.graph.find_nodes(op="call_function", target=target)) for target in targets)


def states(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tables(kind: str, rows: int, q_len: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin ``(rows, q_len, head_dim)`` of transformers' own embedding; the full one turns a quarter."""
    positions = torch.arange(rows * q_len).view(rows, q_len) * 7 + 3
    cos, sin = EMBEDDING(torch.empty(0, dtype=dtype), positions, kind)
    return cos.clone(), sin.clone()


def inputs(q_len: int = 4, heads: int = 4, kind: str = "sliding_attention", dtype: torch.dtype = torch.float32):
    return states(3, q_len, heads, WIDTHS[kind], dtype=dtype), *tables(kind, 3, q_len, dtype)


def trace(fn: Callable[..., Any], *args: Tensor):
    """A trace with a symbolic number of rows (the first axis), all else as given."""
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(arg: Tensor) -> Tensor:
        sizes = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (arg.dim() - 1)
        return mode.from_tensor(arg, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    return make_fx(fn)(*map(fake, args))


def same(actual: Any, expected: Any, scale: float) -> None:
    """float32 keeps its bits. Half precision is rounded once instead of three times: each product lost half a unit."""
    for a, b in zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]:
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=3 * UNIT.get(b.dtype, 0.0) * scale)


def fuse(gm, *args: Tensor):
    """Run the pass twice; no guard may be added, numbers stay as :func:`same` says."""
    expected = gm(*[arg.clone() for arg in args])
    value = next(node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder")
    before = len(value.fake_mode.shape_env.guards)
    result = fuse_rotary(gm)
    assert fuse_rotary(gm).changed == 0
    gm.graph.lint()
    gm.recompile()
    assert len(value.fake_mode.shape_env.guards) == before
    same(gm(*args), expected, 2 * args[0].abs().max().item())
    return result


def rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


@settings(max_examples=25)
@given(
    kind=st.sampled_from(list(WIDTHS)),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(2, 5),
    q_len=st.integers(1, 5),
    heads=st.integers(1, 5),
    seed=st.integers(0, 999),
)
def test_the_function_of_gemma_4(kind, dtype, rows, q_len, heads, seed):
    x = states(rows, q_len, heads, WIDTHS[kind], dtype=dtype, seed=seed)
    cos, sin = tables(kind, rows, q_len, dtype)
    gm = trace(lambda x, cos, sin: apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=2), x, cos, sin)
    result = fuse(gm, x, cos, sin)
    assert (result.changed, dict(result.left)) == (1, {})
    (node,) = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert node.target is ops.rotary.default
    assert list(node.args) == gm.graph.find_nodes(op="placeholder")
    assert (str(node.meta["val"].shape), node.meta["val"].dtype) == (str(node.args[0].meta["val"].shape), dtype)
    more = torch.cat([x, x]), torch.cat([cos, cos]), torch.cat([sin, sin])
    same(gm(*more), apply_rotary_pos_emb(*more, unsqueeze_dim=2), 2 * x.abs().max().item())


def test_half_precision_is_rounded_once():
    x, cos, sin = inputs(dtype=torch.bfloat16)
    gm = trace(lambda x, cos, sin: apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=2), x, cos, sin)
    thrice = gm(x, cos, sin)
    assert fuse_rotary(gm).changed == 1
    gm.recompile()
    once = gm(x, cos, sin)
    exact = apply_rotary_pos_emb(x.double(), cos.double(), sin.double(), unsqueeze_dim=2)
    assert not torch.equal(once, thrice)
    assert (once - exact).abs().sum() < (thrice - exact).abs().sum()


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "chunk": lambda x, c, s: x * c.unsqueeze(2) + rotate_half(x) * s.unsqueeze(2),
    "terms swapped": lambda x, c, s: rotate_half(x) * s.unsqueeze(2) + x * c.unsqueeze(2),
    "factors swapped": lambda x, c, s: c.unsqueeze(2) * x + s.unsqueeze(2) * rotate_half(x),
    "axis from the end": lambda x, c, s: x * c.unsqueeze(-2) + rotate_half(x) * s.unsqueeze(-2),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_same_rotation(form):
    args = inputs()
    gm = trace(FORMS[form], *args)
    result = fuse(gm, *args)
    assert (result.changed, dict(result.left)) == (1, {})
    (node,) = gm.graph.find_nodes(op="call_function", target=ops.rotary.default)
    assert list(node.args) == gm.graph.find_nodes(op="placeholder")


def test_tokens_without_a_batch_axis():
    x, cos, sin = (each.flatten(0, 1) for each in inputs())
    gm = trace(lambda x, cos, sin: apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=1), x, cos, sin)
    assert fuse(gm, x, cos, sin).changed == 1
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [ops.rotary.default]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("heads", [(4, 2), (1, 1)])
def test_heads_before_positions(heads, q_len, dtype):
    """Llama's layout: two views around the operator, and what comes after still is a view."""

    def attention(q, k, cos, sin):
        query, key = (x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in (q, k))
        query, key = llama_rotary(query, key, cos, sin)
        return query.transpose(1, 2).flatten(2), key

    q, k = (states(3, q_len, 16 * n, dtype=dtype, seed=n) for n in heads)
    args = q, k, *tables("sliding_attention", 3, q_len, dtype)
    gm = trace(attention, *args)
    copies = count(gm, aten.clone.default)
    result = fuse(gm, *args)
    assert (result.changed, dict(result.left)) == (2, {})
    assert (count(gm, ops.rotary.default), count(gm, aten.clone.default)) == (2, copies)
    for node in gm.graph.find_nodes(op="call_function", target=ops.rotary.default):
        assert tuple(node.args[0].meta["val"].shape[1:]) in [(q_len, n, 16) for n in heads]


def test_heads_before_positions_in_contiguous_memory():
    """The operator's result is put back in the order later views were traced with."""
    x, cos, sin = inputs()
    args = x.transpose(1, 2).contiguous(), cos, sin
    gm = trace(lambda x, cos, sin: apply_rotary_pos_emb(x, cos, sin, 1).view(-1, 4 * 4 * 16), *args)
    assert fuse(gm, *args).changed == 1
    assert (count(gm, ops.rotary.default), count(gm, aten.clone.default)) == (1, 1)


def test_tables_shared_by_query_and_key_stay_one():
    q, (k, cos, sin) = states(3, 4, 2, 16), inputs()

    def both(q, k, cos, sin):
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        return tuple(x * cos + rotate_half(x) * sin for x in (q, k))

    gm = trace(both, q, k, cos, sin)
    assert fuse(gm, q, k, cos, sin).changed == 2
    nodes = gm.graph.find_nodes(op="call_function", target=ops.rotary.default)
    assert [node.args[1:] for node in nodes] == [tuple(gm.graph.find_nodes(op="placeholder")[2:])] * 2


def _split(x, cos, sin):
    turned, rest = x.split([8, 8], -1)
    cos, sin = cos[..., :8].unsqueeze(2), sin[..., :8].unsqueeze(2)
    return torch.cat((turned * cos + rotate_half(turned) * sin, rest), -1)


def _sliced(x, cos, sin):
    turned, rest = x[..., :4], x[..., 4:]
    cos, sin = cos[..., :4].unsqueeze(2), sin[..., :4].unsqueeze(2)
    return torch.cat((turned * cos + rotate_half(turned) * sin, rest), -1)


def _turned_read(x, cos, sin):
    turned = rotate_half(x)
    return x * cos.unsqueeze(2) + turned * sin.unsqueeze(2), turned


def _product_read(x, cos, sin):
    product = x * cos.unsqueeze(2)
    return product + rotate_half(x) * sin.unsqueeze(2), product


def _with(turn: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, cos, sin: x * cos.unsqueeze(2) + turn(x) * sin.unsqueeze(2)


def _halves(sign_left: int, sign_right: int, swap: bool) -> Callable[[Tensor], Tensor]:
    def turn(x):
        parts = [(-p if sign < 0 else p) for p, sign in zip(x.chunk(2, -1), (sign_left, sign_right), strict=True)]
        return torch.cat(parts[::-1] if swap else parts, -1)

    return turn


OTHER = "other halves or signs than cat(-x2, x1)"
APART = "not the halves of one value"
SUM = "not a sum of two products"
TABLES = "cos and sin are not expanded over the heads"
LEFT: dict[str, tuple[Callable[..., Any], str]] = {
    "cat(x2, -x1)": (_with(_halves(-1, 1, True)), OTHER),
    "cat(-x2, -x1)": (_with(_halves(-1, -1, True)), OTHER),
    "cat(-x1, x2)": (_with(_halves(-1, 1, False)), OTHER),
    "cat(x1, -x2)": (_with(_halves(1, -1, False)), OTHER),
    "uneven": (_with(lambda x: torch.cat((-x[..., 4:], x[..., :4]), -1)), APART),
    "interleaved": (_with(lambda x: torch.cat((-x[..., 1::2], x[..., ::2]), -1)), APART),
    "halves of two values": (_with(lambda x: torch.cat((-(x + 1)[..., 8:], x[..., :8]), -1)), APART),
    "turned another value": (_with(lambda x: rotate_half(x * 2)), SUM),
    "difference": (lambda x, c, s: x * c.unsqueeze(2) - rotate_half(x) * s.unsqueeze(2), SUM),
    "scaled": (lambda x, c, s: torch.add(x * c.unsqueeze(2), rotate_half(x) * s.unsqueeze(2), alpha=2), SUM),
    "no product": (lambda x, c, s: x + rotate_half(x) * s.unsqueeze(2), SUM),
    "turned alone": (lambda x, c, s: rotate_half(x), SUM),
    "turned is read": (_turned_read, "an intermediate is read elsewhere"),
    "a product is read": (_product_read, "an intermediate is read elsewhere"),
    "split and concatenation": (_split, "partial rotary embedding of a slice"),
    "slice and concatenation": (_sliced, "partial rotary embedding of a slice"),
    "scalar tables": (lambda x, c, s: x * 0.6 + rotate_half(x) * 0.8, TABLES),
    "table per head": (lambda x, c, s: x * c[:, :, :1].expand(3, 4, 4)[..., None] + rotate_half(x) * 0.5, TABLES),
    "different axes": (lambda x, c, s: x * c.unsqueeze(2) + rotate_half(x) * s.unsqueeze(1), TABLES),
    "over rows": (lambda x, c, s: x * c.unsqueeze(0)[:, 0] + rotate_half(x) * s.unsqueeze(0)[:, 0], TABLES),
    "one row of tables": (
        lambda x, c, s: x * c[:1].unsqueeze(2) + rotate_half(x) * s[:1].unsqueeze(2),
        "cos and sin are broadcast over rows or positions",
    ),
    "double": (
        lambda *args: apply_rotary_pos_emb(*[a.double() for a in args], 2),
        "torch.float64 in, torch.float64 out",
    ),
    "float32 tables": (
        lambda x, c, s: apply_rotary_pos_emb(x.bfloat16(), c, s, 2),
        "torch.bfloat16 in, torch.float32 out",
    ),
    "layout": (
        lambda x, c, s: apply_rotary_pos_emb(x.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0), c, s, 2),
        "the result is laid out in no order the operator gives",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_and_why(name):
    fn, reason = LEFT[name]
    args = inputs()
    gm = trace(fn, *args)
    nodes = [node.name for node in gm.graph.nodes]
    result = fuse(gm, *args)
    assert (result.changed, dict(result.left)) == (0, {reason: 1})
    assert [node.name for node in gm.graph.nodes] == nodes


def test_interleaved_rotary_of_glm_is_no_candidate_or_left():
    x, cos, sin = inputs()
    args = x.transpose(1, 2).contiguous(), cos, sin
    gm = trace(lambda x, cos, sin: glm_rotary(x, x, cos, sin)[0], *args)
    assert fuse(gm, *args).changed == 0
    assert count(gm, ops.rotary.default) == 0


def test_concatenations_that_are_no_rotation():
    gm = trace(lambda x: (torch.cat((x, x), -1), torch.cat((-x, x, x), -1), torch.cat((-x, x), 0)), inputs()[0])
    result = fuse(gm, inputs()[0])
    assert (result.changed, dict(result.left)) == (0, {})


def test_a_value_written_in_between_is_not_read_late():
    def fn(x, cos, sin):
        turned = rotate_half(x) * sin.unsqueeze(2)
        straight = x * cos.unsqueeze(2)
        x.add_(1.0)
        return straight + turned

    args = inputs()
    result = fuse(trace(fn, *args), *args)
    assert (result.changed, dict(result.left)) == (0, {"it reads a value the graph writes to": 1})
