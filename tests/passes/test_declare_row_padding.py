"""What a padded row holds is a fact of the graph; the node that states it must become metadata and cost nothing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.ops import row_padding
from gemma_npu_compile.passes.declare_row_padding import declare_row_padding
from gemma_npu_compile.passes.fx import placeholders

NODE = torch.ops.gemma_npu.row_padding.default
ARGS = (torch.ones(2, 3), torch.zeros(4, 3), torch.full((4, 3), 7.0))


def traced(fn: Callable[..., Any], args: tuple[Tensor, ...] = ARGS) -> GraphModule:
    return make_fx(fn, tracing_mode="fake")(*args)


def test_padding_moves_to_the_input() -> None:
    def fn(x: Tensor, pad: Tensor, other: Tensor) -> list[Tensor]:
        return [row_padding(x, pad) * 2, other]

    gm = traced(fn)
    result = declare_row_padding(gm)
    gm.graph.lint()
    gm.recompile()
    x, pad, other = placeholders(gm)
    assert (result.changed, dict(result.left)) == (1, {})
    assert x.meta["padding"] is pad
    assert "padding" not in pad.meta
    assert "padding" not in other.meta
    assert not gm.graph.find_nodes(op="call_function", target=NODE)
    torch.testing.assert_close(gm(*ARGS), fn(*ARGS), rtol=0, atol=0)


def test_the_same_statement_twice_is_one_fact() -> None:
    gm = traced(lambda x, pad, other: [row_padding(x, pad) + row_padding(x, pad)])
    result = declare_row_padding(gm)
    assert (result.changed, dict(result.left)) == (2, {})
    assert placeholders(gm)[0].meta["padding"] is placeholders(gm)[1]


def test_what_is_not_about_an_input_is_left_with_a_reason() -> None:
    def fn(x: Tensor, pad: Tensor, other: Tensor) -> list[Tensor]:
        return [row_padding(x + 1, pad), row_padding(x, pad * 2), row_padding(x, pad), row_padding(x, other)]

    gm = traced(fn)
    result = declare_row_padding(gm)
    gm.graph.lint()
    gm.recompile()
    assert result.changed == 1
    assert result.left == {
        "the padded tensor is computed in the graph": 1,
        "the padding is computed in the graph": 1,
        "the input already has another padding": 1,
    }
    assert placeholders(gm)[0].meta["padding"] is placeholders(gm)[1]
    assert len(gm.graph.find_nodes(op="call_function", target=NODE)) == 3
    torch.testing.assert_close(gm(*ARGS), fn(*ARGS), rtol=0, atol=0)


def test_idempotent() -> None:
    gm = traced(lambda x, pad, other: [row_padding(x, pad) * 2, row_padding(other, pad * 2)])
    first = declare_row_padding(gm)
    before = [(n.name, n.args) for n in gm.graph.nodes]
    second = declare_row_padding(gm)
    assert (first.changed, second.changed) == (1, 0)
    assert second.left == first.left
    assert [(n.name, n.args) for n in gm.graph.nodes] == before
    assert placeholders(gm)[0].meta["padding"] is placeholders(gm)[1]
