"""Lengths on the device or on the host give the same tokens; what differs is the exact number of task updates."""

from collections.abc import Sequence

import pytest
import torch

import gemma_npu_compile as gnc
from gemma_npu_compile.graphs.host import HostGraph
from gemma_npu_compile.passes.host_lengths import bucket

STEPS = 30


@pytest.fixture(scope="module")
def expected(pair) -> list[list[list[int]]]:
    """New tokens of every row and step, and the lengths before each, by the plain module."""
    return rounds(gnc.Engine(*pair, 1, max_rows=4, max_model_len=700, compiled=False))


def rounds(engine: gnc.Engine) -> list[list[list[int]]]:
    state = engine.prefill([torch.arange(1, 1 + n) % 127 + 1 for n in (110, 7, 240)])
    found = []
    for _ in range(STEPS):
        lengths = list(state.lengths)
        state, new, _, _ = engine.decode(state)
        found.append([lengths, *new])
    return found


def updates(lists: Sequence[Sequence[int]], first: Sequence[int]) -> int:
    """How often a list differs from the one before it."""
    return sum(list(a) != list(b) for a, b in zip([first, *lists[:-1]], lists, strict=True))


@pytest.mark.parametrize("kv_lens", ["device", "host"])
def test_tokens_and_updates(pair, expected, kv_lens) -> None:
    options = gnc.Options(kv_lens=kv_lens, capture_sizes=(3, 4), on_fallback="error")
    engine = gnc.Engine(*pair, 1, max_rows=4, max_model_len=700, options=options)
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
