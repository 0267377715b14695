"""The bundled trained pair: acceptance is guarded, and what acceptance can and cannot see is shown."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import gemma_npu_compile as gnc
from gemma_npu_compile.engine import Engine
from gemma_npu_compile.loading import load_pair
from gemma_npu_compile.stats import Acceptance
from gemma_npu_compile.tiny_pair import ASSISTANT_DIR, CODING_PROMPTS, TARGET_DIR, heldout_prompts
from gemma_npu_compile.verify import verify

pytestmark = pytest.mark.slow
NEW = 128
README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.fixture(scope="module")
def bundled():
    loaded = load_pair(TARGET_DIR, ASSISTANT_DIR, "float32", "cpu")
    return loaded.target, loaded.assistant


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
    held_out = heldout_prompts()
    assert len(held_out) >= 10
    return [tokenizer(text)["input_ids"] for text in (*CODING_PROMPTS, *held_out)]


def batch(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    return ids, torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])


def test_the_pair_is_what_the_readme_says(bundled):
    target, assistant = bundled
    text = target.config.get_text_config()
    assert text.layer_types.count("sliding_attention") == 5
    assert [text.per_layer_config[i].head_dim for i in (0, 5)] == [64, 512]
    assert text.sliding_window == 64
    assert text.attention_k_eq_v
    assert assistant.config.text_config.kv_sharing_modes == ["reuse"] * 4
    files = [f for directory in (TARGET_DIR, ASSISTANT_DIR) for f in directory.iterdir()]
    assert sum(f.stat().st_size for f in files) <= 12 * 2**20


def test_acceptance_and_tokens(bundled, prompts):
    """Pooled acceptance stays above what the field asked to guard; every token is plain greedy's; nothing fell back.

    Batch 8 and batch 5 of rows of different lengths, twice the window and more.
    """
    target, assistant = bundled
    pooled = Acceptance([0, 0, 0])
    for start in range(0, len(prompts), 8):
        part = prompts[start : start + 8]
        ids, mask = batch(part)
        output, stats = gnc.generate(
            target, ids, mask, assistant_model=assistant, max_new_tokens=NEW, return_stats=True
        )
        eos = [target.generation_config.eos_token_id]
        width = ids.shape[1]
        rows = [row[width:].tolist() for row in output]
        rows = [r[: r.index(eos[0]) + 1] if eos[0] in r else r for r in rows]
        assert verify(target, part, rows, NEW, eos, 0).differences == ()
        totals = stats.report.totals()
        assert (totals["fallbacks"], totals["recompiles"]) == ({}, 0)
        pooled.merge(stats.acceptance)
    rates = pooled.rate_per_pos
    assert rates[0] >= 0.65
    assert rates[1] >= 0.45
    assert rates[2] >= 0.35
    (graph,) = stats.report.graphs
    passes = {p.name: (p.changed, p.nodes_after, p.launches_after) for p in graph.passes}
    table = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \| (\d+) \| (\d+) \|$", README.read_text(), flags=re.MULTILINE)
    assert {name: tuple(map(int, counts)) for name, *counts in table} == passes, "the README's table of passes"


def test_batches_of_1_3_and_5_give_the_same_tokens(bundled, prompts):
    target, assistant = bundled
    results = []
    for rows in (1, 3, 5):
        tokens = []
        for start in range(0, 5, rows):
            part = prompts[start : min(5, start + rows)]
            ids, mask = batch(part)
            output = gnc.generate(target, ids, mask, assistant_model=assistant, max_new_tokens=NEW)
            tokens += [row[ids.shape[1] :].tolist() for row in output]
        results.append([[t for t in row if t != 0] for row in tokens])
    assert results[0] == results[1] == results[2]


def drafts_of(engine: Engine, prompts: list[list[int]], rounds: int) -> tuple[list, Acceptance]:
    state = engine.prefill([torch.tensor(p) for p in prompts])
    accepted, drafts = Acceptance([0] * engine.step.num_draft_tokens), []
    run = engine._run("greedy")
    call = run.call

    def record(*inputs, **more):
        output = call(*inputs, **more)
        drafts.append(output.drafts.tolist())
        return output

    run.call = record
    for _ in range(rounds):
        state, _, counts, _ = engine.decode(state)
        for count in counts:
            accepted.add(count)
    engine.cache.reset()
    return drafts, accepted


def test_one_draft_layer_on_the_other_groups_table(bundled, prompts):
    """The field's fault. Acceptance falls, draft tokens change; emitted tokens, repaired by verification, do not."""
    results = []
    for groups in (None, (0, 0, 0, 0)):
        engine = Engine(*bundled, 3, max_rows=5, max_model_len=512, compiled=False)
        if groups is not None:
            engine.step.draft_groups = groups  # the full layer reads the sliding group's blocks
            engine.cache._free[0].reverse()
        results.append(drafts_of(engine, prompts[:5], 40))
    (right, right_accepted), (wrong, wrong_accepted) = results
    assert right[0] != wrong[0]
    assert right_accepted.accepted_per_pos[0] > wrong_accepted.accepted_per_pos[0]
    assert right_accepted.accepted_per_pos[2] > wrong_accepted.accepted_per_pos[2]


def cli(*arguments: str, seed: str = "0") -> dict:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-m", "gemma_npu_compile.cli", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_acceptance_captured_equals_eager_for_three_hash_seeds():
    """The field's acceptance varied from process to process; here it is one number, captured or not."""
    common = ("acceptance", "--repeats", "1", "--max-new-tokens", "48", "--batch", "5")
    results = [cli(*common, *mode, seed=seed) for seed in ("0", "1", "2") for mode in ((), ("--eager",))]
    assert [r["mode"] for r in results] == ["captured", "eager"] * 3
    assert all(r["acceptance"] == results[0]["acceptance"] for r in results)
    for captured, eager in zip(results[::2], results[1::2], strict=True):
        assert captured["graphs"]["replays"] > 0
        assert (eager["graphs"]["captures"], eager["graphs"]["replays"]) == (0, 0)
    assert results[0]["requests"] == 5
