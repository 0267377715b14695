"""Regions that Dynamo traced once are written out: the graph behind them is the one without regions."""

import copy
import importlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import gemma_npu_compile as gnc
from gemma_npu_compile.backend import Backend
from gemma_npu_compile.regions import CALL, write_out

backend_module = importlib.import_module("gemma_npu_compile.backend")  # the package has an object of this name
HOP = torch.ops.higher_order.invoke_subgraph


@pytest.fixture(autouse=True)
def _clean(fresh_dynamo: None) -> Iterator[None]:
    with torch.no_grad():
        yield


def compiled(fn: Callable[..., Any], *args: Any) -> tuple[Any, Backend]:
    backend = Backend()
    run = torch.compile(fn, backend=backend, fullgraph=True, options={"platform": "cpu", "cache": False})
    return run(*args), backend


@torch.compiler.nested_compile_region
def inner(x: Tensor) -> Tensor:
    return x.sin() * 2


@torch.compiler.nested_compile_region
def outer(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return inner(x) + y, inner(y)


def nested(x: Tensor) -> Tensor:
    for _ in range(3):
        x, y = outer(x, x + 1)
    return inner(x - y)


def flat(x: Tensor) -> Tensor:
    for _ in range(3):
        y = x + 1
        x, y = x.sin() * 2 + y, y.sin() * 2
    return (x - y).sin() * 2


@torch.compiler.nested_compile_region
def choosing(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def test_regions_in_regions(structure) -> None:
    x = torch.linspace(-1, 1, 6).view(2, 3)
    graphs = []
    for fn in (nested, flat):
        result, backend = compiled(fn, x)
        torch.testing.assert_close(result, flat(x))
        (runner,) = backend._runners
        graphs.append(structure(runner.gm))
        torch._dynamo.reset()
    assert graphs[0] == graphs[1]


def test_a_region_keeps_the_bodies_of_what_it_calls() -> None:
    """Dynamo's graph of it, run as it stands: other operators of higher order stay what they are."""
    seen: list[GraphModule] = []

    def run(gm: GraphModule, _: Any) -> Any:
        write_out(gm)
        gm.graph.lint()
        seen.append(gm)
        return gm.forward

    call = torch.compile(lambda x: choosing(x) * choosing(x - 9), backend=run, fullgraph=True)
    x = torch.arange(3.0)
    assert call(x).tolist() == ((x + 1) * (x - 10)).tolist()
    assert not seen[0].graph.find_nodes(op="call_function", target=HOP)
    assert len(seen[0].graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond)) == 2


def test_what_dynamo_writes_out_itself_leaves_nothing_behind() -> None:
    """A region called once: its body would keep the graph out of the compile cache."""
    children: list[list[str]] = []

    def run(gm: GraphModule, _: Any) -> Any:
        before = [name for name, _ in gm.named_children()]
        write_out(gm)
        children.append([*before, "|", *(name for name, _ in gm.named_children())])
        return gm.forward

    x = torch.arange(3.0)
    call = torch.compile(lambda x: inner(x) + choosing(x), backend=run, fullgraph=True)
    torch.testing.assert_close(call(x), x.sin() * 2 + x + 1)
    (names,) = children
    before, after = names[: names.index("|")], names[names.index("|") + 1 :]
    assert len(before) > len(after) == 2, "the two branches of a condition stay"


def test_a_call_knows_its_number() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.gemma_npu.row_padding.default, (x, f"a {CALL}")),))
    body, graph = GraphModule({}, graph), torch.fx.Graph()
    value = graph.placeholder("x")
    for _ in range(3):
        call = graph.call_function(HOP, (graph.get_attr("body"), "body", value))
        value = graph.call_function(operator.getitem, (call, 0))
    graph.output((value,))
    gm = GraphModule({"body": body}, graph)
    write_out(gm)
    assert [node.args[1] for node in gm.graph.nodes if node.op == "call_function"] == ["a 0", "a 1", "a 2"]
    assert not hasattr(gm, "body")


def test_a_step_traces_one_iteration_and_its_graph_stays_what_it_was(pair, structure, places, monkeypatch) -> None:
    """Operators, source lines, inputs, names of attention sites; with regions, three calls of one body."""
    calls: list[list[str]] = []

    def watched(gm: GraphModule) -> None:
        calls.append([node.args[0].target for node in gm.graph.find_nodes(op="call_function", target=HOP)])
        write_out(gm)

    monkeypatch.setattr(backend_module, "write_out", watched)
    found = []
    for regions in (True, False):
        options = gnc.Options(platform="cpu", cache=False)
        engine = gnc.Engine(*pair, 3, max_rows=2, max_model_len=256, options=options)
        engine.step.regions = regions
        engine.warm_up()
        (report,) = engine.report.graphs
        assert report.aot is None
        (runner,) = engine._run("greedy").runners
        inputs = sorted((i.role, str(i.shape), i.static, i.label) for i in runner.plan.inputs)
        sites = [f"{each.phase}/{each.layer}" for each in runner.plan.attention]
        changed = {record.name: record.changed for record in report.passes}
        operators = [each[:2] for each in structure(runner.gm) if each[0] == "call_function"]
        lines = [
            place
            for node, place in zip(runner.gm.graph.nodes, places(runner.gm), strict=True)
            if node.op == "call_function"
        ]
        found.append((sites, operators, lines, inputs, changed))
        torch._dynamo.reset()
    assert calls[0] == calls[0][:1] * 3
    assert calls[1] == []
    assert [site.split("/")[0] for site in found[0][0][:6]] == ["draft.0"] * 2 + ["draft.1"] * 2 + ["draft.2"] * 2
    for one, other in zip(*found, strict=True):
        assert one == other


def test_two_steps_in_one_function_are_not_one(pair) -> None:
    """Same classes, another assistant: the second step's drafts are its own."""
    other = copy.deepcopy(pair[1])
    for parameter in other.parameters():
        parameter.data = parameter.data.flip(0).contiguous()
    steps, inputs = [], []
    for assistant in (pair[1], other):
        engine = gnc.Engine(pair[0], assistant, 2, max_rows=2, max_model_len=256, compiled=False)
        state = engine.prefill([torch.arange(1, 9), torch.arange(5, 30)])
        for row, length in zip(state.rows, state.lengths, strict=True):
            engine.cache.extend(row, length + 3)
        steps.append(gnc.DraftVerifyStep(pair[0], assistant, engine.cache, 2, regions=True))
        inputs.append((state.token, state.hidden, state.seq_len, engine.cache.block_tables(state.rows)))

    def drafts() -> list[Tensor]:
        return [step(*given).drafts for step, given in zip(steps, inputs, strict=True)]

    expected = [each.tolist() for each in drafts()]
    assert expected[0] != expected[1]
    found, _ = compiled(drafts)
    assert [each.tolist() for each in found] == expected
