"""The runner keeps the promises a serving loop relies on: right rows, nothing half done, results nobody overwrites."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.errors import CaptureError, CompileError, ReplayError
from gemma_npu_compile.graphs.runner import GraphRunner
from gemma_npu_compile.graphs.runtime import HostRuntime
from gemma_npu_compile.ops import paged_attention, row_padding, slot_mapping, store_kv

MAX_ROWS = 4


@pytest.fixture(autouse=True)
def _clean(fresh_dynamo: None) -> Iterator[None]:
    with torch.no_grad():
        yield


class Cache:
    """Blocks of 4 slots: block ``i`` is the null block of row ``i``, blocks ``8 + i`` belong to row ``i``."""

    def __init__(self, width: int = 2) -> None:
        self.k, self.v = torch.zeros(16, 4, 1, 4), torch.zeros(16, 4, 1, 4)
        for cache in (self.k, self.v):
            torch._dynamo.mark_static_address(cache, guard=False)
        null = torch.arange(MAX_ROWS, dtype=torch.int32)
        self.padding = (
            torch.full((MAX_ROWS, 2, 4), 7.0),
            null[:, None].expand(-1, width).clone(),
            torch.ones(MAX_ROWS, dtype=torch.int32),
        )

    def call(self, rows: int, seed: int = 0, width: int = 2) -> tuple[Any, ...]:
        """Arguments of :func:`step` for ``rows`` rows of the same length."""
        x = torch.randn(rows, 2, 4, generator=torch.Generator().manual_seed(seed))
        table = torch.stack([torch.arange(8, 8 + rows), *[torch.arange(12, 12 + rows)] * (width - 1)], 1).int()
        lens = torch.full((rows,), 2 + seed % 6, dtype=torch.int32)
        for tensor in (x, table, lens):
            torch._dynamo.mark_dynamic(tensor, 0)
        return x, table, lens, self.k, self.v, self.padding


def step(x: Tensor, table: Tensor, lens: Tensor, k: Tensor, v: Tensor, padding: tuple[Tensor, ...]) -> Any:
    """Write one token of each row and attend; the second result makes tables and lengths agree on the rows."""
    x, table, lens = map(row_padding, (x, table, lens), padding)
    store_kv(x[:, :1], x[:, 1:], k, v, slot_mapping(table, (lens - 1)[:, None], 4))
    return paged_attention(x, k, v, table, lens, 1.0, layer="verify/m.layers.0"), lens + table[:, 0]


def build(fn: Callable[..., Any] = step, **options: Any) -> tuple[Callable[..., Any], Backend]:
    backend = Backend()
    return torch.compile(fn, backend=backend, fullgraph=True, options={"platform": "cpu", **options}), backend


def only(backend: Backend) -> GraphRunner:
    (found,) = backend._runners
    return found


def equal(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


# ---- padded rows


def test_stale_rows_hold_the_padding() -> None:
    run, backend = build(capture_sizes=[MAX_ROWS])
    cache, reference = Cache(), Cache()
    equal(run(*cache.call(4, 1)), step(*reference.call(4, 1)))
    equal(run(*cache.call(2, 2)), step(*reference.call(2, 2)))
    (buffers,) = only(backend)._bindings[0].buffers.values()
    stable = {tuple(b.shape[1:]): b for b in buffers.buffers.values()}
    assert stable[(2,)][2:].tolist() == [[2, 2], [3, 3]]
    assert stable[()][2:].tolist() == [1, 1]
    assert (stable[2, 4][2:] == 7.0).all()
    # Padded rows wrote to their null blocks, and to nothing else.
    equal((cache.k[8:], cache.v[8:]), (reference.k[8:], reference.v[8:]))
    assert (cache.k[2:4, 0] == 7.0).all()
    assert not cache.k[4:8].any()
    assert (only(backend).report.captures, only(backend).report.replays) == (1, 2)


def test_every_row_count_is_right_and_never_compiles_again() -> None:
    run, backend = build()
    cache, reference = Cache(), Cache()
    for rows in (2, 1, 3, 4):
        equal(run(*cache.call(rows, rows)), step(*reference.call(rows, rows)))
    reports = sorted((r.report.sizes for r in backend._runners), key=len)
    assert reports == [[], [4, 2]], "one graph for one row, one for all others, largest first"
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in range(12):
            rows = seed % 4 + 1
            equal(run(*cache.call(rows, seed)), step(*reference.call(rows, seed)))
    equal((cache.k[8:], cache.v[8:]), (reference.k[8:], reference.v[8:]))
    assert sum(r.report.replays for r in backend._runners) == 16


@pytest.mark.parametrize("first", [2, 0])
def test_empty_batch(first: int) -> None:
    """Empty results of the right shape, whether or not the function has been compiled for rows before."""
    run, _ = build()
    cache = Cache()
    if first:
        run(*cache.call(first))
    before = cache.k.clone()
    x, table, lens, *rest = cache.call(2)
    context, numbers = run(x[:0], table[:0], lens[:0], *rest)
    assert (tuple(context.shape), context.dtype) == ((0, 2, 4), torch.float32)
    assert (tuple(numbers.shape), numbers.dtype) == ((0,), torch.int32)
    equal(cache.k, before)


def test_writes_to_an_ordinary_input_reach_the_caller() -> None:
    """Nothing marks this input as static; it is one all the same, for a copy of it would take the write."""
    run, backend = build(lambda total, x: total.add_(x).sum())
    total, x = torch.zeros(3), torch.ones(3)
    assert [run(total, x).item() for _ in range(3)] == [3.0, 6.0, 9.0]
    assert total.tolist() == [3.0, 3.0, 3.0]
    assert only(backend).report.replays == 3


# ---- refusals before anything runs


def runner_args(runner: GraphRunner, call: tuple[Any, ...]) -> list[Any]:
    """A call of :func:`step` as the runner gets it."""
    x, table, lens, k, v, padding = call
    named = {"x": x, "table": table, "lens": lens, "k": k, "v": v}
    named.update({f"padding[{i}]": p for i, p in enumerate(padding)})
    found = {i.source: named.get(i.label, x.shape[0]) for i in runner.plan.inputs}
    return [found[source] for source in sorted(found)]


def test_wider_table_is_refused_before_anything_runs() -> None:
    run, backend = build()
    cache = Cache()
    run(*cache.call(3, 1))
    runner = only(backend)
    before, replays = cache.k.clone(), runner.report.replays
    buffers = [b.clone() for b in runner._bindings[0].buffers[()].buffers.values()]
    x, table, lens, *rest = cache.call(3, 2)
    wide = torch.cat([table, table], 1)
    with pytest.raises(ReplayError, match=r"m\.layers\.0 \(verify, group g0\) is 4 blocks wide, .* captured 2 wide"):
        runner(runner_args(runner, (x, wide, lens, *rest)))
    equal(cache.k, before)
    equal(list(runner._bindings[0].buffers[()].buffers.values()), buffers)
    assert (runner.report.replays, dict(runner.report.fallbacks)) == (replays, {})
    with pytest.raises(Exception, match=r"axis 1 of the input is .* wide, its padding 2"):
        run(x, wide, lens, *rest)
    equal(cache.k, before)
    equal(run(*cache.call(3, 2))[1], torch.tensor([12, 13, 14], dtype=torch.int32))


def test_a_captured_graph_runs_nothing_for_an_empty_batch() -> None:
    run, backend = build()
    cache = Cache()
    run(*cache.call(2))
    before, runner = cache.k.clone(), only(backend)
    x, table, lens, *rest = cache.call(2)
    context, numbers = runner(runner_args(runner, (x[:0], table[:0], lens[:0], *rest)))
    assert (tuple(context.shape), context.dtype) == ((0, 2, 4), torch.float32)
    assert (tuple(numbers.shape), numbers.dtype) == ((0,), torch.int32)
    equal(cache.k, before)
    assert runner.report.replays == 1


def test_moved_static_input_is_named() -> None:
    run, backend = build()
    cache, moved = Cache(), Cache()
    run(*cache.call(2))
    moved.v = cache.v
    with pytest.raises(ReplayError, match=r"static input k is at 0x.*captured at 0x.*nothing was run"):
        run(*moved.call(2))
    assert not moved.k.any()
    assert only(backend).report.replays == 1


def test_another_cache_gets_captures_of_its_own() -> None:
    """Dynamo runs one compiled graph for all objects of a class; five of them take turns, four are kept."""
    run, backend = build()
    objects = [(Cache(), Cache()) for _ in range(5)]
    for turn in range(3):
        for cache, reference in objects:
            equal(run(*cache.call(2, turn)), step(*reference.call(2, turn)))
            equal(cache.k, reference.k)
    assert len(only(backend)._bindings) == 4
    cache, reference = objects[-1]
    before = only(backend).report.captures
    equal(run(*cache.call(2, 7)), step(*reference.call(2, 7)))
    assert only(backend).report.captures == before


def test_two_modules_of_one_class_do_not_see_each_other() -> None:
    backend = Backend()
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    compiled = [torch.compile(layer, backend=backend, fullgraph=True) for layer in layers]
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(2):
            for layer, run in zip(layers, compiled, strict=True):
                assert torch.equal(run(x), layer(x))


def test_a_function_that_returns_the_input_it_wrote() -> None:
    for fn in (lambda x: x.add_(1), lambda x: x.index_copy_(0, torch.tensor([1]), torch.full((1,), 5.0))):
        run, _ = build(fn)
        x, reference = torch.zeros(3), torch.zeros(3)
        for _ in range(2):
            assert torch.equal(run(x), fn(reference))
            assert torch.equal(x, reference)


def test_inference_mode_and_no_grad_in_any_order() -> None:
    run, _ = build()
    cache, reference = Cache(), Cache()
    for index, mode in enumerate((torch.inference_mode, torch.no_grad, torch.inference_mode)):
        with mode():
            equal(run(*cache.call(2, index)), step(*reference.call(2, index)))


def test_size_above_the_ceiling_is_refused() -> None:
    run, _ = build(capture_sizes=[2, 64])
    with pytest.raises(CompileError, match=r"has 64 rows, .* at most 4"):
        run(*Cache().call(2))


# ---- fallbacks


def test_fallback_as_an_error() -> None:
    run, backend = build(on_fallback="error")
    cache = Cache()
    run(*cache.call(4))
    x, table, lens, *rest = cache.call(4)
    six = [torch.cat([t, t[:2]]) for t in (x, table, lens)]
    for tensor in six:
        torch._dynamo.mark_dynamic(tensor, 0)
    before = cache.k.clone()
    with pytest.raises(CaptureError, match=r"6 rows exceed the largest capture size 4 \(on_fallback='error'\)"):
        run(*six, *rest)
    equal(cache.k, before)
    assert not only(backend).report.fallbacks


def test_no_size_is_kept_when_one_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    real = HostRuntime.capture

    def second_fails(*args: Any) -> Any:
        if args[4] == "capture of 2 rows":
            raise CaptureError("capture of 2 rows: no memory")
        return real(*args)

    monkeypatch.setattr(HostRuntime, "capture", second_fails)
    run, backend = build()
    cache, reference = Cache(), Cache()
    for rows in (3, 2, 4):
        equal(run(*cache.call(rows, rows)), step(*reference.call(rows, rows)))
    report = only(backend).report
    assert report.fallbacks == {"capture of 2 rows: no memory": 3}
    assert (report.captures, report.replays, report.sizes, only(backend)._bindings[0].graphs) == (0, 0, [], {})
    equal(cache.k, reference.k)


# ---- results, memory, isolation


def test_results_survive_later_replays() -> None:
    run, _ = build()
    cache, reference = Cache(), Cache()
    calls = [(4, 1), (4, 2), (2, 3), (3, 4), (4, 5)]
    kept = [run(*cache.call(*call)) for call in calls]
    equal(kept, [step(*reference.call(*call)) for call in calls])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uncaptured_is_bitwise_the_same(dtype: torch.dtype) -> None:
    outcomes = []
    for capture in (True, False):
        torch._dynamo.reset()
        run, backend = build(capture=capture)
        cache = Cache()
        cache.k, cache.v = cache.k.to(dtype), cache.v.to(dtype)
        cache.padding = (cache.padding[0].to(dtype), *cache.padding[1:])
        for tensor in (cache.k, cache.v):
            torch._dynamo.mark_static_address(tensor, guard=False)
        results = []
        for seed, rows in enumerate((4, 2, 3, 3)):
            x, *rest = cache.call(rows, seed)
            x = x.to(dtype)
            torch._dynamo.mark_dynamic(x, 0)
            results.append(run(x, *rest))
        report = only(backend).report
        assert (report.replays, report.eager_calls, report.captures) == ((4, 0, 2) if capture else (0, 4, 0))
        assert not report.fallbacks
        outcomes.append((results, cache.k, cache.v))
    equal(outcomes[0], outcomes[1])


def test_backends_do_not_see_each_other() -> None:
    first, one = build(capture_sizes=[3])
    second, two = build(capture=False)
    caches, reference = (Cache(), Cache()), Cache()
    expected = step(*reference.call(2, 1))
    equal(first(*caches[0].call(2, 1)), expected)
    equal(second(*caches[1].call(2, 1)), expected)
    assert (only(one).sizes, only(one).report.replays, only(one).report.eager_calls) == ((3, 4), 1, 0)
    assert (only(two).report.replays, only(two).report.eager_calls) == (0, 1)


def test_reset_frees_everything_twice() -> None:
    run, backend = build()
    cache, reference = Cache(), Cache()
    run(*cache.call(3, 1))
    step(*reference.call(3, 1))
    runner = only(backend)
    assert runner._runtime.nbytes > 0
    for _ in range(2):
        torch._dynamo.reset()
        assert (runner._runtime.nbytes, runner._bindings) == (0, [])
    equal(run(*cache.call(3, 2)), step(*reference.call(3, 2)))


def heavy(x: Tensor) -> Tensor:
    return (x @ x.mT).softmax(-1) @ x


def test_two_threads() -> None:
    run, backend = build(lambda x, pad: heavy(row_padding(x, pad)))
    pad, wrong = torch.zeros(4, 6, 6), []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for i in range(60):
                x = torch.randn(2 + (i + seed) % 3, 6, 6, generator=generator)
                torch._dynamo.mark_dynamic(x, 0)
                if not torch.equal(run(x, pad), heavy(x)):
                    wrong.append((seed, i))

    x = torch.randn(2, 6, 6)
    torch._dynamo.mark_dynamic(x, 0)
    run(x, pad)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert only(backend).report.replays == 121


def test_a_number_is_the_one_of_its_call() -> None:
    """No size depends on it, so one capture serves all: what it came to there is not what it comes to now."""

    def fn(x: Tensor, n: int) -> tuple[Tensor, int]:
        return x + 1, n * 2

    backend = Backend()
    run = torch.compile(fn, backend=backend, dynamic=True, options={"platform": "cpu"})
    assert [run(torch.ones(2, 3), n)[1] for n in (5, 7, 9)] == [10, 14, 18]
    assert only(backend).report.captures == 1
