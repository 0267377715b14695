"""The plan is all a replay knows of the graph: a wrong role or symbol freezes what should be copied, or the reverse."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.graphs.plan import Output, Plan
from gemma_npu_compile.ops import paged_attention, row_padding, slot_mapping, store_kv
from gemma_npu_compile.report import collect


@pytest.fixture(autouse=True)
def _clean(fresh_dynamo: None) -> Iterator[None]:
    with torch.no_grad():
        yield


def plan(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
    with collect() as report:
        torch.compile(fn, backend=Backend(), fullgraph=True, options={"platform": "cpu"})(*args, **kwargs)
    assert report.graphs[0].plan is not None
    return report.graphs[0].plan


def dynamic(tensor: Tensor) -> Tensor:
    torch._dynamo.mark_dynamic(tensor, 0)
    return tensor


class Step(torch.nn.Module):
    """One layer: embed a token, write it, read the cache."""

    kc: Tensor
    vc: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 4)
        self.register_buffer("kc", torch.zeros(8, 4, 1, 4))
        self.register_buffer("vc", torch.zeros(8, 4, 1, 4))

    def forward(self, token: Tensor, table: Tensor, lens: Tensor, pads: tuple[Tensor, Tensor, Tensor]) -> Any:
        token, table, lens = map(row_padding, (token, table, lens), pads)
        x = self.embed(token)[:, None]
        store_kv(x, x + 1, self.kc, self.vc, slot_mapping(table, (lens - 1)[:, None], 4))
        y = paged_attention(x, self.kc, self.vc, table, lens, 0.5, 3, layer="verify/m.layers.0")
        return y, lens + table[:, 0], token.shape[0]


def arguments(rows: int, max_rows: int = 6) -> tuple[Any, ...]:
    token = dynamic(torch.arange(rows))
    table = dynamic(torch.arange(max_rows, max_rows + rows, dtype=torch.int32)[:, None].clone() % 8)
    lens = dynamic(torch.full((rows,), 2, dtype=torch.int32))
    pads = (
        torch.zeros(max_rows, dtype=torch.long),
        torch.zeros(max_rows, 1, dtype=torch.int32),
        torch.ones(max_rows, dtype=torch.int32),
    )
    return token, table, lens, pads


def test_roles() -> None:
    found = plan(Step(), *arguments(2))
    roles = {i.label: i.role for i in found.inputs if i.role not in ("unused", "size")}
    assert roles == {
        "token": "token",
        "pads[0]": "padding",
        "pads[1]": "padding",
        "pads[2]": "padding",
        "table": "block_table",
        "lens": "lengths",
        "embed.weight": "parameter",
        "kc": "cache",
        "vc": "cache",
    }
    static = {i.label for i in found.inputs if i.static and i.role != "unused"}
    assert static == {"embed.weight", "kc", "vc"}
    assert {i.buffer for i in found.inputs if i.label == "table"} <= {None, "block_table.g0"}
    bound = [i for i in found.inputs if i.layer is not None]
    assert [(i.layer, i.phase, i.group) for i in bound] == [("m.layers.0", "verify", "g0")]
    assert all(i.padding is not None for i in found.inputs if i.buffer is not None)


def test_rows_attention_and_outputs() -> None:
    found = plan(Step(), *arguments(2))
    assert isinstance(found.rows, sympy.Symbol)
    assert found.max_rows == 6
    assert found.symbols == (found.rows,)
    (attention,) = found.attention
    assert (attention.layer, attention.phase, attention.group) == ("m.layers.0", "verify", "g0")
    assert (attention.heads, attention.head_dim, attention.window, attention.scale) == (1, 4, 3, 0.5)
    assert (attention.layout, attention.kv_len_source) == ("TND", "lens")
    shapes = [(o.shape, o.dtype) for o in found.outputs]
    assert shapes[:2] == [((found.rows, 1, 4), torch.float32), ((found.rows,), torch.int32)]
    assert found.values([_argument(i, 5) for i in _by_source(found)]) == {found.rows: 5}


def _by_source(found: Plan) -> list[Any]:
    return list({i.source: i for i in sorted(found.inputs, key=lambda i: i.source)}.values())


def _argument(item: Any, rows: int) -> Any:
    sizes = [rows if isinstance(d, sympy.Symbol) else int(d) for d in item.shape]
    return sizes[0] if item.dtype is None else torch.zeros(sizes, dtype=item.dtype)


def test_rows_need_every_padding() -> None:
    """One input without padding would replay stale rows: such a graph is captured for exact sizes."""

    def fn(x: Tensor, y: Tensor, pad: Tensor) -> Tensor:
        return row_padding(x, pad) + y

    found = plan(fn, dynamic(torch.ones(3, 2)), dynamic(torch.ones(3, 2)), torch.zeros(4, 2))
    assert (found.rows, found.max_rows) == (None, None)
    assert len(found.symbols) == 1


def test_the_smallest_padding_bounds_the_rows() -> None:
    def fn(x: Tensor, y: Tensor, small: Tensor, large: Tensor) -> Tensor:
        return row_padding(x, large) + row_padding(y, small)

    args = dynamic(torch.ones(3, 2)), dynamic(torch.ones(3, 2)), torch.zeros(4, 2), torch.zeros(8, 2)
    assert plan(fn, *args).max_rows == 4


def test_declared_rows_that_nothing_relates_are_not_lost() -> None:
    """Attention has one length per table row; the plan must see one number of rows, not two."""

    def fn(q: Tensor, table: Tensor, lens: Tensor, cache: Tensor, pads: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        q, table, lens = map(row_padding, (q, table, lens), pads)
        return paged_attention(q, cache, cache, table, lens, 1.0)

    token, table, lens, (_, *pads) = arguments(3)
    q = dynamic(torch.ones(3, 2, 4))
    found = plan(fn, q, table, lens, torch.zeros(8, 4, 1, 4), (torch.zeros(6, 2, 4), *pads))
    leading = {i.shape[0] for i in found.inputs if i.role in ("block_table", "lengths")}
    assert len(leading) == 1
    assert len(token) == 3


def test_one_row_is_an_exact_size() -> None:
    found = plan(lambda x, pad: row_padding(x, pad) * 2, torch.ones(1, 2), torch.zeros(4, 2))
    assert (found.rows, found.max_rows, found.symbols) == (None, None, ())


def test_unused_inputs_have_no_buffer() -> None:
    found = plan(lambda x, y: (x + 1, y.shape[0]), torch.ones(3), dynamic(torch.ones(5)))
    assert {i.label: i.role for i in found.inputs if i.dtype is not None}.get("y", "unused") == "unused"
    assert [i.label for i in found.inputs if i.buffer is not None] == ["x"]


def test_outputs_are_cut() -> None:
    rows = sympy.Symbol("s0")
    result = torch.arange(12.0).view(4, 3)
    output = Output((rows, 3), torch.float32, torch.device("cpu"))
    assert torch.equal(output.cut(result, {rows: 2}), result[:2])
    assert Output((rows * 2, 1), torch.int8, torch.device("cpu")).empty({rows: 0}).shape == (0, 1)
    assert Output((rows + 1,)).cut(99, {rows: 2}) == 3
    assert Output((rows + 1,)).empty({rows: 0}) == 1
