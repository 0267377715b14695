"""A trace as plain data and back, on graphs made by hand."""

import json
import operator

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule

from gemma_npu_compile.compile_cache.names import NotCacheableError
from gemma_npu_compile.compile_cache.trace import Trace, from_plain, to_plain


def build(*results: str) -> GraphModule:
    """A graph of multiplications with the names given, in this order; values are numbers."""
    graph = Graph()
    last = graph.placeholder("arg0_1")
    for name in results:
        last = graph.create_node("call_function", operator.mul, (last, 2), name=name)
        last.meta["val"] = None
    graph.output((last,))
    return GraphModule({}, graph)


def back(graph: GraphModule, dynamo: GraphModule) -> GraphModule:
    plain = json.loads(json.dumps(to_plain(Trace(graph, (), (), (None,)), dynamo, {})))
    return from_plain(plain, dynamo, [3], FakeTensorMode(), {}).graph


def test_names_given_later_are_those_of_the_trace() -> None:
    """FX counts on from the last name it made, whether its node is still there or not."""
    graph = build("mul", "mul_9", "add_4", "mul_3", "sub_5")
    graph.graph.erase_node(graph.graph.create_node("call_function", operator.mul, (1, 2), name="mul_4"))
    graph.graph.erase_node(graph.graph.create_node("call_function", operator.mul, (1, 2), name="sub_8"))
    loaded = back(graph, build("x"))
    assert loaded.code == graph.code
    made = [
        [
            each.graph.create_node("call_function", operator.mul, (1, 2), name=name).name
            for name in ("mul", "sub", "sub")
        ]
        for each in (graph, loaded)
    ]
    assert made[0] == made[1] == ["mul_5", "sub", "sub_9"]


def test_source_lines_and_modules_are_those_of_the_graph_at_hand() -> None:
    """Of the first node that looked alike when the trace was made; a node without a place has none."""
    then, now = build("a", "b", "c"), build("a", "b", "c")
    for node, line in zip(then.graph.nodes, ("", "one", "two", "two", ""), strict=True):
        node.meta.update(stack_trace=f"line {line}", nn_module_stack={"0": (f"L['self'].{node.name}", "M")})
    for number, node in enumerate(now.graph.nodes):
        node.meta.update(stack_trace=f"line {100 + number}", nn_module_stack={"7": (f"L['self'].{node.name}", "M")})
    graph = build("p", "q", "r")
    p, q, _ = graph.graph.find_nodes(op="call_function", target=operator.mul)
    b = next(node for node in then.graph.nodes if node.name == "b")
    p.meta.update(stack_trace=b.meta["stack_trace"], nn_module_stack=b.meta["nn_module_stack"])
    q.meta.update(stack_trace="line two")
    plain = json.loads(json.dumps(to_plain(Trace(graph, (), (), (None,)), then, {})))
    loaded = from_plain(plain, now, [3], FakeTensorMode(), {}).graph
    p, q, r = loaded.graph.find_nodes(op="call_function", target=operator.mul)
    assert (p.meta["stack_trace"], p.meta["nn_module_stack"]) == ("line 102", {"7": ("L['self'].b", "M")})
    assert q.meta["stack_trace"] == "line 102"
    assert "nn_module_stack" not in q.meta
    assert set(r.meta) == {"val"}


def test_other_nodes_and_values_are_refused_by_name() -> None:
    graph = build("a")
    with graph.graph.inserting_before(graph.graph.find_nodes(op="output")[0]):
        graph.graph.call_method("cos", (graph.graph.find_nodes(op="placeholder")[0],))
    with pytest.raises(NotCacheableError, match="the trace has a call_method"):
        back(graph, build("x"))
    graph = build("a")
    graph.graph.find_nodes(op="call_function", target=operator.mul)[0].meta["val"] = torch.ones(2)
    with pytest.raises(NotCacheableError, match="a value of type Tensor"):
        back(graph, build("x"))
