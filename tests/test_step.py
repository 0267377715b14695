"""The step against an independent reference: draft tokens, logits, state. Acceptance alone misses most faults."""

import itertools

import pytest
import torch

import gemma_npu_compile as gnc
from gemma_npu_compile.engine import Engine, State

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5], list(range(1, 40)))


def with_logits(pair, k: int, **cache) -> tuple[Engine, gnc.DraftVerifyStep]:
    """An uncompiled engine whose step also returns logits."""
    options = {"max_rows": 4, "max_model_len": 160, "block_size": 16, "prefill_chunk": 20, **cache}
    engine = Engine(*pair, k, compiled=False, **options)
    step = gnc.DraftVerifyStep(*pair, engine.cache, k, return_logits=True)
    return engine, step


def run(engine: Engine, step: gnc.DraftVerifyStep, state: State):
    """One step with logits, and the next state."""
    for row, length in zip(state.rows, state.lengths, strict=True):
        engine.cache.extend(row, length + 1 + step.num_draft_tokens)
    output = step(state.token, state.hidden, state.seq_len, engine.cache.block_tables(state.rows))
    lengths = output.seq_len.tolist()
    for row, length in zip(state.rows, lengths, strict=True):
        engine.cache.set_length(row, length)
    return output, State(state.rows, output.token, output.hidden, output.seq_len, lengths)


@pytest.mark.parametrize(("k", "ordered"), [(1, False), (3, False), (3, True)])
def test_drafts_logits_and_tokens_equal_the_reference(make_pair, reference_round, k, ordered):
    """Rows of different lengths, 20 rounds, well past the window of 24; round 0 is the golden first step."""
    pair = make_pair(ordered=ordered)
    engine, step = with_logits(pair, k)
    state = engine.prefill([torch.tensor(p) for p in PROMPTS])
    prefixes = [[*p, t] for p, t in zip(PROMPTS, state.token.tolist(), strict=True)]
    accepted = 0
    for _ in range(20):
        output, state = run(engine, step, state)
        for row, prefix in enumerate(prefixes):
            expected = reference_round(*pair, prefix, k)
            assert output.drafts[row].tolist() == expected.drafts
            if not ordered:  # the fill value of ordered embeddings is the minimum over the whole batch
                torch.testing.assert_close(output.draft_logits[row], expected.draft_logits, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(output.target_logits[row], expected.target_logits, rtol=1e-4, atol=1e-4)
            n = int(output.accepted[row])
            assert output.tokens[row, : n + 1].tolist() == expected.tokens
            assert int(output.token[row]) == expected.tokens[-1]
            prefix.extend(expected.tokens)
            assert int(output.seq_len[row]) == len(prefix) - 1
            accepted += n
    assert 0 < accepted < 20 * 3 * k, "the pair must accept some drafts and reject others for this to mean anything"


def test_drafts_equal_transformers_after_a_full_acceptance(pair, monkeypatch):
    """transformers drafts from stale keys after a rejection; after a full acceptance we must agree with it."""
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Generator

    target, assistant = pair
    rounds: list[tuple[list[int], list[int], int]] = []
    original = Generator.get_candidates

    def record(self, input_ids, **kwargs):
        candidates, logits = original(self, input_ids, **kwargs)
        drafts = candidates[0, input_ids.shape[1] :].tolist()
        if drafts:
            rounds.append((input_ids[0].tolist(), drafts, kwargs["n_last_matches"]))
        return candidates, logits

    monkeypatch.setattr(Generator, "get_candidates", record)
    monkeypatch.setattr(assistant.generation_config, "num_assistant_tokens", 2)
    monkeypatch.setattr(assistant.generation_config, "num_assistant_tokens_schedule", "constant")
    prompt = torch.tensor([PROMPTS[0]])
    mask = torch.ones_like(prompt)
    target.generate(prompt, attention_mask=mask, assistant_model=assistant, do_sample=False, max_new_tokens=150)
    engine, _ = with_logits(pair, 2)
    compared = 0
    for (before, drafts, _), (ids, following, matches) in itertools.pairwise(rounds):
        if matches != len(drafts) or len(following) != 2 or ids[: len(before)] != before:
            continue
        state = engine.prefill([torch.tensor(ids[:-1])])
        assert state.token.tolist() == ids[-1:]
        engine.cache.extend(state.rows[0], len(ids) + 2)
        output = engine.step(state.token, state.hidden, state.seq_len, engine.cache.block_tables(state.rows))
        assert output.drafts[0].tolist() == following
        engine.cache.reset()
        compared += 1
    assert compared >= 3


def test_a_wrong_group_table_changes_drafts_but_not_tokens(pair):
    """Draft tokens show that one draft layer reads through the other group's table; emitted tokens never do.

    (What acceptance shows of it is measured on the trained pair, test_bundled.py.)
    """
    engine, step = with_logits(pair, 1)
    wrong = gnc.DraftVerifyStep(*pair, engine.cache, 1)
    wrong.draft_groups = (wrong.draft_groups[1], wrong.draft_groups[1])  # the sliding layer through the full group
    engine.cache._free[0].reverse()  # so that the groups' block ids differ
    state = engine.prefill([torch.tensor(p) for p in PROMPTS[:2]])
    changed = 0
    for _ in range(30):
        for row, length in zip(state.rows, state.lengths, strict=True):
            engine.cache.extend(row, length + 2)
        tables = engine.cache.block_tables(state.rows)
        faulty = wrong(state.token, state.hidden, state.seq_len, tables)
        output, state = run(engine, step, state)
        changed += int((faulty.drafts != output.drafts).sum())
        assert torch.equal(faulty.tokens[:, 0], output.tokens[:, 0])  # verification repairs any draft
    assert changed >= 3


def test_a_cache_read_through_another_groups_table_does_not_compile(pair):
    """The binding pass sees the fault before anything runs."""
    engine = Engine(*pair, 1, max_rows=2, max_model_len=64)
    engine.step.draft_groups = (engine.step.draft_groups[1], engine.step.draft_groups[1])
    with pytest.raises(ValueError, match=r"draft\.0/assistant\.layers\.0.*verify/target|verify/target.*draft\.0"):
        engine.warm_up()


def test_null_blocks_and_unreached_blocks(pair, reference_round):
    """NaN in every block that no table names changes nothing."""
    engine, step = with_logits(pair, 2)
    state = engine.prefill([torch.tensor(PROMPTS[2])])
    prefix = [*PROMPTS[2], int(state.token)]
    engine.cache.extend(state.rows[0], len(prefix) + 2)
    tables = engine.cache.block_tables(state.rows)
    for group, table in zip(engine.cache.groups, tables, strict=True):
        owned = set(table.flatten().tolist()) | set(range(group.null_blocks))
        for layer in group.layers:
            for block in set(range(group.num_blocks)) - owned:
                engine.cache.key_pools[layer][block] = torch.nan
                engine.cache.value_pools[layer][block] = torch.nan
    output = step(state.token, state.hidden, state.seq_len, tables)
    expected = reference_round(*pair, prefix, 2)
    assert output.drafts[0].tolist() == expected.drafts
    torch.testing.assert_close(output.target_logits[0], expected.target_logits, rtol=1e-4, atol=1e-4)


def test_the_users_models_are_untouched(make_pair):
    target, assistant = make_pair()
    before = [(m.config.to_dict(), m.config._attn_implementation, dict(vars(m))) for m in (target, assistant)]
    engine = Engine(target, assistant, 1, max_rows=2, max_model_len=64, compiled=False)
    engine.prefill([torch.tensor([1, 2, 3])])
    for model, (config, attention, attributes) in zip((target, assistant), before, strict=True):
        assert model.config.to_dict() == config
        assert model.config._attn_implementation == attention
        assert dict(vars(model)) == attributes
    assert engine.step.target.lm_head.weight is target.lm_head.weight, "weights are shared, not copied"


def test_a_pair_that_does_not_fit_is_refused_with_every_difference(make_pair):
    target, _ = make_pair()
    _, assistant = make_pair(head_dim=32, vocab_size=64, sliding_window=16)
    cache = gnc.PagedKVCache(target.config, max_rows=2, max_model_len=64)
    with pytest.raises(ValueError, match="does not fit") as error:
        gnc.DraftVerifyStep(target, assistant, cache, 1)
    for part in ("vocab_size: target 128, assistant 64", "sliding_window: target 24, assistant 16", "head_dim"):
        assert part in str(error.value)


def test_a_stranger_is_refused_by_class(pair):
    target, assistant = pair
    cache = gnc.PagedKVCache(target.config, max_rows=2, max_model_len=64)
    with pytest.raises(ValueError, match="target is a Linear"):
        gnc.DraftVerifyStep(torch.nn.Linear(1, 1), assistant, cache, 1)
    with pytest.raises(ValueError, match="assistant is a Gemma4ForCausalLM"):
        gnc.DraftVerifyStep(target, target, cache, 1)
    with pytest.raises(ValueError, match=r"num_draft_tokens is 17, it must be in 1\.\.16"):
        gnc.DraftVerifyStep(target, assistant, cache, 17)
    with pytest.raises(ValueError, match="without an assistant it must be 0"):
        gnc.DraftVerifyStep(target, None, cache, 2)


def test_inputs_that_do_not_fit_are_refused(pair):
    engine, step = with_logits(pair, 1)
    state = engine.prefill([torch.tensor([1, 2, 3])])
    tables = engine.cache.block_tables(state.rows)
    wide = (torch.cat([tables[0], tables[0]], dim=1), tables[1])
    with pytest.raises(ValueError, match=r"sliding_attention \(layers \(0,\)\) is \d+ blocks wide.*are \d+ wide"):
        step(state.token, state.hidden, state.seq_len, wide)
    with pytest.raises(ValueError, match="1 block tables were given, the cache has 2 groups"):
        step(state.token, state.hidden, state.seq_len, tables[:1])
    with pytest.raises(ValueError, match="rows"):
        step(state.token.repeat(2), state.hidden, state.seq_len, tables)
