"""RMSNorms become one operator with the same bits; what is not quite the same arithmetic stays, with a reason."""

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import gemma_npu_compile as gnc
from gemma_npu_compile.backend import Backend
from gemma_npu_compile.passes import pipeline
from gemma_npu_compile.passes.fuse_gated_gelu import fuse_gated_gelu
from gemma_npu_compile.passes.fuse_rms_norm import fuse_rms_norm
from gemma_npu_compile.passes.fuse_rotary import fuse_rotary
from gemma_npu_compile.passes.fx import where
from gemma_npu_compile.report import collect

aten, ops = torch.ops.aten, torch.ops.gemma_npu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RMS, ADD = ops.rms_norm.default, ops.add_rms_norm.default


def count(gm, *targets) -> int:
    return sum(len(gm.graph.find_nodes(op="call_function", target=target)) for target in targets)


def states(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def trace(fn: Callable[..., Any], *args: Tensor):
    """A trace that holds for any number of rows."""
    return make_fx(fn, tracing_mode="symbolic")(*args)


def module_fn(module: torch.nn.Module) -> Callable[..., Any]:
    """The module as a function of its input and its parameters, which AOT makes inputs too."""
    names = [name for name, _ in module.named_parameters()]
    return lambda x, *weights: functional_call(module, dict(zip(names, weights, strict=True)), (x,))


def guards(gm) -> list[str]:
    values = [node.meta["val"] for node in gm.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    return [str(guard.expr) for guard in values[0].fake_mode.shape_env.guards]


def fuse(gm, *args: Tensor):
    """Run the pass twice; results must keep their bits, shapes and meta values, and no guard may be added."""
    inputs = [arg.clone() for arg in args]
    expected, before = gm(*inputs), guards(gm)
    result = fuse_rms_norm(gm)
    again = fuse_rms_norm(gm)
    gm.graph.lint()
    gm.recompile()
    assert again.changed == 0
    assert guards(gm) == before
    actual = gm(*args)
    pairs = zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    return result


def plain(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@settings(max_examples=15)
@given(
    dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from([None, *DTYPES]),
    lead=st.lists(st.integers(2, 5), min_size=1, max_size=3),
    width=st.integers(6, 200),
    eps=st.sampled_from([1e-6, 1e-3]),
    seed=st.integers(0, 999),
)
def test_the_module_becomes_one_operator(dtype, weight_dtype, lead, width, eps, seed):
    x = states(*lead, width, dtype=dtype, seed=seed)
    module = Gemma4RMSNorm(width, eps, with_scale=weight_dtype is not None)
    weights = [] if weight_dtype is None else [states(width, dtype=weight_dtype, seed=seed + 1)]
    gm = trace(module_fn(module), x, *weights)
    result = fuse(gm, x, *weights)
    assert (result.changed, dict(result.left)) == (1, {})
    (node,) = gm.graph.find_nodes(op="call_function", target=RMS)
    assert node.args[2] == eps
    assert node.args[0].op == "placeholder", "the conversions to float32 and back are inside the operator"
    # A weight of another half precision than x is converted outside.
    converted = weight_dtype not in (None, torch.float32, dtype)
    assert len([n for n in gm.graph.nodes if n.op == "call_function"]) == 1 + converted
    assert (str(node.meta["val"].shape), node.meta["val"].dtype) == (
        str(node.args[0].meta["val"].shape),
        dtype,
    )
    more = torch.cat([x, x])
    assert torch.equal(gm(more, *weights), functional_call(module, dict(zip(["weight"], weights, strict=False)), more))


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rsqrt": lambda x, w: plain(x) * w,
    "weight first": lambda x, w: w * plain(x),
    "factors swapped": lambda x, w: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * x * w,
    "x times x": lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w,
    "last axis by number": lambda x, w: x * torch.rsqrt(x.pow(2).mean([2], keepdim=True) + 1e-6) * w,
    "F.rms_norm after AOT": lambda x, w: x * aten.add.Scalar(x.pow(2).mean([2], True), 1e-6).rsqrt() * w,
    "Llama, float32": lambda x, w: functional_call(LlamaRMSNorm(16), {"weight": w}, (x,)),
    "a number added is no residual": lambda x, w: plain(x + 1.0) * w,
    "converted weight": lambda x, w: plain(x) * w.bfloat16().float(),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_same_arithmetic(form):
    x, weight = states(3, 4, 16), states(16, seed=1)
    gm = trace(FORMS[form], x, weight)
    result = fuse(gm, x, weight)
    assert (result.changed, dict(result.left)) == (1, {})
    assert (count(gm, RMS), count(gm, aten.mul.Tensor, aten.rsqrt.default, aten.mean.dim)) == (1, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_plus_weight_is_a_weight(dtype):
    """Gemma 2 and 3 store the weight minus one: the sum stays, in float32, and is the operator's weight."""
    x, weight = states(3, 4, 16, dtype=dtype), states(16, dtype=dtype, seed=1)
    gm = trace(module_fn(Gemma2RMSNorm(16)), x, weight)
    assert fuse(gm, x, weight).changed == 1
    (node,) = gm.graph.find_nodes(op="call_function", target=RMS)
    assert node.args[1].target is aten.add.Tensor
    assert node.args[1].meta["val"].dtype == torch.float32
    assert count(gm, aten.mul.Tensor) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_weight_behind_the_rounding_stays_a_product(dtype):
    """Llama's order in half precision: the norm is exact without its weight, and would not be with it."""
    x, weight = states(30, 4, 16, dtype=dtype), states(16, dtype=dtype, seed=1)
    gm = trace(module_fn(LlamaRMSNorm(16)), x, weight)
    result = fuse(gm, x, weight)
    assert result.changed == 1
    assert dict(result.left) == {f"weight kept: it is multiplied after rounding to {dtype}": 1}
    (node,) = gm.graph.find_nodes(op="call_function", target=RMS)
    assert node.args[1] is None
    assert count(gm, aten.mul.Tensor) == 1


@pytest.mark.parametrize("result", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_of_another_type_are_converted_behind_a_float32_norm(dtype, result):
    x, weight = states(3, 16, dtype=dtype), states(16, seed=1)
    gm = trace(lambda x, w: (plain(x.float()) * w).to(result), x, weight)
    assert fuse(gm, x, weight).changed == 1
    (node,) = gm.graph.find_nodes(op="call_function", target=RMS)
    assert node.meta["val"].dtype == node.args[0].meta["val"].dtype == torch.float32
    assert count(gm, aten._to_copy.default) == (dtype != torch.float32) + (result != torch.float32)


@settings(max_examples=15)
@given(
    dtype=st.sampled_from(DTYPES),
    weighted=st.booleans(),
    read_later=st.booleans(),
    rows=st.integers(2, 5),
    width=st.integers(6, 100),
    seed=st.integers(0, 999),
)
def test_a_residual_sum_joins_the_norm(dtype, weighted, read_later, rows, width, seed):
    a, b = (states(rows, 3, width, dtype=dtype, seed=seed + i) for i in (0, 1))
    weights = [states(width, dtype=dtype, seed=seed + 2)] if weighted else []
    norm = module_fn(Gemma4RMSNorm(width, with_scale=weighted))

    def layer(a, b, *weights):
        total = a + b
        normed = norm(total, *weights)
        return (normed, total * 2) if read_later else normed

    gm = trace(layer, a, b, *weights)
    result = fuse(gm, a, b, *weights)
    assert (result.changed, dict(result.left)) == (1, {})
    (node,) = gm.graph.find_nodes(op="call_function", target=ADD)
    assert [arg.name for arg in node.args[:2]] == [n.name for n in gm.graph.nodes][:2]
    assert sorted(user.args[1] for user in node.users) == ([0, 1] if read_later else [0])
    assert [value.dtype for value in node.meta["val"]] == [dtype, dtype]
    assert count(gm, RMS, aten.add.Tensor, aten._to_copy.default, aten.mean.dim) == 0


KEPT: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "broadcast": (lambda a, b: plain(a + b[:1]), "it converts, broadcasts or scales"),
    "scaled": (lambda a, b: plain(torch.add(a, b, alpha=2)), "it converts, broadcasts or scales"),
    "converted": (lambda a, b: plain(a + b.bfloat16()), "it converts, broadcasts or scales"),
    "read before": (lambda a, b: (lambda s: (s.sin(), plain(s)))(a + b), "it is read before the norm"),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_sum_that_stays(name):
    fn, reason = KEPT[name]
    args = states(3, 4, 16), states(3, 4, 16, seed=1)
    gm = trace(fn, *args)
    result = fuse(gm, *args)
    assert (result.changed, count(gm, RMS), count(gm, ADD), count(gm, aten.add.Tensor)) == (1, 1, 0, 1)
    assert dict(result.left) == {f"residual sum kept: {reason}": 1}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [False, True])
def test_keys_and_values_of_one_projection(residual, dtype):
    """Full attention without a value projection: after common subexpressions both norms share their core."""

    def both(x, y, weight):
        wide = (x + y if residual else x).float()
        normed = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5)
        return (normed * weight.float()).to(dtype), normed.to(dtype)

    args = states(3, 2, 16, dtype=dtype), states(3, 2, 16, dtype=dtype, seed=1), states(16, dtype=dtype, seed=2)
    gm = trace(both, *args)
    result = fuse(gm, *args)
    assert (result.changed, dict(result.left)) == (2, {})
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    assert [n.target for n in nodes] == ([ADD, RMS] if residual else [RMS, RMS])
    assert len([n for n in nodes if n.args[-2] is not None]) == 1


def test_two_weights_on_one_core():
    args = states(3, 2, 16), states(3, 2, 16, seed=1), states(16, seed=2), states(16, seed=3)
    gm = trace(lambda x, y, a, b: (lambda n: (n * a, n * b))(plain(x + y)), *args)
    result = fuse(gm, *args)
    assert (result.changed, count(gm, RMS), count(gm, ADD)) == (2, 2, 0)
    assert dict(result.left) == {"residual sum kept: it is read before the norm": 1}


def test_two_norms_of_one_sum():
    """The first takes the sum along, the second reads it."""
    args = states(3, 2, 16), states(3, 2, 16, seed=1), states(16, seed=2), states(16, seed=3)
    gm = trace(lambda x, y, a, b: (lambda s: (plain(s) * a, plain(s, 1e-5) * b, s))(x + y), *args)
    result = fuse(gm, *args)
    assert (result.changed, count(gm, RMS), count(gm, ADD), dict(result.left)) == (2, 1, 1, {})
    (second,) = gm.graph.find_nodes(op="call_function", target=RMS)
    assert (second.args[0].target, second.args[0].args[1]) == (operator.getitem, 1)


def _shared_inverse(x, w):
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x * inverse * w, inverse


def _shared_square(x, w):
    square = x.pow(2)
    return x * torch.rsqrt(square.mean(-1, keepdim=True) + 1e-6) * w, square


LEFT: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "inverse": (_shared_inverse, "an intermediate is read elsewhere"),
    "square": (_shared_square, "an intermediate is read elsewhere"),
    "axis": (lambda x, w: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * w, "not over the last axis"),
    "two axes": (lambda x, w: x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 1e-6) * w, "not over the last"),
    "eps": (lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w[:1] ** 2) * w, "eps is not a number"),
    "other": (lambda x, w: (x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), "another value than it"),
    "double": (lambda x, w: plain(x.double()) * w.double(), "computed in torch.float64"),
    "half": (lambda x, w: plain(x.bfloat16()) * w.bfloat16(), "computed in torch.bfloat16"),
    "layout": (lambda x, w: plain(x.transpose(0, 1)) * w, "not laid out contiguously"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_and_why(name):
    fn, reason = LEFT[name]
    x, weight = states(3, 4, 16), states(16, seed=1)
    gm = trace(fn, x, weight)
    nodes = [node.name for node in gm.graph.nodes]
    result = fuse(gm, x, weight)
    assert (result.changed, [node.name for node in gm.graph.nodes]) == (0, nodes)
    assert [(reason in key, number) for key, number in result.left.items()] == [(True, 1)]


def test_a_weight_that_is_none_stays_a_product():
    """Other shapes than the last axis, and integers: the norm is fused, the product stays."""
    x = states(3, 4, 16)
    for other in (states(4, 16), states(1), torch.arange(16)):
        gm = trace(lambda x, w: plain(x) * w, x, other)
        result = fuse(gm, x, other)
        assert (result.changed, count(gm, RMS), count(gm, aten.mul.Tensor)) == (1, 1, 1)


def test_no_candidates():
    x = states(3, 4, 16)
    for fn in (
        lambda x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6),
        lambda x: x * torch.pow(x.abs().mean(-1, keepdim=True) + 1e-6, -0.5),
        lambda x: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6).nan_to_num(),
        lambda x: x * torch.pow(x.pow(2).mean(-1, keepdim=True) + 1e-6, 0.5),
    ):
        result = fuse(trace(fn, x), x)
        assert (result.changed, dict(result.left)) == (0, {})


@pytest.mark.parametrize("which", ["input", "term"])
def test_a_value_written_in_between_is_not_read_late(which):
    def fn(x, y, w):
        normed = plain(x + y if which == "term" else x)
        x.add_(1.0)
        return normed * w

    args = states(3, 4, 16), states(3, 4, 16, seed=1), states(16, seed=2)
    gm = trace(fn, *args)
    result = fuse(gm, *args)
    assert result.changed == (which == "term")
    (reason,) = result.left
    assert "a value the graph writes to" in reason
    assert count(gm, ADD) == 0


@pytest.fixture(scope="module")
def step(pair):
    """A compiled draft-plus-verify step of two layers per model, all three fusions in the pipeline."""
    before = "keep_writes_in_place", "remove_host_syncs", "declare_row_padding", "remove_no_ops"
    passes = {name: pipeline.PASSES[name] for name in (*before, "eliminate_common_subexpressions")}
    passes |= {"rms_norm": fuse_rms_norm, "rotary": fuse_rotary, "gated_gelu": fuse_gated_gelu}
    passes["bind_block_tables"] = pipeline.PASSES["bind_block_tables"]
    engine = gnc.Engine(*pair, 1, max_rows=3, max_model_len=96, block_size=16, compiled=False)
    state = engine.prefill([torch.arange(1, 4 + 9 * row) for row in range(3)])
    for row, length in zip(state.rows, state.lengths, strict=True):
        engine.cache.extend(row, length + 2)
    inputs = state.token, state.hidden, state.seq_len, engine.cache.block_tables(state.rows)
    gnc.mark_rows(*inputs)
    backend = Backend()
    run = torch.compile(engine.step, backend=backend, fullgraph=True, options={"platform": "cpu"})
    with pytest.MonkeyPatch.context() as patch, collect() as report:
        patch.setattr(pipeline, "PASSES", passes)
        run(*inputs)
    (graph,), (runner,) = report.graphs, backend._runners
    return SimpleNamespace(module=engine.step, run=run, inputs=inputs, report=graph, gm=runner.gm, backend=backend)


def test_every_norm_of_both_models_is_fused(step, pair):
    """One draft: each module of both models runs once. One sum per layer is normalised as it is."""
    target, assistant = (len([m for m in model.modules() if isinstance(m, Gemma4RMSNorm)]) for model in pair)
    assert (target, assistant) == (2 * 7 + 1, 2 * 5 + 1)
    record = next(r for r in step.report.passes if r.name == "rms_norm")
    assert (record.changed, dict(record.left)) == (target + assistant, {})
    assert count(step.gm, RMS, ADD) == target + assistant
    assert count(step.gm, ADD) == 4
    assert count(step.gm, aten.mean.dim, aten.rsqrt.default, aten.pow.Tensor_Scalar) == 0
    weightless = [n for n in step.gm.graph.nodes if n.target in (RMS, ADD) and n.args[-2] is None]
    assert len(weightless) == 2, "value norms of the target"


def test_every_rotation_and_gated_gelu_of_both_models_is_fused(step):
    """Queries of four layers, keys of the two layers that own some; four MLPs."""
    records = {r.name: r for r in step.report.passes}
    assert (records["rotary"].changed, dict(records["rotary"].left)) == (6, {})
    assert (records["gated_gelu"].changed, dict(records["gated_gelu"].left)) == (4, {})
    assert (count(step.gm, ops.rotary.default), count(step.gm, ops.gelu_mul.default)) == (6, 4)
    assert count(step.gm, aten.gelu.default, aten.neg.default) == 0


def test_the_fused_step_captured_gives_the_numbers_of_the_module(step):
    expected = step.module(*step.inputs)
    result = step.run(*step.inputs)
    assert step.report.fallbacks == {}
    for name, left, right in zip(expected._fields, result, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6, msg=name)


def test_fused_nodes_know_where_they_come_from(step):
    lines = [where(n) for n in step.gm.graph.nodes if str(n.target).startswith("gemma_npu.")]
    fused = [line for line in lines if any(name in line for name in ("rms_norm", "gelu_mul", "rotary"))]
    assert len(fused) == 26 + 6 + 4
    assert all("modeling_gemma4" in line for line in fused)
