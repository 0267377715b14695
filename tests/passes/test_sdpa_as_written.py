"""SDPA in graphs that are not decomposed: the operator itself, with bool masks and GQA as options."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.capabilities import platform
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


def close(result, wanted, dtype=torch.float32):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(result, wanted, atol=tolerance, rtol=tolerance)


def tensors(seed, dtype, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def attention(query, key, value, *rest, **options):
    return F.scaled_dot_product_attention(query, key, value, *rest, **options)


@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_as_it_is_written(masked):
    """The form of graphs that are not decomposed: a bool mask stays one, GQA an option."""

    def call(query, key, *mask):
        return F.scaled_dot_product_attention(query, key, key, *mask, scale=0.3, enable_gqa=True)

    args = (*tensors(0, torch.float32, (2, 4, 3, 64), (2, 2, 6, 64)), torch.rand(2, 1, 3, 6) < 0.6)
    args = args if masked else args[:2]
    gm = trace(call, *args, pre_dispatch=True)
    assert len(nodes(gm, aten.scaled_dot_product_attention.default)) == 1
    assert sdpa_to_fia(gm, platform=A2).changed == 1
    close(run(gm, args), call(*args))
    wanted = [*[aten.logical_not.default] * masked, FIA, operator.getitem]
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == wanted


def test_sdpa_of_other_devices():
    """What devices registered beside the tree trace SDPA to: nothing on a CPU runs it, so its node is put in."""
    query, key = args = tensors(0, torch.float32, (2, 4, 3, 64), (2, 4, 6, 64))
    gm = trace(lambda q, k: SDPA(q, k, k, 0.0, True)[0], *args)
    (node,) = nodes(gm, SDPA)
    node.target = aten._scaled_dot_product_fused_attention_overrideable.default
    node.args, node.kwargs = node.args[:3], {"is_causal": True}
    node.meta["val"] = (node.meta["val"][0], *[None] * 8)
    assert sdpa_to_fia(gm, platform=A2).changed == 1
    close(run(gm, args), F.scaled_dot_product_attention(query, key, key, is_causal=True))


@pytest.mark.parametrize(
    "choose", [lambda m, c: torch.where(c, m, c), lambda m, c: m.masked_fill(c, True), lambda m, c: m[:1] & c]
)
def test_a_bool_mask_that_is_chosen_is_no_additive_one(choose):
    """``where`` and ``masked_fill`` of truth values: what they hold counts, not what they choose by."""

    def call(query, key, mask, choice):
        return F.scaled_dot_product_attention(query, key, key, choose(mask, choice))

    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(2, 1, 3, 6, generator=generator) < p for p in (0.8, 0.5)]
    args = (*tensors(0, torch.float32, (2, 4, 3, 64), (2, 4, 6, 64)), *masks)
    gm = trace(call, *args, pre_dispatch=True)
    assert sdpa_to_fia(gm, platform=A2).changed == 1
    close(run(gm, args), call(*args))


def test_values_of_another_width_stay():
    args = tensors(0, torch.float32, (1, 2, 3, 64), (1, 2, 6, 64), (1, 2, 6, 32))
    gm = trace(attention, *args, pre_dispatch=True)
    assert dict(sdpa_to_fia(gm, platform=A2).left) == {"keys and values of different shapes": 1}


@pytest.mark.parametrize(("dtype", "changed"), [(torch.float32, 0), (torch.bfloat16, 1), (torch.float16, 1)])
def test_float32_is_emulated_and_no_device_has_it(dtype, changed):
    x = torch.empty(1, 2, 3, 64, dtype=dtype, device="meta")
    gm = trace(lambda x: F.scaled_dot_product_attention(x, x, x), x, pre_dispatch=True)
    result = sdpa_to_fia(gm, platform=A2)
    assert (result.changed, dict(result.left)) == (changed, {} if changed else {"torch.float32 operands": 1})


@pytest.mark.parametrize(
    ("shape", "key_shape", "reason"),
    [
        ((4, 3, 64), (4, 6, 64), "operands that are not (B, N, S, D)"),
        ((2, 4, 3, 64), (1, 4, 6, 64), "keys of another batch size"),
        ((2, 1, 3, 64), (2, 4, 6, 64), "heads that broadcast"),
        ((2, 4, 0, 64), (2, 4, 6, 64), "empty operands"),
    ],
)
def test_shapes_of_the_written_form_that_stay(shape, key_shape, reason):
    args = tensors(0, torch.float32, shape, key_shape)
    gm = trace(lambda q, k: F.scaled_dot_product_attention(q, k, k), *args, pre_dispatch=True)
    assert dict(sdpa_to_fia(gm, platform=A2).left) == {reason: 1}
