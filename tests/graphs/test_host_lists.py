"""Host lists are frozen at capture; a replay sees new ones only through an update of the tasks that read them."""

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.errors import CaptureError, ReplayError
from gemma_npu_compile.graphs.host import HostGraph
from gemma_npu_compile.graphs.memory import Pool
from gemma_npu_compile.ops.library import Kernel, implement

LIBRARY = torch.library.Library("gemma_npu_test", "DEF")
LIBRARY.define("scaled(Tensor x, SymInt[] factors) -> Tensor")
SCALED = torch.ops.gemma_npu_test.scaled.default


def _check(x: Tensor, factors: list[int]) -> None:
    if len(factors) != x.shape[0] or max(factors) > 100:
        raise ValueError(f"{factors} must be {x.shape[0]} factors of at most 100")


def _run(x: Tensor, factors: list[int], *, out: Tensor | None = None) -> Tensor:
    return torch.mul(x, torch.tensor(factors)[:, None], out=out)


implement(LIBRARY, SCALED, Kernel(_check, _run, lambda x, factors: torch.empty_like(x)))


def graph() -> tuple[GraphModule, Tensor]:
    """``scaled(x, a) + scaled(x, b) + scaled(x, a)`` with two lists as inputs."""
    x = torch.ones(2, 3)
    fake = make_fx(lambda x: x + 1, tracing_mode="fake")(x).graph.find_nodes(op="placeholder")[0].meta["val"]
    made = Graph()
    inputs = [made.placeholder(name) for name in ("x", "a", "b")]
    inputs[0].meta["val"] = fake
    parts = [made.call_function(SCALED, (inputs[0], each)) for each in (inputs[1], inputs[2], inputs[1])]
    total = made.call_function(torch.ops.aten.add.Tensor, (parts[0], parts[1]))
    total = made.call_function(torch.ops.aten.add.Tensor, (total, parts[2]))
    for node in made.nodes:
        if node.op == "call_function":
            node.meta["val"] = fake
    made.output([total])
    return GraphModule(torch.nn.Module(), made), x


def test_lists_are_frozen_and_updated_task_by_task() -> None:
    gm, x = graph()
    first, second = [1, 2], [10, 20]
    captured = HostGraph(gm, [x, first, second], {}, Pool())
    first[:] = [99, 99]  # the caller's list is not the graph's
    captured.replay()
    assert captured.outputs[0][:, 0].tolist() == [12.0, 24.0]
    assert captured.update(0, [1, 2]) == 0, "nothing changed, nothing is updated"
    assert captured.update(0, [3, 4]) == 2, "two tasks read the first list"
    assert captured.update(1, [5, 6]) == 1
    captured.replay()
    assert captured.outputs[0][:, 0].tolist() == [11.0, 14.0]
    assert captured.host == [[3, 4], [5, 6]]


def test_a_list_the_operator_refuses_changes_nothing() -> None:
    gm, x = graph()
    captured = HostGraph(gm, [x, [1, 2], [10, 20]], {}, Pool(), "capture of 2 rows")
    with pytest.raises(ReplayError, match=r"capture of 2 rows: scaled.*\[3, 101\] must be 2 factors.*nothing was run"):
        captured.update(0, [3, 101])
    captured.replay()
    assert captured.outputs[0][:, 0].tolist() == [12.0, 24.0]


def test_a_bad_list_is_refused_at_capture() -> None:
    gm, x = graph()
    with pytest.raises(CaptureError, match=r"capture of 2 rows: scaled.*\[1, 2, 3\] must be 2 factors"):
        HostGraph(gm, [x, [1, 2], [1, 2, 3]], {}, Pool(), "capture of 2 rows")
