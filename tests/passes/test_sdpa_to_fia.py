"""Plain SDPA becomes fused attention over un-repeated keys with the same numbers, or stays with its reason."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.capabilities import AttentionRule, platform
from gemma_npu_compile.passes.sdpa_to_fia import sdpa_to_fia

aten = torch.ops.aten
FIA = torch.ops.npu.npu_fused_infer_attention_score.default
SDPA = aten._scaled_dot_product_flash_attention_for_cpu.default
A2 = platform("ascend910b")


def trace(fn, *args, **options):
    with torch.no_grad():
        return make_fx(fn, tracing_mode="fake", **options)(*args)


def run(gm, args):
    gm.graph.lint()
    gm.recompile()
    with torch.no_grad():
        return gm(*args)


def nodes(gm, target):
    return gm.graph.find_nodes(op="call_function", target=target)


def only(gm):
    (node,) = nodes(gm, FIA)
    return node


def close(result, wanted, dtype=torch.float32):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(result, wanted, atol=tolerance, rtol=tolerance)


def tensors(seed, dtype, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def repeat_kv(x, repeats):
    rows, heads, keys, width = x.shape
    return x[:, :, None].expand(rows, heads, repeats, keys, width).reshape(rows, heads * repeats, keys, width)


REPEATS = {
    "gqa": lambda x, n: x,
    "repeat_kv": repeat_kv,
    "interleave": lambda x, n: x.repeat_interleave(n, 1),
}
MASKS = {
    "none": None,
    "rows": lambda m: m,
    "shared": lambda m: m[:1],
    "queries": lambda m: m[0, 0],
    "keys": lambda m: m[:, :, :1],
    "additive": lambda m: torch.where(m, 0.0, -torch.inf),
    "hidden": lambda m: torch.where(~m, -torch.inf, 0.0),
    "filled": lambda m: torch.zeros(m.shape).masked_fill(~m, -torch.inf),
    "expanded": lambda m: torch.where(m[:1], 0.0, -torch.inf).expand(m.shape),
    "sliced": lambda m: torch.where(torch.cat([m, m], -1), 0.0, -torch.inf)[..., : m.shape[-1]],
}


@given(
    seed=st.integers(0, 99),
    rows=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([64, 128, 256, 512]),
    q_len=st.sampled_from([1, 2, 4, 19]),
    keys=st.sampled_from([1, 5, 19]),
    mask=st.sampled_from([*sorted(MASKS), "causal"]),
    repeat=st.sampled_from(["gqa", "repeat_kv", "interleave"]),
    scale=st.sampled_from([None, 1.0, 0.3]),
    strided=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_numbers_stay(seed, rows, kv_heads, group, head_dim, q_len, keys, mask, repeat, scale, strided, dtype):
    assume(mask != "causal" or q_len > 1)
    heads = kv_heads * group
    query, key, value = tensors(seed, dtype, (rows, q_len, heads, head_dim), *[(rows, keys, kv_heads, head_dim)] * 2)
    visible = torch.rand(rows, 1, q_len, keys, generator=torch.Generator().manual_seed(seed)) < 0.6

    def call(query, key, value, visible):
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if not strided:
            query, key, value = (x.contiguous() for x in (query, key, value))
        key, value = (REPEATS[repeat](x, group) for x in (key, value))
        given = None if mask in ("none", "causal") else MASKS[mask](visible)
        given = given.to(dtype) if given is not None and given.is_floating_point() else given
        out = F.scaled_dot_product_attention(
            query, key, value, given, is_causal=mask == "causal", scale=scale, enable_gqa=repeat == "gqa"
        )
        return out, out.transpose(1, 2).flatten(2)

    args = (query, key, value, visible)
    gm = trace(call, *args)
    assert len(nodes(gm, SDPA)) == 1
    wanted = run(gm, args)
    result = sdpa_to_fia(gm, platform=A2)
    assert (result.changed, dict(result.left)) == (1, {})
    got = run(gm, args)
    for each, other in zip(got, wanted, strict=True):
        close(each, other, dtype)
        assert each.is_contiguous() == other.is_contiguous(), "views behind the attention rely on its strides"

    node = only(gm)
    assert not nodes(gm, SDPA)
    assert node.kwargs["input_layout"] == "BNSD"
    assert (node.kwargs["num_heads"], node.kwargs["num_key_value_heads"]) == (heads, kv_heads)
    assert node.kwargs["scale"] == (head_dim**-0.5 if scale is None else scale)
    assert node.kwargs.get("sparse_mode", 0) == (2 if mask == "causal" else 0)
    assert node.kwargs.get("inner_precise", 0) == (2 if q_len > 1 and mask not in ("none", "causal") else 0)
    for index, each in enumerate(node.args):
        assert each.meta["val"].is_contiguous()
        assert each.meta["val"].shape[1] == (heads if index == 0 else kv_heads)
    again = sdpa_to_fia(gm, platform=A2)
    assert (again.changed, dict(again.left)) == (0, {})


def test_one_clone_per_strided_operand_and_none_for_the_repetition():
    """4 heads over 2: repeated keys and their copies go, each strided operand is copied, and the result laid back."""

    def call(query, key, value):
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(query, repeat_kv(key, 2), repeat_kv(value, 2)).transpose(1, 2)

    gm = trace(call, *tensors(0, torch.float32, (2, 3, 4, 64), *[(2, 5, 2, 64)] * 2))
    assert (len(nodes(gm, aten.expand.default)), len(nodes(gm, aten.clone.default))) == (2, 2)
    sdpa_to_fia(gm, platform=A2)
    assert (len(nodes(gm, aten.expand.default)), len(nodes(gm, aten.clone.default))) == (0, 4)
    assert [each.args[0].target for each in only(gm).args] == [aten.transpose.int] * 3
    gm = trace(lambda q, k: F.scaled_dot_product_attention(q, k, k), *tensors(0, torch.float32, *[(2, 4, 5, 64)] * 2))
    sdpa_to_fia(gm, platform=A2)
    assert [each.op for each in only(gm).args] == ["placeholder"] * 3
    assert len(nodes(gm, aten.clone.default)) == 0, "contiguous queries have a contiguous result"


def test_layers_share_masks():
    """One inverted mask and one causal triangle for all layers; the triangle hides what lies above the diagonal."""

    def call(query, key, visible):
        masked = [F.scaled_dot_product_attention(query, key * i, key, visible) for i in (1, 2)]
        causal = [F.scaled_dot_product_attention(query, key * i, key, is_causal=True) for i in (1, 2)]
        return (*masked, *causal)

    query, key = tensors(0, torch.float32, *[(2, 2, 4, 64)] * 2)
    args = (query, key, torch.rand(2, 1, 4, 4) < 0.7)
    gm = trace(call, *args)
    wanted = run(gm, args)
    assert sdpa_to_fia(gm, platform=A2).changed == 4
    assert len(nodes(gm, aten.logical_not.default)) == 1
    assert len(nodes(gm, aten.where.self)) == 0
    (held,) = gm.graph.find_nodes(op="get_attr")
    assert torch.equal(getattr(gm, held.target), torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    for each, other in zip(run(gm, args), wanted, strict=True):
        close(each, other)


def attention(query, key, value, *rest, **options):
    return F.scaled_dot_product_attention(query, key, value, *rest, **options)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda q, k, m: SDPA(q, k, k, 0.5)[0], "dropout"),
        (lambda q, k, m: SDPA(q, k, k)[1], "the log-sum-exp is read"),
        (lambda q, k, m: attention(q, k, k, m.float()), "an additive mask"),
        (lambda q, k, m: attention(q, k, k, torch.where(m, 0.0, -1e4)), "an additive mask"),
        (lambda q, k, m: attention(q, k, k, torch.where(m, 1.0, -torch.inf)), "an additive mask"),
        (lambda q, k, m: attention(q, k, k, torch.where(m, -torch.inf, 1.0)), "an additive mask"),
        (
            lambda q, k, m: attention(q, k, k, torch.where(m[0, 0, 0], q[:, :1, :, :6] * 0, -torch.inf)),
            "an additive mask",
        ),
        (lambda q, k, m: attention(q, k, k, torch.where(m[0], torch.zeros(m.shape), -torch.inf)), "an additive mask"),
        (lambda q, k, m: attention(q, k, k, torch.where(m, q[:, :1, :, :6], -torch.inf)), "an additive mask"),
        (lambda q, k, m: attention(q, k, k, m.expand(2, 4, 3, 6)), "a mask for each head"),
        (lambda q, k, m: attention(q[:, :, :1], k, k, is_causal=True), "is_causal over one query"),
        (lambda q, k, m: attention(q.double(), k.double(), k.double()), "torch.float64 operands"),
        (lambda q, k, m: SDPA(q, k, k, 0.0, True, attn_mask=m.float())[0], "a mask and is_causal"),
    ],
)
def test_what_the_operator_cannot_say_stays(fn, reason):
    args = (*tensors(0, torch.float32, (2, 4, 3, 64), (2, 4, 6, 64)), torch.rand(2, 1, 3, 6) < 0.5)
    gm = trace(fn, *args)
    before = str(gm.graph)
    result = sdpa_to_fia(gm, platform=A2)
    assert (result.changed, dict(result.left)) == (0, {reason: 1})
    assert str(gm.graph) == before


@pytest.mark.parametrize(
    ("name", "shape", "key_shape", "reason"),
    [
        ("cpu", (1, 2, 3, 64), (1, 2, 3, 64), "cpu has no npu_fused_infer_attention_score"),
        (
            "ascend910b",
            (1, 2, 3, 528),
            (1, 2, 3, 528),
            "npu_fused_infer_attention_score: the last axis is 528, it must be at most 512",
        ),
        ("ascend910b", (1, 128, 3, 64), (1, 1, 3, 64), "at most 64 query heads per kv head"),
        (
            "ascend910b",
            (1, 2, 3, 72),
            (1, 2, 3, 72),
            "npu_fused_infer_attention_score: the last axis is 72, it must be",
        ),
    ],
)
def test_what_the_platform_forbids_stays(name, shape, key_shape, reason):
    def call(query, key):
        return F.scaled_dot_product_attention(query, key, key, enable_gqa=True)

    gm = trace(call, *tensors(0, torch.float32, shape, key_shape))
    result = sdpa_to_fia(gm, platform=platform(name))
    (left,) = result.left
    assert (result.changed, left.startswith(reason)) == (0, True)
    if shape[1] == 128:
        assert sdpa_to_fia(gm, platform=platform("ascend950")).changed == 1


@pytest.mark.parametrize(
    ("before", "after", "kv_heads"),
    [(False, False, 2), (True, False, 2), (False, True, 4), (True, True, 4)],
)
def test_writes_around_the_repetition(before, after, kv_heads):
    """Repeated keys are a copy of what the cache held: reading the cache itself would see a write behind the copy."""

    def call(query, cache):
        if before:
            cache.mul_(3)
        keys = repeat_kv(cache, 2)
        if after:
            cache.add_(1)
        return F.scaled_dot_product_attention(query, keys, keys)

    query, cache = tensors(0, torch.float32, (1, 4, 3, 64), (1, 2, 5, 64))
    gm = trace(call, query, cache)
    for node in nodes(gm, aten.mul_.Tensor):  # as a graph has it whose writes were put back in place
        node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.target is aten.add_.Tensor)
    wanted = run(gm, (query, cache.clone()))
    assert sdpa_to_fia(gm, platform=A2).changed == 1
    assert only(gm).kwargs["num_key_value_heads"] == kv_heads
    close(run(gm, (query, cache.clone())), wanted)


def test_a_mask_that_changes_stays():
    def call(query, key, visible):
        mask = torch.where(visible, 0.0, -torch.inf)
        visible.fill_(True)
        return F.scaled_dot_product_attention(query, key, key, mask)

    args = (*tensors(0, torch.float32, (1, 2, 3, 64), (1, 2, 5, 64)), torch.rand(1, 1, 3, 5) < 0.5)
    result = sdpa_to_fia(trace(call, *args), platform=A2)
    assert dict(result.left) == {"a mask the graph writes to": 1}


def test_keys_repeated_unlike_their_values_stay_repeated():
    def call(query, key, value):
        return F.scaled_dot_product_attention(query, repeat_kv(key, 2), value)

    args = tensors(0, torch.float32, (1, 4, 3, 64), (1, 2, 5, 64), (1, 4, 5, 64))
    gm = trace(call, *args)
    wanted = run(gm, args)
    assert sdpa_to_fia(gm, platform=A2).changed == 1
    assert only(gm).kwargs["num_key_value_heads"] == 4
    close(run(gm, args), wanted)


def test_is_causal_over_one_query_and_one_key_hides_nothing():
    args = tensors(0, torch.float32, (1, 2, 1, 64), (1, 2, 1, 64))
    gm = trace(lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True), *args)
    assert sdpa_to_fia(gm, platform=A2).changed == 1
    assert {"atten_mask", "sparse_mode"}.isdisjoint(only(gm).kwargs)
    close(run(gm, args), args[1])


def test_a_view_of_a_mask_whose_condition_is_expanded():
    """The additive mask lay contiguous, its condition does not: the view of it needs a copy first."""

    def call(query, key, hidden):
        mask = torch.where(hidden.expand(2, 1, 3, 2, 3), -torch.inf, 0.0)
        return F.scaled_dot_product_attention(query, key, key, mask.view(2, 1, 3, 6))

    hidden = torch.rand(2, 1, 3, 1, 3, generator=torch.Generator().manual_seed(0)) < 0.3
    args = (*tensors(0, torch.float32, (2, 2, 3, 64), (2, 2, 6, 64)), hidden)
    gm = trace(call, *args)
    wanted = run(gm, args)
    assert sdpa_to_fia(gm, platform=A2).changed == 1
    close(run(gm, args), wanted)


@pytest.mark.parametrize("form", ["none", "causal", "full"])
def test_the_platform_is_asked_for_the_form_of_the_mask(form):
    """A table that allows this one form rewrites this one node."""

    def call(query, key, mask):
        sdpa = F.scaled_dot_product_attention
        return sdpa(query, key, key), sdpa(query, key, key, is_causal=True), sdpa(query, key, key, mask)

    args = (*tensors(0, torch.float32, (1, 2, 3, 64), (1, 2, 3, 64)), torch.rand(3, 3) < 0.8)
    gm = trace(call, *args)
    rule = AttentionRule(True, "a test", "BNSD", q_len=">1", paged=False, masks=(form,))
    result = sdpa_to_fia(gm, platform=replace(A2, attention=(rule,)))
    assert (result.changed, sum(result.left.values())) == (1, 2)
    kwargs = only(gm).kwargs
    assert kwargs.get("sparse_mode", 0) == (2 if form == "causal" else 0)
    assert ("atten_mask" in kwargs) == (form != "none")


def test_a_result_with_strides_of_its_own_stays():
    x = torch.randn(2, 4, 3, 64)
    gm = trace(lambda x: SDPA(x, x, x)[0], x)
    (node,) = nodes(gm, SDPA)
    strided = node.meta["val"][0].transpose(0, 1).contiguous().transpose(0, 1)
    node.meta["val"] = (strided, *node.meta["val"][1:])
    assert dict(sdpa_to_fia(gm, platform=A2).left) == {"a result with strides of its own": 1}


def test_keys_repeated_along_their_length_stay():
    """The same pattern with another view behind it: two heads of ten keys, the second five as the first."""

    def call(query, key, mask):
        longer = key[:, :, None].expand(1, 2, 2, 5, 64).reshape(1, 2, 10, 64)
        return F.scaled_dot_product_attention(query, longer, longer, mask)

    args = (*tensors(0, torch.float32, (1, 2, 3, 64), (1, 2, 5, 64)), torch.rand(3, 10) < 0.5)
    gm = trace(call, *args)
    wanted = run(gm, args)
    assert sdpa_to_fia(gm, platform=A2).changed == 1
    assert only(gm).args[1].meta["val"].shape == (1, 2, 10, 64)
    close(run(gm, args), wanted)


def test_tiled_heads_are_no_repetition():
    """``repeat`` puts the copies side by side: head 1 reads keys 1, not keys 0."""

    def call(query, key):
        tiled = key[:, None].expand(1, 2, 2, 5, 64).reshape(1, 4, 5, 64)
        return F.scaled_dot_product_attention(query, tiled, tiled)

    args = tensors(0, torch.float32, (1, 4, 3, 64), (1, 2, 5, 64))
    gm = trace(call, *args)
    wanted = run(gm, args)
    assert sdpa_to_fia(gm, platform=A2).changed == 1
    assert only(gm).kwargs["num_key_value_heads"] == 4
    close(run(gm, args), wanted)
