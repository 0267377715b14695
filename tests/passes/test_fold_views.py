"""Views cost nothing but a reader's time; folding them must keep every element in its place."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.passes.fold_views import fold_views

aten = torch.ops.aten
SHAPES = ([2, 12], [24], [4, 3, 2], [-1, 6], [2, 3, 4])


@given(
    steps=st.lists(
        st.one_of(st.sampled_from(SHAPES), st.tuples(st.integers(-1, 2), st.integers(-1, 2)), st.just("copy")),
        min_size=1,
        max_size=6,
    )
)
def test_every_element_stays_in_its_place(steps: list) -> None:
    """Any chain of views, exchanges and copies."""

    def fn(x: Tensor) -> Tensor:
        for step in steps:
            if step == "copy":
                x = x.clone(memory_format=torch.contiguous_format)
            elif isinstance(step, tuple):
                axes = [min(axis, x.dim() - 1) for axis in step]
                x = x.transpose(*axes)
            else:
                x = x.contiguous().view(step)
        return x * 1.5

    x = torch.arange(24.0).view(2, 3, 4)
    gm = make_fx(fn, tracing_mode="fake")(x)
    expected = gm(x)
    fold_views(gm)
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(gm(x), expected)
    assert fold_views(gm).changed == 0


def test_counts() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.transpose(1, 2).transpose(2, 1).view(6, 4).view(2, 12) + 1

    gm = make_fx(fn, tracing_mode="fake")(torch.randn(2, 3, 4))
    assert fold_views(gm).changed == 2
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert targets == [aten.view.default, aten.add.Tensor]


def test_other_exchanges_and_strided_bases_stay() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.transpose(0, 1).transpose(1, 2) + 1

    gm = make_fx(fn, tracing_mode="fake")(torch.randn(2, 3, 4))
    assert fold_views(gm).changed == 0
    strided = torch.randn(4, 2, 3).permute(1, 2, 0)[..., ::2]
    gm = make_fx(lambda x: torch.ops.aten.view(torch.ops.aten.view(x, [2, 3, 1, 2]), [2, 3, 2]) + 1)(strided)
    fold_views(gm)
    gm.recompile()
    assert torch.equal(gm(strided), strided + 1)
