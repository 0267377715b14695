"""A kind of call that is met again is copied: the graph is the one that running every call gives, memory included."""

import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.node import map_arg
from torch.fx.traceback import preserve_node_meta
from torch.multiprocessing.reductions import StorageWeakRef

from gemma_npu_compile.expansion import Expander


def formed_other(x: Tensor, y: Tensor) -> Tensor:
    return y.view_as(x)


CALLS: dict[str, Any] = {
    "add": lambda g, x, y: g.call_function(operator.add, (x, y)),
    "scaled": lambda g, x, y: g.call_function(operator.mul, (x, 2)),
    "scaled by a float": lambda g, x, y: g.call_function(operator.mul, (x, 2.0)),
    "scaled by one": lambda g, x, y: g.call_function(operator.mul, (x, 1)),
    "scaled by truth": lambda g, x, y: g.call_function(operator.mul, (x, True)),
    "linear": lambda g, x, y: g.call_function(torch.nn.functional.linear, (x, g.find_nodes(op="placeholder")[1])),
    "norm": lambda g, x, y: g.call_function(torch.nn.functional.layer_norm, (x, (4,))),
    "slice": lambda g, x, y: g.call_function(operator.getitem, (x, (slice(None), slice(0, 4)))),
    "joined": lambda g, x, y: g.call_function(torch.cat, ([x, y],), {"dim": 0}),
    "view": lambda g, x, y: g.call_method("view", (x, -1, 2, 2)),
    "flat": lambda g, x, y: g.call_method("reshape", (x, -1, 4)),
    "contiguous": lambda g, x, y: g.call_method("contiguous", (x,)),
    "turned": lambda g, x, y: g.call_method("transpose", (x, 0, -1)),
    "half": lambda g, x, y: g.call_function(operator.getitem, (g.call_method("chunk", (x, 2, -1)), 1)),
    "largest": lambda g, x, y: g.call_function(operator.getitem, (g.call_method("max", (x, -1, True)), 0)),
    "written": lambda g, x, y: g.call_method("add_", (x, 1)),
    "nothing": lambda g, x, y: g.call_function(operator.mul, (x, 0.0)),
    "nothing, negative": lambda g, x, y: g.call_function(operator.mul, (x, -0.0)),
    "formed like": lambda g, x, y: g.call_method("view_as", (x, y)),
    "the other formed": lambda g, x, y: g.call_function(formed_other, (x, y)),
    "negated": lambda g, x, y: g.call_function(torch._neg_view, (x,)),
    "resolved": lambda g, x, y: g.call_method("resolve_neg", (x,)),
    "longer": lambda g, x, y: g.call_method("unsqueeze_", (x, 0)),
    "its size": lambda g, x, y: g.call_function(operator.mul, (x, g.call_method("size", (y, 0)))),
}


def build(program: list[tuple[str, int, int]]) -> GraphModule:
    """Each call reads two of the values before it, by number from the last one back."""
    graph = Graph()
    x, _ = graph.placeholder("x"), graph.placeholder("weight")
    values = [x, graph.call_function(operator.add, (x, 1))]
    for name, first, second in program:
        values.append(CALLS[name](graph, *(values[-1 - each % len(values)] for each in (first, second))))
    graph.output(tuple(values[2:]))
    for index, node in enumerate(graph.nodes):
        node.meta["stack_trace"] = f"line {index}"
    return GraphModule({}, graph)


def trace(gm: GraphModule, kind: type[Interpreter]) -> tuple[GraphModule, Any]:
    made: list[Interpreter] = []

    def run(*args: Any) -> Any:
        made.append(kind(gm))
        return made[0].run(*args)

    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.zeros(6, 4), source=ConstantSource("x"), symbolic_context=sizes)
    weight = mode.from_tensor(torch.zeros(4, 4), static_shapes=True)
    with preserve_node_meta(), mode, torch.no_grad():
        graph = make_fx(run)(x, weight)
    return graph, made[0]


def described(gm: GraphModule) -> list[Any]:
    """Every tensor: operator, operands, layout, and the line it comes from. Sizes are what they are, not nodes."""
    nodes = [node for node in gm.graph.nodes if not isinstance(node.meta.get("val"), torch.SymInt)]
    order = {node: f"%{index}" for index, node in enumerate(nodes)}
    found = []
    for node in nodes:
        given = map_arg((node.args, node.kwargs), lambda each: order.get(each) or str(each.meta["val"]))
        value = node.meta.get("val")
        sizes = (value.shape, value.stride(), value.storage_offset()) if isinstance(value, Tensor) else ()
        found.append((str(node.target), str(given), str(sizes), node.meta.get("stack_trace")))
    return found


def together(nodes: list[Node], memory: Any) -> list[int]:
    """For every node the first one that shares its memory."""
    seen: dict[Any, int] = {}
    return [seen.setdefault(memory(node), index) for index, node in enumerate(nodes)]


def alike(gm: GraphModule) -> None:
    """The graph and who shares memory, run with copies and without."""
    (plain, _), (copied, expander) = trace(gm, Interpreter), trace(gm, Expander)
    assert described(copied) == described(plain)
    nodes, others = ([n for n in g.graph.nodes if isinstance(n.meta.get("val"), Tensor)] for g in (copied, plain))
    expected = together(others, lambda node: StorageWeakRef(node.meta["val"].untyped_storage()))
    assert together(nodes, expander.memory.__getitem__) == expected


@given(
    st.lists(st.tuples(st.sampled_from(sorted(CALLS)), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12)
)
def test_every_graph_is_the_one_that_calls_give(program) -> None:
    """Random programs, run once as they are; what does not trace fails alike."""
    gm = build(program)
    try:
        trace(gm, Interpreter)
    except Exception as error:
        with pytest.raises(type(error)):
            trace(gm, Expander)
    else:
        alike(gm)


def test_alike_layers_are_copied() -> None:
    gm = build([("linear", 0, 0), ("norm", 0, 0), ("scaled", 0, 0)] * 5)
    graph, expander = trace(gm, Expander)
    assert expander.copied == 3 * 4
    assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.native_layer_norm.default)) == 5


@pytest.mark.parametrize("name", ["written", "its size"])
def test_what_is_never_copied(name) -> None:
    """Writes; and sizes, which are no tensors: their products are copied."""
    _, expander = trace(build([(name, 0, 0)] * 3), Expander)
    assert expander.copied == (0 if name == "written" else 2)


@pytest.mark.parametrize(
    "program",
    [
        [("scaled", 0, 0), ("scaled by a float", 1, 0)],  # equal constants
        [("scaled by one", 0, 0), ("scaled by truth", 1, 0)],
        [("nothing", 0, 0), ("nothing, negative", 1, 0)],
        [("negated", 0, 0), ("negated", 1, 1), ("resolved", 0, 0)],
        [("formed like", 0, 0), ("add", 1, 1), ("add", 2, 1)],  # x + x, and x + a view of it
        [("formed like", 0, 0), ("the other formed", 1, 0), ("add", 0, 0), ("the other formed", 0, 1)],  # one memory
    ],
)
def test_what_looks_alike_and_is_not(program) -> None:
    alike(build(program))
