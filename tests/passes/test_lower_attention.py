"""Fused attention takes lengths as host integers; however they get there, each query sees its visible prefix."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.capabilities import platform
from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.ops import paged_attention
from gemma_npu_compile.ops.npu import emulate
from gemma_npu_compile.passes.bind_block_tables import bind_block_tables
from gemma_npu_compile.passes.clip_to_window import clip_to_window
from gemma_npu_compile.passes.fx import placeholders
from gemma_npu_compile.passes.large_heads_to_bnsd import large_heads_to_bnsd
from gemma_npu_compile.passes.lower_attention import lower_attention

A2 = platform("ascend910b")
FIA = torch.ops.npu.npu_fused_infer_attention_score.default
BLOCK, WIDTH = 128, 5


def inputs(lens: list[int], q_len: int, head_dim: int, window: int | None, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows with blocks of their own; blocks no query of the row can see hold NaN, and no table names them."""
    torch.manual_seed(sum(lens) + q_len + head_dim)
    rows = len(lens)
    blocks = rows * WIDTH + 1
    keys, values = (torch.randn(blocks, BLOCK, 2, head_dim, dtype=dtype) for _ in range(2))
    table = torch.zeros(rows, WIDTH, dtype=torch.int32)
    owned = torch.randperm(blocks - 1)[: rows * WIDTH].view(rows, WIDTH) + 1
    for row, length in enumerate(lens):
        oldest = 0 if window is None else max(0, length - (window + q_len - 1))
        for column in range(WIDTH):
            reached = column * BLOCK < length and (column + 1) * BLOCK > oldest
            block = int(owned[row, column])
            if reached:
                table[row, column] = block
            else:
                keys[block] = values[block] = torch.nan
    query = torch.randn(rows * q_len, 4, head_dim, dtype=dtype)
    return query, keys, values, table, torch.tensor(lens, dtype=torch.int32)


def traced(args: tuple[Tensor, ...], window: int | None, layers: int = 1, extra: int = 0) -> GraphModule:
    """Layers of one phase; the node's lengths are the input's plus ``extra``, as in a verification."""

    def fn(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lens: Tensor) -> list[Tensor]:
        kv = lens + extra if extra else lens
        return [
            paged_attention(query, keys, values, table, kv, 0.7, window, "TND", f"verify/t.layers.{i}")
            for i in range(layers)
        ]

    gm = make_fx(fn, tracing_mode="fake")(*args)
    for index, node in enumerate(placeholders(gm)):
        node.meta.update(source=index, label=node.name)
    return gm


def lowered(gm: GraphModule, kv_lens: str, clip: bool = True) -> list[Node]:
    large_heads_to_bnsd(gm, platform=A2, kv_lens=kv_lens)
    bind_block_tables(gm)
    if clip:
        clip_to_window(gm)
    lower_attention(gm, platform=A2, kv_lens=kv_lens)
    gm.graph.lint()
    gm.recompile()
    return gm.graph.find_nodes(op="call_function", target=FIA)


def run(gm: GraphModule, args: tuple[Tensor, ...]) -> Any:
    """The graph on its inputs, bound tables and host lists."""
    given = []
    for node in placeholders(gm):
        host = node.meta.get("host")
        given.append(args[node.meta["source"]] if host is None else host([args[s] for s in host.sources]))
    with emulate(A2):
        return gm(*given)


@settings(max_examples=25)
@given(
    lens=st.lists(st.integers(4, WIDTH * BLOCK - 4), min_size=2, max_size=3),
    q_len=st.sampled_from([1, 4]),
    head_dim=st.sampled_from([64, 256, 512]),
    window=st.sampled_from([None, 1, 60, 200]),
    kv_lens=st.sampled_from(["device", "host"]),
    clip=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_numbers_are_those_of_the_dialect(lens, q_len, head_dim, window, kv_lens, clip, dtype) -> None:
    args = inputs(lens, q_len, head_dim, window, dtype)
    gm = traced(args, window, extra=q_len if q_len > 1 else 0)
    args = (*args[:4], args[4] - (q_len if q_len > 1 else 0))
    expected = gm(*args)[0]
    assert torch.isfinite(expected).all()
    (node,) = lowered(gm, kv_lens, clip)
    assert node.kwargs["scale"] == 0.7
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(run(gm, args)[0], expected, **tolerance)


def facts(node: Node) -> dict[str, Any]:
    kwargs = node.kwargs
    mask = kwargs.get("atten_mask")
    return {
        "layout": kwargs["input_layout"],
        "mask": None if mask is None else tuple(mask.meta["val"].shape),
        "mode": kwargs.get("sparse_mode", 0),
        "lengths": node.meta["attention"].lengths,
    }


@pytest.mark.parametrize(
    ("head_dim", "q_len", "window", "kv_lens", "expected"),
    [
        (512, 4, None, "device", {"layout": "BNSD", "mask": (2, 1, 4, 640), "mode": 0, "lengths": "bucket"}),
        (512, 1, None, "device", {"layout": "BNSD", "mask": (2, 1, 1, 640), "mode": 0, "lengths": "bucket"}),
        (256, 4, 60, "device", {"layout": "BNSD", "mask": (2, 1, 4, 256), "mode": 0, "lengths": "fixed 256"}),
        (64, 4, 60, "device", {"layout": "BNSD", "mask": (2, 1, 4, 256), "mode": 0, "lengths": "fixed 256"}),
        (512, 4, None, "host", {"layout": "BNSD", "mask": (2048, 2048), "mode": 3, "lengths": "exact"}),
        (512, 1, None, "host", {"layout": "BNSD", "mask": None, "mode": 0, "lengths": "exact"}),
        (64, 4, None, "host", {"layout": "TND", "mask": (2048, 2048), "mode": 3, "lengths": "exact"}),
        (64, 1, None, "host", {"layout": "TND", "mask": None, "mode": 0, "lengths": "exact"}),
        (256, 1, 60, "host", {"layout": "BNSD", "mask": (2, 1, 1, 256), "mode": 0, "lengths": "fixed 256"}),
    ],
)
def test_the_form_of_a_call(head_dim, q_len, window, kv_lens, expected) -> None:
    gm = traced(inputs([300, 40], q_len, head_dim, window, torch.float32), window)
    (node,) = lowered(gm, kv_lens)
    assert facts(node) == expected


def test_layers_share_masks_lists_and_views() -> None:
    """What depends on the group and the phase alone is computed once, whatever the number of layers."""
    gm = traced(inputs([300, 40], 4, 512, None, torch.float32), None, layers=5)
    nodes = lowered(gm, "device")
    assert len(nodes) == 5
    for name in ("atten_mask", "actual_seq_lengths_kv"):
        assert len({node.kwargs[name] for node in nodes}) == 1
    assert len({node.kwargs["block_table"] for node in nodes}) == 5, "each layer has its own table input"
    assert len({node.args[1] for node in nodes}) == 1, "one view of the one cache"
    (host,) = [n.meta["host"] for n in placeholders(gm) if "host" in n.meta]
    assert host.sites == tuple(f"verify/t.layers.{i}" for i in range(5))
    assert (host.sources, host.block_size, host.capacity) == ((4,), 128, 640)


def test_clipped_layers_need_nothing_from_the_host() -> None:
    gm = traced(inputs([300, 40], 4, 512, 60, torch.float32), 60, layers=2)
    lowered(gm, "device")
    assert [n for n in placeholders(gm) if "host" in n.meta] == []


def test_lengths_the_host_cannot_compute() -> None:
    """On the device the layer reads all blocks; exact host lengths would be wrong, and are refused by name."""
    args = inputs([300, 40], 4, 512, None, torch.float32)

    def fn(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        return paged_attention(query, keys, values, table, lens.sort().values, 0.7, None, "TND", "verify/t.layers.7")

    for kv_lens in ("device", "host"):
        gm = make_fx(fn, tracing_mode="fake")(*args)
        for index, node in enumerate(placeholders(gm)):
            node.meta.update(source=index)
        if kv_lens == "host":
            with pytest.raises(CompileError, match=r"verify/t\.layers\.7.*kv_lens='host' cannot"):
                lowered(gm, kv_lens)
            continue
        expected = gm(*args)
        (node,) = lowered(gm, kv_lens)
        assert node.meta["attention"].lengths == "fixed 640"
        torch.testing.assert_close(run(gm, args), expected, rtol=1e-5, atol=1e-5)


def test_the_cpu_keeps_the_dialect() -> None:
    gm = traced(inputs([300, 40], 4, 512, None, torch.float32), None)
    result = lower_attention(gm, platform=platform("cpu"), kv_lens="device")
    assert (result.changed, dict(result.left)) == (0, {"cpu has no npu_fused_infer_attention_score": 1})


def test_idempotent() -> None:
    gm = traced(inputs([300, 40], 4, 512, None, torch.float32), None)
    lowered(gm, "device")
    again = lower_attention(gm, platform=A2, kv_lens="device")
    assert (again.changed, sum(again.left.values())) == (0, 0)


def test_symbolic_pools_put_no_raw_size_into_the_graph() -> None:
    """A size that is a number only while tracing cannot be captured."""
    args = inputs([300, 40], 4, 512, None, torch.float32)

    def fn(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        return paged_attention(query, keys, values, table, lens, 0.7, None, "TND", "verify/t.layers.0")

    gm = make_fx(fn, tracing_mode="symbolic")(*args)
    for index, node in enumerate(placeholders(gm)):
        node.meta.update(source=index, label=node.name)
    expected = gm(*args)
    (node,) = lowered(gm, "device")
    leaves = [each for n in gm.graph.nodes for each in torch.utils._pytree.tree_leaves((n.args, n.kwargs))]
    assert not any(isinstance(each, torch.SymInt) for each in leaves)
    torch.testing.assert_close(run(gm, args), expected, rtol=1e-5, atol=1e-5)
