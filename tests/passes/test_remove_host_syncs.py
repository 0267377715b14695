"""A number read from the device is an error inside a capture; one computed there instead must be the same number."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.passes import PASSES, PassRecord
from gemma_npu_compile.passes.remove_host_syncs import remove_host_syncs
from gemma_npu_compile.report import GraphReport, collect

READ = torch.ops.aten._local_scalar_dense.default
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]


@pytest.fixture(autouse=True)
def _clean(fresh_dynamo: None) -> Iterator[None]:
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


def compiled(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, GraphModule, GraphReport]:
    """Results of one compiled call, the final graph and its report."""
    backend = Backend()
    with collect() as report:
        results = torch.compile(fn, backend=backend, fullgraph=True, options=options)(*args)
    (runner,) = backend._runners
    return results, runner.gm, report.graphs[0]


def record_of(report: GraphReport) -> PassRecord:
    return next(record for record in report.passes if record.name == "remove_host_syncs")


def left_over(gm: GraphModule) -> list[str]:
    """Nodes of host arithmetic, and reads."""
    return [
        str(n.target)
        for n in gm.graph.nodes
        if n.op == "call_function" and (n.target is READ or getattr(n.target, "__module__", "") == "_operator")
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fill_stays_on_the_device(dtype: torch.dtype) -> None:
    """The assistant's masked embeddings: everything but the candidates gets the minimum less one."""

    def fn(x: Tensor) -> Tensor:
        return torch.full((2, 3), x.min().item() - 1, dtype=x.dtype)

    x = torch.tensor([7, 100, 37]).to(dtype)
    result, gm, report = compiled(fn, x)
    record = record_of(report)
    assert (record.changed, dict(record.left)) == (1, {})
    assert left_over(gm) == []
    assert report.captures == 1
    assert not report.fallbacks
    torch.testing.assert_close(result, fn(x), rtol=0, atol=0)
    assert result.is_contiguous()


def test_each_call_reads_its_own_number() -> None:
    backend = Backend()

    def fn(x: Tensor) -> Tensor:
        return torch.full((2,), x.max().item() * 2 + 1)

    run = torch.compile(fn, backend=backend, fullgraph=True)
    assert [run(torch.tensor([1.0, n]))[0].item() for n in (2.0, 3.0, 4.0)] == [5.0, 7.0, 9.0]
    (runner,) = backend._runners
    assert (runner.report.captures, runner.report.replays) == (1, 3)


NUMBERS = st.floats(-500, 500, width=16)
ARITHMETIC: dict[str, Callable[[Any], Any]] = {
    "minus one": lambda n: n - 1,
    "times three": lambda n: n * 3,
    "half": lambda n: n / 2,
    "chain": lambda n: (n + 4) * 2 - 1,
    "itself": lambda n: n,
}


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("filled", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("read", [torch.float32, torch.bfloat16])
def test_same_numbers_as_host_arithmetic(name: str, filled: torch.dtype, read: torch.dtype) -> None:
    arithmetic = ARITHMETIC[name]

    def fn(x: Tensor) -> Tensor:
        return torch.full((3,), arithmetic(x.min().item()), dtype=filled)

    backend = Backend()
    run = torch.compile(fn, backend=backend, fullgraph=True)

    @given(NUMBERS)
    def check(number: float) -> None:
        x = torch.tensor([number, 600.0]).to(read)
        torch.testing.assert_close(run(x), fn(x), rtol=0, atol=0)

    check()
    (runner,) = backend._runners
    assert runner.report.captures == 1


def test_used_otherwise_is_left_and_named() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        number = x.min().item()
        return torch.full((2,), number - 1), torch.clamp(y, number)

    x, y = torch.tensor([2.0, 3.0]), torch.ones(2)
    result, gm, report = compiled(fn, x, y)
    record = record_of(report)
    assert record.changed == 1
    assert record.left == {"the number is used by aten.clamp.default": 1}
    assert READ in [n.target for n in gm.graph.nodes]
    assert report.captures == 0
    ((reason, count),) = report.fallbacks.items()
    assert count == 1
    assert "_local_scalar_dense" in reason
    assert "x.min().item()" in reason
    torch.testing.assert_close(result, fn(x, y), rtol=0, atol=0)


def test_number_on_the_left_is_left_and_right() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.full((2,), 1 - x.min().item())

    x = torch.tensor([2.0, 3.0])
    result, gm, report = compiled(fn, x)
    assert record_of(report).changed == 0
    assert sum(record_of(report).left.values()) == 1
    assert left_over(gm)
    torch.testing.assert_close(result, fn(x), rtol=0, atol=0)


@pytest.mark.parametrize("otherwise", [False, True])
def test_idempotent(otherwise: bool) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        number = x.min().item()
        return torch.full((2,), number - 1), torch.clamp(y, number) if otherwise else y * 2

    _, gm, _ = compiled(fn, torch.tensor([2.0, 3.0]), torch.ones(2), disable_passes=tuple(PASSES))
    first = remove_host_syncs(gm)
    gm.graph.lint()
    before = [(n.op, n.target) for n in gm.graph.nodes]
    second = remove_host_syncs(gm)
    assert (first.changed, second.changed) == (1, 0)
    assert second.left == first.left
    assert bool(first.left) == otherwise
    assert [(n.op, n.target) for n in gm.graph.nodes] == before
