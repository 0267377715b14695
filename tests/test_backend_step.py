"""The step through torch.compile: one graph for any number of rows, bound tables, in-place caches, fixed memory."""

import json

import pytest
import torch

import gemma_npu_compile as gnc
from gemma_npu_compile.backend import Backend
from gemma_npu_compile.passes.in_place import functional_writes
from gemma_npu_compile.report import collect


class Case:
    """A compiled step with rows prefilled, and everything needed to call it."""

    def __init__(self, pair, max_rows: int = 5, **options) -> None:
        # Blocks of 16 tokens, which no Ascend SoC takes for a verification: several blocks per row, tables that matter.
        options.setdefault("platform", "cpu")
        self.engine = gnc.Engine(*pair, 1, max_rows=max_rows, max_model_len=96, block_size=16, compiled=False)
        self.step = self.engine.step
        self.state = self.engine.prefill([torch.arange(1, 4 + 9 * row) for row in range(max_rows)])
        self.backend = Backend()
        self.run = torch.compile(self.step, backend=self.backend, fullgraph=True, options=options)
        for row, length in zip(self.state.rows, self.state.lengths, strict=True):
            self.engine.cache.extend(row, length + 2)

    def inputs(self, rows: int):
        state = self.state.select(range(rows))
        inputs = state.token, state.hidden, state.seq_len, self.engine.cache.block_tables(state.rows)
        gnc.mark_rows(*inputs)
        return inputs


@pytest.fixture(scope="module")
def case(pair):
    case = Case(pair)
    with collect() as report:
        case.first = case.run(*case.inputs(3))
    case.report = report
    (case.graph,) = report.graphs
    (case.runner,) = case.backend._runners
    return case


@pytest.mark.parametrize("rows", [2, 3, 4, 5])
def test_one_trace_serves_every_number_of_rows(case, rows):
    """Padded or not, results are those of the plain module, and rows of another call leave no trace."""
    inputs = case.inputs(rows)
    expected = case.step(*inputs)
    with torch.compiler.set_stance("fail_on_recompile"):
        result = case.run(*inputs)
    for name, left, right in zip(expected._fields, result, expected, strict=True):
        assert left.shape == right.shape, name
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5, msg=name)
    assert case.graph.sizes == [5, 4, 2]
    assert case.graph.fallbacks == {}


def test_captured_equals_the_same_graph_uncaptured_bit_for_bit(case):
    for rows in (2, 3, 5):
        inputs = case.inputs(rows)
        captured = case.run(*inputs)
        before = case.runner.options
        try:
            case.runner.options = gnc.Options(capture=False)
            uncaptured = case.run(*inputs)
        finally:
            case.runner.options = before
        assert all(torch.equal(a, b) for a, b in zip(captured, uncaptured, strict=True))


def test_no_out_of_place_operator_touches_a_cache(case):
    """Four cache writes went back in place; nothing returns, clones or copies a pool."""
    graph = case.runner.gm.graph
    assert functional_writes(case.runner.gm) == []
    stores = graph.find_nodes(op="call_function", target=torch.ops.gemma_npu_cpu.store_kv.default)
    assert len(stores) == 2
    caches = {arg for node in stores for arg in node.kwargs.values() if arg.op == "placeholder"}
    assert len(caches) == 4
    allowed = {torch.ops.gemma_npu_cpu.store_kv.default, torch.ops.gemma_npu_cpu.paged_attention.default}
    for cache in caches:
        assert {user.target for user in cache.users} == allowed


def test_every_layer_has_its_own_table_input(case):
    """Two layers of two models, two groups, two buffers; the binding is part of the graph."""
    tables = [i for i in case.graph.plan.inputs if i.layer is not None]
    assert [(i.phase, i.layer, i.group) for i in tables] == [
        ("draft.0", "assistant.layers.0", "g0"),
        ("draft.0", "assistant.layers.1", "g1"),
        ("verify", "target.layers.0", "g0"),
        ("verify", "target.layers.1", "g1"),
    ]
    assert len({i.name for i in tables}) == 4
    assert {i.buffer for i in tables} == {"block_table.g0", "block_table.g1"}
    windows = {(a.layer, a.window, a.head_dim) for a in case.graph.plan.attention}
    assert windows == {
        ("assistant.layers.0", 25, 16),
        ("assistant.layers.1", None, 32),
        ("target.layers.0", 24, 16),
        ("target.layers.1", None, 32),
    }
    roles = {i.role for i in case.graph.plan.inputs}
    assert {"block_table", "cache", "lengths", "token", "parameter", "padding"} <= roles


def test_padded_rows_write_nothing_real(case):
    """A replay of 3 rows at size 4 changes exactly the slots of these rows, and null blocks."""
    cache = case.engine.cache
    before = {layer: pool.clone() for layer, pool in cache.key_pools.items()}
    inputs = case.inputs(3)
    case.run(*inputs)
    written = {0: set(), 1: set()}
    for group, table in zip(cache.groups, inputs[3], strict=True):
        for row, length in enumerate(inputs[2].tolist()):
            for position in (length, length + 1):
                written[group.index].add((int(table[row, position // group.block_size]), position % group.block_size))
    for group in cache.groups:
        for layer in group.layers:
            changed = (cache.key_pools[layer] != before[layer]).flatten(2).any(2).nonzero().tolist()
            real = {tuple(place) for place in changed if place[0] >= group.null_blocks}
            assert real <= written[group.index]


def test_a_moved_cache_is_refused_by_name(case):
    cache = case.engine.cache
    original = cache.key_pools[1]
    replays = case.graph.replays
    try:
        cache.key_pools[1] = original.clone()
        torch._dynamo.mark_static_address(cache.key_pools[1], guard=False)
        with pytest.raises(ValueError, match=r"static input cache\.key_pools\[1\] is at 0x.*captured at 0x"):
            case.run(*case.inputs(3))
    finally:
        cache.key_pools[1] = original
    assert case.graph.replays == replays


def test_rows_beyond_the_cache_fall_back_with_a_reason(case, caplog):
    inputs = case.inputs(5)
    doubled = (*(torch.cat([x, x]) for x in inputs[:3]), tuple(torch.cat([t, t]) for t in inputs[3]))
    result = case.run(*doubled)
    reason = "10 rows exceed the largest capture size 5"
    assert case.graph.fallbacks.pop(reason) == 1
    assert caplog.text.count(reason) == 1
    assert torch.equal(result.tokens[:5], result.tokens[5:])


def test_ordered_embeddings_have_no_host_sync(make_pair):
    """The assistant's `.item()` is gone from the graph, and the drafts are those of the module."""
    case = Case(make_pair(ordered=True), max_rows=2)
    with collect() as report:
        result = case.run(*case.inputs(2))
    (runner,) = case.backend._runners
    syncs = runner.gm.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default)
    assert list(syncs) == []
    assert next(p for p in report.graphs[0].passes if p.name == "remove_host_syncs").changed == 1
    assert report.totals()["fallbacks"] == {}
    assert torch.equal(result.drafts, case.step(*case.inputs(2)).drafts)


def test_a_host_sync_that_stays_is_an_error_that_names_it(make_pair):
    off = ["remove_host_syncs", "candidate_argmax"]
    case = Case(make_pair(ordered=True), max_rows=2, disable_passes=off, on_fallback="error")
    with pytest.raises(RuntimeError, match=r"_local_scalar_dense.*modeling_gemma4_assistant.*\.item\(\)"):
        case.run(*case.inputs(2))


def test_reset_frees_everything_twice(pair):
    case = Case(pair, max_rows=2)
    case.run(*case.inputs(2))
    (runner,) = case.backend._runners
    assert runner._bindings
    torch._dynamo.reset()
    torch._dynamo.reset()
    case.backend.reset()
    assert not runner._bindings
    assert runner._runtime.nbytes == 0


def test_explain_reports_the_step(case):
    text = str(case.report)
    assert "attention draft.0/assistant.layers.1: TND, head size 32, all keys, scale 1, g1" in text
    assert "pass keep_writes_in_place: 2 changed" in text
    assert json.loads(json.dumps(case.report.to_dict()))["graphs"][0]["bindings"][0]["phase"] == "draft.0"
