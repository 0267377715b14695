"""The layout is chosen per node, by the platform's table; numbers, scale, window and lengths are carried."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.capabilities import platform
from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.ops import paged_attention
from gemma_npu_compile.passes.fx import argument
from gemma_npu_compile.passes.large_heads_to_bnsd import large_heads_to_bnsd
from gemma_npu_compile.passes.sites import attention_nodes


def case(head_dim: int, q_len: int, *, block_size: int = 128, dtype=torch.float32, window=None):
    """A traced attention call with symbolic rows, and its inputs for 3 rows."""
    torch.manual_seed(head_dim + q_len)
    rows, heads, kv_heads = 3, 4, 2
    query = torch.randn(rows * q_len, heads, head_dim, dtype=dtype)
    caches = [torch.randn(8, block_size, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    table = torch.randperm(8)[:6].view(rows, 2).int()
    lens = torch.tensor([q_len, block_size + 5, 40], dtype=torch.int32)

    def fn(query, keys, values, table, lens):
        return paged_attention(query, keys, values, table, lens, 0.7, window, "TND", "verify/target.layers.3")

    args = (query, *caches, table, lens)
    return make_fx(fn, tracing_mode="symbolic")(*args), args


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("window", [None, 30])
def test_a_head_of_512_becomes_bnsd_with_the_same_numbers(q_len, window, dtype):
    gm, args = case(512, q_len, dtype=dtype, window=window)
    expected = gm(*args)
    result = large_heads_to_bnsd(gm, platform=platform("ascend910b"))
    gm.graph.lint()
    gm.recompile()
    assert (result.changed, dict(result.left)) == (1, {})
    (node,) = attention_nodes(gm)
    assert argument(node, "layout") == "BNSD"
    assert (argument(node, "scale"), argument(node, "window")) == (0.7, window)
    assert argument(node, "layer") == "verify/target.layers.3"
    query = argument(node, "query")
    assert tuple(query.meta["val"].shape[1:]) == (4, q_len, 512)
    assert query.meta["val"].is_contiguous()
    transposes = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.transpose.int)
    assert len(transposes) == (0 if q_len == 1 else 2)
    assert torch.equal(gm(*args), expected)
    again = large_heads_to_bnsd(gm, platform=platform("ascend910b"))
    assert (again.changed, dict(again.left)) == (0, {"already BNSD": 1})


@pytest.mark.parametrize(
    ("name", "head_dim", "kv_lens", "changed"),
    [
        ("ascend910b", 64, "host", 0),
        ("ascend910b", 128, "host", 0),
        ("ascend910b", 256, "host", 1),
        ("ascend910_93", 512, "host", 1),
        ("ascend950", 512, "host", 0),
        # Lengths on the device are an explicit mask, which packed queries cannot have.
        ("ascend910b", 64, "device", 1),
        ("ascend950", 512, "device", 1),
        ("cpu", 512, "device", 0),
    ],
)
def test_what_is_legal_stays(name, head_dim, kv_lens, changed):
    gm, _ = case(head_dim, 4)
    result = large_heads_to_bnsd(gm, platform=platform(name), kv_lens=kv_lens)
    assert result.changed == changed
    assert sum(result.left.values()) == 1 - changed


def test_a_forbidden_call_that_cannot_be_rewritten_is_an_error():
    gm, _ = case(512, 4, block_size=64)
    with pytest.raises(CompileError, match=r"verify/target\.layers\.3 is legal in no layout on ascend910b.*561002.*"):
        large_heads_to_bnsd(gm, platform=platform("ascend910b"))
    gm, _ = case(512, 1, block_size=64)
    assert large_heads_to_bnsd(gm, platform=platform("ascend910b")).changed == 1, "one query takes blocks of 64"
