"""A constant costs a launch in every replay, unless it is kept; what the graph writes to is not a constant."""

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.passes.fold_constants import LARGEST, fold_constants

aten = torch.ops.aten


def test_equal_constants_share_a_buffer() -> None:
    def fn(x: Tensor) -> Tensor:
        return x + torch.arange(4) + torch.arange(4) * torch.arange(4, dtype=torch.int32) + torch.full((4,), 7)

    x = torch.randn(3, 4)
    gm = make_fx(fn, tracing_mode="fake")(x)
    expected = gm(x)
    assert fold_constants(gm).changed == 4
    gm.recompile()
    assert len(gm.graph.find_nodes(op="get_attr", target="constant_0")) == 1
    assert {name: (b.dtype, b.tolist()) for name, b in gm.named_buffers()} == {
        "constant_0": (torch.int64, [0, 1, 2, 3]),
        "constant_1": (torch.int32, [0, 1, 2, 3]),
        "constant_2": (torch.int64, [7, 7, 7, 7]),
    }
    assert torch.equal(gm(x), expected)
    assert fold_constants(gm).changed == 0


def test_memory_is_not_a_constant() -> None:
    """A tensor that is filled later, or handed out, is made anew in every run."""

    def fn(x: Tensor) -> list[Tensor]:
        memory, result = torch.zeros(4), torch.ones(4)
        memory.add_(x)
        return [memory * 2, result.view(2, 2)]

    x = torch.ones(4)
    gm = make_fx(fn, tracing_mode="fake")(x)
    result = fold_constants(gm)
    assert (result.changed, dict(result.left)) == (0, {"the graph writes to it, or returns it": 2})
    first, second = gm(x), gm(x)
    assert first[0].tolist() == second[0].tolist() == [2.0] * 4
    assert first[1].data_ptr() != second[1].data_ptr()


def test_rows_and_large_ones_stay() -> None:
    def fn(x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[0])[:, None] + torch.arange(LARGEST // 8 + 1)[:1]

    gm = make_fx(fn, tracing_mode="symbolic")(torch.randn(3, 4))
    result = fold_constants(gm)
    assert (result.changed, dict(result.left)) == (0, {f"larger than {LARGEST} bytes": 1})


def test_a_graph_without_inputs() -> None:
    gm = make_fx(lambda: torch.arange(5) + 1, tracing_mode="fake")()
    assert fold_constants(gm).changed == 1
    gm.recompile()
    assert gm().tolist() == [1, 2, 3, 4, 5]
