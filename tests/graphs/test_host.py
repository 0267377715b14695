"""A host capture must obey a device's rules, or a green run on a laptop says nothing about the device.

Captures run nothing; addresses and host numbers are frozen; synchronisations are refused by name; memory of dead
intermediates is reused and never that of live ones; a replay equals eager execution bit for bit.
"""

import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.errors import CaptureError
from gemma_npu_compile.graphs.capturable import SYNCS
from gemma_npu_compile.graphs.host import HostGraph
from gemma_npu_compile.graphs.memory import ALIGNMENT, Layout, Pool
from gemma_npu_compile.ops import rotary, store_kv

aten = torch.ops.aten
Fn = Callable[..., Any]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def capture(fn: Fn, *args: Any, pool: Pool | None = None, name: str = "graph") -> HostGraph:
    return HostGraph(make_fx(fn, tracing_mode="fake")(*args), list(args), {}, pool or Pool(), name)


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(list(got), list(expected), rtol=0, atol=0, equal_nan=True)
    assert [t.stride() for t in got] == [t.stride() for t in expected]


# ---- what a capture and a replay do


def test_capture_runs_nothing() -> None:
    def fn(kc: Tensor, vc: Tensor, k: Tensor, slots: Tensor) -> list[Tensor]:
        store_kv(k, k * 2, kc, vc, slots)
        return [kc.add_(1).sum(), vc * 2]

    args = torch.zeros(2, 2, 1, 3), torch.zeros(2, 2, 1, 3), torch.ones(2, 1, 3), torch.tensor([3, 0])
    graph = capture(fn, *args)
    assert len(graph.tasks) == 5
    assert not args[0].any()
    assert not args[1].any()
    expected_caches = torch.zeros(2, 2, 1, 3), torch.zeros(2, 2, 1, 3)
    for _ in range(2):  # not idempotent: every replay runs every kernel once
        graph.replay()
        expected = fn(*expected_caches, *args[2:])
        same(graph.outputs, expected)
        same(args[:2], expected_caches)


def test_replay_reads_fixed_addresses() -> None:
    x, y = torch.ones(3), torch.ones(3)
    graph = capture(lambda x, y: [x * 2 + y.view(3, 1)], x, y)
    graph.replay()
    first = graph.outputs[0].clone()
    x.copy_(torch.arange(3.0))
    y.fill_(5)
    graph.replay()
    assert not torch.equal(first, graph.outputs[0])
    same(graph.outputs, [torch.arange(3.0) * 2 + torch.full((3, 1), 5.0)])


def test_an_operator_that_looks_like_an_in_place_one() -> None:
    x = torch.arange(8)
    graph = capture(lambda x: [x >> 1, x & 3], x)
    x.mul_(3)
    graph.replay()
    same(graph.outputs, [x >> 1, x & 3])


def test_host_numbers_are_frozen_for_each_capture() -> None:
    def fn(x: Tensor, n: int) -> list[Tensor]:
        return [x * n, torch.full((2,), x.shape[0] + n), torch.arange(x.shape[0] * 2)]

    gm = make_fx(fn, tracing_mode="symbolic")(torch.ones(5), 7)
    x, n = gm.graph.find_nodes(op="placeholder")
    symbols = x.meta["val"].shape[0].node.expr, n.meta["val"].node.expr
    graphs = [HostGraph(gm, [torch.ones(size), 3], {symbols[0]: size, symbols[1]: 3}, Pool()) for size in (4, 6)]
    for size, graph in zip((4, 6), graphs, strict=True):
        graph.replay()
        same(graph.outputs, fn(torch.ones(size), 3))


def test_the_graph_owns_what_it_reads() -> None:
    """A captured temporary that its maker drops must stay alive (vLLM #43909)."""
    gm = make_fx(lambda x: [x + 1], tracing_mode="fake")(torch.zeros(1000))
    graph = HostGraph(gm, [torch.full((1000,), 3.0)], {}, Pool())
    noise = [torch.full((1000,), -1.0) for _ in range(20)]
    graph.replay()
    same(graph.outputs, [torch.full((1000,), 4.0)])
    assert len(noise) == 20


def test_constants_survive() -> None:
    gm = make_fx(lambda x: [x + torch.tensor([1, 2, 3, 4])], tracing_mode="fake")(torch.ones(4))
    assert gm.graph.find_nodes(op="get_attr")
    graph = HostGraph(gm, [torch.ones(4)], {}, Pool())
    del gm
    for _ in range(2):
        graph.replay()
        same(graph.outputs, [torch.tensor([2.0, 3, 4, 5])])


def test_replay_from_another_thread() -> None:
    """A new thread has gradients enabled, and this input is a parameter: its kernels would refuse to write."""
    x = torch.nn.Parameter(torch.randn(4, 6))
    errors = []
    graph = capture(lambda x: [x.softmax(-1) @ x.t(), x.topk(2)[1]], x)
    graph.replay()
    here = [o.clone() for o in graph.outputs]
    for output in graph.outputs:
        output.zero_()

    def replay() -> None:
        try:
            graph.replay()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=replay)
    thread.start()
    thread.join()
    assert errors == []
    same(graph.outputs, here)


# ---- equal to eager

ZOO: dict[str, Fn] = {
    "views": lambda x: [x.transpose(0, 1)[1:].unsqueeze(0) * 2, x.view(-1)[::2] + 1, x[:, None].squeeze(1) - 1],
    "cat": lambda x: [torch.cat([x, x * 2, x[:1]], 0), torch.stack([x, -x], 1)],
    "split": lambda x: [part * i for i, part in enumerate((x + 1).split([1, x.shape[0] - 1]))],
    "chunk": lambda x: list((x * 3).chunk(2, -1)),
    "topk": lambda x: [*x.topk(1), *(x + 1).sort(-1, descending=True)],
    "max": lambda x: [*x.max(-1), x.argmax(-1), x.amax(0, keepdim=True)],
    "no out form": lambda x: [rotary(x.repeat(1, 2)[:, None], x.repeat(1, 2), x.repeat(1, 2) + 1), x.flip(0)],
    "layer norm": lambda x: [torch.nn.functional.layer_norm(x, x.shape[-1:]), *torch.var_mean(x, -1)],
    "creation": lambda x: [
        torch.full((2, 3), 1.5) + x.sum(),
        torch.arange(x.shape[0], device=x.device) * 2,
        torch.arange(1, 9, 3, dtype=torch.int32) + 1,
        torch.zeros(3) + x[0, 0],
        torch.ones_like(x) * x,
    ],
    "casts": lambda x: [x.bfloat16().float() * 2, x.to(torch.float64) / 3, (x * 4).to(torch.int32), x > 0, x.half()],
    "copies": lambda x: [
        x[:, None].expand(-1, 3, -1).clone(memory_format=torch.contiguous_format),
        x.t().clone(),
        x.t().contiguous() + 1,
    ],
    "reductions": lambda x: [x.sum(), x.mean(-1), x.prod(0), x.cumsum(0), (x > 0).any(-1), x.norm()],
    "matmul": lambda x: [
        x @ x.t(),
        torch.einsum("ab,cb->ac", x, x + 1),
        torch.baddbmm(x[None], x[None], x.t()[None] @ x),
    ],
    "gather": lambda x: [x.gather(0, (x > 0).long()), x[(x[:, 0] > 0).long()], torch.where(x > 0, x, -x)],
    "writes": lambda x: [
        (x * 2).index_copy_(0, torch.zeros(1, dtype=torch.long), x[:1]),
        (x + 1).add_(x).mul_(2),
        torch.zeros_like(x).scatter_(1, (x > 9).long(), x),
    ],
    "written view": lambda x: [_write_through_a_view(x)],
    "activations": lambda x: [
        torch.nn.functional.gelu(x, approximate="tanh"),
        x.softmax(-1),
        torch.tanh(x) * x.rsqrt(),
    ],
    "attention": lambda x: [
        torch.nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])
    ],
    "reused": lambda x: [((((x * 2) + 1) * 3 - x) / 7).relu() + ((x - 4) * (x + 4)).abs()],
    "same twice": lambda x: [y := x * 2, y, y.view(-1)],
    "late views": lambda x: [v := (x * 2).t(), ((x + 1) * 3).t() + v],
}


def _write_through_a_view(x: Tensor) -> Tensor:
    y = x * 2
    y[:1].add_(1)
    y.view(-1).mul_(3)
    return y


@pytest.mark.parametrize("name", ZOO)
def test_equal_to_eager(name: str) -> None:
    fn = ZOO[name]

    @settings(max_examples=8)
    @given(st.integers(2, 5), st.integers(2, 6), st.integers(0, 99))
    def check(rows: int, columns: int, seed: int) -> None:
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
        pool = Pool()
        graph = capture(fn, x, pool=pool)
        for shift in (0.0, 1.0):
            x.add_(shift)
            block = pool.take(1)
            block[: block.nbytes // 4 * 4].view(torch.float32).fill_(torch.nan)
            graph.replay()
            same(graph.outputs, fn(x))

    check()


def test_empty_tensors() -> None:
    graph = capture(lambda x: [x * 2, torch.cat([x, torch.ones(1, 3)]), x.sum(0)], torch.zeros(0, 3))
    graph.replay()
    same(graph.outputs, [torch.zeros(0, 3), torch.ones(1, 3), torch.zeros(3)])


# ---- what is refused

X = torch.tensor([1.0, 2.0])
SYNC_ARGS: dict[Any, tuple[Any, ...]] = {
    aten.equal.default: ("x", "x"),
    aten.masked_select.default: ("x", "mask"),
    aten.nonzero.default: ("mask",),
    aten.repeat_interleave.Tensor: ("counts",),
}


def manual(target: Any, *names: str) -> tuple[GraphModule, list[Tensor]]:
    """A graph of one call of ``target``, as if traced from a user's line."""
    tensors = {"x": X, "mask": X > 1, "counts": torch.tensor([1, 2])}
    gm = make_fx(lambda *a: [a[0] * 1], tracing_mode="fake")(*[tensors[n] for n in names])
    nodes = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(nodes[-1]):
        node = gm.graph.call_function(target, tuple(nodes))
    node.meta["stack_trace"] = '  File "model.py", line 42, in forward\n    n = steps.how_many()\n'
    return gm, [tensors[n] for n in names]


@pytest.mark.parametrize("target", SYNCS, ids=str)
def test_synchronisations_name_the_node_and_the_line(target: Any) -> None:
    gm, args = manual(target, *SYNC_ARGS.get(target, ("x",)))
    (node,) = gm.graph.find_nodes(op="call_function", target=target)
    pool = Pool()
    with pytest.raises(CaptureError) as caught:
        HostGraph(gm, args, {}, pool, "capture of 4 rows")
    message = str(caught.value)
    assert message.startswith(f"capture of 4 rows: {node.name} ({target})")
    assert '"model.py", line 42, in forward: n = steps.how_many()' in message
    assert SYNCS[target] in message
    assert pool.nbytes == 0


def test_a_lazily_negated_tensor_is_refused() -> None:
    """Kernels are called without the dispatcher: they would read the numbers behind the bit."""

    def fn(x: Tensor) -> list[Tensor]:
        return [torch._neg_view(x) * 2]

    with pytest.raises(CaptureError, match=r"clone.* reads a tensor that is negated or conjugated lazily"):
        capture(fn, torch.arange(4.0))


def test_data_dependent_size_is_refused() -> None:
    traced = make_fx(lambda x: [x[x > 0] * 2], tracing_mode="symbolic", _error_on_data_dependent_ops=False)
    gm = traced(torch.tensor([1.0, -1.0, 2.0]))
    x = gm.graph.find_nodes(op="placeholder")[0]
    values = dict.fromkeys(x.meta["val"].shape[0].node.expr.free_symbols, 3)
    pool = Pool()
    with pytest.raises(CaptureError, match=r"index.*has a size known only from data"):
        HostGraph(gm, [torch.ones(3)], values, pool)
    assert pool.nbytes == 0


def test_calls_that_are_no_operators_are_refused() -> None:
    gm = make_fx(lambda x: [x + 1, (x * 2).sum()], tracing_mode="fake")(X)
    (add,) = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    add.target = operator.add
    pool = Pool()
    with pytest.raises(CaptureError, match=r"add .* is not an operator; a capture cannot record it"):
        HostGraph(gm, [X], {}, pool)
    assert pool.nbytes == 0, "a refused capture keeps nothing"


def test_method_calls_are_refused() -> None:
    gm = make_fx(lambda x: [x + 1], tracing_mode="fake")(X)
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.op, node.target, node.args = "call_method", "neg", node.args[:1]
    with pytest.raises(CaptureError, match=r"add \(neg\).* is a call_method"):
        HostGraph(gm, [X], {}, Pool())


def test_operators_without_a_result() -> None:
    """``_assert_async`` returns nothing and writes nothing; it must neither crash a capture nor be lost."""

    def fn(x: Tensor) -> list[Tensor]:
        aten._assert_async.msg(x.sum() > 0, "must be positive")
        return [x + 1]

    x = torch.ones(3)
    graph = capture(fn, x)
    graph.replay()
    same(graph.outputs, [x + 1])
    x.neg_()
    with pytest.raises(RuntimeError, match="must be positive"):
        graph.replay()


def test_results_without_elements_are_no_tasks() -> None:
    graph = capture(lambda x: [x.new_empty(0), x[:0] * 2, x + 1], torch.ones(3))
    graph.replay()
    assert len(graph.tasks) == 1
    assert [tuple(each.shape) for each in graph.outputs] == [(0,), (0,), (3,)]


# ---- memory


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 6)), max_size=40))
def test_live_buffers_never_overlap(steps: list[tuple[int, int]]) -> None:
    """Each step places a buffer that dies a number of steps later; an interval model watches."""
    layout = Layout()
    live: dict[int, tuple[int, int]] = {}
    most = 0
    for now, (nbytes, life) in enumerate(steps):
        gone = [start for start, (_, death) in live.items() if death < now]
        layout.release(gone)
        for start in gone:
            del live[start]
        start = layout.place(nbytes)
        end = start + max(nbytes, 1)
        assert start % ALIGNMENT == 0
        assert all(end <= other or start >= other_end for other, (other_end, _) in live.items())
        assert end <= layout.peak
        live[start] = (end, now + life)
        most = max(most, sum(-(-(e - s) // ALIGNMENT) * ALIGNMENT for s, (e, _) in live.items()))
    assert most <= layout.peak <= sum(-(-max(n, 1) // ALIGNMENT) * ALIGNMENT for n, _ in steps)


def test_dead_intermediates_are_reused() -> None:
    pool = Pool()
    graph = capture(lambda x: [((((x + 1) * 2) - 3) / 4).relu().neg()], torch.ones(1024), pool=pool)
    assert len(graph.tasks) == 6
    assert pool.nbytes == 2 * 4096, "a chain needs two buffers, whatever its length"


def test_pool_serves_smaller_captures_and_never_moves() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        return [(x + 1) * 2]

    pool = Pool()
    small, large = torch.ones(64), torch.full((512,), 3.0)
    first = capture(fn, torch.ones(128), pool=pool)
    size, address = pool.nbytes, first.outputs[0].data_ptr()
    second = capture(fn, small, pool=pool)
    assert pool.nbytes == size
    base = pool.take(1).data_ptr()
    assert base <= second.outputs[0].data_ptr() < base + size
    third = capture(fn, large, pool=pool)
    assert pool.nbytes == size + 2 * large.nbytes, "the first block stays, a second one joins it"
    assert first.outputs[0].data_ptr() == address
    for graph, x in ((third, large), (first, torch.ones(128)), (second, small)):
        graph.replay()
        same(graph.outputs, fn(x))
    pool.free()
    assert pool.nbytes == 0
