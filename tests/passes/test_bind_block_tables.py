"""A layer that reads another group's block table reads other requests' keys, and nothing crashes: bind the tables."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.ops import paged_attention
from gemma_npu_compile.passes.bind_block_tables import bind_block_tables
from gemma_npu_compile.passes.fx import argument, placeholders
from gemma_npu_compile.passes.sites import TableBinding, attention_nodes
from gemma_npu_compile.report import collect


@pytest.fixture(autouse=True)
def _clean(fresh_dynamo: None) -> Iterator[None]:
    with torch.no_grad():
        yield


def attend(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor, layer: str) -> Tensor:
    return paged_attention(q, cache, cache, table, lens, 1.0, layer=layer)


def two_groups(
    q: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, slide: Tensor, full: Tensor, lens: Tensor
) -> tuple[Tensor, Tensor]:
    """Three layers in two groups, verified once; the full layer comes first in the graph, its table second."""
    a = attend(q, c2, full, lens, "verify/m.layers.2")
    b = attend(a, c0, slide, lens, "verify/m.layers.0")
    c = attend(b, c1, slide, lens, "draft.0/m.layers.1")
    d = attend(c, c2, full, lens, "draft.0/m.layers.2")
    return c, d


def inputs(rows: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    tables = [torch.arange(1, 1 + rows * 2, dtype=torch.int32).view(rows, 2), torch.arange(6 - rows, 6)[:, None].int()]
    lens = torch.full((rows,), 3, dtype=torch.int32)
    return [torch.randn(rows, 2, 4), *torch.randn(3, 6, 4, 1, 4).unbind(), *tables, lens]


def traced(fn: Callable[..., Any], args: list[Tensor]) -> GraphModule:
    gm = make_fx(fn, tracing_mode="fake")(*args)
    for index, node in enumerate(placeholders(gm)):
        node.meta.update(source=index, label=node.name)
    return gm


def test_each_node_gets_its_own_placeholder() -> None:
    gm = traced(two_groups, inputs())
    result = bind_block_tables(gm)
    gm.graph.lint()
    assert (result.changed, dict(result.left)) == (4, {})
    nodes = attention_nodes(gm)
    tables = [argument(node, "block_table") for node in nodes]
    assert len(set(tables)) == 4
    assert tables == placeholders(gm)[-4:]
    # g0 is the first table among the inputs (slide), although the graph reads the other one first.
    assert [table.meta["table"] for table in tables] == [
        TableBinding("m.layers.2", "verify", "g1"),
        TableBinding("m.layers.0", "verify", "g0"),
        TableBinding("m.layers.1", "draft.0", "g0"),
        TableBinding("m.layers.2", "draft.0", "g1"),
    ]
    assert [table.meta["source"] for table in tables] == [5, 4, 4, 5]
    assert [table.name for table in tables][:2] == ["block_table_verify_m_layers_2", "block_table_verify_m_layers_0"]
    assert not placeholders(gm)[4].users
    assert not placeholders(gm)[5].users


def test_group_numbers_follow_the_inputs() -> None:
    def swapped(
        q: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, full: Tensor, slide: Tensor, lens: Tensor
    ) -> tuple[Tensor, Tensor]:
        return two_groups(q, c0, c1, c2, slide, full, lens)

    gm = traced(swapped, inputs())
    bind_block_tables(gm)
    assert [n.meta["table"].group for n in placeholders(gm) if "table" in n.meta] == ["g0", "g1", "g1", "g0"]


def test_layers_of_a_group_share_one_stable_buffer_and_results_are_right() -> None:
    args = inputs()
    backend = Backend()
    with collect() as report:
        results = torch.compile(two_groups, backend=backend, fullgraph=True, options={"platform": "cpu"})(*args)
    (runner,) = backend._runners
    bound = {(i.phase, i.layer): i.buffer for i in runner.plan.inputs if i.layer is not None}
    assert bound["verify", "m.layers.0"] == bound["draft.0", "m.layers.1"]
    assert bound["verify", "m.layers.2"] == bound["draft.0", "m.layers.2"]
    assert len(set(bound.values())) == 2
    (buffers,) = runner._bindings[0].buffers.values()
    assert sum(name.startswith("block_table.") for name in buffers.buffers) == 2
    assert report.graphs[0].captures == 1
    torch.testing.assert_close(results, two_groups(*args), rtol=0, atol=0)
    # New tables in other memory: a replay copies them, the captured addresses stay.
    args[4], args[5] = args[4].flip(0).clone(), args[5].flip(0).clone()
    torch.testing.assert_close(
        torch.compile(two_groups, backend=backend, fullgraph=True, options={"platform": "cpu"})(*args),
        two_groups(*args),
        rtol=0,
        atol=0,
    )


def shared_cache(q: Tensor, cache: Tensor, t0: Tensor, t1: Tensor, lens: Tensor) -> tuple[Tensor]:
    a = attend(q, cache, t0, lens, "verify/m.layers.3")
    return (attend(a, cache, t1, lens, "draft.1/d.layers.0"),)


def test_one_cache_through_two_tables_is_refused() -> None:
    q, cache, _, _, table, _, lens = inputs()
    gm = traced(shared_cache, [q, cache, table, table.clone(), lens])
    with pytest.raises(CompileError, match=r"draft\.1/d\.layers\.0 .* verify/m\.layers\.3"):
        bind_block_tables(gm)


def test_refusal_reaches_the_user_as_a_value_error() -> None:
    q, cache, _, _, table, _, lens = inputs()
    with pytest.raises(ValueError, match=r"draft\.1/d\.layers\.0") as caught:
        torch.compile(shared_cache, backend=Backend(), fullgraph=True, options={"platform": "cpu"})(
            q, cache, table, table.clone(), lens
        )
    assert type(caught.value) is CompileError
    assert "verify/m.layers.3" in str(caught.value)


def test_a_computed_table_is_left_with_a_reason() -> None:
    def fn(q: Tensor, c0: Tensor, c1: Tensor, table: Tensor, lens: Tensor) -> tuple[Tensor]:
        a = attend(q, c0, table, lens, "verify/m.layers.0")
        return (attend(a, c1, table + 1, lens, "verify/m.layers.1"),)

    q, c0, c1, _, table, _, lens = inputs()
    gm = traced(fn, [q, c0, c1, table, lens])
    result = bind_block_tables(gm)
    assert (result.changed, dict(result.left)) == (1, {"the table is computed in the graph": 1})
    gm.graph.lint()
    first, second = attention_nodes(gm)
    assert "table" in argument(first, "block_table").meta  # type: ignore[attr-defined]
    assert argument(second, "block_table").target is torch.ops.aten.add.Tensor  # type: ignore[attr-defined]
    results = torch.compile(fn, backend=Backend(), fullgraph=True, options={"platform": "cpu"})(q, c0, c1, table, lens)
    torch.testing.assert_close(results, fn(q, c0, c1, table, lens), rtol=0, atol=0)


def test_idempotent() -> None:
    gm = traced(two_groups, inputs())
    bind_block_tables(gm)
    before = [(n.name, n.args) for n in gm.graph.nodes]
    again = bind_block_tables(gm)
    assert (again.changed, dict(again.left)) == (0, {})
    assert [(n.name, n.args) for n in gm.graph.nodes] == before


@pytest.mark.parametrize("layer", ["verify/m.layers.0", "verify/my-model.layers[0]", "", "layers.0"])
@pytest.mark.parametrize("capture", [True, False])
def test_any_layer_name_compiles_even_twice(layer: str, capture: bool) -> None:
    """A name is the caller's; the final graph must run uncaptured (a fallback) as well."""

    def fn(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        return attend(attend(q, cache, table, lens, layer), cache, table, lens, layer)

    q, cache, _, _, table, _, lens = inputs()
    result = torch.compile(fn, backend=Backend(), fullgraph=True, options={"platform": "cpu", "capture": capture})(
        q, cache, table, lens
    )
    torch.testing.assert_close(result, fn(q, cache, table, lens), rtol=0, atol=0)
