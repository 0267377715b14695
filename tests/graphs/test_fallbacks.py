"""Every call that is not replayed must say why, once in the log and each time in the report, and still be right."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.errors import ReplayError
from gemma_npu_compile.graphs.runner import GraphRunner
from gemma_npu_compile.graphs.runtime import HostRuntime
from gemma_npu_compile.ops import row_padding

LOGGER = "gemma_npu_compile.graphs.runner"


@pytest.fixture(autouse=True)
def _clean(fresh_dynamo: None) -> Iterator[None]:
    with torch.no_grad():
        yield


def build(fn: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Backend]:
    backend = Backend()
    return torch.compile(fn, backend=backend, fullgraph=True, options=options), backend


def only(backend: Backend) -> GraphRunner:
    (found,) = backend._runners
    return found


def equal(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_rows_above_the_largest_size(caplog: pytest.LogCaptureFixture) -> None:
    def fn(x: Tensor, pad: Tensor) -> Tensor:
        return row_padding(x, pad) * 2

    run, backend = build(fn)
    xs = [torch.randn(rows, 2) for rows in (3, 6, 6, 7)]
    for x in xs:
        torch._dynamo.mark_dynamic(x, 0)
    with caplog.at_level(logging.WARNING, LOGGER):
        for x in xs:
            equal(run(x, torch.zeros(4, 2)), x * 2)
    report = only(backend).report
    assert report.fallbacks == {
        "6 rows exceed the largest capture size 4": 2,
        "7 rows exceed the largest capture size 4": 1,
    }
    assert report.replays == 1
    warned = [r.getMessage() for r in caplog.records if r.name == LOGGER]
    assert [sum(f"{rows} rows" in w for w in warned) for rows in (3, 6, 7)] == [0, 1, 1]


def test_capture_failure_is_kept_and_costs_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []
    real = HostRuntime.capture

    def counted(*args: Any) -> Any:
        attempts.append(args)
        return real(*args)

    monkeypatch.setattr(HostRuntime, "capture", counted)
    run, backend = build(lambda x, y: (x.clamp(y.min().item()) * 2).softmax(-1))
    with torch._dynamo.config.patch(capture_scalar_outputs=True), caplog.at_level(logging.WARNING, LOGGER):
        for n in range(100):
            x, y = torch.arange(3.0), torch.tensor([n / 50])
            equal(run(x, y), (x.clamp(n / 50) * 2).softmax(-1))
    runner = only(backend)
    ((reason, count),) = runner.report.fallbacks.items()
    assert count == 100
    assert "_local_scalar_dense" in reason
    assert len(attempts) == 1
    assert (runner._runtime.nbytes, runner.report.captures, [b.graphs for b in runner._bindings]) == (0, 0, [{}])
    assert len([r for r in caplog.records if r.name == LOGGER]) == 1


def test_exact_sizes_are_captured_up_to_a_limit() -> None:
    run, backend = build(lambda x: x.cumsum(0) * 2, max_captures=2)
    for repeat in range(2):
        for rows in (2, 3, 4, 5, 6, 7, 8, 9):
            x = torch.randn(rows, 2)
            torch._dynamo.mark_dynamic(x, 0)
            equal(run(x), x.cumsum(0) * 2)
        assert only(backend).report.captures == 2
        assert only(backend).report.replays == 2 * (repeat + 1)
    runner = only(backend)
    assert runner.report.fallbacks == {"more than 2 input sizes (max_captures)": 12}
    assert sum(len(b.buffers) for b in runner._bindings) <= 2, "sizes that are never captured need no buffers"


@pytest.mark.parametrize("capture", [True, False])
def test_checks_of_sizes_compile(capture: bool) -> None:
    """``torch._check`` leaves an assertion without a result in the graph."""

    def fn(x: Tensor) -> Tensor:
        torch._check(x.shape[0] < 100)
        return x * 2

    run, backend = build(fn, capture=capture)
    x = torch.ones(3)
    torch._dynamo.mark_dynamic(x, 0)
    equal(run(x), x * 2)
    assert not only(backend).report.fallbacks


def test_padding_that_the_graph_reads_is_not_frozen() -> None:
    """A padding tensor may be an operand as well; each call must see its own, or be refused."""
    run, _ = build(lambda x, pad: row_padding(x, pad) + pad.sum())
    x = torch.ones(3, 2)
    torch._dynamo.mark_dynamic(x, 0)
    keep = [torch.zeros(4, 2), torch.ones(4, 2)]
    equal(run(x, keep[0]), x)
    try:
        second = run(x, keep[1])
    except ReplayError:
        return
    equal(second, x + 8)
