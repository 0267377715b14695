"""Merged weights are a copy: it must follow the originals, and the runtime must notice when they move."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.report import collect

OPS = torch.ops.gemma_npu


class MLP(nn.Module):
    """Two of Gemma's gated blocks."""

    def __init__(self, hidden: int = 8, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for gate, up, down in zip(self.gate, self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(gate(x), approximate="tanh") * up(x))
        return x


@pytest.fixture(autouse=True)
def _clean(fresh_dynamo: None) -> Iterator[None]:
    with torch.no_grad():
        yield


def compiled(model: nn.Module, **options):
    backend = Backend()
    run = torch.compile(model, backend=backend, fullgraph=True, options={"on_fallback": "error", **options})
    return run, backend


@pytest.mark.parametrize("platform", ["cpu", "ascend910b"])
@pytest.mark.parametrize("shape", [(2, 3, 8), (5, 8)])
def test_one_product_instead_of_two(platform, shape) -> None:
    model, x = MLP(), torch.randn(*shape)
    run, backend = compiled(model, platform=platform, merge_weights=True)
    with collect() as report:
        result = run(x)
    torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-6)
    (graph,), (runner,) = report.graphs, backend._runners
    assert next(p for p in graph.passes if p.name == "merge_gate_up").changed == 2
    native = torch.ops.gemma_npu_cpu
    product = native.linear.default if platform == "cpu" else torch.ops.aten.mm.default
    assert len(runner.gm.graph.find_nodes(op="call_function", target=product)) == 4
    fused = native.geglu.default if platform == "cpu" else torch.ops.npu.npu_geglu.default
    assert len(runner.gm.graph.find_nodes(op="call_function", target=fused)) == 2
    assert graph.merged_bytes == sum(each.weight.nbytes for each in (*model.gate, *model.up))
    assert {i.role for i in graph.plan.inputs if i.label.endswith("weight")} == {"parameter"}


def test_a_weight_changed_in_place_is_merged_again_at_the_same_address() -> None:
    model, x = MLP(), torch.randn(3, 8)
    run, backend = compiled(model, merge_weights=True)
    run(x)
    (runner,) = backend._runners
    (binding,) = runner._bindings
    addresses = [tensor.data_ptr() for tensor in binding.merged._tensors]
    model.gate[1].weight.mul_(-2)
    torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-6)
    assert [tensor.data_ptr() for tensor in binding.merged._tensors] == addresses
    assert runner.report.captures == 1


def test_another_model_has_weights_of_its_own() -> None:
    first, second, x = MLP(), MLP(), torch.randn(3, 8)
    for each in second.parameters():
        each.mul_(1.5)
    run, _ = compiled(first, merge_weights=True)
    other, _ = compiled(second, merge_weights=True)
    torch.testing.assert_close(run(x), first(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(other(x), second(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(run(x), first(x), rtol=1e-5, atol=1e-6)


def test_without_the_option_nothing_is_copied() -> None:
    model, x = MLP(), torch.randn(3, 8)
    run, _ = compiled(model)
    with collect() as report:
        torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-6)
    record = next(p for p in report.graphs[0].passes if p.name == "merge_gate_up")
    assert (record.changed, dict(record.left)) == (0, {"merge_weights is off": 2})
    assert report.graphs[0].merged_bytes == 0


def test_uncaptured_runs_use_the_same_weights() -> None:
    model, x = MLP(), torch.randn(3, 8)
    run, _ = compiled(model, merge_weights=True, capture=False)
    torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-6)


def test_what_is_not_a_pair_of_products() -> None:
    class Other(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.gelu(self.gate[0](x), approximate="tanh") * self.up[0](x + 1)

    run, _ = compiled(Other(), merge_weights=True)
    with collect() as report:
        run(torch.randn(3, 8))
    record = next(p for p in report.graphs[0].passes if p.name == "merge_gate_up")
    assert dict(record.left) == {"gate and up are not products of one input with two weights": 1}


def test_weights_given_as_arguments_may_be_others_the_next_time() -> None:
    def fn(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return nn.functional.gelu(x @ gate.t(), approximate="tanh") * (x @ up.t())

    run, _ = compiled(fn, merge_weights=True)
    x = torch.randn(3, 8)
    for seed in range(3):
        torch.manual_seed(seed)
        gate, up = torch.randn(12, 8), torch.randn(12, 8)  # new tensors, perhaps at an old address
        torch.testing.assert_close(run(x, gate, up), fn(x, gate, up), rtol=1e-5, atol=1e-5)
