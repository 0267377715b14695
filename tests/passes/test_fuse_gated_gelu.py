"""The gated GELU becomes one operator; halves of one tensor, gate first, are taken as they lie."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional as F
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextMLP

from gemma_npu_compile.passes.fuse_gated_gelu import fuse_gated_gelu, half

aten, ops = torch.ops.aten, torch.ops.gemma_npu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Half precision: the GELU is no longer rounded before the product, one unit in the last place at most."""


def count(gm, *targets) -> int:
    return sum(len(gm.graph.find_nodes(op="call_function", target=target)) for target in targets)


def states(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def trace(fn: Callable[..., Any], *args: Tensor):
    """A trace with a symbolic number of rows (the first axis of the first argument), all else as given."""
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(arg: Tensor) -> Tensor:
        rows = [DimDynamic.DYNAMIC if arg.shape[0] == args[0].shape[0] else DimDynamic.STATIC]
        sizes = rows + [DimDynamic.STATIC] * (arg.dim() - 1)
        return mode.from_tensor(arg, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    return make_fx(fn)(*map(fake, args))


def fuse(gm, *args: Tensor):
    """Run the pass twice; no guard may be added, dtypes, shapes and (to the stated tolerance) numbers stay."""
    inputs = [arg.clone() for arg in args]
    expected = gm(*inputs)
    value = next(node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder")
    before = len(value.fake_mode.shape_env.guards)
    result = fuse_gated_gelu(gm)
    assert fuse_gated_gelu(gm).changed == 0
    gm.graph.lint()
    gm.recompile()
    assert len(value.fake_mode.shape_env.guards) == before
    actual = gm(*args)
    for a, b in zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]:
        tolerance = TOLERANCE.get(b.dtype, 0.0)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * 1e-2)
    return result


def tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(2, 5),
    middle=st.lists(st.integers(1, 4), max_size=2),
    width=st.integers(1, 50),
    swapped=st.booleans(),
    seed=st.integers(0, 999),
)
def test_two_tensors(dtype, rows, middle, width, swapped, seed):
    gate, up = (states(rows, *middle, width, dtype=dtype, seed=seed + i) for i in (0, 1))
    gm = trace((lambda g, u: u * tanh(g)) if swapped else (lambda g, u: tanh(g) * u), gate, up)
    result = fuse(gm, gate, up)
    assert (result.changed, dict(result.left)) == (1, {})
    (node,) = gm.graph.find_nodes(op="call_function", target=ops.gelu_mul.default)
    assert [arg.name for arg in node.args] == [n.name for n in gm.graph.find_nodes(op="placeholder")]
    assert count(gm, aten.gelu.default, aten.mul.Tensor) == 0
    assert (str(node.meta["val"].shape), node.meta["val"].dtype) == (str(node.args[0].meta["val"].shape), dtype)
    more = torch.cat([gate, gate]), torch.cat([up, up])
    torch.testing.assert_close(gm(*more), tanh(more[0]) * more[1], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 1e-2)


HALVES: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "chunk": lambda x: x.chunk(2, -1),
    "split": lambda x: x.split([12, 12], dim=2),
    "slices": lambda x: (x[..., :12], x[..., 12:]),
    "negative slices": lambda x: (x[..., :-12], x[..., -12:]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", HALVES)
def test_halves_of_one_tensor(form, dtype):
    x = states(3, 4, 24, dtype=dtype)

    def fn(x):
        gate, up = HALVES[form](x)
        return tanh(gate) * up

    gm = trace(fn, x)
    assert fuse(gm, x).changed == 1
    (node,) = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert (node.target, node.args[0].op) == (ops.geglu.default, "placeholder")
    assert tuple(node.meta["val"].shape[1:]) == (4, 12)


NOT_HALVES: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "up first": lambda x: x.chunk(2, -1)[::-1],
    "the same half": lambda x: (x[..., :12], x[..., :12] + 0),
    "other axis": lambda x: (x[:, :2], x[:, 2:]),
    "quarters": lambda x: (x[..., :6], x[..., 6:12]),
    "overlapping": lambda x: (x[..., :12], x[..., 6:18]),
    "every other": lambda x: (x[..., 0::2], x[..., 1::2]),
    "a half and every other": lambda x: (x[..., ::2], x[..., 12:]),
    "the middle of three parts": lambda x: (x[..., :12], x.split([6, 12, 6], -1)[1]),
    "two tensors": lambda x: (x[..., :12], (x + 1)[..., 12:]),
}


@pytest.mark.parametrize("form", NOT_HALVES)
def test_what_is_no_gate_and_up_in_one_tensor(form):
    x = states(3, 4, 24)

    def fn(x):
        gate, up = NOT_HALVES[form](x)
        return tanh(gate) * up

    gm = trace(fn, x)
    assert fuse(gm, x).changed == 1
    assert (count(gm, ops.gelu_mul.default), count(gm, ops.geglu.default)) == (1, 0)


def test_half_names_the_value_and_the_side():
    gm = trace(lambda x: (x[..., :3], x[..., 3:], *x.chunk(2, -1), x[..., :2], x.t()), states(2, 6))
    outputs = next(iter(gm.graph.find_nodes(op="output"))).args[0]
    (x,) = gm.graph.find_nodes(op="placeholder")
    assert [half(node) for node in outputs] == [(x, 0), (x, 1), (x, 0), (x, 1), None, None]
    assert [half(x), half(3.0)] == [None, None]


def _read_elsewhere(x, y):
    gate = tanh(x)
    return gate * y, gate


LEFT: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "exact": (lambda x, y: F.gelu(x) * y, "gelu without the tanh approximation"),
    "read elsewhere": (_read_elsewhere, "gelu is read elsewhere"),
    "alone": (lambda x, y: tanh(x) + y, "gelu is not multiplied by a second tensor"),
    "number": (lambda x, y: tanh(x) * 2.0, "gelu is not multiplied by a second tensor"),
    "square": (lambda x, y: (lambda g: g * g)(tanh(x)), "gelu is not multiplied by a second tensor"),
    "broadcast": (lambda x, y: tanh(x) * y[:, :1], "gate and up differ in shape or dtype"),
    "dtype": (lambda x, y: tanh(x) * y.bfloat16(), "gate and up differ in shape or dtype"),
    "double": (lambda x, y: tanh(x.double()) * y.double(), "computed in float64, the operator computes in float32"),
    "layout": (lambda x, y: tanh(x.transpose(1, 2)) * y.transpose(1, 2), "the product is not laid out contiguously"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_and_why(name):
    fn, reason = LEFT[name]
    args = states(3, 4, 24), states(3, 4, 24, seed=1)
    gm = trace(fn, *args)
    nodes = [node.name for node in gm.graph.nodes]
    result = fuse(gm, *args)
    assert (result.changed, dict(result.left)) == (0, {reason: 1})
    assert [node.name for node in gm.graph.nodes] == nodes


def test_a_gate_written_in_between_is_not_read_late():
    def fn(gate, up):
        activated = tanh(gate)
        gate.add_(1.0)
        return activated * up

    args = states(3, 24), states(3, 24, seed=1)
    result = fuse(trace(fn, *args), *args)
    assert (result.changed, dict(result.left)) == (0, {"it reads a value the graph writes to": 1})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mlp_of_gemma_4(dtype):
    config = Gemma4TextConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    torch.manual_seed(0)
    mlp = Gemma4TextMLP(config, 0).to(dtype)
    names = [name for name, _ in mlp.named_parameters()]
    x, weights = states(3, 4, 32, dtype=dtype), [p.detach() for p in mlp.parameters()]
    gm = trace(lambda x, *w: functional_call(mlp, dict(zip(names, w, strict=True)), (x,)), x, *weights)
    expected = gm(x, *weights)
    result = fuse_gated_gelu(gm)
    gm.recompile()
    assert (result.changed, count(gm, ops.gelu_mul.default), count(gm, aten.mm.default)) == (1, 1, 3)
    scale = expected.abs().max().item()
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(gm(x, *weights), expected, rtol=0, atol=tolerance * scale)


def test_experts_with_one_gate_up_projection():
    """Mixture-of-experts blocks project to both halves at once."""

    def expert(x, weight):
        gate, up = F.linear(x, weight).chunk(2, dim=-1)
        return tanh(gate) * up

    args = states(5, 16), states(24, 16, seed=1)
    gm = trace(expert, *args)
    assert fuse(gm, *args).changed == 1
    assert (count(gm, ops.geglu.default), count(gm, aten.split.Tensor)) == (1, 0)
