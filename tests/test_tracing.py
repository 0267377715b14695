"""Graphs of the step are traced in one run; the result is AOT's, and what a run cannot tell is left to AOT."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import gemma_npu_compile as gnc
from gemma_npu_compile.backend import Backend
from gemma_npu_compile.ops import row_padding, store_kv

backend_module = importlib.import_module("gemma_npu_compile.backend")  # the package has an object of this name
PADDING = torch.full((4, 3), 7.0)


@pytest.fixture(autouse=True)
def _clean(fresh_dynamo: None) -> Iterator[None]:
    with torch.no_grad():
        yield


def compiled(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, Backend]:
    backend = Backend()
    run = torch.compile(fn, backend=backend, fullgraph=True, options={"platform": "cpu", "cache": False, **options})
    return run(*args), backend


def rows(count: int = 2) -> Tensor:
    x = torch.arange(3.0 * count).view(count, 3)
    torch._dynamo.mark_dynamic(x, 0)
    return x


@pytest.mark.parametrize("platform", ["cpu", "ascend910b"])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_the_final_graph_of_a_step_is_the_one_aot_leads_to(
    pair, structure, places, monkeypatch, platform, kind
) -> None:
    """Operators, operands, plan, source lines, modules."""
    found = []
    for aot in (False, True):
        if aot:
            monkeypatch.setattr(backend_module, "trace_step", lambda gm, inputs: "asked for")
        options = gnc.Options(platform=platform, cache=False)
        engine = gnc.Engine(*pair, 1, max_rows=2, max_model_len=256, options=options)
        engine.warm_up(kind)
        (report,) = engine.report.graphs
        assert report.aot == ("asked for" if aot else None)
        (runner,) = engine._run(kind).runners
        inputs = [(i.role, str(i.shape), i.source, i.static, i.label) for i in runner.plan.inputs]
        changed = {record.name: record.changed for record in report.passes if record.name != "keep_writes_in_place"}
        found.append((structure(runner.gm), places(runner.gm), inputs, changed))
        torch._dynamo.reset()
    for one, other in zip(*found, strict=True):
        assert one == other


def plain(x: Tensor, padding: Tensor) -> Tensor:
    return row_padding(x, padding) * 2


def test_a_graph_of_the_dialect_is_traced_in_one_run(monkeypatch) -> None:
    monkeypatch.setattr("torch._dynamo.backends.common.aot_module_simplified", None)
    result, backend = compiled(plain, rows(), PADDING)
    assert result.tolist() == (rows() * 2).tolist()
    (runner,) = backend._runners
    assert runner.report.aot is None


def test_a_trace_that_fails_is_left_to_aot(monkeypatch) -> None:
    def fails(fn: Any) -> Any:
        raise NotImplementedError("no such thing\nand more of it")

    monkeypatch.setattr("gemma_npu_compile.tracing.make_fx", fails)
    result, backend = compiled(plain, rows(), PADDING)
    assert result.tolist() == (rows() * 2).tolist()
    (runner,) = backend._runners
    assert runner.report.aot == "NotImplementedError: no such thing"


def in_place(x: Tensor, padding: Tensor) -> Tensor:
    y = row_padding(x, padding) + 1
    y *= 3
    return y


def test_a_write_to_a_result_nobody_reads_again_becomes_a_new_one() -> None:
    result, backend = compiled(in_place, rows(), PADDING)
    assert result.tolist() == ((rows() + 1) * 3).tolist()
    (runner,) = backend._runners
    assert runner.report.aot is None
    assert not runner.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul_.Tensor)


def read_again(x: Tensor, padding: Tensor) -> Tensor:
    y = row_padding(x, padding) + 1
    first = y[:, 0]
    y *= 3
    return y + first.unsqueeze(1)


def chained(x: Tensor, padding: Tensor) -> Tensor:
    y = row_padding(x, padding) + 1
    y += 2
    y *= 3
    return y.masked_fill_(y > 12, 0.0)


def test_writes_behind_writes_become_new_ones() -> None:
    result, backend = compiled(chained, rows(), PADDING)
    assert result.tolist() == chained(rows(), PADDING).tolist()
    (runner,) = backend._runners
    assert runner.report.aot is None


def other_overload(x: Tensor, padding: Tensor) -> Tensor:
    """``pow.Scalar`` is another operator than ``pow_.Scalar``."""
    y = row_padding(x, padding) * 2
    y.pow_(2)
    return y


def several(x: Tensor, padding: Tensor) -> Tensor:
    y = row_padding(x, padding) + 1
    torch._foreach_mul_([y], 2.0)
    return y


def strided(x: Tensor, padding: Tensor) -> Tensor:
    """What is computed anew would be dense."""
    base = row_padding(x, padding) + 1
    y = base[:, ::2]
    y.mul_(2)
    return y.as_strided((2, 2), (3, 2)) * 1


def inner_autocast(x: Tensor, padding: Tensor) -> Tensor:
    y = row_padding(x, padding)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return y @ torch.full((3, 3), 1.01)


def to_input(x: Tensor, padding: Tensor) -> Tensor:
    y = row_padding(x, padding)
    x.add_(1)
    return y * x


def narrowed(x: Tensor, padding: Tensor) -> Tensor:
    y = (row_padding(x, padding) + 1).to(torch.bfloat16)
    y *= torch.full((3,), 0.1)
    return y.float()


def number(x: Tensor, padding: Tensor) -> Tensor:
    return row_padding(x, padding) * padding[0, 0].item()


def same(x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    y = row_padding(x, padding) * 2
    return y, y[:, :2]


def given_back(x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    return row_padding(x, padding) * 2, padding[1:]


def drawn(x: Tensor, padding: Tensor) -> Tensor:
    y = row_padding(x, padding)
    return y + torch.zeros_like(y).bernoulli(0.0)


def without(x: Tensor, padding: Tensor) -> Tensor:
    return x * 2 + padding[0]


def with_grad(x: Tensor, padding: Tensor) -> Tensor:
    with torch.enable_grad():
        return row_padding(x, padding) * 2


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (read_again, "mul_ writes in place, by aten.mul_.Tensor"),
        (to_input, "writes in place, by aten.add_.Tensor"),
        (other_overload, "pow_ writes in place, by aten.pow_.Scalar"),
        (several, "writes in place, by aten._foreach_mul_.Scalar"),
        (strided, "mul_ writes in place, by aten.mul_.Tensor"),
        (inner_autocast, "switches autocast"),
        (narrowed, "mul_ writes in place, by aten.mul_.Tensor"),
        (number, "calls item"),
        (same, "results share memory"),
        (given_back, "results share memory"),
        (drawn, "draws random numbers"),
        (without, "the graph has no operator of the dialect"),
        (with_grad, "switches gradients on"),
    ],
)
def test_what_one_run_cannot_tell_is_left_to_aot(fn, reason) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        result, backend = compiled(fn, rows(), PADDING.clone())
    (runner,) = backend._runners
    assert reason in runner.report.aot
    assert f"traced by AOT: {runner.report.aot}" in "\n".join(runner.report.lines())
    expected = fn(rows(), PADDING.clone())
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def product(x: Tensor, padding: Tensor) -> Tensor:
    y = row_padding(x, padding)
    with torch.autocast("cpu", enabled=False):
        return y @ torch.full((3, 3), 1.01)


def test_autocast_around_a_call_is_left_to_aot() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result, backend = compiled(product, rows(), PADDING)
        expected = product(rows(), PADDING)
    assert result.dtype == expected.dtype
    assert result.tolist() == expected.tolist()
    (runner,) = backend._runners
    assert runner.report.aot == "autocast is on"


def test_a_result_is_never_the_input_it_was_padded_from() -> None:
    """row_padding returns a copy, and the graph has it no more; five rows are above the padding and run uncaptured."""
    for count in (2, 5):
        x = rows(count)
        result, _ = compiled(row_padding, x, PADDING)
        assert result.tolist() == x.tolist()
        assert result.data_ptr() != x.data_ptr()


def stored(x: Tensor, padding: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    x = row_padding(x, padding)
    token = x[:, None, :2].contiguous()
    store_kv(token, token, keys, values, torch.arange(x.shape[0], dtype=torch.int32))
    return x + 1


def test_writes_are_counted_as_aot_counts_them() -> None:
    keys, values = torch.zeros(2, 4, 1, 2), torch.zeros(2, 4, 1, 2)
    before = keys._version, values._version
    _, backend = compiled(stored, rows(), PADDING, keys, values)
    (runner,) = backend._runners
    assert runner.report.aot is None
    assert keys._version > before[0]
    assert values._version > before[1]
    assert keys[0, :2, 0].tolist() == rows()[:, :2].tolist()


def test_two_caches_in_one_memory_are_left_to_aot() -> None:
    memory = torch.zeros(4, 4, 1, 2)
    _, backend = compiled(stored, rows(), PADDING, memory[:2], memory[2:])
    (runner,) = backend._runners
    assert runner.report.aot == "an input that is written to shares memory with another"


def test_a_result_keeps_its_dynamic_rows() -> None:
    """Dynamo takes the rows of a compiled result for dynamic in what is traced next, as behind AOT."""
    result, _ = compiled(plain, rows(), PADDING)
    assert result._dynamo_propagated_dynamic_indices == {0}


def test_nodes_of_fx_are_those_of_dynamo(pair) -> None:
    """A node names the node it was traced from: the compile cache takes source lines from there."""
    kept: list[GraphModule] = []
    runner_type = backend_module.GraphRunner

    def keep(gm: GraphModule, *rest: Any) -> Any:
        kept.append(gm)
        return runner_type(gm, *rest)

    backend = Backend(runner=keep)
    run = torch.compile(plain, backend=backend, fullgraph=True, options={"platform": "cpu", "cache": False})
    run(rows(), PADDING)
    (mul,) = kept[0].graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor) or [None]
    assert isinstance(mul, Node)
    assert "row_padding(x, padding) * 2" in mul.meta["stack_trace"]
