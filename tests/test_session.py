"""Session: requests join and leave, and each one's tokens are those of plain greedy decoding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import StoppingCriteria

import gemma_npu_compile as gnc
from gemma_npu_compile.verify import plain_greedy, verify

SMALL = {"max_model_len": 128, "block_size": 16, "prefill_chunk": 32}
NEW = 44
PROMPTS = [torch.randint(1, 128, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 2, 9, 33, 70)]


@pytest.fixture(scope="module")
def references(pair):
    """What the target says after each prompt, by transformers alone."""
    return [plain_greedy(pair[0], prompt, NEW, [], 0) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=[False, True], ids=["reads_at_once", "reads_a_step_late"])
def session(engine, request):
    with gnc.Session.on(engine, asynchronous=request.param) as session:
        yield session


def assert_empty(session) -> None:
    """Every row, block and reservation came back."""
    cache = session.engine.cache
    assert (session.waiting, session.running, cache.rows) == (0, 0, ())
    assert [cache.free_blocks(g.index) for g in cache.groups] == [g.num_blocks - g.null_blocks for g in cache.groups]
    assert session._reserved.taken == [0, 0]


@st.composite
def arrivals(draw):
    """Requests as ``(step of arrival, prompt, limit, position of the end token, step of cancellation)``."""
    one = st.tuples(
        st.integers(0, 25),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(1, NEW),
        st.none() | st.integers(0, NEW - 1),
        st.none() | st.integers(0, 40),
    )
    return sorted(draw(st.lists(one, min_size=1, max_size=7)), key=lambda each: each[0])


@settings(max_examples=20)
@given(plan=arrivals())
def test_tokens_are_plain_greedy_whatever_runs_beside(session, pair, references, plan):
    """Random arrivals, lengths, ends and cancellations, with memory for fewer than three requests."""
    requests = {}
    got: dict[object, list[int]] = {}
    now = 0
    waiting = list(enumerate(plan))
    admitted = []
    while waiting or session.waiting or session.running or session._unread:
        while waiting and waiting[0][1][0] <= now:
            index, (_, prompt, limit, end, _) = waiting.pop(0)
            eos = None if end is None else references[prompt][end]
            requests[index] = session.add(PROMPTS[prompt], max_new_tokens=limit, eos_token_id=eos)
        for index, request in requests.items():
            if plan[index][4] == now and not request.finished:
                assert session.cancel(request)
                assert not session.cancel(request)
        for request, tokens in session.step():
            got.setdefault(request, []).extend(tokens)
        for request, longest in zip(session._active, session._state.lengths if session._state else (), strict=False):
            if not request.finished:  # what the host assumes is exact, or ahead by the one step not read yet
                cache = session.engine.cache
                assert longest == cache.length(request.row) + 2 * session._depth
                held = [len(blocks) for blocks in cache._rows[request.row].blocks]
                assert all(h <= n for h, n in zip(held, request.needs, strict=True)), "never more than was set aside"
        admitted += [i for i, r in requests.items() if i not in admitted and (r.row is not None or r.tokens)]
        now += 1
    assert_empty(session)
    assert admitted == sorted(admitted), "first in, first out"
    for index, request in requests.items():
        _, prompt, limit, end, _ = plan[index]
        expected = references[prompt][:limit]
        if end is not None and references[prompt][end] in expected:
            expected = expected[: expected.index(references[prompt][end]) + 1]
        if request.finish_reason == "cancelled":
            expected = expected[: len(request.tokens)]
        else:
            ended = end is not None and expected[-1] == references[prompt][end]
            assert request.finish_reason == ("eos" if ended else "length")
        assert got.get(request, []) == request.tokens
        if request.tokens != expected:
            eos = [] if end is None else [references[prompt][end]]
            assert verify(pair[0], [PROMPTS[prompt]], [request.tokens], len(expected), eos, 0).differences == ()


def test_steps_are_counted_and_captured_once(session):
    """Whatever the tests above did, nothing was compiled twice and nothing ran beside the captures."""
    graphs = session.stats.report.graphs
    assert [(g.sizes, g.captures, g.recompile, g.fallbacks) for g in graphs] == [([3, 2, 1], 3, False, {})] * len(
        graphs
    )


def test_a_request_that_could_never_run_is_refused_and_leaves_nothing(session, pair):
    for ids, limits, message in (
        ([], {"max_new_tokens": 3}, r"prompt_ids is \(0,\), it must be 1-d with at least one token"),
        ([1.0], {"max_new_tokens": 3}, r"prompt_ids is torch\.float32, it must hold integers"),
        ([1, 128], {"max_new_tokens": 3}, r"prompt_ids has token 128, the model's tokens are 0\.\.127"),
        ([-1, 7], {"max_new_tokens": 3}, r"prompt_ids has token -1, "),
        ([[1, 2]], {"max_new_tokens": 3}, r"prompt_ids is \(1, 2\)"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0, it must be an integer, 1 or more"),
        (
            [1] * 120,
            {"max_new_tokens": 9},
            "120 tokens and max_new_tokens is 9, together more than max_model_len, 12[68]",
        ),
        ([1], {"max_new_tokens": 3, "min_new_tokens": -1}, "min_new_tokens is -1"),
        ([1], {"max_new_tokens": 3, "eos_token_id": [2.5]}, r"eos_token_id is \[2\.5\]"),
        ([1], {"max_new_tokens": 3, "sampling": {"temperature": 1}}, "sampling is a dict"),
        ([1], {"max_new_tokens": 3, "stop_strings": "x"}, "stop_strings='x' needs the tokenizer"),
        ([1], {"max_new_tokens": 3, "stopping_criteria": [len]}, "stopping criterion builtin_function_or_method"),
        ([1], {"max_new_tokens": 3, "logits_processor": [len]}, "logits processor builtin_function_or_method"),
    ):
        with pytest.raises(ValueError, match=message):
            session.add(ids, **limits)
        assert_empty(session)
    with pytest.raises(TypeError, match="max_tokens"):
        session.add([1], max_tokens=3)
    blocks = {"sliding_attention": 9, "full_attention": 3}
    few = gnc.Engine(*pair, 1, max_rows=2, num_blocks=blocks, compiled=False, **SMALL)
    with pytest.raises(ValueError, match="need 7 blocks of KV group 'full_attention', the cache has 3"):
        gnc.Session.on(few).add([1] * 60, max_new_tokens=40)


def test_the_oldest_waits_and_nobody_overtakes(session):
    """A small request behind one that does not fit is not let through."""
    big = [session.add(PROMPTS[4], max_new_tokens=NEW) for _ in range(3)]
    small = session.add(PROMPTS[0], max_new_tokens=9)
    for _ in range(4):
        session.step()
    assert [r.row is not None for r in (*big, small)] == [True, True, False, False]
    assert (session.running, session.waiting) == (2, 2)
    assert session.cancel(big[2])
    session.step()
    assert small.row is not None, "a cancelled one keeps nobody waiting"
    done = session.drain()
    assert [r in done for r in (*big, small)] == [True, True, False, True]
    assert_empty(session)


def test_a_failed_prefill_leaves_the_session_as_it_was(session, references, monkeypatch):
    """The rows that run go on, the new ones wait and are admitted later."""
    first = session.add(PROMPTS[2], max_new_tokens=NEW)
    session.step()
    second = session.add(PROMPTS[3], max_new_tokens=5)
    with monkeypatch.context() as patch:
        patch.setattr(session.engine.step, "logits", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.step()
    assert (session.running, session.waiting, second.row) == (1, 1, None)
    session.drain()
    assert (first.tokens, second.tokens) == (references[2], references[3][:5])
    assert_empty(session)


class Raises(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] > 12:
            raise ZeroDivisionError("mine")
        return torch.tensor([False])


def test_a_criterion_that_raises_ends_its_own_request_only(session, references):
    bad = session.add(PROMPTS[2], max_new_tokens=NEW, stopping_criteria=[Raises()])
    good = session.add(PROMPTS[1], max_new_tokens=NEW)
    got: list[int] = []
    events = iter(session)
    while not bad.finished:
        try:
            request, tokens = next(events)
        except ZeroDivisionError:
            events = iter(session)
        else:
            got += tokens if request is good else []
    for request, tokens in events:
        assert request is good
        got += tokens
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert got == good.tokens == references[1]
    assert_empty(session)


def test_a_minimal_length_holds_and_then_costs_nothing(session, pair, references, replays):
    """End tokens are held back in an open step; once the row is long enough, the greedy graph serves it again."""
    eos = references[2][4]
    request = session.add(PROMPTS[2], max_new_tokens=NEW, min_new_tokens=9, eos_token_id=eos)
    beside = session.add(PROMPTS[3], max_new_tokens=NEW)
    ids = torch.tensor([PROMPTS[2]])
    expected = pair[0].generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW,
        min_new_tokens=9,
        eos_token_id=eos,
    )
    before = replays()["greedy"]
    session.drain()
    assert request.tokens == expected[0, len(PROMPTS[2]) :].tolist()
    assert beside.tokens == references[3]
    assert replays()["greedy"] > before + 5
    assert_empty(session)


def test_requests_count_their_own_acceptance(session):
    total = session.stats.acceptance.drafts
    requests = [session.add(prompt, max_new_tokens=20) for prompt in PROMPTS[:3]]
    session.drain()
    assert sum(r.acceptance.drafts for r in requests) == session.stats.acceptance.drafts - total
    assert all(20 <= 1 + r.acceptance.drafts + r.acceptance.accepted_per_pos[0] <= 21 for r in requests)


def test_reading_late_draws_the_same_and_gives_back_the_same(engine):
    """Sampled rows and rows with processors, one step late."""
    results = []
    for late in (False, True):
        with gnc.Session.on(engine, asynchronous=late) as session:
            requests = [
                session.add(
                    prompt, max_new_tokens=30, sampling=gnc.Sampling(seed=seed), min_new_tokens=seed, eos_token_id=9
                )
                for seed, prompt in enumerate(PROMPTS[:4])
            ]
            session.drain()
            assert_empty(session)
        results.append([r.tokens for r in requests])
    assert results[0] == results[1]


def test_a_step_is_queued_before_the_last_is_read(engine, monkeypatch):
    """Late: launch, launch, read, launch, read, ... ; a CPU by itself reads at once."""
    order: list[str] = []
    launch, read = engine.launch, gnc.state.Results.read
    monkeypatch.setattr(engine, "launch", lambda *args: (order.append("launch"), launch(*args))[1])
    monkeypatch.setattr(gnc.state.Results, "read", lambda self: (order.append("read"), read(self))[1])
    for late, expected in (
        (True, ["launch", "read", "launch", "read", "launch", "read"]),
        (None, ["read", "launch", "read", "launch", "read", "launch", "read"]),
    ):
        with gnc.Session.on(engine, asynchronous=late) as session:
            session.add(PROMPTS[2], max_new_tokens=12)
            order.clear()
            for _ in range(3):
                session.step()
        assert order == expected


def test_closing(engine):
    session = gnc.Session.on(engine)
    with session:
        running, waiting = [session.add(PROMPTS[4], max_new_tokens=NEW) for _ in range(4)], session.waiting
        session.step()
        with pytest.raises(ValueError, match="holds rows"):
            gnc.Session.on(engine)
    assert waiting == 4
    assert {r.finish_reason for r in running} == {"cancelled"}
    assert_empty(session)
    session.close()
    assert list(session) == []
    for call in (session.step, lambda: session.add([1], max_new_tokens=1)):
        with pytest.raises(ValueError, match="this session is closed"):
            call()
    other = gnc.Session.on(engine)
    stranger = other.add([1], max_new_tokens=1)
    with gnc.Session.on(engine) as session, pytest.raises(ValueError, match="another session"):
        session.cancel(stranger)
    other.close()
