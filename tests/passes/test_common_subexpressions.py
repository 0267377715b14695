"""Each value is computed once, and a read after a write is another value than the read before it."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.ops import store_kv
from gemma_npu_compile.passes.common_subexpressions import eliminate_common_subexpressions

aten = torch.ops.aten


def count(gm, target) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=target))


def check(fn, *args):
    """Trace, run the pass, compare results on copies; return graph and number of changes."""
    gm = make_fx(fn)(*[a.clone() for a in args])
    expected = gm(*[a.clone() for a in args])
    changed = eliminate_common_subexpressions(gm).changed
    gm.graph.lint()
    gm.recompile()
    for left, right in zip(gm(*[a.clone() for a in args]), expected, strict=True):
        assert torch.equal(left, right)
    assert eliminate_common_subexpressions(gm).changed == 0
    return gm, changed


def test_chains_collapse():
    def rope(x):
        tables = [(x.unsqueeze(1) * 2.0).cos() + (x.unsqueeze(1) * 2.0).sin() for _ in range(3)]
        return [tables[0] + tables[1], tables[2]]

    gm, changed = check(rope, torch.randn(4))
    assert changed == 3 * 7 - 5
    assert (count(gm, aten.cos.default), count(gm, aten.sin.default), count(gm, aten.mul.Tensor)) == (1, 1, 1)


def test_constants_of_other_types_differ():
    """1, 1.0 and True are equal in Python and not the same argument."""
    gm, changed = check(lambda x: [x + 1, x + 1.0, x.to(torch.float64) + 1], torch.arange(3))
    assert changed == 0
    assert count(gm, aten.add.Tensor) == 3


def test_reads_around_a_write_stay_apart():
    def step(x, cache):
        before = cache[0] * 2
        cache.add_(x)
        after = cache[0] * 2
        again = cache[0] * 2
        return [before, after, again]

    gm, changed = check(step, torch.ones(3), torch.zeros(2, 3))
    assert count(gm, aten.mul.Tensor) == 2
    assert changed == 2


def test_a_view_taken_before_a_write_shows_the_new_contents():
    def step(x, cache):
        view = cache[0]
        before = view * 2
        cache.add_(x)
        return [before, view * 2]

    gm, _ = check(step, torch.ones(3), torch.zeros(2, 3))
    assert count(gm, aten.mul.Tensor) == 2


def test_custom_writes_and_random_numbers_stay():
    def step(key, key_cache, value_cache, slots):
        store_kv(key, key, key_cache, value_cache, slots)
        first = key_cache.sum()
        store_kv(key, key, key_cache, value_cache, slots + 2)
        return [first, key_cache.sum()]

    cache = torch.zeros(2, 4, 1, 2)
    gm, changed = check(step, torch.ones(2, 1, 2), cache, cache.clone(), torch.tensor([1, 2]))
    assert changed == 0
    assert count(gm, aten.sum.default) == 2

    gm = make_fx(lambda x: [torch.rand_like(x), torch.rand_like(x)])(torch.ones(2))
    assert eliminate_common_subexpressions(gm).changed == 0


def test_fresh_buffers_that_are_written_stay_apart():
    def step(x):
        first, second = torch.zeros(3), torch.zeros(3)
        first.add_(x)
        return [first, second + 1]

    gm, _ = check(step, torch.ones(3))
    assert count(gm, aten.zeros.default) == 2
