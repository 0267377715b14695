"""torch.compile on unmodified transformers models: right tokens, decode captured, prefill not, compiled once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CompileConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)
from transformers.models.gemma4 import Gemma4Config, Gemma4ForConditionalGeneration

from gemma_npu_compile.report import CompileReport, collect

NEW = 28  # past the sliding window of 24
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": None,
}


@pytest.fixture(autouse=True)
def _clean(fresh_dynamo: None) -> None:
    pass


def model(kind: str, make_pair: Callable[..., Any]) -> PreTrainedModel:
    if kind == "llama":
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    if kind == "qwen":
        torch.manual_seed(0)
        return Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16)).eval()
    target = make_pair()[0]
    if kind == "gemma4":
        return target
    config = Gemma4Config(text_config=target.config.to_dict(), vision_config=None, audio_config=None)
    whole = Gemma4ForConditionalGeneration(config).eval()
    whole.model.language_model.load_state_dict(target.model.state_dict())
    whole.lm_head.load_state_dict(target.lm_head.state_dict())
    return whole


def prompt(rows: int, length: int) -> Tensor:
    return torch.randint(1, 128, (rows, length), generator=torch.Generator().manual_seed(rows * 100 + length))


def generate(target: PreTrainedModel, ids: Tensor, cache: str | None = "static", new: int = NEW) -> Tensor:
    return target.generate(ids, max_new_tokens=new, do_sample=False, cache_implementation=cache)


def check_static(report: CompileReport, calls: int) -> None:
    """One prefill a call; every other token a replay; no fallback."""
    totals = report.totals()
    assert totals["fallbacks"] == {}
    assert sum(g.prefills for g in report.graphs) == calls
    assert totals["replays"] == calls * (NEW - 1)


def test_generate_of_a_compiled_gemma4(pair: Any) -> None:
    target = pair[0]
    ids, other = prompt(2, 9), prompt(2, 9) + 0
    other[:, 0] = 5
    expected = [generate(target, each) for each in (ids, other)]
    forward = target.forward
    try:
        with collect() as report:
            target.compile(backend="gemma_npu")
            assert torch.equal(generate(target, ids), expected[0])
            with torch.compiler.set_stance("fail_on_recompile"):
                assert torch.equal(generate(target, other), expected[1])
    finally:
        target._compiled_call_impl = None
    assert target.forward == forward
    check_static(report, 2)
    # One graph makes the cache, one fills it, one runs with the sliding layer full; never one a token.
    assert [(g.prefills > 0, g.replays > 0) for g in report.graphs] == [(True, False), (False, True), (False, True)]
    assert sum(g.captures for g in report.graphs) == 4, "two caches, two graphs"


def test_a_loop_without_masks_has_one_capture_not_one_per_token(pair: Any) -> None:
    """The mask is then computed in the graph, from a length the cache counts in Python."""
    target = pair[0]

    def loop(run: Callable[..., Any], new: int) -> list[int]:
        cache = StaticCache(config=target.config, max_cache_len=48)
        token, found = prompt(1, 9), []
        with torch.no_grad():
            for _ in range(new):
                token = run(input_ids=token, cache=cache).logits[:, -1:].argmax(-1)
                found.append(int(token))
        return found

    expected = loop(target, 12)
    with collect() as report:
        run = torch.compile(target.forward, backend="gemma_npu", options={"platform": "cpu"}, fullgraph=True)
        assert loop(run, 12) == expected
    assert [(g.prefills, g.captures, g.replays) for g in report.graphs] == [(1, 0, 0), (0, 1, 11)]
    (passed,) = [p for p in report.graphs[1].passes if p.name == "numbers_on_device"]
    assert passed.changed == 2


@pytest.mark.slow
def test_a_growing_cache_is_not_captured_and_says_so(make_pair: Any) -> None:
    target = model("llama", make_pair)
    ids = prompt(2, 9)
    expected = generate(target, ids, None, 8)
    with collect() as report:
        target.forward = torch.compile(target.forward, backend="gemma_npu", options={"platform": "cpu"})
        assert torch.equal(generate(target, ids, None, 8), expected)
    totals = report.totals()
    assert (totals["captures"], totals["replays"]) == (0, 0)
    ((reason, count),) = {r: c for r, c in totals["fallbacks"].items() if "DynamicCache" in r or "grows" in r}.items()
    assert count == sum(totals["fallbacks"].values()) == 7
    assert "layers[0]" in reason
    assert "cache_implementation='static'" in reason


def test_training_is_refused_in_a_sentence(make_pair: Any) -> None:
    target = model("llama", make_pair)
    target.compile(backend="gemma_npu")
    with pytest.raises(ValueError, match=r"inference only, and an input of this graph requires grad: call it under"):
        target(prompt(2, 4), labels=prompt(2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen", "gemma4", "gemma4_conditional"])
def test_models_and_attentions(kind: str, attention: str, make_pair: Any) -> None:
    target = model(kind, make_pair)
    target.set_attn_implementation(attention)
    ids = prompt(2, 9)
    expected = generate(target, ids)
    with collect() as report:
        target.forward = torch.compile(target.forward, backend="gemma_npu")
        assert torch.equal(generate(target, ids), expected)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(generate(target, ids), expected)
    check_static(report, 2)


@pytest.mark.slow
def test_assisted_generation_of_transformers(make_pair: Any) -> None:
    """transformers hands the assistant a slice of the cache, which grows; the target's verification is captured."""
    target, assistant = make_pair(sliding_window=128)
    assistant.generation_config.num_assistant_tokens = 3
    ids = prompt(1, 9)
    expected = generate(target, ids, None)
    with collect() as report:
        for each in (target, assistant):
            each.compile(backend="gemma_npu", options={"platform": "cpu"}, isolate_recompiles=True)
        found = target.generate(
            ids, assistant_model=assistant, max_new_tokens=NEW, do_sample=False, cache_implementation="static"
        )
    assert torch.equal(found, expected)
    verifications = [g for g in report.graphs if g.plan and g.plan.calls and g.plan.calls.query_len and not g.prefills]
    assert sum(g.replays for g in verifications) > 3
    assert all("shared_kv_states" in reason for reason in report.totals()["fallbacks"])


@pytest.mark.slow
def test_transformers_compiles_the_decode_itself(make_pair: Any) -> None:
    """``CompileConfig``: generate() calls a compiled forward for decoding, and its own for the prompt."""
    target = model("llama", make_pair)
    ids = prompt(2, 9)
    expected = generate(target, ids)
    config = CompileConfig(backend="gemma_npu", mode=None, options={"platform": "cpu"}, fullgraph=True)
    config._compile_all_devices = True
    with collect() as report:
        found = target.generate(
            ids, max_new_tokens=NEW, do_sample=False, cache_implementation="static", compile_config=config
        )
    assert torch.equal(found, expected)
    (graph,) = report.graphs
    assert (graph.prefills, graph.replays) == (0, NEW - 1)


MODES: dict[str, dict[str, Any]] = {
    "left padding": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "two sequences": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 2, "max_new_tokens": 40},
    "penalty and end": {"repetition_penalty": 1.3, "eos_token_id": 7},
    "everything returned": {"return_dict_in_generate": True, "output_hidden_states": True, "output_scores": True},
    "chunked prefill": {"prefill_chunk_size": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_modes_of_generate(mode: str, make_pair: Any) -> None:
    """What generate() does around the model is its own; the model answers as it does uncompiled."""
    target = model("gemma4", make_pair)
    ids = prompt(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def run() -> Tensor:
        torch.manual_seed(0)
        given = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", **MODES[mode]}
        found = target.generate(ids, attention_mask=mask, **given)
        return found if isinstance(found, Tensor) else found.sequences

    expected = run()
    with collect() as report:
        target.forward = torch.compile(target.forward, backend="gemma_npu", options={"platform": "cpu"})
        assert torch.equal(run(), expected)
    assert report.totals()["replays"] >= 1
    if mode == "beams":  # every step moves the cache
        ((reason, count),) = report.totals()["fallbacks"].items()
        assert "beam search moves its caches" in reason
        assert count < 39
    else:
        assert report.totals()["fallbacks"] == {}
