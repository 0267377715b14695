"""The decorator: loops run as they are, on stand-ins; what a user gave in is never changed."""

import collections
import copy
import functools
import gc
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import StaticCache

import gemma_npu_compile as gnc
from gemma_npu_compile.backend import Backend
from gemma_npu_compile.shadows import kept_in


@pytest.fixture(autouse=True)
def _clean(fresh_dynamo: None) -> Iterator[None]:
    with torch.no_grad():
        yield


class Doubler(nn.Module):
    """Small enough to compile in a blink; says whether it was traced."""

    def __init__(self, by: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), by), requires_grad=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        return x * self.weight


def state(model: nn.Module) -> dict[int, dict[str, Any]]:
    """Every attribute of every module, dicts one level deep."""
    return {
        id(module): {k: dict(v) if isinstance(v, dict) else v for k, v in module.__dict__.items()}
        for module in model.modules()
    }


def greedy(model: Any, input_ids: Tensor, new: int = 8, **ignored: Any) -> Tensor:
    cache = StaticCache(config=model.config, max_cache_len=64)
    found, token = [input_ids], input_ids
    for _ in range(new):
        token = model(input_ids=token, cache=cache).logits[:, -1:].argmax(-1)
        found.append(token)
    return torch.cat(found, dim=1)


X = torch.arange(3.0)


def test_the_models_given_run_compiled_and_are_left_alone() -> None:
    models = [Doubler(2), Doubler(3), Doubler(5), Doubler(7)]
    before = [state(each) for each in models]

    @gnc.compile_loop
    def loop(first: Any, *rest: Any, last: Any, more: Any = None) -> Tensor:
        return last["model"](more[0](rest[0](first(X))))

    result = loop(models[0], models[1], last={"model": models[2]}, more=(models[3], "text"))
    assert torch.equal(result, X * 210)
    assert [each.calls for each in models] == [0, 0, 0, 0]
    assert [state(each) for each in models] == before
    assert loop.report.totals()["replays"] == 4
    assert loop.report.totals()["fallbacks"] == {}


def test_a_second_call_compiles_nothing() -> None:
    model = Doubler()
    loop = gnc.compile_loop(platform="cpu")(lambda model: model(X))
    loop(model)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(loop(model=model), X * 2)
    assert (len(loop.report.graphs), loop.report.totals()["replays"]) == (1, 2)


def test_nothing_stays_after_an_exception() -> None:
    model = Doubler()
    before = state(model)

    @gnc.compile_loop
    def loop(model: Any) -> None:
        model(X)
        model.note = "of this call"
        model.register_forward_hook(lambda *args: None)
        raise KeyError("half way")

    with pytest.raises(KeyError, match="half way"):
        loop(model)
    assert state(model) == before


def test_weights_are_shared_not_copied() -> None:
    model, loop = Doubler(), gnc.compile_loop(lambda model: model(X))
    assert torch.equal(loop(model), X * 2)
    model.weight.fill_(9)
    assert torch.equal(loop(model), X * 9)
    assert len(loop.report.graphs) == 1


def test_loops_inside_loops_and_recursion() -> None:
    @gnc.compile_loop
    def inner(model: Any, x: Tensor) -> Tensor:
        return model(x)

    @gnc.compile_loop
    def outer(model: Any, depth: int) -> Tensor:
        return inner(model, X) if depth == 0 else outer(model, depth - 1) * 2

    model = Doubler()
    assert torch.equal(outer(model, 2), X * 8)
    assert (len(outer.report.graphs), len(inner.report.graphs)) == (1, 0)
    assert torch.equal(inner(model, X), X * 2)
    assert len(inner.report.graphs) == 1
    assert model.calls == 0


def test_threads_do_not_see_each_other() -> None:
    model, barrier, seen = Doubler(), threading.Barrier(3), {}

    @gnc.compile_loop
    def loop(model: Any, name: int) -> Tensor:
        model.name = name
        barrier.wait()
        x = model(X + name)
        barrier.wait()
        seen[name] = model.name, x
        return x

    threads = [threading.Thread(target=torch.no_grad()(loop), args=(model, each)) for each in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert {name: value[0] for name, value in seen.items()} == {0: 0, 1: 1, 2: 2}
    assert all(torch.equal(value[1], (X + name) * 2) for name, value in seen.items())
    assert not hasattr(model, "name")
    assert model.calls == 0
    assert sum(g.replays for g in loop.report.graphs) == 3


def test_models_in_closures_run_compiled() -> None:
    model, models = Doubler(), [Doubler(3)]

    @gnc.compile_loop
    def loop(x: Tensor) -> Tensor:
        return sum(each(model(x)) for each in models)

    assert torch.equal(loop(X), X * 6)
    assert (model.calls, models[0].calls, loop.report.totals()["replays"]) == (0, 0, 2)


def test_defaults_run_compiled() -> None:
    model = Doubler()

    @gnc.compile_loop
    def loop(x: Tensor, model: Any = model) -> Tensor:
        return model(x)

    assert torch.equal(loop(X), X * 2)
    assert model.calls == 0


HIDDEN = Doubler()


def helper(x: Tensor) -> Tensor:
    return HIDDEN(x)


class Keeper:
    """No module, but it keeps one."""

    def __init__(self, model: nn.Module) -> None:
        self.rate, self.models = 2, {"target": model}

    def run(self, x: Tensor) -> Tensor:
        return self.models["target"](x)


KEEPER = Keeper(Doubler())


def test_models_kept_by_other_objects_are_refused_and_not_run() -> None:
    """They would run uncompiled beside the stand-ins, and nothing would say so."""
    keeper, other = Keeper(Doubler()), Doubler()
    forward = other.forward

    def argument(model: nn.Module, helper: Any) -> Tensor:
        return model(helper.run(X))

    def closure(model: nn.Module) -> Tensor:
        return model(keeper.run(X))

    def in_globals(model: nn.Module) -> Tensor:
        return model(KEEPER.run(X))

    def method(model: nn.Module) -> Tensor:
        return model(forward(X))

    through = (
        r"compile_loop: the loop would reach the model {} through a {}, and run it uncompiled; pass it to the loop"
    )
    for loop, args, place, kind in (
        (argument, (keeper,), r"helper\.models\['target'\]", "Keeper"),
        (argument, (keeper.run,), r"helper\.__self__\.models\['target'\]", "method"),
        (argument, ([1, {"a": keeper}],), r"helper\[1\]\['a'\]\.models\['target'\]", "list"),
        (closure, (), r"keeper\.models\['target'\]", "Keeper"),
        (in_globals, (), r"KEEPER\.models\['target'\]", "Keeper"),
        (method, (), r"forward\.__self__", "method"),
    ):
        model = Doubler()
        with pytest.raises(ValueError, match=through.format(place, kind)):
            gnc.compile_loop(loop)(model, *args)
        assert model.calls == 0
    with pytest.raises(ValueError, match=through.format(r"self\.models\['target'\]", "Keeper")):
        gnc.compile_loop(keeper.run)(X)
    assert (keeper.models["target"].calls, other.calls) == (0, 0)

    class Slots:
        __slots__ = ("empty", "model")

    class Models(list):
        pass

    def holding(name: str, value: Any) -> Any:
        made = types.SimpleNamespace()
        setattr(made, name, value)
        return made

    class OneSlot:
        __slots__ = "model"

    slots, one, named = Slots(), OneSlot(), Models()
    slots.model = one.model = named.model = other
    cycle: list[Any] = [1]
    cycle.append(cycle)
    kept = {
        ".o.m": holding("o", holding("m", other)),
        ".model": slots,
        ".f.__self__": holding("f", other.forward),
        ".func": functools.partial(other),
        ".args[0]": functools.partial(print, other),
        "[0]": Models([other]),
        "['a']": collections.OrderedDict(a=other),
        "[0][1][0]": [(1, Models([other]))],
        "[1].m": [cycle, holding("m", other)],
        "": {other},
    }
    assert {place: kept_in(value) for place, value in kept.items()} == {place: place for place in kept}
    assert kept_in(named) == kept_in(one) == ".model"
    for fine in (other, [other], {"a": (other,)}, cycle, slots.__class__(), Models(), X, {"a": {1: "b"}}, len, torch):
        assert kept_in(fine) is None

    class Settings:
        rate = 2

    def settings(model: nn.Module, given: Settings) -> Tensor:
        return model(X) * given.rate

    assert gnc.compile_loop(settings, platform="cpu")(Doubler(), Settings()).tolist() == [0.0, 4.0, 8.0]


def test_models_out_of_reach_are_refused() -> None:
    @gnc.compile_loop
    def through_globals(x: Tensor) -> list[Tensor]:
        return [HIDDEN(x) for _ in range(2)]

    @gnc.compile_loop
    def through_a_helper(model: Any, x: Tensor) -> Tensor:
        return helper(model(x))

    with pytest.raises(ValueError, match=r"through_globals reads the model 'HIDDEN' from its module; pass it"):
        through_globals(X)
    with pytest.raises(ValueError, match=r"helper reads the model 'HIDDEN' from its module; pass it"):
        through_a_helper(Doubler(), X)
    with pytest.raises(ValueError, match=r"was given no model"):
        gnc.compile_loop(lambda x: x)(X)
    assert HIDDEN.calls == 0


def test_options_are_checked_when_decorating() -> None:
    with pytest.raises(ValueError, match=r"unknown option 'platfrom' \(did you mean 'platform'\?\)"):
        gnc.compile_loop(platfrom="cpu")
    with pytest.raises(ValueError, match="num_draft_tokens is -1"):
        gnc.compile_loop(num_draft_tokens=-1)
    with pytest.raises(ValueError, match="give one of them"):
        gnc.compile_loop(num_draft_tokens=1, max_query_len=2)


def test_a_model_compiled_before_or_patched() -> None:
    model = Doubler()
    model.forward = torch.compile(model.forward, backend=Backend())
    loop = gnc.compile_loop(lambda model: model(X))
    assert torch.equal(loop(model), X * 2)
    assert torch.equal(loop(torch.compile(model, backend=Backend())), X * 2)
    assert (len(loop.report.graphs), loop.report.totals()["replays"]) == (1, 2)
    model.forward = lambda x: x
    with pytest.raises(ValueError, match="this Doubler has a forward of its own"):
        loop(model)


def test_what_comes_back_is_the_users() -> None:
    model, kept = Doubler(), []
    loop = gnc.compile_loop(lambda model, out: out.append(1) or {"model": [model], "x": model(X)})
    result = loop(model, kept)
    assert result["model"][0] is model
    assert kept == [1]


def test_module_lists_are_run_by_their_members() -> None:
    models = nn.ModuleList([Doubler(2), Doubler(3)])
    loop = gnc.compile_loop(lambda models: models[1](models[0](X)))
    assert torch.equal(loop(models), X * 6)
    assert [each.calls for each in models] == [0, 0]


def test_captures_go_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Backend] = []
    start = Backend.__init__
    monkeypatch.setattr(Backend, "__init__", lambda self, *args: (made.append(self), start(self, *args))[1])
    model = Doubler()
    loop = gnc.compile_loop(lambda model: model(X))
    loop(model)
    (runner,) = made[0]._runners
    assert runner._bindings
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not runner._bindings
    assert runner._runtime.nbytes == 0


def test_signature_and_name_are_those_of_the_loop() -> None:
    import inspect

    loop = gnc.compile_loop(greedy)
    assert loop.__name__ == "greedy"
    assert list(inspect.signature(loop).parameters) == ["model", "input_ids", "new", "ignored"]


def test_custom_generate_of_transformers(pair: Any) -> None:
    """Prompt uncaptured and untraced, each further token a replay, tokens those of generate()."""
    target = copy.copy(pair[0])
    ids = torch.randint(1, 128, (1, 9), generator=torch.Generator().manual_seed(3))
    expected = target.generate(ids, max_new_tokens=8, do_sample=False)
    loop = gnc.compile_loop(greedy, platform="cpu")
    for _ in range(2):
        assert torch.equal(target.generate(ids, do_sample=False, custom_generate=loop), expected)
    totals = loop.report.to_dict()
    assert (totals["prefills"], totals["replays"], totals["fallbacks"]) == (2, 14, {})
    assert len(loop.report.graphs) == 1


def test_a_growing_cache_is_reported(pair: Any) -> None:
    target = pair[0]
    loop = gnc.compile_loop(functools.partial(target_generate, new=3), platform="cpu")
    ids = torch.randint(1, 128, (1, 9))
    assert torch.equal(loop(target, ids), target.generate(ids, max_new_tokens=3, do_sample=False))
    ((reason, count),) = loop.report.totals()["fallbacks"].items()
    assert count == 2
    assert "DynamicCache" in reason
    assert loop.report.prefills == 1
    assert loop.report.graphs == []


def target_generate(model: Any, ids: Tensor, new: int) -> Tensor:
    return model.generate(ids, max_new_tokens=new, do_sample=False)
