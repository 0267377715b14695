"""KV-shared layers rotate no keys, whatever throwaway key a fused module brings; nobody writes a cache twice."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.ops import rotary, rotary_qk, store_kv
from gemma_npu_compile.passes import elide_key_rope as module
from gemma_npu_compile.passes.elide_key_rope import elide_key_rope, register_joint_rotary
from gemma_npu_compile.report import collect

gemma_npu = torch.ops.gemma_npu


def count(gm, target) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=target))


class Attention(nn.Module):
    """In the style of serving engines: one module for layers with and without keys of their own, joint rotary."""

    def __init__(self, shared: bool, throwaway: str) -> None:
        super().__init__()
        self.shared, self.throwaway = shared, throwaway
        self.q_proj, self.k_proj = nn.Linear(8, 16, bias=False), nn.Linear(8, 8, bias=False)
        self.k_weight = nn.Parameter(torch.rand(4))

    def forward(self, x, cos, sin):
        query = self.q_proj(x).view(-1, 4, 4)
        if self.shared and self.throwaway != "projected":
            heads = {"empty": 0, "one": 1, "full": 4}[self.throwaway]
            key = x.new_zeros(x.shape[0], heads, 4)
        else:
            key = self.k_proj(x).view(-1, 2, 4)
            key = key * torch.rsqrt(key.pow(2).mean(-1, keepdim=True) + 1e-6) * self.k_weight
        query, key = rotary_qk(query, key, cos, sin)
        return query.flatten(1) if self.shared else (query.flatten(1), key.flatten(1))


def args():
    angle = torch.randn(5, 4)
    return torch.randn(5, 8), angle.cos(), angle.sin()


@pytest.mark.parametrize("throwaway", ["empty", "one", "full", "projected"])
def test_a_shared_layer_rotates_its_query_only(throwaway):
    layer, inputs = Attention(True, throwaway), args()
    gm = make_fx(layer, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    expected, before = gm(*inputs), len(gm.graph.nodes)
    result = elide_key_rope(gm)
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(gm(*inputs), expected)
    assert (count(gm, gemma_npu.rotary_qk.default), count(gm, gemma_npu.rotary.default)) == (0, 1)
    # Projection, norm and placeholder of the key are gone: one matmul is left.
    assert count(gm, torch.ops.aten.mm.default) == 1
    assert count(gm, torch.ops.aten.rsqrt.default) == 0
    assert count(gm, torch.ops.aten.new_zeros.default) == 0
    assert before - len(gm.graph.nodes) >= {"projected": 10}.get(throwaway, 2)
    assert result.changed == 1
    assert elide_key_rope(gm).changed == 0


def test_an_owner_keeps_its_key():
    layer, inputs = Attention(False, "projected"), args()
    gm = make_fx(layer, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    result = elide_key_rope(gm)
    assert (result.changed, dict(result.left)) == (0, {"the key is read": 1})
    assert count(gm, gemma_npu.rotary_qk.default) == 1


def test_a_fused_operator_of_ones_own(monkeypatch):
    monkeypatch.setattr(module, "JOINT", dict(module.JOINT))
    with torch.library._scoped_library("elide_test", "FRAGMENT") as library:
        library.define("norm_rope(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)")
        library.impl(
            "norm_rope",
            lambda q, k, cos, sin: (rotary(q, cos, sin), rotary(k, cos, sin)),
            "CompositeExplicitAutograd",
        )
        op = torch.ops.elide_test.norm_rope.default
        angle = torch.randn(5, 4)
        inputs = torch.randn(5, 2, 4), torch.randn(5, 1, 4), angle.cos(), angle.sin()
        gm = make_fx(lambda *a: op(*a)[0] + 1, tracing_mode="fake")(*inputs)
        assert elide_key_rope(gm).changed == 0, "an unknown operator is left"
        register_joint_rotary(op, lambda node: (gemma_npu.rotary.default, (node.args[0], *node.args[2:])))
        expected = gm(*inputs)
        assert elide_key_rope(gm).changed == 1
        gm.recompile()
        assert torch.equal(gm(*inputs), expected)


def test_a_second_writer_is_an_error_that_names_both():
    class Layer(nn.Module):
        def forward(self, key, cache, slots):
            store_kv(key, key, cache[0], cache[1], slots)
            return key + 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.owner, self.reuse = Layer(), Layer()

        def forward(self, key, cache, slots):
            return self.reuse(self.owner(key, cache, slots), cache, slots)

    cache = torch.zeros(2, 16, 1, 4), torch.zeros(2, 16, 1, 4)
    run = torch.compile(Model(), backend=Backend(), fullgraph=True)
    with torch.no_grad(), pytest.raises(ValueError, match=r"reuse writes into the cache that .*owner owns"):
        run(torch.ones(3, 1, 4), cache, torch.tensor([1, 2, 3]))


def test_nothing_to_do_on_transformers_traces(pair):
    """transformers' KV-shared layers have no keys at all: the pass finds nothing, and says so."""
    from gemma_npu_compile.engine import Engine

    engine = Engine(*pair, 1, max_rows=2, max_model_len=64)
    with collect():
        engine.warm_up()
    (record,) = [p for p in engine.report.graphs[0].passes if p.name == "elide_key_rope"]
    assert (record.changed, dict(record.left)) == (0, {})
