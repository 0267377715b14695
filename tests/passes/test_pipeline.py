"""The one list of passes: its order, opting out by name, its records, and that a broken pass is caught at once."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.ops import row_padding
from gemma_npu_compile.options import Options
from gemma_npu_compile.passes import PASSES, PassRecord, PassResult, pipeline, run_passes
from gemma_npu_compile.passes.fx import placeholders
from gemma_npu_compile.report import collect

ORDER = ["keep_writes_in_place", "remove_host_syncs", "declare_row_padding", "bind_block_tables"]


@pytest.fixture(autouse=True)
def _clean(fresh_dynamo: None) -> Iterator[None]:
    with torch.no_grad():
        yield


def graph() -> GraphModule:
    """Two nodes to drop for the third pass, nothing for the others."""

    def fn(x: Tensor, pad: Tensor) -> list[Tensor]:
        return [row_padding(x, pad) + row_padding(x, pad)]

    return make_fx(fn, tracing_mode="fake")(torch.ones(2, 3), torch.zeros(4, 3))


def test_order() -> None:
    """New passes may come between; these four keep their order, and run in it."""
    records = run_passes(graph())
    assert [r.name for r in records] == list(PASSES)
    assert [name for name in PASSES if name in ORDER] == ORDER


def test_records() -> None:
    records = {r.name: r for r in run_passes(graph(), disable=[name for name in PASSES if name not in ORDER])}
    record = records["declare_row_padding"]
    assert (record.changed, record.nodes_before, record.nodes_after) == (2, 6, 4)
    assert record.seconds > 0
    assert "declare_row_padding: 2 changed, 6 -> 4 nodes" in str(record)
    untouched = records["keep_writes_in_place"]
    assert (untouched.changed, untouched.nodes_before, untouched.nodes_after) == (0, 6, 6)
    left = PassRecord("p", 0, PassResult().left + type(PassResult().left)({"why": 3}))
    assert str(left).endswith("left 3: why")


def test_disable_by_name() -> None:
    gm = graph()
    records = run_passes(gm, disable=["declare_row_padding"])
    assert [r.name for r in records] == [name for name in PASSES if name != "declare_row_padding"]
    assert "row_padding.default(" in gm.code


def test_disabled_from_options() -> None:
    options: dict[str, Any] = {"disable_passes": ["bind_block_tables", "remove_host_syncs"]}
    with collect() as report:
        torch.compile(lambda x: x + 1, backend=Backend(), options=options)(torch.ones(2))
    ran = [p.name for p in report.graphs[0].passes]
    assert ran == [name for name in PASSES if name not in options["disable_passes"]]


def test_unknown_pass_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'bind_block_table' \(did you mean 'bind_block_tables'\?\)"):
        Options(disable_passes=("bind_block_table",))
    with pytest.raises(CompileError, match="did you mean 'keep_writes_in_place'"):
        torch.compile(lambda x: x + 1, backend=Backend(), options={"disable_passes": "keep_writes_inplace"})(
            torch.ones(2)
        )


def test_after_sees_each_pass_and_a_runnable_graph() -> None:
    seen: list[tuple[str, int]] = []
    args = torch.ones(2, 3), torch.zeros(4, 3)

    def after(name: str, gm: GraphModule) -> None:
        torch.testing.assert_close(gm(*args), [torch.full((2, 3), 2.0)])
        seen.append((name, gm.code.count("row_padding.default(")))

    run_passes(graph(), after=after, disable=["bind_block_tables"])
    counts = dict(seen)
    assert [name for name, _ in seen] == [name for name in PASSES if name != "bind_block_tables"]
    assert counts["remove_host_syncs"] > 0
    assert counts["declare_row_padding"] == 0


def broken(gm: GraphModule) -> PassResult:
    """Use a value before it is computed."""
    add = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[0]
    with gm.graph.inserting_before(placeholders(gm)[-1].next):
        gm.graph.call_function(torch.ops.aten.neg.default, (add,))
    return PassResult(changed=1)


def test_a_pass_that_breaks_the_graph_is_caught_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def later(gm: GraphModule) -> PassResult:
        ran.append(gm)
        return PassResult()

    monkeypatch.setattr(pipeline, "PASSES", {"fine": lambda gm: PassResult(), "broken": broken, "later": later})
    seen: list[str] = []
    with pytest.raises(RuntimeError, match=r"add.*used before it has been defined|was used before"):
        run_passes(graph(), after=lambda name, gm: seen.append(name))
    assert seen == ["fine"]
    assert ran == []
