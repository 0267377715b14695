"""The engine's own way to a captured step: the same results, and back to Dynamo's as soon as something has changed."""

import gc
import weakref

import pytest
import torch
from torch import nn

import gemma_npu_compile as gnc
from gemma_npu_compile.direct import _held
from gemma_npu_compile.errors import ReplayError

PROMPT = torch.tensor([3, 1, 4, 1, 5])


@pytest.fixture(scope="module")
def own(make_pair):
    """A pair these tests may change, with an engine for it."""
    pair = make_pair()
    options = gnc.Options(platform="cpu", on_fallback="error")
    return gnc.Engine(*pair, 1, max_rows=3, max_model_len=64, block_size=16, options=options)


@pytest.fixture
def calls(own, monkeypatch):
    """Calls of what torch.compile made, from a warm state on."""
    steps(own, 2)
    (run,) = own._runs.values()
    counted = []

    def call(*args, **kwargs):
        counted.append(len(args[0]))
        return original(*args, **kwargs)

    original = run.call
    monkeypatch.setattr(run, "call", call)
    return counted


def steps(engine, count: int, rows: int = 1) -> list[list[list[int]]]:
    """New tokens of ``rows`` equal rows over ``count`` steps; the cache is empty afterwards."""
    state, found = engine.prefill([PROMPT] * rows), []
    try:
        for _ in range(count):
            state, new, _, _ = engine.decode(state)
            found.append(new)
    finally:
        for row in state.rows:
            engine.cache.release(row)
    return found


def test_dynamo_is_asked_once(own, calls):
    replays = own.report.totals()["replays"]
    found = steps(own, 5), steps(own, 5, rows=3)
    assert calls == []
    assert own.report.totals()["replays"] == replays + 10
    (run,) = own._runs.values()
    run.direct.possible = False
    try:
        assert (steps(own, 5), steps(own, 5, rows=3)) == found
    finally:
        run.direct.possible = True
    assert calls == [2] * 5 + [3] * 5


def test_a_replaced_weight_is_seen(own, calls):
    head = own.step.target.lm_head
    before, kept = steps(own, 3), head.weight
    changed = nn.Parameter(kept.detach().flip(0).clone())
    head.weight = changed
    try:
        with pytest.raises(ReplayError, match="it was captured at"):
            steps(own, 3)
        assert calls == [2]
    finally:
        head.weight = kept
    assert steps(own, 3) == before
    assert calls == [2], "with the weight back, the direct way is right again"


def test_whatever_a_step_holds_must_stay() -> None:
    """Weights, buffers and attributes: replaced, taken away, or added."""
    step = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    held = _held(step)
    assert held.still()
    for owner, name in ((step[0]._parameters, "bias"), (step[1]._buffers, "running_var"), (vars(step), "training")):
        kept = owner[name]
        owner[name] = kept.clone() if isinstance(kept, torch.Tensor) else None
        assert not held.still(), name
        owner[name] = kept
        assert held.still(), name
    vars(step)["extra"] = 1
    assert not held.still()
    del vars(step)["extra"], step[0].bias
    assert not held.still()


def test_modes_go_through_dynamo(own, calls):
    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    state = own.prefill([PROMPT])
    run = next(iter(own._runs.values()))
    assert run.direct.holds()
    with Watch():
        assert not run.direct.holds()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not run.direct.holds()
    own.cache.release(state.rows[0])


def test_after_a_reset_it_learns_anew(own, calls):
    before = steps(own, 3)
    run = next(iter(own._runs.values()))
    old = run.direct
    runners = weakref.WeakSet(run.runners)
    for _ in range(2):  # Dynamo tells a backend of the first reset only
        torch._dynamo.reset()
        gc.collect()
        assert not any(runner._bindings for runner in runners), "captures must not outlive Dynamo's code"
        assert steps(own, 3) == before
        runners |= run.runners
    assert run.direct is not old
    assert run.direct.holds()
    assert calls == [2, 2] * 2, "compiled with the first, learnt from the second"
