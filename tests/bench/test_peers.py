"""The real subjects on small random pairs: the same tokens everywhere, and the work that is forced on them."""

import itertools

import pytest
import torch

from gemma_npu_compile.bench import steady
from gemma_npu_compile.bench.measure import Measured, Unavailable, differences, prepare
from gemma_npu_compile.bench.pairs import medium_pair
from gemma_npu_compile.bench.peers import Eager, HuggingFace, Ours, Plain, makers, parse_peers
from gemma_npu_compile.bench.work import ForcedWork, TextWork
from gemma_npu_compile.verify import plain_greedy

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "max_position_embeddings": 1024,
}
PROMPT = list(range(1, 30))
NEW = 14


class Ticks:
    """A clock that moves on by one second whenever it is asked."""

    def __init__(self):
        self.now = itertools.count()

    def __call__(self) -> float:
        return float(next(self.now))


@pytest.fixture(scope="module")
def text(make_pair):
    """One row, one draft, past the window; nobody stops at an end of text."""
    target, assistant = make_pair()
    target.generation_config.eos_token_id = [5]
    return TextWork(target, assistant, [PROMPT], NEW, drafts=1)


@pytest.fixture(scope="module")
def greedy(text) -> list[list[int]]:
    return [plain_greedy(text.target, PROMPT, NEW, (), 0)]


@pytest.fixture(scope="module")
def found(text):
    return prepare(makers(text, ("eager", "hf_assisted", "hf_plain"), "cpu"))


def test_everybody_gives_the_tokens_of_plain_greedy_decoding(found, greedy):
    assert {name: measured.reason for name, measured in found.items()} == dict.fromkeys(found)
    assert list(found) == ["ours", "eager", "hf_assisted", "hf_plain"]
    assert differences(found, greedy) == []
    assert len(greedy[0]) == NEW


def test_the_decode_phase_is_what_is_counted(found):
    """13 of 14 tokens: the first is the prefill's. Plain decoding takes a step for each, a draft saves some."""
    counted = {name: (measured.rounds[0].counted, len(measured.rounds[0].seconds)) for name, measured in found.items()}
    assert counted["hf_plain"] == (NEW - 1, NEW - 1)
    assert counted["ours"] == counted["eager"]
    assert counted["ours"][0] == counted["hf_assisted"][0] == NEW - 1
    assert (NEW - 1) / 2 <= counted["ours"][1] < NEW - 1
    assert (NEW - 1) / 2 <= counted["hf_assisted"][1] < NEW - 1
    assert found["ours"].compile_s > 0
    assert found["eager"].compile_s is None


def test_lengths_are_those_of_each_step(found):
    (start,), *_ = lengths = found["ours"].rounds[0].lengths
    assert start == len(PROMPT)
    grown = [after[0] - before[0] for before, after in itertools.pairwise(lengths)]
    assert set(grown) == {1, 2}
    assert len(lengths) == len(found["ours"].rounds[0].seconds)


def test_one_other_token_of_one_peer_is_found(found, greedy):
    changed = {name: Measured(rounds=list(measured.rounds)) for name, measured in found.items()}
    rounds = [*changed["eager"].rounds]
    tokens = [list(row) for row in rounds[0].tokens]
    tokens[0][7] += 1
    rounds[0] = type(rounds[0])(rounds[0].seconds, tokens, rounds[0].counted)
    changed["eager"].rounds = rounds
    (line,) = differences(changed, greedy)
    assert line.startswith("eager: round 0, row 0, token 7 is ")


def test_the_facts_of_the_steady_state(found):
    ours = found["ours"].subject
    replays = ours.engine.report.graphs[0].replays
    facts = ours.facts()
    assert ours.engine.report.graphs[0].replays == replays + steady.STEPS + 1
    assert facts["sizes"] == [2, 1]
    seconds = dict(facts["seconds"])
    del seconds["aot"]
    assert facts["capture_s"] == pytest.approx(sum(seconds.values()))
    assert facts["host_overhead_us"] > 0
    # the largest size, two rows: token, hidden state, length, and one block of each of two groups
    assert [table.shape[1] for table in ours.engine.cache.padding_tables] == [1, 1]
    assert facts["steady"]["stable_bytes"] == 2 * (8 + 64 * 4 + 4 + 2 * 4)
    assert facts["steady"]["recompiles"] == 0
    assert facts["steady"]["memory_ratio"] == 1.0
    graphs = [g for b in steady._runner(ours.engine)._bindings for g in b.graphs.values()]
    assert ["replay" in vars(graph) for graph in graphs] == [False, False], "the clock is taken out again"


def test_host_overhead_is_the_step_without_its_replay(found, monkeypatch):
    """A clock of ticks: a step is five of them, two of which belong to one replay."""
    ours = found["ours"].subject
    ticks = Ticks()
    monkeypatch.setattr(steady, "perf_counter", ticks)
    monkeypatch.setattr(ours, "clock", ticks)
    # the step's clock, the replay's two readings, the step's clock: three seconds, one of them in the replay
    overhead = steady.host_overhead_us(ours.engine, lambda: ours.step(ours.work.begin(ours.engine)))
    assert overhead == 2e6


def test_allocations_are_counted_inside_the_replay_only():
    def step():
        torch.zeros(100)
        with torch.profiler.record_function("replay"):
            kept = [torch.zeros(100), torch.zeros(10)]
            kept.pop()  # gives back
        torch.zeros(10)
        del kept

    assert steady._allocations(step) == 2
    assert steady._allocations(lambda: torch.zeros(3)) == 0


def test_transformers_steps_are_the_times_between_tokens(text):
    """A clock of one tick per reading: the prompt's is left out, each step is one second."""
    peer = HuggingFace(text, assisted=False, clock=Ticks())
    assert peer.round().seconds == [1.0] * (NEW - 1)


def test_transformers_takes_no_part_where_it_cannot(text):
    two = TextWork(text.target, text.assistant, [PROMPT, PROMPT[:5]], NEW, drafts=1)
    with pytest.raises(Unavailable, match="one row"):
        HuggingFace(two, assisted=True)
    forced = ForcedWork(text.target, text.assistant, 1, 40, (1,), drafts=1)
    with pytest.raises(Unavailable, match="random weights"):
        HuggingFace(forced, assisted=False)


def test_two_rows_of_plain_decoding_and_of_the_step_agree(text):
    """Left-padded for transformers, packed here; the counted tokens are those of both rows but their first.

    The last step gives the first row a token too many, which is neither compared nor counted.
    """
    work = TextWork(text.target, text.assistant, [PROMPT, PROMPT[:5]], 15, drafts=1)
    step, plain = Eager(work).round(), HuggingFace(work, assisted=False).round()
    assert step.tokens == plain.tokens
    assert step.counted == plain.counted == 2 * 14
    assert len(plain.seconds) == 14


# ---- forced acceptance


@pytest.fixture(scope="module")
def forced() -> ForcedWork:
    """Two rows of 100 tokens, four times the window; bfloat16 as it is measured."""
    pair = medium_pair(layers=4, **SMALL)
    return ForcedWork(*pair, batch=2, context=100, pattern=(3, 0, 2))


@pytest.fixture(scope="module")
def forced_round(forced):
    return Eager(forced).round()


def test_lengths_and_counts_follow_the_pattern_whatever_is_accepted(forced, forced_round):
    assert forced_round.lengths == [[100, 100], [104, 104], [105, 105]]
    assert forced_round.counted == 2 * (4 + 1 + 3)
    assert forced_round.hidden.shape == (3, 2, 64)


def test_rounds_and_caches_of_one_seed_repeat(forced, forced_round):
    subject = Eager(forced)
    for _ in range(2):
        again = subject.round()
        assert again.tokens == forced_round.tokens
        assert torch.equal(again.hidden, forced_round.hidden)
    tables = subject.engine.cache.block_tables([0, 1])
    full = subject.engine.cache.groups[1]
    assert full.window is None
    keys = subject.engine.cache.key_pools[full.layers[0]][tables[1][0, 0].long()]
    assert keys.float().std() == pytest.approx(32**-0.25, rel=0.05)


def test_choices_are_clear(forced):
    """The best logit of every verified position is far ahead: no order of bfloat16 sums turns it."""
    subject = Eager(forced)
    subject.engine.step.return_logits = True
    state = forced.begin(subject.engine)
    tables = subject.engine.cache.block_tables(state.rows)
    out = subject.engine.step(state.token, state.hidden, state.seq_len, tables)
    for logits in (out.target_logits, out.draft_logits):
        best = logits.float().topk(2).values
        assert ((best[..., 0] - best[..., 1]) > 0.1 * best[..., 0].abs()).all()


@pytest.mark.parametrize("pools", ["key_pools", "value_pools"])
def test_one_layer_with_other_keys_or_values_is_seen(forced, forced_round, pools):
    """Tokens say little of the layers; hidden states do, for each layer of the target alone."""
    for layer in range(4):
        subject = Eager(forced)
        forced.begin(subject.engine)
        pool = getattr(subject.engine.cache, pools)[layer]
        pool.copy_(pool.flip(0, 1))
        found = {"ours": Measured(rounds=[forced_round]), "eager": Measured(rounds=[subject.round()])}
        assert any("hidden states differ" in line for line in differences(found, None)), layer


@pytest.mark.slow
def test_the_captured_step_agrees_in_bfloat16(forced, forced_round):
    ours = Ours(forced, "cpu")
    assert ours.first() > 0
    found = {"ours": Measured(rounds=[ours.round(), ours.round()]), "eager": Measured(rounds=[forced_round])}
    assert differences(found, None) == []
    assert ours.engine.report.totals()["recompiles"] == 0


def test_a_peer_runs_under_inference_mode_on_its_own_number_of_rows(text):
    subject = Plain(text)
    seen = []

    def call(token, hidden, seq_len, tables):
        seen.append((torch.is_inference_mode_enabled(), token.shape[0], token.is_inference(), hidden.is_inference()))
        return subject.engine.step(token, hidden, seq_len, tables)

    subject.call = call
    subject.round()
    assert set(seen) == {(True, 1, True, True)}


def test_peers_are_named():
    assert parse_peers("hf_plain, eager") == ("eager", "hf_plain")
    assert parse_peers("") == ()
    with pytest.raises(ValueError, match="did you mean 'inductor'"):
        parse_peers("indutcor")
