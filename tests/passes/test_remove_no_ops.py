"""Operators that return their argument go away; copies that hold old contents stay."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.passes.remove_no_ops import remove_no_ops

aten = torch.ops.aten


def targets(gm) -> list:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def run(fn, *args):
    gm = make_fx(fn, tracing_mode="symbolic")(*args)
    expected = gm(*[a.clone() for a in args])
    result = remove_no_ops(gm)
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(gm(*[a.clone() for a in args]), expected)
    again = remove_no_ops(gm)
    assert again.changed == 0
    return gm, result


def test_identities_go():
    def fn(x):
        x = x * 1.0
        x = aten._to_copy.default(x, dtype=torch.float32)
        x = aten.slice.Tensor(x, 0, 0, 9223372036854775807)
        return aten.view.default(aten.expand.default(x, list(x.shape)), list(x.shape)) + 1

    gm, _ = run(fn, torch.randn(3, 4))
    assert [t for t in targets(gm) if "sym_size" not in str(t)] == [aten.add.Tensor]


def test_what_changes_something_stays():
    def fn(x):
        doubled = (x * 1).to(torch.float64) * 2.0
        return doubled[1:].reshape(-1)

    gm, result = run(fn, torch.arange(12).view(3, 4))
    assert aten.mul.Tensor in targets(gm)
    assert aten._to_copy.default in targets(gm)
    assert result.left == {}


def test_an_integer_times_one_point_zero_is_a_conversion():
    gm, _ = run(lambda x: x * 1.0, torch.arange(3))
    assert targets(gm) == [aten.mul.Tensor]


def test_a_copy_of_a_written_input_stays():
    def fn(cache):
        old = aten._to_copy.default(cache, dtype=torch.float32)
        cache.add_(1.0)
        return old + 0.0

    gm, result = run(fn, torch.zeros(3))
    assert aten._to_copy.default in targets(gm)
    assert result.left == {"it copies a value the graph writes to": 1}


def test_a_product_with_one_is_a_copy_when_its_input_is_written():
    def fn(x, y):
        old = x[:] * 1.0
        x.add_(y)
        return old

    gm, result = run(fn, torch.zeros(3), torch.ones(3))
    assert aten.mul.Tensor in targets(gm)
    assert result.left == {"it copies a value the graph writes to": 1}
