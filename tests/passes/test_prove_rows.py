"""Padding must never change a row: what is proven is run padded and compared, what mixes rows is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.report import GraphReport

SIZE = 8
WEIGHT = torch.arange(24.0).view(4, 6).remainder(5) - 2
TABLE = torch.arange(28.0).view(7, 4)


def rows(count: int, *shape: int) -> Tensor:
    """Small integers: exact in any order of summation."""
    x = torch.randint(-3, 4, (count, *shape), generator=torch.Generator().manual_seed(count)).float()
    torch._dynamo.mark_dynamic(x, 0)
    return x


@torch.no_grad()
def compiled(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> GraphReport:
    """Run ``fn`` compiled for 3 and 5 rows, padded where that is allowed, and compare exactly."""
    torch._dynamo.reset()
    reports: list[GraphReport] = []
    backend = Backend(reports.append)
    run = torch.compile(fn, backend=backend, fullgraph=True, options={"platform": "cpu", "capture_sizes": (SIZE,)})
    for count in (3, 5):
        inputs = [rows(count, *shape) for shape in shapes]
        torch.testing.assert_close(run(*inputs), fn(*inputs), rtol=0, atol=0)
    (report,) = reports
    assert report.fallbacks == {}
    assert report.plan is not None
    if report.plan.rows is not None:
        assert (report.sizes, report.captures) == ([SIZE], 1)
        assert report.plan.unpadded is None
    return report


ROW = torch.tensor([1, 0, 2])
STEPS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.relu() - 1,
    lambda x: x.clamp(-4, 4),
    lambda x: x * x.shape[-1],
    lambda x: x / x.shape[0],
    lambda x: x.transpose(0, 1),
    lambda x: x.transpose(1, -1),
    lambda x: x.permute([x.dim() - 1 - axis for axis in range(x.dim())]),
    lambda x: x.flatten(0, 1),
    lambda x: x.flatten(-2),
    lambda x: x.reshape(x.shape[0], -1),
    lambda x: x.reshape(-1, x.shape[-1]),
    lambda x: x.reshape(x.shape[0] * 2, -1),
    lambda x: x.unflatten(-1, (-1, 2)),
    lambda x: x.unsqueeze(0),
    lambda x: x.unsqueeze(-1),
    lambda x: x.squeeze(0),
    lambda x: x.sum(-1),
    lambda x: x.sum(0),
    lambda x: x.sum(1, keepdim=True),
    lambda x: x - x.sum(0, keepdim=True),
    lambda x: x.amax((0, -1)),
    lambda x: x.amax((1, -1)),
    lambda x: x.argmax(-1).float(),
    lambda x: x.cumsum(0),
    lambda x: x.cumsum(-1),
    lambda x: x.flip(0),
    lambda x: x.flip(-1),
    lambda x: x.roll(1, 0),
    lambda x: x.roll(1, 1),
    lambda x: x.sort(0).values,
    lambda x: x.sort(-1).values,
    lambda x: x.topk(2, -1).values,
    lambda x: x @ x.transpose(-1, -2),
    lambda x: x.transpose(-1, -2) @ x,
    lambda x: x @ x.new_ones(x.shape[-1], 3),
    lambda x: torch.cat([x, x], -1),
    lambda x: torch.cat([x, x], 0),
    lambda x: torch.stack([x, x], 1),
    lambda x: torch.stack([x, x], 0),
    lambda x: x[..., :2],
    lambda x: x[:2],
    lambda x: x[1:],
    lambda x: x[0],
    lambda x: x[:, 0],
    lambda x: x[:, -1:],
    lambda x: x[ROW],
    lambda x: x[:, ROW[:2]],
    lambda x: x[torch.arange(x.shape[0]), 1],
    lambda x: x[torch.arange(x.shape[0]).flip(0), 1],
    lambda x: x[torch.arange(x.shape[0]) - 1],
    lambda x: x[torch.arange(x.shape[0]), x.flatten(1).amax(1).clamp(0, 1).long()],
    lambda x: x.gather(-1, x.argmax(-1, keepdim=True)),
    lambda x: x.gather(0, x.argmax(0, keepdim=True)),
    lambda x: TABLE[x.long().clamp(0, 6)],
    lambda x: torch.nn.functional.embedding(x.long().remainder(7), TABLE),
    lambda x: x + torch.arange(x.shape[0]).view(-1, *[1] * (x.dim() - 1)),
    lambda x: x + torch.arange(x.shape[-1]),
    lambda x: x * torch.arange(x.shape[0]).sum(),
    lambda x: x + torch.full((x.shape[0], *[1] * (x.dim() - 1)), 2.0),
    lambda x: torch.where(x > 0, x, -x),
    lambda x: x.masked_fill(x == x.amax(0), 0.0),
    lambda x: x.repeat(2, *[1] * (x.dim() - 1)),
    lambda x: x.repeat(*[1] * (x.dim() - 1), 2),
    lambda x: x.repeat_interleave(2, 0),
    lambda x: x.expand(2, *x.shape),
    lambda x: torch.nn.functional.pad(x, (1, 1)),
    lambda x: torch.nn.functional.pad(x, (0, 0, 1, -1)),
    lambda x: x.scatter(-1, x.argmax(-1, keepdim=True), 5.0),
    lambda x: x.index_copy(-1, torch.tensor([0]), x[..., -1:] * 2),
    lambda x: x.index_copy(0, torch.tensor([0]), x[-1:] * 2),
    lambda x: x.index_put((torch.arange(x.shape[0]), torch.tensor(0)), x.flatten(1).sum(1)) if x.dim() == 2 else x,
    lambda x: x.split(2, -1)[0],
    lambda x: x.unbind(1)[0],
    lambda x: x.tril(),
]


def applicable(steps: list[int]) -> list[int]:
    """Those of the steps that can be taken one after the other, keeping tensors small."""
    x, taken = rows(3, 4, 6), []
    for step in steps:
        try:
            after = STEPS[step](x)
            STEPS[step](torch.cat([x, x]))
        except (RuntimeError, IndexError, ValueError):
            continue
        if after.dim() and 0 < after.numel() < 3000 and after.abs().max() < 1e5 and after.dim() < 5:
            x, taken = after, [*taken, step]
    return taken


def test_whatever_is_proven_is_exact_when_padded() -> None:
    seen = {True: 0, False: 0}

    @settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    @given(st.lists(st.integers(0, len(STEPS) - 1), min_size=1, max_size=6))
    def check(steps: list[int]) -> None:
        taken = applicable(steps)

        def fn(x: Tensor) -> Tensor:
            for step in taken:
                x = STEPS[step](x)
            return x + 0

        try:
            report = compiled(fn, (4, 6))
        except torch._dynamo.exc.UserError:  # these steps need a fixed number of rows
            return
        assert report.plan is not None
        seen[report.plan.rows is not None] += 1

    check()
    assert min(seen.values()) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("step", range(len(STEPS)))
def test_each_step_alone(step: int) -> None:
    if step in applicable([step]):
        try:
            compiled(lambda x: STEPS[step](x) + 0, (4, 6))
        except torch._dynamo.exc.UserError:
            return


INDEPENDENT: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "linear": (lambda x: torch.nn.functional.linear(x, WEIGHT, torch.ones(4)), [(6,)]),
    "heads": (lambda x: x.view(x.shape[0], 5, 2, 3).transpose(1, 2).reshape(x.shape[0] * 2, 5, 3).sum(1), [(5, 6)]),
    "two inputs": (lambda x, y: x @ y.transpose(1, 2), [(5, 6), (4, 6)]),
    "layer norm": (lambda x: torch.nn.functional.layer_norm(x, (6,)), [(5, 6)]),
    "softmax": (lambda x: x.softmax(-1), [(5, 6)]),
    "own entry": (lambda x, y: x[torch.arange(x.shape[0]), y.long().abs()], [(5, 6), ()]),
    "moved": (lambda x: x.transpose(0, 2).flip(0).sum(1), [(5, 6)]),
    "row number": (lambda x: x + torch.arange(x.shape[0])[:, None], [(6,)]),
    "attention": (
        lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.view(-1, 5, 2, 3).transpose(1, 2)] * 3),
        [(5, 6)],
    ),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_rows_are_padded(name: str) -> None:
    fn, shapes = INDEPENDENT[name]
    report = compiled(fn, *shapes)
    assert report.plan is not None
    assert report.plan.rows is not None, report.plan.unpadded


CACHE = torch.zeros(16, 6)

MIXING: dict[str, tuple[Callable[..., Any], str, str]] = {
    "batch mean": (lambda x: x - x.mean(0), "mean", "it works across rows"),
    "cumsum": (lambda x: x.cumsum(0), "cumsum", "it works across rows"),
    "contraction": (lambda x: x.t() @ x, "mm", "it multiplies rows with rows"),
    "sum over rows": (
        lambda x: torch.ones(2, 3) @ x.view(-1, 3, 2).sum(2).t() @ x,
        "mm",
        "it multiplies rows with rows",
    ),
    "reduction": (lambda x: x.t() @ torch.ones(x.shape[0], 2), "mm", "it multiplies rows with rows"),
    "flip": (lambda x: x + x.flip(0), "flip", "it works across rows"),
    "permutation": (lambda x: x[ROW], "index", "it picks rows"),
    "softmax": (lambda x: x.softmax(0), "_softmax", "it works across rows"),
    "merged": (lambda x: x.t().reshape(-1) * 2, "", "it merges rows with the axis in front of them"),
    "previous row": (lambda x: x[torch.arange(x.shape[0]) - 1] * 2, "index", "it picks rows"),
    "another row": (lambda x: x[x[:, 0].long().clamp(0, 1)] * 2, "index", "it picks rows"),
    "rows by rows": (lambda x: (x @ x.t())[:, :2], "mm", "it multiplies rows with rows"),
    "count": (lambda x: x / x.shape[0], "div", "it reads the number of rows"),
    "count made": (lambda x: x + torch.full((1,), x.shape[0]), "full", "it reads the number of rows"),
    "neighbour": (lambda x: x[:-1] - x[1:], "slice", "is not a number of entries for each row"),
    "number as index": (
        lambda x: TABLE[torch.arange(x.shape[0])] + x[:, :4],
        "index",
        "it uses row numbers as an index into something without rows",
    ),
    "random": (lambda x: x + torch.rand_like(x) * 0, "rand", "it draws random numbers"),
    "doubled": (lambda x: torch.cat([x, x]), "cat", "it puts other rows behind the rows"),
    "shifted": (lambda x: torch.nn.functional.pad(x, (0, 0, 1, -1)), "constant_pad_nd", "it shifts or pads the rows"),
}


@pytest.mark.parametrize("name", MIXING)
def test_the_first_node_that_mixes_rows_is_named(name: str) -> None:
    fn, node, why = MIXING[name]
    report = compiled(fn, (6,))
    assert report.plan is not None
    assert report.plan.rows is None
    found = str(report.plan.unpadded)
    assert found.startswith(f"rows are not independent at {node}"), found
    assert '.py", line' in found
    assert found.endswith(why), found


@torch.no_grad()
def test_padded_rows_write_nowhere() -> None:
    """Neither into a cache of the rows nor, through an index, into one they share."""

    def of_rows(x: Tensor, cache: Tensor) -> Tensor:
        cache[:, 0] = x
        return cache.sum(1)

    def shared(x: Tensor, cache: Tensor) -> Tensor:
        cache.index_copy_(0, x[:, 0].long(), x)
        return x * 2

    for fn, cache, reason in (
        (of_rows, rows(3, 4, 6), "input cache: it is written in place and has the rows"),
        (shared, torch.zeros(9, 6), "writes rows into cache, where padded rows would write too"),
    ):
        torch._dynamo.reset()
        reports: list[GraphReport] = []
        run = torch.compile(fn, backend=Backend(reports.append), options={"platform": "cpu"})
        x = torch.arange(18.0).view(3, 6).remainder(7)
        x[:, 0] = torch.tensor([4.0, 1, 7])
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_static_address(cache, guard=False) if fn is shared else None
        expected = cache.clone()
        wanted = fn(x, expected)
        torch.testing.assert_close(run(x, cache), wanted, rtol=0, atol=0)
        torch.testing.assert_close(cache, expected, rtol=0, atol=0)
        assert reports[0].plan is not None
        assert reason in str(reports[0].plan.unpadded)


@torch.no_grad()
def test_sizes_without_a_ceiling_are_powers_of_two() -> None:
    reports: list[GraphReport] = []
    run = torch.compile(lambda x: x * 2, backend=Backend(reports.append), options={"platform": "cpu"})
    for count in (3, 4, 5, 9, 7, 2):
        x = rows(count, 2)
        torch.testing.assert_close(run(x), x * 2, rtol=0, atol=0)
    assert (reports[0].sizes, reports[0].captures, reports[0].replays) == ([4, 8, 16, 2], 4, 6)


@torch.no_grad()
def test_rows_above_the_sizes_fall_back() -> None:
    reports: list[GraphReport] = []
    options = {"platform": "cpu", "capture_sizes": (2, 4)}
    run = torch.compile(lambda x: x * 2, backend=Backend(reports.append), options=options)
    for count in (3, 5):
        x = rows(count, 2)
        torch.testing.assert_close(run(x), x * 2, rtol=0, atol=0)
    assert reports[0].fallbacks == {"5 rows exceed the largest capture size 4": 1}
