"""``check`` and ``replay-check`` on a small step: faults planted on purpose are found, by name."""

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from gemma_npu_compile.check import Checker, Result, difference
from gemma_npu_compile.check_step import StepState, fill, random_state, trace
from gemma_npu_compile.errors import ReplayError
from gemma_npu_compile.graphs.buffers import StableBuffers
from gemma_npu_compile.kv_cache import PagedKVCache
from gemma_npu_compile.options import Options
from gemma_npu_compile.passes import PASSES, PassResult
from gemma_npu_compile.passes.fx import call
from gemma_npu_compile.passes.sites import attention_nodes, site
from gemma_npu_compile.replay_check import ReplayChecker
from gemma_npu_compile.step import DraftVerifyStep

aten = torch.ops.aten


def make_step(pair) -> DraftVerifyStep:
    cache = PagedKVCache(pair[0].config, max_rows=4, max_model_len=256)
    return DraftVerifyStep(*pair, cache, 1)


@pytest.fixture(scope="module")
def traced(pair) -> tuple[Checker, Result]:
    step = make_step(pair)
    return trace(step, random_state(step, [3, 140, 200], seed=1), Options(platform="ascend910b"), seed=1)


def plant(monkeypatch, name: str, change: Any) -> None:
    """Let a pass do its work, and then something wrong."""
    original = PASSES[name]

    def broken(gm: GraphModule, platform: Any = None) -> PassResult:
        import inspect

        result = original(gm, platform) if "platform" in inspect.signature(original).parameters else original(gm)
        change(gm)
        return result

    monkeypatch.setitem(PASSES, name, broken)


def test_a_sound_step_is_equal_at_every_stage(traced):
    checker, start = traced
    assert start.fault is None
    result = checker.run()
    assert result.fault is None
    assert list(result.stages) == [*PASSES, "captured"]
    assert max(result.stages.values()) < 1e-4


def test_a_pass_that_binds_the_wrong_groups_table_is_named_with_the_layer(traced, monkeypatch):
    def wrong(gm: GraphModule) -> None:
        nodes = {"/".join(site(node)): node for node in attention_nodes(gm)}
        sliding, full = nodes["verify/target.layers.0"], nodes["verify/target.layers.1"]
        full.update_arg(3, sliding.args[3])

    plant(monkeypatch, "bind_block_tables", wrong)
    fault = traced[0].run(bisect=True).fault
    assert fault is not None
    assert fault.stage == "bind_block_tables"
    assert "paged_attention" in fault.node
    assert fault.candidates == []


def test_a_new_node_that_computes_something_else_is_among_the_candidates(traced, monkeypatch):
    def wrong(gm: GraphModule) -> None:
        node = gm.graph.find_nodes(op="call_function", target=torch.ops.gemma_npu.gelu_mul.default)[-1]
        with gm.graph.inserting_before(node):
            new = call(gm.graph, torch.ops.gemma_npu.gelu_mul.default, node.args[1], node.args[0])
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)

    plant(monkeypatch, "fuse_gated_gelu", wrong)
    fault = traced[0].run(bisect=True).fault
    assert fault is not None
    assert fault.stage == "fuse_gated_gelu"
    assert any("gelu_mul" in each for each in fault.candidates)
    assert "modeling_gemma4.py" in fault.node


def test_a_pass_that_drops_a_cache_write_is_named_with_the_cache(traced, monkeypatch):
    def wrong(gm: GraphModule) -> None:
        gm.graph.erase_node(gm.graph.find_nodes(op="call_function", target=torch.ops.gemma_npu.store_kv.default)[0])

    plant(monkeypatch, "keep_writes_in_place", wrong)
    fault = traced[0].run().fault
    assert fault is not None
    assert fault.stage == "keep_writes_in_place"
    assert fault.what.startswith(("result", "cache."))


def test_a_capture_that_differs_is_a_stage_of_its_own(traced, monkeypatch):
    load = StableBuffers.load

    def shifted(self: StableBuffers, args: list[Any], rows: int | None, size: int | None) -> int:
        loaded = load(self, args, rows, size)
        for item in self.inputs:
            if item.role == "lengths":
                self.buffers[str(item.buffer)] += 1
        return loaded

    monkeypatch.setattr(StableBuffers, "load", shifted)
    fault = traced[0].run().fault
    assert fault is not None
    assert fault.stage == "captured"


def test_reading_a_block_no_table_reaches_is_the_steps_own_fault(pair, monkeypatch):
    step = make_step(pair)
    state = random_state(step, [3, 140], seed=0)
    block = state.tables[1][1, 1]
    monkeypatch.setattr(
        "gemma_npu_compile.check_step.fill",
        lambda cache, tables, seed: fill(cache, [tables[0], torch.where(tables[1] == block, 0, tables[1])], seed),
    )
    _, result = trace(step, state, Options())
    assert result.fault is not None
    assert result.fault.stage == "step"


def test_poison_is_everywhere_but_in_reached_and_null_blocks(pair):
    step = make_step(pair)
    state = random_state(step, [3, 140], seed=0)
    fill(step.cache, state.tables, 0)
    for group, table in zip(step.cache.groups, state.tables, strict=True):
        pool = step.cache.key_pools[group.layers[0]]
        finite = {index for index in range(group.num_blocks) if pool[index].isfinite().all()}
        reached = set(table.flatten().tolist()) - {0}
        assert finite == reached | set(range(group.null_blocks))
        assert all(pool[index].isnan().all() for index in range(group.num_blocks) if index not in finite)


def test_difference_counts_nan_and_types():
    nan = float("nan")
    exact = (0.0, 0.0)
    assert difference(torch.tensor([1.0, nan]), torch.tensor([1.0, nan]), exact) == (True, 0.0)
    same, error = difference(torch.tensor([1.0, nan]), torch.tensor([1.0, 2.0]), (1.0, 1.0))
    assert not same
    assert error != error
    assert difference(torch.tensor([1, 5]), torch.tensor([1, 2]), (9.0, 9.0)) == (False, 3.0)
    assert difference(torch.zeros(2), torch.zeros(2, dtype=torch.half), exact)[0] is False
    assert difference(torch.tensor([1.0]), torch.tensor([1.5]), (0.0, 0.6)) == (True, 0.5)


# ---- replays


@pytest.fixture(scope="module")
def replays(pair) -> ReplayChecker:
    checker = ReplayChecker(make_step(pair), Options(capture_sizes=(2, 4)))
    assert checker.run(12, seed=3) == []
    return checker


def invariants(checker: ReplayChecker) -> set[str]:
    return {each.invariant for each in checker.run(8, seed=5)}


def test_a_table_that_is_rebound_instead_of_copied_is_found(replays, monkeypatch):
    load = StableBuffers.load

    def rebind(self: StableBuffers, args: list[Any], rows: int | None, size: int | None) -> int:
        for name, buffer in list(self.buffers.items()):
            self.buffers[name] = buffer.clone()
        return load(self, args, rows, size)

    kept = [dict(b.buffers) for r in replays._runners for each in r._bindings for b in each.buffers.values()]
    monkeypatch.setattr(StableBuffers, "load", rebind)
    assert {"addresses", "results"} <= invariants(replays)
    found = [b for r in replays._runners for each in r._bindings for b in each.buffers.values()]
    for buffers, before in zip(found, kept, strict=True):  # the captures read these
        buffers.buffers.update(before)


def test_rows_of_an_earlier_call_are_found(replays, monkeypatch):
    load = StableBuffers.load
    monkeypatch.setattr(StableBuffers, "load", lambda self, args, rows, size: load(self, args, rows, rows))
    assert "stale rows" in invariants(replays)


def test_a_wider_table_that_is_not_refused_by_name_is_found(replays, monkeypatch):
    monkeypatch.setattr(StableBuffers, "check", lambda self, args, rows=None: None)
    found = replays.run(2, seed=5)
    assert {each.invariant for each in found} == {"refusals"}
    assert any("full_attention" in each.what for each in found)


def test_a_refusal_that_comes_too_late_is_found(replays, monkeypatch):
    def late(self: StableBuffers, args: list[Any], rows: int | None = None) -> None:
        table = next(i for i in self.inputs if i.role == "block_table")
        if args[table.source].shape[1] != self.buffers[str(table.buffer)].shape[1]:
            next(iter(replays.cache.key_pools.values()))[0] += 1
            raise ReplayError("too wide")

    monkeypatch.setattr(StableBuffers, "check", late)
    assert any("came after a write" in each.what for each in replays.run(2, seed=5))


def test_frozen_lengths_are_found(replays, monkeypatch):
    load = StableBuffers.load

    def frozen(self: StableBuffers, args: list[Any], rows: int | None, size: int | None) -> int:
        loaded = load(self, args, rows, size)
        for item in self.inputs:
            if item.role == "lengths":
                self.buffers[str(item.buffer)].fill_(7)
        return loaded

    monkeypatch.setattr(StableBuffers, "load", frozen)
    assert {"lengths", "results"} <= invariants(replays)


def test_another_groups_table_is_found(replays, monkeypatch):
    load = StableBuffers.load

    def swapped(self: StableBuffers, args: list[Any], rows: int | None, size: int | None) -> int:
        loaded = load(self, args, rows, size)
        self.buffers["block_table.g1"].copy_(self.buffers["block_table.g0"])
        return loaded

    monkeypatch.setattr(StableBuffers, "load", swapped)
    found = replays.run(8, seed=5)
    assert any(each.invariant == "tables" and "verify/target.layers.1" in each.what for each in found)


def test_uncaptured_options_are_refused(pair):
    with pytest.raises(ValueError, match="needs captured graphs"):
        ReplayChecker(make_step(pair), Options(capture=False))


def test_a_state_is_rows_and_their_blocks(pair):
    step = make_step(pair)
    state: StepState = random_state(step, [1, 200], seed=0)
    assert state.lengths == [1, 200]
    assert [tuple(t.shape) for t in state.tables] == [(2, 3), (2, 3)]
    assert step.cache.length(1) == 200
