"""What the emulated attention refuses, in the words of the device, and for which SoC; and what a trace knows of it."""

import contextlib
import logging
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.capabilities import platform
from gemma_npu_compile.ops import npu, npu_attention_call

V1 = torch.ops.npu.npu_fused_infer_attention_score
V2 = torch.ops.npu.npu_fused_infer_attention_score_v2
RENAMED = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse",
}
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)

TABLE = torch.arange(6, dtype=torch.int32).view(2, 3)
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"input_layout": "TND_NTD"}, "'TND_NTD' is not emulated"),
    "dimensions": ({"query": torch.zeros(2, 4, 64)}, r"a BNSD query has 4 dimensions, got \(2, 4, 64\)"),
    "dtypes": ({"query": torch.zeros(2, 4, 2, 64, dtype=torch.bfloat16)}, "dtypes differ: query torch.bfloat16"),
    "integers": ({name: torch.zeros(2, 4, 2, 64).char() for name in ("query", "key", "value")}, "torch.int8"),
    "strides": ({"query": torch.zeros(2, 2, 4, 64).half().transpose(1, 2)}, "query must be contiguous"),
    "strided keys": ({"key": torch.zeros(6, 128, 64).half().transpose(1, 2)}, "key must be contiguous"),
    "strided mask": ({"atten_mask": torch.zeros(2, 384, 1, 2).bool().transpose(1, 3)}, "atten_mask must be contig"),
    "heads": ({"num_heads": 8}, r"8 heads, the BNSD query is \(2, 4, 2, 64\)"),
    "no heads": ({"num_heads": 0}, "0 heads"),
    "groups": ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3"),
    "values": ({"value": torch.zeros(6, 128, 64).half()}, r"key is \(6, 128, 128\), value \(6, 128, 64\)"),
    "head size": (
        {"query": torch.zeros(2, 4, 2, 24).half(), **{n: torch.zeros(6, 128, 48).half() for n in ("key", "value")}},
        "head size must be a multiple of 16",
    ),
    "blocks": (
        {"block_size": 64, **{n: torch.zeros(6, 64, 128).half() for n in ("key", "value")}},
        "block size 64 must be a multiple of 128 for 2 queries",
    ),
    "block size of another cache": ({"block_size": 256}, r"paged keys of a BNSD query are \(6, 128, 128\)"),
    "NZ cache": ({n: torch.zeros(6, 2, 4, 128, 16).half() for n in ("key", "value")}, "BnBsH .* or BnNBsD"),
    "int64 table": ({"block_table": TABLE.long()}, r"block_table is torch.int64 \(2, 3\)"),
    "rows of the table": ({"block_table": TABLE[:1]}, r"it must be int32 \(2, blocks\)"),
    "flat table": ({"block_table": TABLE[0]}, r"\(3,\), it must be int32"),
    "no lengths": ({"actual_seq_lengths_kv": None}, "paged keys need the actual lengths"),
    "too long": ({"actual_seq_lengths_kv": [385, 5]}, r"\[385, 5\]: each must lie in 0 .. 384"),
    "negative": ({"actual_seq_lengths_kv": [-1, 5]}, "each must lie in 0"),
    "too few lengths": (
        {"query": torch.zeros(3, 4, 2, 64).half(), "block_table": TABLE.repeat(2, 1)[:3].contiguous()},
        "2 for 3 rows",
    ),
    "queries": ({"actual_seq_lengths": [3, 1]}, r"query are \[3, 1\]: each must lie in 0 .. 2"),
    "sparse mode": ({"sparse_mode": 5}, "sparse_mode is 5"),
    "inner precise": ({"inner_precise": 4}, "inner_precise is 4"),
    "mode without mask": ({"sparse_mode": 3}, "sparse_mode 3 needs atten_mask"),
    "all-mask without mask": ({"sparse_mode": 1}, "sparse_mode 1 needs atten_mask"),
    "mask dtype": ({"atten_mask": torch.zeros(2, 1, 2, 384)}, "atten_mask is torch.float32"),
    "narrow mask": ({"atten_mask": torch.zeros(2, 1, 2, 383).bool()}, "with at least 384 keys"),
    "mask per head": ({"atten_mask": torch.zeros(2, 4, 2, 384).bool()}, r"\(2 or 1, 1, 2, keys\)"),
    "mask of other rows": ({"atten_mask": torch.zeros(3, 1, 2, 384).bool()}, r"\(2 or 1, 1, 2, keys\)"),
    "rows of a flat mask": ({"atten_mask": torch.zeros(3, 384).bool()}, r"\(2, keys\)"),
    "triangle": (
        {"atten_mask": torch.zeros(2, 1, 2, 384).bool(), "sparse_mode": 3},
        r"sparse_mode 3 takes \(2048, 2048\)",
    ),
    "inverted triangle": ({"atten_mask": ~TRIANGLE, "sparse_mode": 3}, "must be 1 above the diagonal"),
    "rope": ({"query_rope": torch.zeros(2, 4, 2, 64).half()}, "query_rope is not emulated"),
    "pse": ({"pse_shift": torch.zeros(1, 4, 2, 384).half()}, "pse_shift is not emulated"),
    "quantisation": ({"antiquant_scale": torch.ones(2)}, "antiquant_scale is not emulated"),
    "quantisation mode": ({"key_antiquant_mode": 1}, "key_antiquant_mode is not emulated"),
    "prefix": ({"actual_shared_prefix_len": [4]}, "actual_shared_prefix_len is not emulated"),
    "padding": ({"kv_padding_size": torch.zeros(1).long()}, "kv_padding_size is not emulated"),
}
ONE: dict[str, tuple[dict[str, Any], str]] = {
    "precise": ({"inner_precise": 2}, "inner_precise is 2, 1 queries take 0 to 1"),
    "two results": ({"input_layout": "BNSD_BSND"}, "BNSD_BSND needs more than one query"),
    "mask of other rows": ({"atten_mask": torch.zeros(3, 384).bool()}, r"\(2, keys\)"),
    "keys": (
        {"block_table": torch.zeros(2, 2049, dtype=torch.int32), "actual_seq_lengths_kv": [262145]},
        "262145 keys, one query takes at most 262144",
    ),
}
TND: dict[str, tuple[dict[str, Any], str]] = {
    "no query lengths": ({"actual_seq_lengths": None}, "TND needs the actual lengths"),
    "no kv lengths": ({"actual_seq_lengths_kv": None}, "TND needs the actual lengths"),
    "total": ({"actual_seq_lengths": [2, 3]}, r"query are \[2, 3\]: TND counts cumulatively, up to 4"),
    "falling": ({"actual_seq_lengths": [5, 4]}, r"query are \[5, 4\]: TND counts cumulatively"),
    "one kv length for two rows": ({"actual_seq_lengths_kv": [7]}, r"key and value are \[7\]: 1 for 2 rows"),
    "an explicit mask": ({"atten_mask": torch.zeros(2, 1, 2, 384).bool()}, "TND with 3 queries takes no full mask"),
}
DENSE: dict[str, tuple[dict[str, Any], str]] = {
    "cumulative": ({"actual_seq_lengths_kv": [7, 9]}, "TND counts cumulatively, up to 10"),
    "heads": ({n: torch.zeros(10, 4, 64).half() for n in ("key", "value")}, r"dense TND keys are \(10, 4, 64\)"),
}
BSH: dict[str, tuple[dict[str, Any], str]] = {
    "heads first": ({n: torch.zeros(6, 2, 128, 64).half() for n in ("key", "value")}, r"must be BnBsH \(blocks, 128"),
    "heads": ({"num_heads": 3}, r"3 heads, the BSH query is \(2, 2, 256\)"),
}


def base(kind: str) -> dict[str, Any]:
    """A legal call of each kind on ascend910b."""
    caches = {name: torch.zeros(6, 128, 128).half() for name in ("key", "value")}
    options = {"num_heads": 4, "num_key_value_heads": 2, "block_size": 128, "block_table": TABLE, **caches}
    options |= {"actual_seq_lengths_kv": [200, 5], "input_layout": "BNSD", "query": torch.zeros(2, 4, 2, 64).half()}
    if kind == "one":
        options["query"] = torch.zeros(2, 4, 1, 64).half()
    elif kind == "bsh":
        options |= {"query": torch.zeros(2, 2, 256).half(), "input_layout": "BSH"}
    elif kind in ("tnd", "dense"):
        options |= {"query": torch.zeros(4, 4, 64).half(), "input_layout": "TND", "actual_seq_lengths": [1, 4]}
    if kind == "dense":
        options |= {name: torch.zeros(10, 2, 64).half() for name in ("key", "value")}
        options |= {"actual_seq_lengths_kv": [7, 10], "block_table": None, "block_size": 0}
    return options


def invoke(options: dict[str, Any]) -> Any:
    operands = [options.pop(name) for name in ("query", "key", "value")]
    return V1(*operands, **options)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind, table in {"many": CHANGES, "one": ONE, "tnd": TND, "dense": DENSE, "bsh": BSH}.items()
        for name in table
    ],
)
def test_what_a_device_refuses(kind: str, name: str) -> None:
    changes, message = {"many": CHANGES, "one": ONE, "tnd": TND, "dense": DENSE, "bsh": BSH}[kind][name]
    invoke(base(kind))
    with pytest.raises(npu.AclnnError, match=message) as error:
        invoke(base(kind) | changes)
    assert str(error.value).startswith("561002: ")
    assert isinstance(error.value, RuntimeError)


def packed(head_dim: int) -> dict[str, Any]:
    """One query of each of two rows as TND."""
    caches = {name: torch.zeros(6, 128, head_dim).half() for name in ("key", "value")}
    options = {"num_heads": 4, "num_key_value_heads": 1, "block_size": 128, "block_table": TABLE, **caches}
    options |= {"actual_seq_lengths": [1, 2], "actual_seq_lengths_kv": [200, 5], "input_layout": "TND"}
    return options | {"query": torch.zeros(2, 4, head_dim).half()}


@pytest.mark.parametrize(
    ("head_dim", "text"),
    [
        (512, "561002: D is 512, TND, q_rope and k_rope should not be null;"),
        (256, "561002: queryD(256) must be 192/128/64"),
        (48, "561002: no rule allows TND with head size 48;"),
    ],
)
def test_the_platform_is_asked_and_quoted(head_dim: int, text: str) -> None:
    with pytest.raises(npu.AclnnError) as error:
        invoke(packed(head_dim))
    assert str(error.value).startswith(text)
    assert "npu_fused_infer_attention_score on ascend910b" in str(error.value)
    with npu.emulate(platform("ascend950")):
        assert invoke(packed(head_dim))[0].shape == (2, 4, head_dim)
    with npu.emulate(platform("ascend910_93")), pytest.raises(npu.AclnnError, match="on ascend910_93"):
        invoke(packed(head_dim))


def test_wide_caches_need_heads_first() -> None:
    heads, size = 129, 512
    options = {"num_heads": heads, "num_key_value_heads": heads, "block_size": 16, "input_layout": "BNSD"}
    options |= {"block_table": torch.zeros(1, 1, dtype=torch.int32), "actual_seq_lengths_kv": [3]}
    query = torch.zeros(1, heads, 1, size).half()
    flat, first = torch.zeros(1, 16, heads * size).half(), torch.zeros(1, heads, 16, size).half()
    with pytest.raises(npu.AclnnError, match="BnBsH keys are 66048 wide, at most 65535"):
        V1(query, flat, flat, **options)
    assert V1(query, first, first, **options)[0].shape == query.shape


def test_emulation_belongs_to_its_thread() -> None:
    seen: list[str] = []
    with npu.emulate(platform("ascend950")):
        thread = threading.Thread(target=lambda: seen.append(npu.emulated().name))
        thread.start()
        thread.join()
        with contextlib.suppress(ZeroDivisionError), npu.emulate(platform("cpu")):
            seen.append(npu.emulated().name)
            raise ZeroDivisionError
        seen.append(npu.emulated().name)
    assert [*seen, npu.emulated().name] == ["ascend910b", "cpu", "ascend950", "ascend910b"]


def test_float32_is_allowed_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    npu_attention_call._say_float32.cache_clear()
    with caplog.at_level(logging.WARNING, logger="gemma_npu_compile"):
        invoke(base("many"))
        assert caplog.messages == []
        for _ in range(2):
            invoke({k: v.float() if k in ("query", "key", "value") else v for k, v in base("many").items()})
    assert len(caplog.messages) == 1
    assert "float32" in caplog.messages[0]
    assert "comparing tokens exactly" in caplog.messages[0]


# ---- traces

RESULTS = {
    # query, key, extra options; the result and its log-sum-exp, as torch_npu's meta kernels have them
    "BNSD": ((3, 4, 5, 64), (3, 2, 9, 64), (3, 4, 5, 64), (3, 4, 5, 1)),
    "BSND": ((3, 5, 4, 64), (3, 9, 2, 64), (3, 5, 4, 64), (3, 4, 5, 1)),
    "BSH": ((3, 5, 256), (3, 9, 128), (3, 5, 256), (3, 4, 5, 1)),
    "TND": ((15, 4, 64), (27, 2, 64), (15, 4, 64), (15, 4, 1)),
    "NTD": ((4, 15, 64), (2, 27, 64), (4, 15, 64), (15, 4, 1)),
    "BNSD_BSND": ((3, 4, 5, 64), (3, 2, 9, 64), (3, 5, 4, 64), (3, 4, 5, 1)),
    "BNSD_NBSD": ((3, 4, 5, 64), (3, 2, 9, 64), (4, 3, 5, 64), (3, 4, 5, 1)),
    "BSH_BNSD": ((3, 5, 256), (3, 9, 128), (3, 4, 5, 64), (3, 4, 5, 1)),
    "TND_NTD": ((15, 4, 64), (27, 2, 64), (4, 15, 64), (15, 4, 1)),
    "NTD_TND": ((4, 15, 64), (2, 27, 64), (15, 4, 64), (15, 4, 1)),
}


@pytest.mark.parametrize("layout", RESULTS)
def test_fakes_know_every_layout(layout: str) -> None:
    query, key, out, lse = RESULTS[layout]
    with FakeTensorMode():
        tensors = [torch.empty(size, dtype=torch.bfloat16) for size in (query, key, key)]
        options = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": layout}
        found = V1(*tensors, **options, softmax_lse_flag=True)
        assert [(tuple(each.shape), each.dtype) for each in found] == [(out, torch.bfloat16), (lse, torch.float32)]
        assert V1(*tensors, **options)[1].shape == (0,)
        with pytest.raises(RuntimeError, match="'NBSD'"):
            V1(*tensors, **options | {"input_layout": "NBSD"})


def test_a_trace_is_not_judged_and_stays_symbolic() -> None:
    """torch_npu's meta kernels enforce no limit, and a call must be traced before a pass can make it legal."""
    options = packed(512)
    query, *caches, table = (options.pop(name) for name in ("query", "key", "value", "block_table"))

    def fn(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
        return V1(query, key, value, block_table=table, **options)[0] + 1

    graph = make_fx(fn, tracing_mode="symbolic")(query, *caches, table)
    (node,) = graph.graph.find_nodes(op="call_function", target=V1.default)
    result, nothing = node.meta["val"]
    assert isinstance(result.shape[0], torch.SymInt)
    assert str(result.shape) == str(node.args[0].meta["val"].shape)
    assert tuple(nothing.shape) == (0,)
    with pytest.raises(npu.AclnnError, match="D is 512, TND"):
        graph(query, *caches, table)


@pytest.mark.parametrize("layout", ["tnd", "many"])
def test_opcheck(layout: str) -> None:
    options = base(layout)
    operands = tuple(options.pop(name) for name in ("query", "key", "value"))
    torch.library.opcheck(V1.default, operands, options, test_utils=("test_schema", "test_faketensor"))


def test_schemas_are_those_of_the_wheel() -> None:
    first, second = V1.default._schema, V2.default._schema
    assert (len(first.arguments), len(second.arguments)) == (40, 45)
    defaults = {"scale": 1.0, "num_heads": 1, "num_key_value_heads": 0, "input_layout": "BSH", "sparse_mode": 0}
    defaults |= {"pre_tokens": 2147483647, "next_tokens": 2147483647, "block_size": 0, "softmax_lse_flag": False}
    assert {a.name: a.default_value for a in first.arguments if a.name in defaults} == defaults
    renamed = {RENAMED.get(name, name): value for name, value in defaults.items()}
    assert {a.name: a.default_value for a in second.arguments if a.name in renamed} == renamed
    for schema in (first, second):
        assert [a.name for a in schema.arguments if not a.kwarg_only] == ["query", "key", "value"]
        assert [str(r.type) for r in schema.returns] == ["Tensor", "Tensor"]
