"""A user's own fused-attention calls: forbidden TND becomes BNSD with the same numbers, or an error says why not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.capabilities import platform
from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.ops.npu import emulate
from gemma_npu_compile.passes.fia_to_bnsd import fia_to_bnsd
from gemma_npu_compile.passes.fx import argument

aten = torch.ops.aten
V1 = torch.ops.npu.npu_fused_infer_attention_score.default
V2 = torch.ops.npu.npu_fused_infer_attention_score_v2.default
A2 = platform("ascend910b")
V2_NAMES = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse",
}
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
MODES = {
    "none": {},
    "corner": {"sparse_mode": 2},
    "causal": {"sparse_mode": 3},
    "band": {"sparse_mode": 4, "pre_tokens": 6, "next_tokens": 0},
}


def fia(op, query, key, value, **options):
    """Either version, by the names of the first."""
    return op(query, key, value, **{V2_NAMES[k] if op is V2 and k in V2_NAMES else k: v for k, v in options.items()})


def trace(fn, *args):
    return make_fx(fn, tracing_mode="fake")(*args)


def run(gm, args, name="ascend910b"):
    gm.graph.lint()
    gm.recompile()
    with emulate(platform(name)):
        return gm(*args)


def count(gm, target) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=target))


def only(gm, op=V1):
    (node,) = gm.graph.find_nodes(op="call_function", target=op)
    return node


def attend(query, key, value, scale, hidden):
    """One request in plain float32: ``(S, N, D)`` over ``(K, KV_N, D)``; result and log-sum-exp ``(S, N, 1)``."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(repeats, 1) for x in (key, value))
    scores = torch.einsum("snd,knd->nsk", query.float(), key) * scale
    scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.einsum("nsk,knd->snd", scores.softmax(-1).nan_to_num(0), value)
    return out.to(query.dtype), scores.logsumexp(-1).T[..., None]


def hides(mode, q_len, keys):
    """``(q_len, keys)``, True where a mode of MODES hides: queries end at the newest token, or start at the first."""
    if mode == "corner" and q_len > 1:
        return torch.arange(keys) > torch.arange(q_len)[:, None]
    distance = torch.arange(keys - q_len, keys)[:, None] - torch.arange(keys)
    if mode == "none" or (q_len == 1 and mode == "corner"):  # which one query ignores
        return torch.zeros(q_len, keys, dtype=torch.bool)
    return (distance < 0) | (distance > MODES["band"]["pre_tokens"] if mode == "band" else False)


def expected(query, keys, values, scale, mode):
    """Results of requests one after the other, from lists of their keys and values."""
    queries = query.chunk(len(keys))
    parts = [
        attend(q, k, v, scale, hides(mode, q.shape[0], k.shape[0]))
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def close(result, wanted, dtype):
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(result, wanted, atol=tolerance, rtol=tolerance)


def tensors(seed, dtype, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


@given(
    op=st.sampled_from([V1, V2]),
    seed=st.integers(0, 99),
    head_dim=st.sampled_from([256, 512]),
    q_len=st.sampled_from([1, 2, 4, 17]),
    kv_heads=st.integers(1, 2),
    group=st.integers(2, 3),
    lens=st.lists(st.integers(17, 250), min_size=1, max_size=3),
    mode=st.sampled_from(sorted(MODES)),
    scale=st.sampled_from([1.0, 0.3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    by_head=st.booleans(),
    lse=st.booleans(),
    precise=st.sampled_from([0, 1, 2, 3]),
)
def test_a_paged_call_keeps_its_numbers(
    op, seed, head_dim, q_len, kv_heads, group, lens, mode, scale, dtype, by_head, lse, precise
):
    rows, heads = len(lens), kv_heads * group
    query, *pools = tensors(
        seed, dtype, (rows * q_len, heads, head_dim), *[(2 * rows + 1, 128, kv_heads, head_dim)] * 2
    )
    table = torch.randperm(2 * rows + 1)[: 2 * rows].view(rows, 2).int()
    caches = [p.transpose(1, 2).contiguous() if by_head else p.flatten(2) for p in pools]
    options = {
        "actual_seq_lengths": [q_len * (i + 1) for i in range(rows)],
        "actual_seq_lengths_kv": lens,
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "block_size": 128,
        "input_layout": "TND",
        "scale": scale * head_dim**-0.5,
        "softmax_lse_flag": lse,
        "inner_precise": precise,
        **MODES[mode],
    }

    def call(query, key, value, table, triangle):
        mask = None if mode == "none" else triangle
        out, log = fia(op, query, key, value, block_table=table, atten_mask=mask, **options)
        return (out, log) if lse else (out,)

    args = (query, *caches, table, TRIANGLE)
    gm = trace(call, *args)
    paged = [[p[table[b].long()].flatten(0, 1)[:n] for b, n in enumerate(lens)] for p in pools]
    wanted = expected(query, *paged, options["scale"], mode)
    # One query ignores a band, and takes no repair of hidden rows: the rewrite sees to both.
    if q_len > 1 or (mode != "band" and precise < 2):
        close(run(gm, args, "cpu")[0], wanted[0], dtype)
    with pytest.raises(RuntimeError, match="561002"):
        run(gm, args)

    result = fia_to_bnsd(gm, platform=A2)
    assert (result.changed, dict(result.left)) == (1, {})
    got = run(gm, args)
    close(got[0], wanted[0], dtype)
    if lse:
        assert got[1].dtype == torch.float32
        torch.testing.assert_close(got[1], wanted[1], atol=2e-5, rtol=2e-5)
    node = only(gm, op)
    assert node.meta["val"][0].shape == (rows, heads, q_len, head_dim)
    assert node.kwargs["input_layout"] == "BNSD"
    assert not {"actual_seq_lengths", "actual_seq_qlen"} & set(node.kwargs)
    assert [node.args[1].name, node.args[2].name] == ["key_1", "value_1"], "caches are read where they lie"
    assert argument(node, "sparse_mode") == (MODES[mode].get("sparse_mode", 0) if q_len > 1 else 0)
    assert argument(node, "inner_precise") == (precise if q_len > 1 else precise & 1)
    swaps = 0 if q_len == 1 else 3 if lse else 2
    assert (count(gm, aten.transpose.int), count(gm, aten.clone.default)) == (swaps, swaps)
    again = fia_to_bnsd(gm, platform=A2)
    assert (again.changed, dict(again.left)) == (0, {f"BNSD with head size {head_dim} is legal": 1})


@given(
    seed=st.integers(0, 99),
    rows=st.integers(1, 3),
    q_len=st.sampled_from([1, 3]),
    keys=st.integers(3, 40),
    mode=st.sampled_from(sorted(MODES)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_dense_call_keeps_its_numbers(seed, rows, q_len, keys, mode, dtype):
    query, key, value = tensors(seed, dtype, (rows * q_len, 4, 256), *[(rows * keys, 2, 256)] * 2)

    def call(query, key, value, triangle):
        return fia(
            V1,
            query,
            key,
            value,
            atten_mask=None if mode == "none" else triangle,
            actual_seq_lengths=[q_len * (i + 1) for i in range(rows)],
            actual_seq_lengths_kv=[keys * (i + 1) for i in range(rows)],
            num_heads=4,
            num_key_value_heads=2,
            input_layout="TND",
            scale=0.05,
            **MODES[mode],
        )[0]

    args = (query, key, value, TRIANGLE)
    gm = trace(call, *args)
    assert fia_to_bnsd(gm, platform=A2).changed == 1
    node = only(gm)
    assert [each.meta["val"].shape for each in node.args[1:]] == [(rows, 2, keys, 256)] * 2
    assert node.kwargs["actual_seq_lengths_kv"] == [keys] * rows
    wanted, _ = expected(query, key.chunk(rows), value.chunk(rows), 0.05, mode)
    close(run(gm, args), wanted, dtype)


class Compiled:
    """``torch.compile`` with this pass alone: its graphs, what it changed, and the guards it added."""

    def __init__(self, fn):
        torch._dynamo.reset()
        self.graphs, self.changed, self.guards = [], 0, 0
        backend = aot_autograd(fw_compiler=self.compile, inference_compiler=self.compile)
        self.fn = torch.compile(fn, backend=backend, fullgraph=True)

    def compile(self, gm, inputs):
        env = detect_fake_mode(inputs).shape_env
        before = len(env.guards)
        self.changed += fia_to_bnsd(gm, platform=A2).changed
        self.guards += len(env.guards) - before
        gm.graph.lint()
        gm.recompile()
        self.graphs.append(gm)
        return gm.forward

    @torch.no_grad()
    def __call__(self, *args):
        return self.fn(*args)


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("dense", [False, True])
def test_symbolic_queries_stay_symbolic(dense, mode, fresh_dynamo):
    """``[s, 2 * s]`` is proved from the expressions; the pass adds no guard, and one graph serves every length."""
    options = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "TND", **MODES[mode]}

    def call(query, key, table, triangle):
        q_len, keys = query.shape[1], key.shape[1]
        more = {"actual_seq_lengths": [q_len, 2 * q_len], "atten_mask": None if mode == "none" else triangle}
        if dense:
            more |= {"actual_seq_lengths_kv": [keys, 2 * keys]}
            key = key.flatten(0, 1)
        else:
            more |= {"actual_seq_lengths_kv": [70, 140], "block_table": table, "block_size": 128}
            key = key.flatten(2)
        return fia(V1, query.flatten(0, 1), key, -key, **more, **options)[0]

    def inputs(q_len):
        keys = (2, 3 * q_len, 2, 256) if dense else (5, 128, 2, 256)
        query, key = tensors(q_len, torch.float32, (2, q_len, 4, 256), keys)
        return query * 0.1, key, torch.tensor([[3, 1], [0, 4]], dtype=torch.int32), TRIANGLE

    compiled, first = Compiled(call), inputs(6)
    for each in first[: 2 if dense else 1]:
        torch._dynamo.mark_dynamic(each, 1)
    for args in (first, inputs(9)):
        query, key, table, _ = args
        pools = [key, -key] if dense else [[p[t.long()].flatten(0, 1) for t in table] for p in (key, -key)]
        lens = [key.shape[1]] * 2 if dense else [70, 140]
        clipped = [[x[:n] for x, n in zip(pool, lens, strict=True)] for pool in pools]
        wanted, _ = expected(query.flatten(0, 1), *clipped, 1.0, mode)
        close(compiled(*args), wanted, torch.float32)
    assert (len(compiled.graphs), compiled.changed, compiled.guards) == (1, 1, 0)
    assert "test_fia_to_bnsd.py" in only(compiled.graphs[0]).stack_trace
    rows, heads, q_len, _ = only(compiled.graphs[0]).args[0].meta["val"].shape
    assert (rows, heads, isinstance(q_len, torch.SymInt)) == (2, 4, True)


@pytest.mark.parametrize(("before", "after"), [(9, 5), (9, -3), (2147483647, -3)])
def test_the_window_of_single_queries_follows_the_table_and_the_lengths(before, after, fresh_dynamo):
    """A table of any width, a request whose length is a symbol, a band that ends before the query."""

    def call(query, key, value, table, triangle, some):
        return fia(
            V1,
            query,
            key,
            value,
            atten_mask=triangle,
            block_table=table,
            actual_seq_lengths=[1, 2],
            actual_seq_lengths_kv=[40, some.shape[0]],
            num_heads=4,
            num_key_value_heads=2,
            input_layout="TND",
            block_size=128,
            sparse_mode=4,
            pre_tokens=before,
            next_tokens=after,
        )[0]

    query, key, value = tensors(0, torch.float32, (2, 4, 256), *[(7, 128, 2 * 256)] * 2)
    query *= 0.1
    compiled = Compiled(call)
    table, some = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32), torch.empty(200)
    torch._dynamo.mark_dynamic(table, 1)
    torch._dynamo.mark_dynamic(some, 0)
    wide = torch.tensor([[3, 1, 2], [0, 4, 6]], dtype=torch.int32)
    for blocks, last in ((table, some), (wide, torch.empty(300))):
        wanted = []
        for row, length in enumerate((40, last.shape[0])):
            k, v = (pool[blocks[row].long()].reshape(-1, 2, 256)[:length] for pool in (key, value))
            places = torch.arange(length)
            hidden = (places < length - 1 - before) | (places > length - 1 + after)
            wanted.append(attend(query[row : row + 1], k, v, 1.0, hidden)[0])
        close(compiled(query, key, value, blocks, TRIANGLE, last), torch.cat(wanted), torch.float32)
    assert (len(compiled.graphs), compiled.changed, compiled.guards) == (1, 1, 0)
    mask = argument(only(compiled.graphs[0]), "atten_mask").meta["val"]
    assert (mask.dtype, mask.shape[:3], isinstance(mask.shape[3], torch.SymInt)) == (torch.bool, (2, 1, 1), True)


def dense(query, key, value, mask=None, *, q_lens=(2, 4), kv_lens=(6, 12), op=V1, **more):
    """A call over dense keys with two heads."""
    options = {"num_heads": 2, "input_layout": "TND", **more}
    lens = {"actual_seq_lengths": list(q_lens), "actual_seq_lengths_kv": list(kv_lens)}
    return fia(op, query, key, value, atten_mask=mask, **lens, **options)[0]


def traced(mask=None, head_dim=256, tokens=4, **options):
    """The graph of :func:`dense` over 12 keys."""
    args = tensors(0, torch.float32, (tokens, 2, head_dim), *[(12, 2, head_dim)] * 2)
    args += [] if mask is None else [mask]
    return trace(lambda *given: dense(*given, **options), *args), args


@pytest.mark.parametrize(
    ("q_lens", "shape"),
    [
        ((2, 4), (2, 6)),
        ((2, 4), (1, 2, 6)),
        ((2, 4), (1, 1, 2, 6)),
        ((2, 4), (2, 1, 2, 6)),
        ((1, 2), (2, 6)),
        ((1, 2), (1, 1, 6)),
        ((1, 2), (2, 1, 1, 6)),
    ],
)
@pytest.mark.parametrize("head_dim", [128, 512])
def test_an_explicit_mask_is_carried(q_lens, shape, head_dim):
    """Packed queries cannot have one, whatever their heads."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[..., 0] = False
    gm, args = traced(mask, head_dim, tokens=q_lens[-1], q_lens=q_lens, scale=0.1)
    assert fia_to_bnsd(gm, platform=A2).changed == 1
    assert argument(only(gm), "atten_mask").op == "placeholder"
    query, key, value, _ = args
    per_row = mask.expand(2, 6).view(2, 1, 6) if len(shape) == 2 and q_lens == (1, 2) else None
    per_row = mask.expand(2, 1, q_lens[0], 6)[:, 0] if per_row is None else per_row
    rows = zip(query.chunk(2), key.chunk(2), value.chunk(2), per_row, strict=True)
    close(run(gm, args), torch.cat([attend(q, k, v, 0.1, m)[0] for q, k, v, m in rows]), torch.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"q_lens": (1, 4)},
            r"actual_seq_lengths is \[1, 4\]: BNSD needs the same number of queries for every request",
        ),
        ({"kv_lens": (5, 12)}, r"actual_seq_lengths_kv is \[5, 12\]: dense keys need the same number"),
        ({"kv_lens": (12,)}, r"actual_seq_lengths_kv is \[12\]: it must be a list of 2 lengths"),
        ({"q_lens": (1, 4), "op": V2}, r"actual_seq_qlen is \[1, 4\]"),
        ({"q_lens": (3, 6)}, r"the query has 4 tokens, its lengths end at 6"),
        ({"mask": torch.zeros(3, 6, dtype=torch.bool)}, r"atten_mask is \(3, 6\), BNSD takes \(2 or 1, 1, 2, keys\)"),
    ],
)
def test_a_forbidden_call_that_cannot_be_rewritten_is_an_error(options, message):
    gm, _ = traced(**options)
    before = str(gm.graph)
    with pytest.raises(
        CompileError, match="is illegal on ascend910b: TND: .*cannot become BNSD: .*" + message
    ) as error:
        fia_to_bnsd(gm, platform=A2)
    assert ("561002: queryD(256)" if "mask" not in options else "561002") in str(error.value)
    assert "vllm-ascend #9632" in str(error.value), "the source of the rule"
    assert str(gm.graph) == before


def test_operands_of_the_packed_form_are_named():
    gm, _ = traced()
    node = only(gm)
    node.update_kwarg("pse_shift", node.args[0])
    with pytest.raises(CompileError, match="operand pse_shift has no BNSD form"):
        fia_to_bnsd(gm, platform=A2)


def test_a_call_that_is_legal_in_no_layout_is_an_error_with_both_rules():
    def call(query, key, value, table):
        more = {"block_table": table, "block_size": 64, "num_heads": 2, "input_layout": "TND"}
        return fia(V1, query, key, value, actual_seq_lengths=[2, 4], actual_seq_lengths_kv=[9, 8], **more)[0]

    query, key, value = tensors(0, torch.float32, (4, 2, 512), *[(3, 64, 2 * 512)] * 2)
    gm = trace(call, query, key, value, torch.tensor([[0], [1]], dtype=torch.int32))
    with pytest.raises(CompileError, match=r"561002: D is 512.*; BNSD: block size 64 must be a multiple of 128 for 2"):
        fia_to_bnsd(gm, platform=A2)


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
def test_other_layouts_are_judged_and_not_rewritten(layout):
    def call(query, key, value):
        return fia(V1, query, key, value, num_heads=2, input_layout=layout)[0]

    def graph(width):
        shape = {"BNSD": (1, 2, 3, width), "BSND": (1, 3, 2, width), "BSH": (1, 3, 2 * width)}[layout]
        return trace(call, *tensors(0, torch.float32, *[shape] * 3))

    result = fia_to_bnsd(graph(512), platform=A2)
    assert (result.changed, dict(result.left)) == (0, {f"{layout} with head size 512 is legal": 1})
    with pytest.raises(
        CompileError, match=f"{layout}: no rule allows {layout} with head size 528.*only TND is rewritten"
    ):
        fia_to_bnsd(graph(528), platform=A2)


def test_a_window_that_one_bnsd_query_would_ignore_is_an_error():
    def call(query, key, table, triangle):
        more = {"num_heads": 2, "input_layout": "BNSD", "block_table": table, "block_size": 128, **MODES["band"]}
        return fia(V1, query, key, key, atten_mask=triangle, actual_seq_lengths_kv=[9], **more)[0]

    query, key = tensors(0, torch.float32, (1, 2, 1, 64), (3, 128, 2 * 64))
    gm = trace(call, query, key, torch.tensor([[1]], dtype=torch.int32), TRIANGLE)
    with pytest.raises(CompileError, match="BNSD with one query takes no band mask"):
        fia_to_bnsd(gm, platform=A2)


@pytest.mark.parametrize("layout", ["TND_NTD", "NTD_TND"])
def test_transposing_layouts_are_judged_as_packed(layout):
    gm, _ = traced(head_dim=512)
    only(gm).update_kwarg("input_layout", layout)
    with pytest.raises(CompileError, match=f"{layout}: 561002: D is 512.*only TND is rewritten"):
        fia_to_bnsd(gm, platform=A2)


def test_no_rows_are_left_alone():
    gm, _ = traced(tokens=0, q_lens=(), kv_lens=())
    assert dict(fia_to_bnsd(gm, platform=A2).left) == {"no rows": 1}


@pytest.mark.parametrize(
    ("name", "head_dim", "left"),
    [
        ("ascend910b", 128, "TND with head size 128 is legal"),
        ("ascend950", 512, "TND with head size 512 is legal"),
        ("cpu", 512, "TND with head size 512 is legal"),
    ],
)
def test_what_is_legal_stays_with_lists_of_any_kind(name, head_dim, left):
    gm, _ = traced(head_dim=head_dim, q_lens=(1, 4), kv_lens=(5, 12))
    result = fia_to_bnsd(gm, platform=platform(name))
    assert (result.changed, dict(result.left)) == (0, {left: 1})


def test_what_others_chose_stays():
    gm, _ = traced(head_dim=512)
    node = only(gm)
    node.meta["attention"] = "a record of the lowering"
    assert dict(fia_to_bnsd(gm, platform=A2).left) == {"lowered from the dialect, its layout chosen there": 1}
    del node.meta["attention"]
    node.update_kwarg("query_rope", node.args[0])
    assert dict(fia_to_bnsd(gm, platform=A2).left) == {"rope operands, of which the table does not speak": 1}


def test_lists_that_come_from_outside_are_not_provable(fresh_dynamo):
    """What numbers of the caller hold is not known: the layer is named, and the user's line."""

    class Attention(torch.nn.Module):
        def forward(self, query, key, value, first, second):
            return dense(query, key, value, q_lens=(first.shape[0], second.shape[0]))

    model = torch.nn.ModuleDict({"attention": Attention()})

    numbers = [torch.empty(n, 1) for n in (2, 4)]
    for each in numbers:
        torch._dynamo.mark_dynamic(each, 0)
    args = tensors(0, torch.float32, (4, 2, 256), *[(12, 2, 256)] * 2)
    with pytest.raises(
        CompileError,
        match=r"layer .*attention.*test_fia_to_bnsd\.py.*actual_seq_lengths is \[.*\]: BNSD needs the same number",
    ):
        Compiled(lambda *args: model["attention"](*args))(*args, *numbers)


def test_a_number_of_queries_that_may_be_one_is_not_known(fresh_dynamo):
    """``s // 2`` queries: one would make another graph (BNSD ignores the sparse modes then)."""

    def call(query, key, value):
        q_len = query.shape[0] // 2
        return dense(query[: 2 * q_len], key, value, q_lens=(q_len, 2 * q_len))

    query, key, value = tensors(0, torch.float32, (4, 2, 256), *[(12, 2, 256)] * 2)
    torch._dynamo.mark_dynamic(query, 0)
    with pytest.raises(
        CompileError, match=r"whether a request has one query token or more is not known from \(?s\d+//2"
    ):
        Compiled(call)(query, key, value)


def test_rows_of_strided_queries_are_copied():
    """Queries cut out of a joint projection lie strided; the operator takes none."""

    def call(joint, key, value):
        return dense(joint[:, :2], key, value, q_lens=(1, 2))

    joint, key, value = tensors(0, torch.float32, (2, 4, 256), *[(12, 2, 256)] * 2)
    gm = trace(call, joint, key, value)
    assert fia_to_bnsd(gm, platform=A2).changed == 1
    assert only(gm).args[0].meta["val"].is_contiguous()
    wanted, _ = expected(joint[:, :2], key.chunk(2), value.chunk(2), 1.0, "none")
    close(run(gm, (joint, key, value)), wanted, torch.float32)
