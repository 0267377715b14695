"""Cache writes must end up in place: a functional write copies the whole KV cache, and a wrong one corrupts it."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.ops import store_kv
from gemma_npu_compile.passes import PASSES, PassRecord
from gemma_npu_compile.passes.in_place import functional_writes, keep_writes_in_place
from gemma_npu_compile.report import GraphReport, collect

aten = torch.ops.aten
Fn = Callable[..., Any]


@pytest.fixture(autouse=True)
def _clean(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is under test are AOT's functional writes."""
    backend_module = importlib.import_module("gemma_npu_compile.backend")  # the package has an object of this name
    monkeypatch.setattr(backend_module, "trace_step", lambda gm, inputs: "functional writes")
    with torch.no_grad():
        yield


def caches() -> tuple[Tensor, Tensor]:
    """A key and a value cache at static addresses: 4 blocks of 2 slots, one head of 3."""
    pair = (torch.arange(24.0).view(4, 2, 1, 3), -torch.arange(24.0).view(4, 2, 1, 3))
    for cache in pair:
        torch._dynamo.mark_static_address(cache)
    return pair


def tokens(count: int = 2) -> tuple[Tensor, Tensor]:
    """Keys of ``count`` tokens and their slots."""
    return torch.full((count, 1, 3), 100.0) + torch.arange(count).view(-1, 1, 1), torch.tensor([5, 2, 1, 0])[:count]


def compiled(fn: Fn, *args: Any, **options: Any) -> tuple[Any, GraphModule, GraphReport]:
    """Results of one compiled call, the final graph and its report."""
    backend = Backend()
    with collect() as report:
        results = torch.compile(fn, backend=backend, fullgraph=True, options=options)(*args)
    (runner,) = backend._runners
    return results, runner.gm, report.graphs[0]


def functional(fn: Fn, **args: Tensor) -> tuple[GraphModule, list[str]]:
    """The AOT graph of ``fn`` before any pass, and which argument each placeholder is."""
    backend = Backend()
    options: dict[str, Any] = {"disable_passes": tuple(PASSES)}
    torch.compile(fn, backend=backend, fullgraph=True, options=options)(**args)
    (runner,) = backend._runners
    return runner.gm, [node.meta["label"] for node in runner.gm.graph.find_nodes(op="placeholder")]


def record_of(report: GraphReport) -> PassRecord:
    return next(record for record in report.passes if record.name == "keep_writes_in_place")


def targets(gm: GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


WRITES: dict[str, tuple[Fn, Any]] = {
    "store_kv": (
        lambda kc, vc, k, s: store_kv(k, k, kc, vc, s),
        torch.ops.npu.npu_scatter_pa_kv_cache.default,
    ),
    "index_copy_": (lambda kc, vc, k, s: kc.index_copy_(0, s % 4, k[:, None].expand(-1, 2, -1, -1)), None),
    "index_put_": (lambda kc, vc, k, s: kc.index_put_((s % 4,), k[:, None]), aten.index_put_.default),
    "accumulate": (lambda kc, vc, k, s: kc.index_put_((s % 4,), k[:, None], accumulate=True), None),
    "add_": (lambda kc, vc, k, s: kc.add_(k[0]), aten.add_.Tensor),
}


@pytest.mark.parametrize("name", WRITES)
def test_write_is_in_place(name: str) -> None:
    write, target = WRITES[name]

    def fn(kc: Tensor, vc: Tensor, k: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        write(kc, vc, k, s)
        return kc * 2, vc.sum()

    (kc, vc), (k, s) = caches(), tokens()
    kc0, vc0 = kc.clone(), vc.clone()
    expected = fn(kc0, vc0, k, s)
    address = kc.data_ptr()
    results, gm, report = compiled(fn, kc, vc, k, s)
    record = record_of(report)
    assert (record.changed, dict(record.left)) == (1, {})
    # A custom write loses two copies and two getitems, an ATen one its copy.
    assert record.nodes_before - record.nodes_after == (4 if name == "store_kv" else 1)
    assert functional_writes(gm) == []
    assert target is None or targets(gm).count(target) == 1
    assert kc.data_ptr() == address
    assert (report.captures, report.replays) == (1, 1)
    torch.testing.assert_close((kc, vc, *results), (kc0, vc0, *expected), rtol=0, atol=0)


def test_two_writes_with_reads_between() -> None:
    def fn(kc: Tensor, vc: Tensor, k: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        before = kc.sum()
        store_kv(k, k, kc, vc, s)
        between = kc.sum()
        store_kv(k * 3, k * 5, kc, vc, s[[1, 0]])
        kc.add_(1)
        return before, between, kc.sum(), vc.sum()

    (kc, vc), (k, s) = caches(), tokens()
    kc0, vc0 = kc.clone(), vc.clone()
    expected = fn(kc0, vc0, k, s)
    results, gm, report = compiled(fn, kc, vc, k, s)
    assert record_of(report).changed == 3
    assert not record_of(report).left
    assert functional_writes(gm) == []
    torch.testing.assert_close((kc, vc, *results), (kc0, vc0, *expected), rtol=0, atol=0)
    assert len({float(r) for r in results[:3]}) == 3


@pytest.mark.parametrize("view", [False, True])
def test_old_contents_read_after_the_write(view: bool) -> None:
    def fn(cache: Tensor, index: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        old = cache.view(-1) if view else cache
        new = torch.index_copy(cache, 0, index, rows)
        twice = old * 2
        cache.copy_(new)
        return twice, new.sum()

    args = torch.arange(8.0).view(4, 2), torch.tensor([1, 3]), torch.full((2, 2), 9.0)
    gm = make_fx(fn, tracing_mode="fake")(*args)
    before = targets(gm)
    result = keep_writes_in_place(gm)
    got_cache, cache = args[0].clone(), args[0].clone()
    got = gm(got_cache, *args[1:])
    torch.testing.assert_close((got_cache, *got), (cache, *fn(cache, *args[1:])), rtol=0, atol=0)
    assert result.changed == 0
    assert targets(gm) == before
    assert result.left == {"the old contents are read after the write, by aten.mul.Tensor": 1}


def test_old_contents_read_before_the_write_do_not_matter() -> None:
    def fn(cache: Tensor, index: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        twice = cache * 2
        new = torch.index_copy(cache, 0, index, rows)
        cache.copy_(new)
        return twice, new.sum()

    args = torch.arange(8.0).view(4, 2), torch.tensor([1, 3]), torch.full((2, 2), 9.0)
    gm = make_fx(fn, tracing_mode="fake")(*args)
    assert keep_writes_in_place(gm).changed == 1
    gm.graph.lint()
    gm.recompile()
    assert targets(gm) == [aten.mul.Tensor, aten.index_copy_.default, aten.sum.default]
    got_cache, cache = args[0].clone(), args[0].clone()
    got = gm(got_cache, *args[1:])
    torch.testing.assert_close((got_cache, *got), (cache, *fn(cache, *args[1:])), rtol=0, atol=0)


def test_both_inputs_of_an_operator_stay_functional_when_one_must() -> None:
    def fn(kc: Tensor, vc: Tensor, k: Tensor, s: Tensor) -> Tensor:
        store_kv(k, k, kc, vc, s)
        return kc.sum() + vc.sum()

    (kc, vc), (k, s) = caches(), tokens()
    gm, names = functional(fn, kc=kc.clone(), vc=vc.clone(), k=k, s=s)
    assert auto_functionalized_v2 in targets(gm)
    # Read the old keys after the write: the key cache must stay functional, and so must the value cache.
    output = gm.graph.find_nodes(op="output")[0]
    cache = gm.graph.find_nodes(op="placeholder")[names.index("kc")]
    with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.target is aten.copy_.default)):
        old = gm.graph.call_function(aten.sum.default, (cache,))
    old.meta["val"] = output.args[0][0].meta["val"]
    output.args = ((*output.args[0], old),)
    gm.recompile()
    before = targets(gm)
    result = keep_writes_in_place(gm)
    assert result.changed == 0
    assert targets(gm) == before
    assert result.left == {
        "the old contents are read after the write, by aten.sum.default": 1,
        "another input of the same operator stays functional": 1,
    }
    args = {"kc": kc.clone(), "vc": vc.clone(), "k": k, "s": s}
    total, was = gm(*[args[name] for name in names])
    kc0, vc0 = kc.clone(), vc.clone()
    torch.testing.assert_close((total, was), (fn(kc0, vc0, k, s), kc.sum()), rtol=0, atol=0)
    torch.testing.assert_close((args["kc"], args["vc"]), (kc0, vc0), rtol=0, atol=0)


LEFT: dict[str, tuple[Fn, str]] = {
    "slice": (lambda kc, vc, k, s: kc[1:2].add_(k[0]), "aten.slice_scatter.default has no in-place form"),
    "cast": (lambda kc, vc, k, s: kc.mul_(k[0].double() / 3), "aten._to_copy.default has no in-place form"),
    "view of a cache": (
        lambda kc, vc, k, s: store_kv(k, k, kc[:3], vc[:3], s),
        "gemma_npu.store_kv.default writes to a view of its argument key_cache",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_writes_are_left_with_a_reason_and_right(name: str) -> None:
    write, reason = LEFT[name]

    def fn(kc: Tensor, vc: Tensor, k: Tensor, s: Tensor) -> Tensor:
        write(kc, vc, k, s)
        return kc.sum() - vc.sum()

    (kc, vc), (k, s) = caches(), tokens()
    kc0, vc0 = kc.clone(), vc.clone()
    expected = fn(kc0, vc0, k, s)
    results, gm, report = compiled(fn, kc, vc, k, s)
    assert record_of(report).changed == 0
    assert reason in record_of(report).left
    assert functional_writes(gm)
    torch.testing.assert_close((kc, vc, results), (kc0, vc0, expected), rtol=0, atol=0)


def test_operator_with_a_result_and_a_write_runs_once() -> None:
    lib = torch.library.Library("gemma_npu_test_in_place", "FRAGMENT")
    lib.define("accumulate(Tensor x, Tensor(a!) cache) -> Tensor")
    lib.impl("accumulate", lambda x, cache: cache.add_(x).sum(0), "CPU")
    torch.library.register_fake(
        "gemma_npu_test_in_place::accumulate", lambda x, cache: x.new_empty(cache.shape[1:]), lib=lib
    )

    def fn(cache: Tensor, x: Tensor) -> Tensor:
        return torch.ops.gemma_npu_test_in_place.accumulate(x, cache) + 1

    cache, x = torch.zeros(4, 2), torch.ones(4, 2)
    torch._dynamo.mark_static_address(cache)
    results, _, _ = compiled(fn, cache, x)
    assert results.tolist() == [5.0, 5.0]
    assert cache.tolist() == [[1.0, 1.0]] * 4


@pytest.mark.parametrize("name", [*WRITES, *LEFT])
def test_idempotent(name: str) -> None:
    write = (WRITES.get(name) or LEFT[name])[0]

    def fn(kc: Tensor, vc: Tensor, k: Tensor, s: Tensor) -> Tensor:
        write(kc, vc, k, s)
        return kc.sum() + vc.sum()

    (kc, vc), (k, s) = caches(), tokens()
    gm, _ = functional(fn, kc=kc, vc=vc, k=k, s=s)
    first = keep_writes_in_place(gm)
    gm.graph.lint()
    before = targets(gm)
    second = keep_writes_in_place(gm)
    assert second.changed == 0
    assert second.left == first.left
    assert targets(gm) == before
