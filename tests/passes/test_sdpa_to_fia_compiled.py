"""The pass behind ``torch.compile``: sizes stay symbolic, and transformers' own attention is found in every layer."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4ForCausalLM

from gemma_npu_compile.capabilities import platform
from gemma_npu_compile.passes.sdpa_to_fia import sdpa_to_fia

FIA = torch.ops.npu.npu_fused_infer_attention_score.default
SDPA = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
A2 = platform("ascend910b")


def nodes(gm, target):
    return gm.graph.find_nodes(op="call_function", target=target)


def close(result, wanted):
    torch.testing.assert_close(result, wanted, atol=1e-5, rtol=1e-5)


def tensors(seed, dtype, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def repeat_kv(x, repeats):
    rows, heads, keys, width = x.shape
    return x[:, :, None].expand(rows, heads, repeats, keys, width).reshape(rows, heads * repeats, keys, width)


class Compiled:
    """``torch.compile`` with this pass alone: graphs before and after, results of the pass, guards it added."""

    def __init__(self, fn):
        torch._dynamo.reset()
        self.graphs, self.results, self.guards = [], [], 0
        backend = aot_autograd(fw_compiler=self.compile, inference_compiler=self.compile)
        self.fn = torch.compile(fn, backend=backend, fullgraph=True)

    def compile(self, gm, inputs):
        env = getattr(detect_fake_mode(inputs), "shape_env", None)
        before = len(env.guards) if env is not None else 0
        self.results.append(sdpa_to_fia(gm, platform=A2))
        self.guards += (len(env.guards) if env is not None else 0) - before
        gm.graph.lint()
        gm.recompile()
        self.graphs.append(gm)
        return gm.forward

    @torch.no_grad()
    def __call__(self, *args):
        return self.fn(*args)


@pytest.mark.parametrize("form", ["causal", "mask", "keys", "none"])
def test_symbolic_sizes_stay_symbolic(form, fresh_dynamo):
    """One graph for every number of rows, queries and keys, and no guard from the pass."""

    def call(query, key, visible):
        key = repeat_kv(key.transpose(1, 2), 2)
        mask = visible if form == "mask" else visible[:, :, :1] if form == "keys" else None
        out = F.scaled_dot_product_attention(query.transpose(1, 2), key, key, mask, is_causal=form == "causal")
        return out.transpose(1, 2).flatten(2)

    def inputs(rows, q_len, keys):
        query, key = tensors(rows, torch.float32, (rows, q_len, 4, 64), (rows, keys, 2, 64))
        return query, key, torch.rand(rows, 1, q_len, keys, generator=torch.Generator().manual_seed(rows)) < 0.6

    compiled = Compiled(call)
    args = inputs(3, 5, 7)
    for tensor, axes in zip(args, ((0, 1), (0, 1), (0, 2, 3)), strict=True):
        for axis in axes:
            torch._dynamo.mark_dynamic(tensor, axis)
    for each in (args, inputs(4, 6, 9), inputs(2, 3, 3)):
        close(compiled(*each), call(*each))
    assert (len(compiled.graphs), compiled.guards) == (1, 0)
    assert [(r.changed, dict(r.left)) for r in compiled.results] == [(1, {})]
    (node,) = nodes(compiled.graphs[0], FIA)
    assert node.kwargs["num_key_value_heads"] == 2
    assert "test_sdpa_to_fia_compiled.py" in node.stack_trace


def test_a_number_of_queries_that_may_be_one_stays(fresh_dynamo):
    """``s // 2`` queries: one query and several have other rules."""

    def call(query, key):
        return F.scaled_dot_product_attention(query[:, :, : query.shape[2] // 2], key, key)

    query, key = tensors(0, torch.float32, (1, 2, 6, 64), (1, 2, 5, 64))
    compiled = Compiled(call)
    torch._dynamo.mark_dynamic(query, 2)
    close(compiled(query, key), call(query, key))
    assert [dict(r.left) for r in compiled.results] == [{"a number of queries that may be one or more": 1}]
    assert compiled.guards == 0


def llama():
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=32,
    )
    return LlamaForCausalLM(config)


def gemma4():
    config = Gemma4TextConfig(
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        global_head_dim=512,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=4,
        hidden_size_per_layer_input=0,
        vocab_size=32,
        vocab_size_per_layer_input=0,
    )
    return Gemma4ForCausalLM(config)


@pytest.mark.parametrize("make", [llama, gemma4])
@pytest.mark.parametrize("form", ["prompt", "padded prompt", "decode", "verify"])
def test_attention_of_transformers(make, form, fresh_dynamo):
    """transformers' own sdpa attention: keys un-repeated in every layer, no SDPA left, the logits unchanged."""
    torch.manual_seed(0)
    model = make().eval()
    model.set_attn_implementation("sdpa")
    config = model.config
    prompt = torch.randint(0, 32, (2, 6))
    seen = torch.ones(2, 6, dtype=torch.long)
    seen[0, :2] = 0
    new = torch.randint(0, 32, (2, 1 if form == "decode" else 4))

    def fresh():
        cache = StaticCache(config=config, max_cache_len=16)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        return cache

    if form == "prompt":
        compiled = Compiled(lambda ids: model(ids, use_cache=False).logits)
        args = (prompt,)
        plain = model(prompt, use_cache=False).logits
    elif form == "padded prompt":
        compiled = Compiled(lambda ids, mask: model(ids, attention_mask=mask, use_cache=False).logits)
        args = (prompt, seen)
        plain = model(prompt, attention_mask=seen, use_cache=False).logits
    else:
        positions = torch.arange(6, 6 + new.shape[1])[None]
        cache = fresh()
        compiled = Compiled(lambda ids, at: model(ids, past_key_values=cache, position_ids=at).logits)
        args = (new, positions)
        plain = model(new, past_key_values=fresh(), position_ids=positions).logits
    got = compiled(*args)
    kept = seen.bool() if form == "padded prompt" else torch.ones(args[0].shape, dtype=torch.bool)
    close(got[kept], plain[kept].detach())
    layers = config.num_hidden_layers
    assert [(r.changed, dict(r.left)) for r in compiled.results] == [(layers, {})]
    (gm,) = compiled.graphs
    assert not nodes(gm, SDPA)
    groups = [(n.kwargs["num_heads"], n.kwargs["num_key_value_heads"]) for n in nodes(gm, FIA)]
    assert groups == ([(4, 2)] if make is llama else [(4, 2), (4, 1)])
    scales = {n.kwargs["scale"] for n in nodes(gm, FIA)}
    assert scales == ({0.125} if make is llama else {1.0})
