"""Sampling: the target's own distribution, whatever is drafted and whoever else runs."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import gemma_npu_compile as gnc
import gemma_npu_compile.step
from gemma_npu_compile.sampling import Sampling, draws, sample, uniforms
from gemma_npu_compile.verify import plain_greedy

RIGHT = gemma_npu_compile.step.accept
VOCAB = 8
PROMPT = [3, 1, 4, 1, 5]
SETTINGS = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(temperature=1.7, top_k=3),
    Sampling(top_p=0.9),
    Sampling(temperature=1.3, top_k=6, top_p=0.8),
]


def warped(scores: torch.Tensor, how: Sampling) -> torch.Tensor:
    """Probabilities ``(rows, vocab)`` by transformers' own warpers, in the order of its generate()."""
    warpers = [TemperatureLogitsWarper(how.temperature)]
    warpers += [TopKLogitsWarper(how.top_k)] if how.top_k else []
    warpers += [TopPLogitsWarper(how.top_p)] if how.top_p < 1 else []
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(-1)


def p_value(observed: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's chi-square test; cells that expect fewer than five are pooled. 0 when the impossible was observed."""
    expected = probabilities.double() * observed.sum()
    if observed[expected == 0].any():
        return 0.0
    rare = expected < 5
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = ((observed - expected) ** 2 / expected.clamp(min=1e-12)).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), statistic / 2))


@pytest.mark.parametrize("how", SETTINGS, ids=str)
def test_draws_have_the_probabilities_of_transformers_warpers(how):
    """40,000 positions of one row, for sharp and for flat logits; ties at the k-th token included."""
    for scale in (1.0, 4.0):
        logits = torch.randn(16, generator=torch.Generator().manual_seed(5)) * scale
        logits[3] = logits[logits.topk(3).indices[2]]
        keys = draws([dataclasses.replace(how, seed=11)], torch.device("cpu"))
        drawn = sample(logits.expand(1, 40_000, 16), torch.arange(40_000)[None], keys)[0]
        observed = torch.bincount(drawn, minlength=16)
        assert p_value(observed, warped(logits[None], how)[0]) > 1e-3
        other = dataclasses.replace(how, temperature=how.temperature * 1.5)
        assert p_value(observed, warped(logits[None], other)[0]) < 1e-6, "the test can tell"


def test_uniforms_are_uniform_and_independent():
    """Over positions, over seeds, and from one to the next."""
    for rows, n in ((1, 1 << 16), (1 << 16, 1)):
        keys = draws([Sampling(seed=seed) for seed in range(rows)], torch.device("cpu")).keys
        drawn = uniforms(keys[:, 1:], torch.arange(n).expand(rows, n)).flatten()
        assert 0 <= float(drawn.min()) < float(drawn.max()) < 1
        cells = (drawn * 16).long()
        assert p_value(torch.bincount(cells, minlength=16), torch.full((16,), 1 / 16)) > 1e-3
        pairs = torch.bincount(cells[:-1] * 16 + cells[1:], minlength=256)
        assert p_value(pairs, torch.full((256,), 1 / 256)) > 1e-3


def mixed(word: int) -> int:
    """lowbias32, in Python's integers."""
    word = (word ^ word >> 16) * 0x7FEB352D % 2**32
    word = (word ^ word >> 15) * 0x846CA68B % 2**32
    return word ^ word >> 16


@given(*[st.integers(0, 2**64 - 1)] * 2, st.integers(0, 2**20))
def test_every_bit_of_the_seed_counts_and_numbers_are_those_of_the_formula(seed, other, position):
    """A seed's numbers are part of what a user keeps; both words of its key are in them."""
    keys = [draws([Sampling(seed=each)], torch.device("cpu")).keys[:, 1:] for each in (seed, other)]
    assert (keys[0].tolist() == keys[1].tolist()) == (seed == other), "seeds and keys are one to one"
    first, second = keys[0][0].tolist()
    at = torch.tensor([[position]])
    expected = mixed(mixed((position * 0x9E3779B1 + first) % 2**32) ^ second) >> 8
    assert uniforms(keys[0], at).item() == expected * 2.0**-24
    for word in (0, 1):
        changed = keys[0].clone()
        changed[0, word] ^= 1 << (position % 32)
        ahead = torch.arange(position, position + 4)[None]
        assert uniforms(changed, ahead).tolist() != uniforms(keys[0], ahead).tolist()


@given(
    temperature=st.sampled_from([0.0, 0.1, 1.0, 50.0]),
    top_k=st.sampled_from([0, 1, 3, 16, 99]),
    top_p=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    neighbours=st.integers(0, 3),
)
def test_a_row_draws_only_what_is_possible_and_alone(temperature, top_k, top_p, seed, neighbours):
    """Never a filtered token; the same beside any neighbours; temperature 0, top_k 1 and top_p 0 are the argmax."""
    generator = torch.Generator().manual_seed(seed % 2**32)
    logits = torch.randn(1 + neighbours, 5, 16, generator=generator) * 4
    positions = torch.randint(0, 1 << 20, (1 + neighbours, 5), generator=generator)
    how = Sampling(temperature, top_k, top_p, seed)
    others = [None, Sampling(seed=seed), Sampling(temperature=2.0, seed=1)][:neighbours]
    together = draws([*others, how], torch.device("cpu"))
    alone = draws([how], torch.device("cpu"))
    greedy = logits[-1].argmax(-1)
    if together is None:
        assert temperature == 0
        return
    tokens = sample(logits, positions, together)
    if alone is not None:
        assert torch.equal(tokens[-1], sample(logits[-1:], positions[-1:], alone)[0])
    if temperature == 0 or top_k == 1 or top_p == 0:
        assert torch.equal(tokens[-1], greedy)
    else:
        assert (warped(logits[-1], how).gather(-1, tokens[-1:].T) > 0).all()
    if neighbours:
        assert torch.equal(tokens[0], logits[0].argmax(-1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 2.5}, "top_k is 2.5, it must be an integer"),
        ({"top_k": True}, "top_k is True"),
        ({"top_p": 1.1}, r"top_p is 1\.1, it must be a number in 0\.\.1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
    ],
)
def test_impossible_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**values)


# ---- whole requests


@pytest.fixture(scope="module")
def small(make_pair):
    """A pair with eight tokens."""
    return make_pair(seed=3, vocab_size=VOCAB)


@torch.no_grad()
def sequences(target, how: Sampling) -> torch.Tensor:
    """Probability of each continuation of three tokens, by transformers alone: ``(VOCAB ** 3,)``."""
    joint = torch.ones(1)
    prefixes = torch.tensor([PROMPT])
    for _ in range(3):
        probabilities = warped(target(input_ids=prefixes, use_cache=False).logits[:, -1].float(), how)
        joint = (joint[:, None] * probabilities).flatten()
        tokens = torch.arange(VOCAB).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(VOCAB, 0), tokens], dim=1)
    return joint


def observe(pair, k: int, how: Sampling, count: int) -> torch.Tensor:
    """How often each continuation of three tokens came, over seeds ``0 .. count - 1``."""
    target, assistant = pair
    observed = torch.zeros(VOCAB**3)
    with gnc.Session(
        target,
        assistant if k else None,
        num_draft_tokens=k,
        max_rows=256,
        max_model_len=16,
        block_size=32,
        compiled=False,
    ) as session:
        for seed in range(count):
            session.add(PROMPT, max_new_tokens=3, sampling=dataclasses.replace(how, seed=seed))
        for request in session.drain():
            a, b, c = request.tokens
            observed[(a * VOCAB + b) * VOCAB + c] += 1
        rates = session.stats.acceptance.rate_per_pos
        assert all(rate > 0.1 for rate in rates), "both outcomes are tried"
        if gemma_npu_compile.step.accept is RIGHT:
            assert all(rate < 0.98 for rate in rates)
    return observed


@pytest.mark.parametrize(
    ("k", "how"),
    [
        (1, SETTINGS[0]),
        (0, SETTINGS[4]),
        *(pytest.param(k, how, marks=pytest.mark.slow) for k in (0, 1, 2) for how in SETTINGS),
    ],
    ids=str,
)
def test_requests_follow_the_target(small, k, how):
    """Chi-square over all continuations of three tokens, accepted and rejected drafts among them."""
    assert p_value(observe(small, k, how, 2048), sequences(small[0], how)) > 1e-3


def test_a_broken_acceptance_is_seen(small, monkeypatch):
    """Accepting every draft gives each token a distribution behind the wrong one."""

    def always(choice, drafts, states, seq_len):
        return RIGHT(torch.cat([drafts, choice[:, -1:]], dim=1), drafts, states, seq_len)

    monkeypatch.setattr(gemma_npu_compile.step, "accept", always)
    assert p_value(observe(small, 2, Sampling(), 2048), sequences(small[0], Sampling())) < 1e-9


def run(session, requests):
    added = [session.add(prompt, max_new_tokens=40, sampling=how) for prompt, how in requests]
    session.drain()
    return [request.tokens for request in added]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_tokens_with_and_without_drafts(pair, engine):
    """Captured with a draft, beside greedy and other neighbours; plain PyTorch without an assistant, alone."""
    how = [Sampling(0.8, 20, 0.9, seed=7), None, Sampling(1.4, seed=8), Sampling(temperature=0.0, seed=9)]
    prompts = [[5, 6, 7], [9] * 30, [11, 12], [40, 41, 42, 43]]
    with gnc.Session.on(engine) as session:
        first = run(session, zip(prompts, how, strict=True))
        assert run(session, zip(prompts[::-1], how[::-1], strict=True)) == first[::-1]
        assert session.stats.acceptance.accepted_per_pos[0] > 0
        assert first[1] == plain_greedy(pair[0], prompts[1], 40, [], 0)
        assert first[3] == plain_greedy(pair[0], prompts[3], 40, [], 0)
        other = run(session, [(prompts[0], dataclasses.replace(how[0], seed=6))])
        assert other[0] != first[0]
    with gnc.Session(pair[0], compiled=False, max_rows=1, max_model_len=96, block_size=32) as session:
        assert run(session, zip(prompts, how, strict=True)) == first


def test_who_does_not_sample_keeps_the_greedy_graph(engine, replays):
    """Sampling is a graph of its own, compiled when a row first asks for it, and used only while one does."""
    with gnc.Session.on(engine) as session:
        before = replays()
        run(session, [([1, 2], None), ([3], Sampling(temperature=0.0))])
        between = replays()
        assert between["greedy"] > before["greedy"]
        assert between == before | {"greedy": between["greedy"]}
        run(session, [([1, 2], Sampling()), ([4], None)])
        after = replays()
        assert after["sampled"] > between["sampled"]
        assert after == between | {"sampled": after["sampled"]}
    assert not any(g.recompile for g in engine.report.graphs)
    assert engine.report.totals()["fallbacks"] == {}
