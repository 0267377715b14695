"""Bytes and arithmetic of a step, counted by hand on small pairs."""

import copy

import pytest
import torch

from gemma_npu_compile.bench.costs import costs_of, most_read
from gemma_npu_compile.bench.machine import Rates
from gemma_npu_compile.bench.run import roofline
from gemma_npu_compile.shapes import build

# conftest: vocabulary 128, hidden 64, MLP 96, 4 query heads; a sliding layer with 2 kv heads of 16, a full one with one
# kv head of 32 whose keys are its values; window 24. Norms: four of 64 a layer, q and k norms of the head size.
SLIDING = 64 * (4 * 16) * 2 + 2 * 64 * (2 * 16) + 3 * 64 * 96 + 4 * 64 + 2 * 16
FULL = 64 * (4 * 32) * 2 + 64 * 32 + 3 * 64 * 96 + 4 * 64 + 2 * 32
HEAD = 128 * 64
TARGET = SLIDING + FULL + 64 + HEAD
# no k and v in the assistant, no k norm; two projections around its layers
DRAFT_SLIDING = SLIDING - 2 * 64 * (2 * 16) - 16
DRAFT_FULL = FULL - 64 * 32 - 32
ASSISTANT = DRAFT_SLIDING + DRAFT_FULL + 64 + HEAD + 2 * 64 * 64 + 64 * 64


def test_weights_are_read_once_by_the_target_and_once_per_draft(pair):
    costs = costs_of(*pair)
    assert costs.weights(1, 10, 3) == 4 * (TARGET + 3 * ASSISTANT)
    assert costs.weights(8, 500, 0) == 4 * TARGET
    everything = sum(p.numel() for model in pair for p in model.parameters())
    assert costs.stored == 4 * everything
    assert costs.stored == 4 * (TARGET + ASSISTANT + 2 * HEAD)  # embedding tables are stored, not read


@pytest.mark.parametrize(("rows", "context"), [(1, 10), (3, 10), (2, 100)])
def test_visible_keys_and_values(pair, rows, context):
    """Verification: 3 + 1 new keys, a window and the 3 queries behind its first; drafts: window + 1, three times."""
    sliding, full = 2 * 2 * 16, 2 * 1 * 32  # elements of a key and a value
    verify = full * (context + 4) + sliding * min(context + 4, 24 + 3)
    draft = full * context + sliding * min(context, 25)
    costs = costs_of(*pair)
    assert costs.kv(rows, context, 3) == 4 * rows * (verify + 3 * draft)
    assert costs.kept(rows, context, 3) == 4 * rows * (full * context + sliding * min(context, 24))
    assert costs.read(rows, context, 3) == costs.weights(rows, context, 3) + costs.kv(rows, context, 3)


def test_an_assistant_reads_as_many_heads_as_the_target_wrote(pair):
    target, assistant = pair
    other = copy.copy(assistant)
    other.config = copy.deepcopy(assistant.config)
    other.config.text_config.num_key_value_heads = 4  # nobody asks it
    assert costs_of(target, other).kv(1, 100, 3) == costs_of(target, assistant).kv(1, 100, 3)


def test_arithmetic(pair):
    rows, context = 2, 10
    products = 2 * rows * (4 * TARGET + 3 * ASSISTANT)
    # scores and their sums: two multiply-adds per query head, head element, query and key
    verify = 4 * 4 * rows * 4 * (32 * (context + 4) + 16 * (context + 4))
    drafts = 3 * 4 * 4 * rows * (32 * context + 16 * context)
    costs = costs_of(*pair)
    assert costs.flops(rows, context, 3) == products + verify + drafts
    assert costs.attention(rows, context, 3) == verify + drafts


def test_ordered_embeddings_read_candidates_only(make_pair):
    """16 centroids, the best 8 of them hold 8 tokens each."""
    target, assistant = make_pair(ordered=True)
    plain = costs_of(*make_pair()).weights(1, 1, 1)
    assert plain - costs_of(target, assistant).weights(1, 1, 1) == 4 * (HEAD - 8 * 8 * 64 - 16 * 64)


def test_a_tied_head_is_read_a_table_alone_is_not():
    target, _ = build("e2b", torch.bfloat16, fold=True)
    named = dict(target.named_parameters())
    read = sum(p.numel() for name, p in named.items() if "embed_tokens" not in name)
    costs = costs_of(*build("e2b", torch.bfloat16, fold=True))
    assert costs.weights(1, 100, 0) == 2 * (read + named["model.embed_tokens.weight"].numel())


def test_layers_that_share_keys_read_them_and_keep_none():
    """E2B folded: a sliding and a full layer that own keys, and one of each that reuse them."""
    costs = costs_of(*build("e2b", torch.bfloat16, fold=True))
    sliding, full = 2 * 256, 2 * 512
    assert costs.kv(1, 100, 0) == 2 * 2 * (sliding + full) * 101
    assert costs.kept(1, 100, 0) == 2 * (sliding + full) * 100


def test_experts_are_read_as_far_as_tokens_reach_them():
    """128 experts, 8 a token: one token reads 1/16 of them, many read all."""
    target, assistant = build("26b-a4b", torch.bfloat16, fold=True)
    experts = 2 * sum(p.numel() for name, p in target.named_parameters() if ".experts." in name)
    costs = costs_of(target, assistant)
    one, two, many = (costs.weights(rows, 1, 0) for rows in (1, 2, 10**5))
    assert many - one == pytest.approx(experts * 15 / 16)
    assert two - one == pytest.approx(experts * (1 - 1 / 16) / 16)


def test_a_formula_shows_its_symbols_its_numbers_and_what_they_make(pair):
    weights = costs_of(*pair).weights.to_dict()
    assert weights["formula"] == "bytes_per_element*(W_assistant*drafts + W_target)"
    assert weights["numbers"] == {"bytes_per_element": 4, "W_target": TARGET, "W_assistant": ASSISTANT}
    assert weights["filled"] == f"{4 * ASSISTANT}*drafts + {4 * TARGET}"


def test_roofline_averages_over_the_steps_of_a_round(pair):
    costs = costs_of(*pair)
    lengths = [[10, 30], [12, 34]]
    rates = Rates(copy=20.0, read=16.0, verify=5.0, draft=8.0, attend_verify=3.0, attend_draft=4.0, gflops=50.0)
    found = roofline(costs, 3, lengths, 2.0, rates)
    kv = sum(costs.kv(1, n, 3) for step in lengths for n in step) / 2
    total = costs.weights(2, 0, 3) + kv
    assert found["bytes_per_step"] == round(total)
    assert found["fraction"] == pytest.approx(total / 0.002 / 20e9)
    assert (found["verify_gbps"], found["draft_gbps"], found["flops"]) == (5.0, 8.0, round(costs.flops(2, 21, 3)))
    seen = sum(costs.kv(1, n + 3, 0) for step in lengths for n in step) / 2
    assert 0 < seen < kv
    seconds = 4 * TARGET / 5e9 + 3 * 4 * ASSISTANT / 8e9 + seen / 3e9 + (kv - seen) / 4e9
    assert found["predicted_ms"] == pytest.approx(1e3 * seconds)
    assert found["predicted_over_measured"] == pytest.approx(seconds / 0.002)


def test_the_most_a_fraction_can_be(pair):
    """Each part takes as long as its bytes or its products, whichever is longer."""
    costs = costs_of(*pair)
    total = 4 * (TARGET + 3 * ASSISTANT) + costs.kv(1, 20, 3)
    seen = costs.kv(1, 23, 0)
    attend = 4 * 4 * 4 * (32 + 16) * 24, 3 * 4 * 4 * (32 + 16) * 20  # of verification, of drafts
    common = {"read": 1.0, "verify": 1.0, "draft": 1.0, "attend_verify": 1.0, "attend_draft": 1.0}
    for gflops in (1e-3, 1.0, 3.0, 8.0, 1e6):
        found = roofline(costs, 3, [[20]], 1.0, Rates(copy=1.0, gflops=gflops, **common))
        least = max(4 * TARGET, 2 * 4 * TARGET / gflops) + max(4 * 3 * ASSISTANT, 2 * 3 * ASSISTANT / gflops)
        least += max(seen, attend[0] / gflops) + max(costs.kv(1, 20, 3) - seen, attend[1] / gflops)
        assert found["fraction_at_most"] == pytest.approx(total / least)
    assert found["fraction_at_most"] == pytest.approx(1)


def test_the_layers_that_read_most(pair):
    """The full layer reads all keys; where all lie in the window, the more or wider heads decide."""
    target = pair[0]
    config = target.config.get_text_config()
    geometries = {kind: config.per_layer_config[i] for i, kind in enumerate(config.layer_types)}
    full, sliding = geometries["full_attention"], geometries["sliding_attention"]
    heads = config.num_attention_heads
    assert most_read(target, 4096) == (heads, full.num_key_value_heads, full.head_dim, 4096)
    short = max((sliding, full), key=lambda each: each.num_key_value_heads * each.head_dim)
    assert most_read(target, 8) == (heads, short.num_key_value_heads, short.head_dim, 8)
