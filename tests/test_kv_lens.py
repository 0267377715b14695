"""Lengths on the device or on the host give the same tokens; what differs is the exact number of task updates."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import gemma_npu_compile as gnc
from gemma_npu_compile.capabilities import platform
from gemma_npu_compile.graphs.host import HostGraph
from gemma_npu_compile.ops import npu_attention_call
from gemma_npu_compile.ops.npu import emulate
from gemma_npu_compile.passes.host_lengths import bucket

STEPS = 30


@pytest.fixture(scope="module")
def expected(pair) -> list[list[list[int]]]:
    """New tokens of every row and step, and the lengths before each, by the plain module."""
    return rounds(gnc.Engine(*pair, 1, max_rows=4, max_model_len=700, compiled=False))


@pytest.fixture(scope="module")
def engines(pair) -> Callable[[str], gnc.Engine]:
    """By where lengths are read."""

    @functools.cache
    def make(kv_lens: str) -> gnc.Engine:
        options = gnc.Options(kv_lens=kv_lens, capture_sizes=(3, 4), on_fallback="error")
        return gnc.Engine(*pair, 1, max_rows=4, max_model_len=700, options=options)

    return make


def rounds(engine: gnc.Engine, steps: int = STEPS) -> list[list[list[int]]]:
    state = engine.prefill([torch.arange(1, 1 + n) % 127 + 1 for n in (110, 7, 240)])
    found = []
    for _ in range(steps):
        lengths = list(state.lengths)
        state, new, _, _ = engine.decode(state)
        found.append([lengths, *new])
    for row in state.rows:
        engine.cache.release(row)
    return found


def updates(lists: Sequence[Sequence[int]], first: Sequence[int]) -> int:
    """How often a list differs from the one before it."""
    return sum(list(a) != list(b) for a, b in zip([first, *lists[:-1]], lists, strict=True))


@pytest.mark.parametrize("kv_lens", ["device", "host"])
def test_tokens_and_updates(engines, expected, kv_lens) -> None:
    engine = engines(kv_lens)
    engine.warm_up()
    (report,) = engine.report.graphs
    assert {(a.head_dim, a.lengths) for a in report.plan.attention} == {
        (16, "fixed 256"),
        (32, "bucket" if kv_lens == "device" else "exact"),
    }
    assert [h.sites for h in report.plan.host] == [("draft.0/assistant.layers.1",), ("verify/target.layers.1",)]
    before, captured = report.host_updates, report.captures
    assert rounds(engine) == expected

    size = 128 if kv_lens == "device" else None
    wanted = 0
    padding = engine.cache.padding_lens
    for extra in (0, 2):  # the drafts see seq_len keys, the last query of the verification seq_len + 2
        lists = [[n + extra if size is None else bucket(n + extra, size) for n in step[0]] for step in expected]
        # The capture of three rows was made with padded rows; its first replay brings the first real lengths.
        first = [int(n) + extra if size is None else bucket(int(n) + extra, size) for n in padding[:3]]
        wanted += updates(lists, first)
    assert report.host_updates - before == wanted
    assert report.captures == captured
    assert wanted == 2 * STEPS if kv_lens == "host" else wanted < 10


def test_operators_are_checked_for_the_platform_of_the_graph(engines, expected, monkeypatch) -> None:
    """In updates, captures and runs without one, also where a caller emulates another."""
    engine, seen = engines("host"), []
    engine.warm_up()
    (runner,) = engine._run("greedy").backend._runners
    asked = npu_attention_call.emulated
    monkeypatch.setattr(npu_attention_call, "emulated", lambda: (seen.append(asked().name), asked())[1])

    def found(**options: Any) -> tuple[set[str], dict[str, int]]:
        """Platforms, and what was counted, of two steps."""
        monkeypatch.setattr(runner, "options", dataclasses.replace(runner.options, **options))
        names = ("host_updates", "captures", "eager_calls")
        before = [getattr(runner.report, name) for name in names]
        with emulate(platform("ascend910_93")):
            assert rounds(engine, 2) == expected[:2]
        counted = {name: getattr(runner.report, name) - n for name, n in zip(names, before, strict=True)}
        answer = set(seen), counted
        seen.clear()
        return answer

    rounds(engine, 2)
    seen.clear()
    own = {"ascend910b"}
    assert found() == (own, {"host_updates": 4, "captures": 0, "eager_calls": 0})
    runner.free()
    assert found() == (own, {"host_updates": 2, "captures": 2, "eager_calls": 0})
    assert found(capture=False) == (own, {"host_updates": 0, "captures": 0, "eager_calls": 2})
    monkeypatch.setattr(runner, "sizes", (2,))
    assert found(capture=True, on_fallback="warn") == (own, {"host_updates": 0, "captures": 0, "eager_calls": 0})
    (reason,) = runner.report.fallbacks
    assert (reason, runner.report.fallbacks[reason]) == ("3 rows exceed the largest capture size 2", 2)
    del runner.report.fallbacks[reason]


def test_dense_verification(pair, expected) -> None:
    """Gathered keys give the same tokens; drafts, of one query, go on reading the cache in place."""
    options = gnc.Options(verify_attention="dense", capture_sizes=(3, 4), on_fallback="error")
    engine = gnc.Engine(*pair, 1, max_rows=4, max_model_len=700, options=options)
    assert rounds(engine) == expected
    (runner,) = engine._run("greedy").backend._runners
    fused = runner.gm.graph.find_nodes(op="call_function", target=torch.ops.npu.npu_fused_infer_attention_score.default)
    paged = {node.meta["attention"].phase: "block_table" in node.kwargs for node in fused}
    assert paged == {"draft.0": True, "verify": False}


@pytest.mark.parametrize("frozen", [False, True])
def test_captures_made_at_a_real_call_are_checked_with_the_lengths_of_the_check(
    make_pair, fresh_dynamo, monkeypatch, frozen: bool
) -> None:
    """Weights that moved are captured anew with requests in flight: of one row too, unless its lists do not follow."""
    models = make_pair()
    options = gnc.Options(platform="ascend910b", kv_lens="host")
    engine = gnc.Engine(*models, 1, max_rows=3, max_model_len=256, options=options)
    engine.warm_up()
    (runner,) = engine._run("greedy").runners
    assert (runner.report.sizes, runner.report.captures) == ([3, 2, 1], 3)
    if frozen:
        update = HostGraph.update
        monkeypatch.setattr(HostGraph, "update", lambda self, *a: 0 if " 1 " in self.name else update(self, *a))
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    engine.launch(engine.prefill([torch.arange(1, 38)]))
    assert runner.report.captures == (5 if frozen else 6)
    assert runner.sizes == ((2, 3) if frozen else (1, 2, 3))
    assert (runner.report.one_row is not None) is frozen
    assert not runner.report.fallbacks
