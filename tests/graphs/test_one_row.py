"""One row is captured as one row where the graph is seen to treat it as one of many, and nowhere else."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.graphs.runner import GraphRunner
from gemma_npu_compile.ops import row_padding

PADDING = torch.full((4, 3), 7.0)


@pytest.fixture(autouse=True)
def _clean(fresh_dynamo: None) -> Iterator[None]:
    with torch.no_grad():
        yield


def runner_of(
    fn: Callable[..., Any], first: int = 2, padding: Tensor = PADDING, **options: Any
) -> tuple[GraphRunner, Callable[[Tensor], Any]]:
    """The runner of a function of rows, called with ``first`` rows, and a call of it past Dynamo."""
    backend = Backend(smallest=1)
    x = torch.zeros(first, 3)
    torch._dynamo.mark_dynamic(x, 0)
    run = torch.compile(fn, backend=backend, fullgraph=True, options={"platform": "cpu", **options})
    run(x, padding)
    (runner,) = backend._runners

    def call(rows: Tensor) -> Any:
        given: dict[Any, Any] = {(): len(rows), (3,): rows}
        args = [padding if i.role == "padding" else given[tuple(i.shape[1:])] for i in runner.plan.inputs]
        return runner(args)

    return runner, call


def doubled(x: Tensor, padding: Tensor) -> Tensor:
    x = row_padding(x, padding)
    return (x * 2).unsqueeze(1).sum(1)


def test_one_row_has_a_capture_of_its_own() -> None:
    runner, call = runner_of(doubled)
    assert (runner.report.sizes, runner.report.one_row, runner.report.checked) == ([4, 2, 1], None, 3)
    graphs = runner._bindings[0].graphs
    replayed = []
    for key, graph in graphs.items():
        graph.__dict__["replay"] = lambda key=key, replay=graph.replay: (replayed.append(key), replay())
    for rows in (1, 2, 1, 3):
        x = torch.randn(rows, 3)
        (result,) = call(x)
        torch.testing.assert_close(result, 2 * x, rtol=0, atol=0)
    assert replayed == [(1,), (2,), (1,), (4,)]


def test_sizes_asked_for_are_those_there_are() -> None:
    runner, call = runner_of(doubled, capture_sizes=[2, 3])
    assert runner.sizes == (2, 3, 4)
    assert call(torch.ones(1, 3))[0].tolist() == [[2.0] * 3]


def squeezed(x: Tensor, padding: Tensor) -> Tensor:
    """Dropping an axis of one keeps an axis of two, which is what was traced: one row would lose its own."""
    x = row_padding(x, padding)
    return torch.ops.aten.squeeze.dim(x + 1, 0) * torch.ones(3)


def test_a_graph_that_would_treat_one_row_otherwise_runs_it_beside_a_padded_one() -> None:
    runner, call = runner_of(squeezed)
    assert runner.report.sizes == [4, 2]
    assert runner.report.one_row is not None
    assert "has shape [(3,)] for one row, it would have to be [(1, 3)]" in runner.report.one_row
    assert f"  no capture of one row: {runner.report.one_row}" in runner.report.lines()
    assert runner.sizes == (2, 4)
    (result,) = call(torch.ones(1, 3))
    assert result.tolist() == [[2.0] * 3]
    assert not runner.report.fallbacks


def random(x: Tensor, padding: Tensor) -> Tensor:
    x = row_padding(x, padding)
    return x + torch.rand_like(x)


def test_without_a_check_there_is_no_capture_of_one_row() -> None:
    runner, call = runner_of(random)
    assert runner.report.sizes == [4, 2]
    assert runner.report.one_row == runner.report.unchecked is not None
    assert call(torch.ones(1, 3))[0].shape == (1, 3)


def test_dynamo_never_brings_one_row_so_none_is_captured() -> None:
    backend = Backend()
    x = torch.zeros(2, 3)
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(doubled, backend=backend, fullgraph=True, options={"platform": "cpu", "capture_sizes": [1, 2]})(
        x, PADDING
    )
    (runner,) = backend._runners
    assert runner.report.sizes == [4, 2]


def raising(x: Tensor, padding: Tensor) -> Tensor:
    """Without its axis there are no two to swap."""
    x = row_padding(x, padding)
    return torch.ops.aten.squeeze.dim(x + 1, 0).transpose(0, 1).contiguous().t() * 1


def test_a_graph_that_fails_for_one_row_keeps_its_other_captures() -> None:
    runner, call = runner_of(raising)
    assert runner.report.sizes == [4, 2]
    assert runner.report.one_row is not None
    assert "IndexError" in runner.report.one_row
    assert call(torch.ones(1, 3))[0].tolist() == [[2.0] * 3]


@pytest.mark.parametrize("fn", [squeezed, raising])
def test_the_first_capture_may_be_for_one_row(fn) -> None:
    """Five rows are more than the padding has: they ran uncaptured, and nothing is known of one row yet."""
    runner, call = runner_of(fn, first=5)
    assert runner.report.captures == 0
    for _ in range(2):
        assert call(torch.ones(1, 3))[0].tolist() == [[2.0] * 3]
    assert runner.report.sizes == [4, 2]


def test_a_padding_of_one_row_has_one_size() -> None:
    runner, call = runner_of(doubled, first=2, padding=PADDING[:1])
    assert call(torch.ones(1, 3))[0].tolist() == [[2.0] * 3]
    assert runner.report.sizes == [1]


def counted(x: Tensor, padding: Tensor) -> Tensor:
    """Shapes fit whatever comes, and numbers do not."""
    rows = x.shape[0]
    y = torch.ops.aten.squeeze.dim(row_padding(x, padding), 0)
    return (y.unsqueeze(1) * torch.tensor(1.0) + torch.arange(3.0)).sum(1) + torch.zeros(rows, 3)


@pytest.mark.parametrize("capture", [True, False])
def test_nothing_runs_on_one_row_that_was_not_checked(capture) -> None:
    runner, call = runner_of(counted, capture=capture)
    two = call(torch.tensor([[1.0, 5.0, 2.0]] * 2))[0]
    assert call(torch.tensor([[1.0, 5.0, 2.0]]))[0].tolist() == two[:1].tolist()
    assert 1 not in runner.report.sizes
