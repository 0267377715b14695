"""A report is the only witness of fallbacks and recompiles in production: its numbers must add up and serialise."""

import json
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.loops import compile_loop
from gemma_npu_compile.ops import paged_attention, row_padding
from gemma_npu_compile.passes import PASSES
from gemma_npu_compile.report import CompileReport, GraphReport, collect, explain


@pytest.fixture(autouse=True)
def _clean(fresh_dynamo: None) -> Iterator[None]:
    with torch.no_grad():
        yield


def double(x: Tensor, pad: Tensor) -> Tensor:
    return row_padding(x, pad) * 2


def rows(count: int) -> Tensor:
    x = torch.ones(count, 2)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def test_collect_sees_what_is_compiled_inside() -> None:
    pad = torch.zeros(4, 2)
    with collect() as outer:
        torch.compile(double, backend=Backend())(rows(2), pad)
        with collect() as inner:
            torch.compile(lambda x: x + 1, backend=Backend())(pad)
    torch.compile(lambda x: x - 1, backend=Backend())(pad)
    assert [len(outer.graphs), len(inner.graphs)] == [2, 1]
    assert outer.graphs[1] is inner.graphs[0]


def test_collect_is_per_thread() -> None:
    with collect() as here:
        thread = threading.Thread(target=lambda: torch.compile(lambda x: x + 1, backend=Backend())(torch.ones(2)))
        thread.start()
        thread.join()
    assert here.graphs == []


def test_counts_go_on_after_the_block() -> None:
    run, pad = torch.compile(double, backend=Backend()), torch.zeros(4, 2)
    with collect() as report:
        run(rows(3), pad)
    assert report.totals() == {"captures": 2, "replays": 1, "sizes": [2, 4], "recompiles": 0, "fallbacks": {}}
    run(rows(2), pad)
    run(rows(6), pad)
    totals = report.totals()
    assert (totals["captures"], totals["replays"]) == (2, 2)
    assert totals["fallbacks"] == {"6 rows exceed the largest capture size 4": 1}


def test_totals_add_up() -> None:
    graphs = [
        GraphReport("a", recompile=True, captures=2, sizes=[4, 2], replays=3),
        GraphReport("b", captures=1, sizes=[4], replays=5),
    ]
    graphs[0].fallbacks.update({"why": 2, "how": 1})
    graphs[1].fallbacks.update({"why": 1})
    assert CompileReport(graphs).totals() == {
        "captures": 3,
        "replays": 8,
        "sizes": [2, 4],
        "recompiles": 1,
        "fallbacks": {"why": 3, "how": 1},
    }
    assert CompileReport().totals()["sizes"] == []


def test_explain_runs_once_and_serialises() -> None:
    calls = []

    def fn(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        return paged_attention(q, cache, cache, table, lens, 1.0, 5, layer="verify/m.layers.7")

    args = torch.ones(2, 2, 4), torch.ones(4, 4, 1, 4), torch.ones(2, 1).int(), torch.ones(2).int()
    report = explain(fn, platform="cpu", capture_sizes=(2,), disable_passes=("remove_host_syncs",))(*args)
    calls.append(report)
    (graph,) = json.loads(json.dumps(report.to_dict()))["graphs"]
    assert (graph["captures"], graph["replays"], graph["eager_calls"]) == (1, 1, 0)
    assert [p["name"] for p in graph["passes"]] == [name for name in PASSES if name != "remove_host_syncs"]
    (binding,) = graph["bindings"]
    assert binding == {
        "layer": "m.layers.7",
        "phase": "verify",
        "group": "g0",
        "block_table": "block_table_verify_m_layers_7",
    }
    assert graph["nodes"] == report.graphs[0].nodes > 0
    assert graph["pool_bytes"] > 0
    assert graph["buffer_bytes"] == sum(a.nbytes for a in args)
    assert {"passes", "capture"} <= set(graph["seconds"])
    text = str(report)
    for part in ("1 graphs: captures 1", "attention verify/m.layers.7: TND, head size 4, window 5", "1 replays"):
        assert part in text


def test_text_tells_fallbacks_and_recompiles() -> None:
    graph = GraphReport("graph 0/1", recompile=True)
    graph.fallbacks["too many rows"] += 3
    text = str(CompileReport([graph]))
    assert "graph 0/1: 0 nodes (recompiled)" in text
    assert "fell back 3 times: too many rows" in text
    assert graph.to_dict()["fallbacks"] == {"too many rows": 3}


def test_eager_calls_are_no_fallbacks() -> None:
    (graph,) = explain(double, capture=False)(rows(2), torch.zeros(4, 2)).graphs
    assert (graph.eager_calls, graph.replays, graph.captures, dict(graph.fallbacks)) == (1, 0, 0, {})


def test_recompiles_are_counted_and_only_those() -> None:
    backend = Backend()
    run = torch.compile(lambda x: x * 2, backend=backend)
    with collect() as report:
        run(torch.ones(2))
        run(torch.ones(2, dtype=torch.float64))
        torch.compile(lambda x: x * 3, backend=backend)(torch.ones(2))
    assert [g.recompile for g in report.graphs] == [False, True, False]


def test_after_a_reset_nothing_is_a_recompile() -> None:
    backend = Backend()
    with collect() as report:
        torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2))
        torch._dynamo.reset()
        torch.compile(lambda x: x * 3, backend=backend)(torch.ones(2))
    assert [g.recompile for g in report.graphs] == [False, False]


def test_breaks_and_recompiles_say_where_and_why() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    backend = Backend()
    run = torch.compile(broken, backend=backend)
    with collect() as report:
        run(torch.ones(2))
        run(torch.ones(2, dtype=torch.float64))
    found = json.loads(json.dumps(report.to_dict()))
    assert [(b["code"], b["graph"]) for b in found["breaks"]] == [
        ("torch._dynamo.graph_break()", report.graphs[0].name),
        ("torch._dynamo.graph_break()", report.graphs[2].name),
    ]
    assert found["breaks"][0]["file"] == __file__
    assert found["breaks"][0]["line"] == broken.__code__.co_firstlineno + 2
    assert [g["break"] is None for g in found["graphs"]] == [False, True, False, True]
    reasons = {each["graph"]: each["reason"] for each in found["recompile_reasons"]}
    assert list(reasons) == [report.graphs[2].name, report.graphs[3].name]
    assert "tensor 'x' dtype mismatch. expected Float, actual Double" in reasons[report.graphs[2].name]
    text = str(report)
    assert f"graph break at {__file__}:{broken.__code__.co_firstlineno + 2}: torch._dynamo.graph_break()" in text
    assert "recompiled because of 0/0: tensor 'x' dtype mismatch" in text


def test_explain_of_a_loop_counts_this_call_only() -> None:
    class Model(torch.nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids * 2

    loop = compile_loop(lambda model, n: [model(torch.ones(1, each, dtype=torch.long)) for each in (n, 2)])
    model = Model()
    loop(model, 40)
    report = explain(loop)(model, 50)
    assert (report.prefills, report.graphs) == (1, []), "the graph was compiled by the first call"
    assert loop.report.prefills == 2
    with pytest.raises(ValueError, match="has its options where it was decorated, not \\['platform'\\]"):
        explain(loop, platform="cpu")
