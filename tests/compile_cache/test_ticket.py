"""What is kept, what is not and why, and that a loaded trace behaves as the one that was kept."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gemma_npu_compile.compile_cache.key as key_module
import gemma_npu_compile.compile_cache.ticket as ticket_module
from gemma_npu_compile.compile_cache import Folder
from gemma_npu_compile.compile_cache.ticket import TRACE_HIT
from gemma_npu_compile.errors import CompileError

X = torch.arange(12.0).view(3, 4)


def plus(x):
    return x * 2 + torch.tensor([1.0, 2.0, 3.0, float("inf")]), x.shape[0] * 3


@pytest.mark.parametrize("state", ["hit", TRACE_HIT])
def test_a_second_process_hits_and_never_calls_aot(
    folder: Folder, compiled, entry, no_aot, no_passes, state: str
) -> None:
    first, report = compiled(plus, X, dynamic=True)
    assert report.cache == "stored"
    assert len(list(folder.entries())) == 2
    no_aot()
    if state == "hit":
        entry(folder, "trace").unlink()
        no_passes()
    else:
        entry(folder, "final").unlink()
    second, hit = compiled(plus, X, dynamic=True)
    assert hit.cache == state
    assert torch.equal(first[0], second[0])
    assert torch.equal(second[0], plus(X)[0])
    assert (second[1], first[1]) == (9, 9)
    assert hit.nodes == report.nodes
    assert len(list(folder.entries())) == (1 if state == "hit" else 2)


def test_the_option_and_the_environment_switch_it_off(folder: Folder, compiled, monkeypatch) -> None:
    assert compiled(plus, X, cache=False)[1].cache == "off"
    monkeypatch.setenv("GEMMA_NPU_CACHE", "0")
    assert compiled(plus, X)[1].cache == "off"
    assert not folder.path.exists()


def test_a_hit_serves_other_sizes_and_recompiles_where_it_should(folder: Folder, fresh_dynamo, no_aot) -> None:
    """The loaded graph is symbolic, and the guards of the function itself still hold."""
    from gemma_npu_compile.backend import Backend
    from gemma_npu_compile.report import collect

    def choose(x):
        return x + 1 if x.shape[0] > 5 else x - x.shape[0]

    def run() -> list[str]:
        torch._dynamo.reset()
        made = torch.compile(choose, backend=Backend(), options={"platform": "cpu"}, dynamic=True)
        with collect() as report, torch.no_grad():
            for rows in (3, 4, 5, 7, 9, 2):
                assert torch.equal(made(torch.ones(rows, 4)), choose(torch.ones(rows, 4)))
        return [graph.cache for graph in report.graphs]

    assert run() == ["stored", "stored"]
    no_aot()
    assert run() == ["hit", "hit"]


def test_the_first_size_of_a_hit_may_be_another(folder: Folder, compiled, no_aot) -> None:
    compiled(plus, X, dynamic=True)
    no_aot()
    (result, rows), report = compiled(plus, torch.ones(7, 4), dynamic=True)
    assert report.cache == "hit"
    assert (result.shape, rows) == ((7, 4), 21)


@pytest.mark.parametrize("state", ["hit", TRACE_HIT])
def test_a_loaded_trace_knows_its_sizes_and_adds_no_guard(
    folder: Folder, compiled, monkeypatch, entry, state: str
) -> None:
    """Fakes of the trace in progress: sizes in its symbols, with the values of the call at hand."""
    compiled(plus, X, dynamic=True)
    if state != "hit":
        entry(folder, "final").unlink()
    found = {}

    def watched(*args):
        ticket = look_up(*args)
        assert ticket_module._knowledge() == ticket._before
        trace = ticket.final.trace if ticket.final is not None else ticket.trace
        found.update({node.name: node.meta.get("val") for node in trace.graph.graph.nodes})
        return ticket

    look_up = ticket_module.look_up
    monkeypatch.setattr("gemma_npu_compile.backend.look_up", watched)
    assert compiled(plus, torch.ones(7, 4), dynamic=True)[1].cache == state
    (rows, product) = [value for value in found.values() if isinstance(value, torch.SymInt)]
    assert (rows.node.hint, product.node.hint) == (7, 21)
    assert product.node.expr == 3 * rows.node.expr
    tensors = [value for value in found.values() if isinstance(value, torch.Tensor) and value.dim() == 2]
    assert len(tensors) == 3
    assert {each.fake_mode for each in tensors} == {tensors[0].fake_mode}
    assert [(each.shape[0].node.expr, each.shape[0].node.hint) for each in tensors] == [(rows.node.expr, 7)] * 3


def write(cache, x):
    cache.index_add_(0, torch.tensor([1]), x[:1])
    return cache.sum(0)


def test_writes_results_and_gradients_are_those_of_aot(folder: Folder, compiled) -> None:
    """In place, counted in the version, results marked as dynamic, no gradients though the caller has them on."""
    outcomes = []
    for state in ("stored", "hit"):
        cache, x = torch.zeros(5, 4), torch.ones(2, 4)
        torch._dynamo.mark_dynamic(x, 0)
        version = cache._version
        result, report = compiled(lambda c, x: (write(c, x), x * 2), cache, x, grad=True)
        assert report.cache == state
        assert cache.sum() == 4
        marks = [getattr(each, "_dynamo_propagated_dynamic_indices", None) for each in result]
        outcomes.append((cache._version - version, marks, [each.requires_grad for each in result]))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] == (
        2,
        [set(), {0}],
        [False, False],
    )  # counted by AOT's wrapper, and by the copy the replay ends with


def _unknown(x):
    return x + 1


def _posing(x):
    return x + 2


_posing.__module__ = "torch.nn.functional"
torch.compiler.allow_in_graph(_unknown)
torch.compiler.allow_in_graph(_posing)


NOISE = [i**0.5 for i in range(20)]  # does not pack
REASONS = {
    "view of an input": (lambda x: x.t(), (X,), "a result is an input, or shares memory"),
    "written memory is shared": (lambda x, y: x.add_(1) * y, X.clone().view(-1).split(6), "written to shares memory"),
    "function of the user": (lambda x: _unknown(x), (X,), "calls .*_unknown, which is not known to be torch's own"),
    "posing as torch's": (lambda x: _posing(x), (X,), "calls torch.nn.functional._posing, which is not known"),
    "wrapped": (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), (X,), "modules or tensors of its own"),
    "large constant": (lambda x: x + torch.tensor(NOISE), (torch.ones(1),), "a tensor of 80 bytes"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_is_not_kept_says_why(folder: Folder, compiled, monkeypatch, name: str) -> None:
    monkeypatch.setattr("gemma_npu_compile.compile_cache.trace.MAX_CONSTANT", 64)
    fn, args, reason = REASONS[name]
    for _ in range(2):
        _, report = compiled(fn, *args)
        assert re.match(f"not cached: .*{reason}", report.cache), report.cache
    assert list(folder.entries()) == []


AROUND = {
    "mutated_inp_runtime_indices": ([0], "AOT changes an input outside of the graph"),
    "num_intermediate_bases": (1, "shares memory"),
    "subclass_inp_meta": ([object()], "tensor subclass"),
    "act_input_indices": ([0], "tensor subclass"),
    "tokens": ({"effect": 0}, "operators have effects"),
    "is_rng_op_functionalized": (True, "operators have effects"),
    "grad_enabled_mutation": (False, "changes the grad mode"),
}


@pytest.mark.parametrize("name", AROUND)
def test_whatever_aot_does_around_the_graph_is_a_reason(folder, compiled, monkeypatch, name: str) -> None:
    """Each fact of AOT's metadata on its own, on a graph that is kept otherwise."""
    value, reason = AROUND[name]
    judge = ticket_module._why_not

    def changed(metadata, *graphs):
        assert judge(metadata, *graphs) is None
        return judge(SimpleNamespace(**{**vars(metadata), name: value}), *graphs)

    monkeypatch.setattr(ticket_module, "_why_not", changed)
    _, report = compiled(lambda x: x + 1, X)
    assert re.match(f"not cached: .*{reason}", report.cache), report.cache


def test_autocast_is_not_kept(folder: Folder, compiled) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        _, report = compiled(lambda x: x @ x.t(), X)
    assert report.cache == "not cached: autocast is on"


def test_operators_of_the_user_are_not_kept(folder: Folder, compiled) -> None:
    with torch.library._scoped_library("elsewhere2", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("elsewhere2::twice", torch.empty_like, lib=library)
        result, report = compiled(lambda x: torch.ops.elsewhere2.twice(x), X)
    assert torch.equal(result, X * 2)
    assert report.cache == "not cached: operator elsewhere2::twice is of neither torch nor this package"


def test_training_leaves_nothing_behind(folder: Folder, compiled) -> None:
    with pytest.raises(CompileError, match="inference only"):
        compiled(lambda x: x * 2, X.clone().requires_grad_(), grad=True)
    assert not folder.path.exists()


def test_a_guard_of_aot_is_not_forgotten(folder: Folder, compiled) -> None:
    """A size that only AOT decides by would be unguarded where AOT is not run."""
    calls = []

    def fake(x):
        calls.append(1)
        return torch.empty_like(x) if len(calls) < 2 or x.shape[0] % 2 == 0 else x.new_empty(0)

    with torch.library._scoped_library("gemma_npu", "FRAGMENT") as library:
        library.define("test_guards(Tensor x) -> Tensor")
        library.impl("test_guards", torch.clone, "CompositeExplicitAutograd")
        torch.library.register_fake("gemma_npu::test_guards", fake, lib=library)
        _, report = compiled(lambda x: torch.ops.gemma_npu.test_guards(x), torch.ones(6, 4), dynamic=True)
    assert len(calls) > 1
    assert report.cache == "not cached: tracing added guards"


def _changes(monkeypatch) -> dict[str, Any]:
    plain = lambda x: x + 1  # noqa: E731
    return {
        "constant": lambda run: run(lambda x: x + 2, X),
        "type of a constant": lambda run: run(lambda x: x + 1.0, X),
        "operator": lambda run: run(lambda x: x - 1, X),
        "dtype": lambda run: run(plain, X.double()),
        "shape": lambda run: run(plain, X[:, :2].clone()),
        "stride": lambda run: run(plain, X.view(4, 3).t()),
        "symbols": lambda run: run(plain, X, dynamic=True),
        "gradients": lambda run: run(plain, X, grad=True),
        "default dtype": lambda run: _with_dtype(lambda: run(plain, X)),
        "module": lambda run: run(torch.nn.Sequential(torch.nn.Identity(), _Plus()), X),
        "versions": lambda run: _with_versions(monkeypatch, lambda: run(plain, X)),
    }


class _Plus(torch.nn.Module):
    def forward(self, x):
        return x + 1


def _with_dtype(run):
    torch.set_default_dtype(torch.float64)
    try:
        return run()
    finally:
        torch.set_default_dtype(torch.float32)


def _with_versions(monkeypatch, run):
    other = {**key_module.versions(), "sources": "0" * 64}
    with monkeypatch.context() as patch:
        patch.setattr(key_module, "versions", lambda: other)
        return run()


@pytest.mark.parametrize("name", _changes(None))
def test_the_key_tells_graphs_apart(folder: Folder, compiled, monkeypatch, name: str) -> None:
    assert compiled(lambda x: x + 1, X)[1].cache == "stored"
    assert _changes(monkeypatch)[name](compiled)[1].cache == "stored"
    assert compiled(lambda x: x + 1, X.clone())[1].cache == "hit"


def test_static_addresses_are_part_of_the_key(folder: Folder, compiled) -> None:
    held = X.clone()
    compiled(lambda x: x + 1, held)
    torch._dynamo.mark_static_address(held, guard=False)
    stored, hit = (compiled(lambda x: x + 1, held)[1] for _ in range(2))
    assert (stored.cache, hit.cache) == ("stored", "hit")
    assert [each.plan.inputs[0].static for each in (stored, hit)] == [True, True]


def test_a_folder_that_cannot_be_written_to_is_a_reason(folder: Folder, compiled, monkeypatch, caplog) -> None:
    folder.path.parent.joinpath("graphs").write_text("a file")
    result, report = compiled(plus, X)
    assert torch.equal(result[0], plus(X)[0])
    assert report.cache.startswith("not cached: ")
    assert "graphs" in report.cache
    assert [record.levelname for record in caplog.records if "compile cache" in record.message] == ["WARNING"]
