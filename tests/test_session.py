"""Session: requests join and leave, and each one's tokens are those of plain greedy decoding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gemma_npu_compile as gnc
from gemma_npu_compile.verify import plain_greedy, verify

SMALL = {"max_model_len": 128, "block_size": 16, "prefill_chunk": 32}
NEW = 44
PROMPTS = [torch.randint(1, 128, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 2, 9, 33, 70)]


@pytest.fixture(scope="module")
def references(pair):
    """What the target says after each prompt, by transformers alone."""
    return [plain_greedy(pair[0], prompt, NEW, [], 0) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def engine(pair):
    """Three rows, and blocks for hardly two long requests; shared, since every session must leave it empty."""
    blocks = {"sliding_attention": 24, "full_attention": 18}
    return gnc.Engine(*pair, 1, max_rows=3, num_blocks=blocks, options=gnc.Options(platform="cpu"), **SMALL)


@pytest.fixture(scope="module", params=[False, True], ids=["reads_at_once", "reads_a_step_late"])
def session(engine, request):
    with gnc.Session.on(engine, asynchronous=request.param) as session:
        yield session


def assert_empty(session) -> None:
    """Every row, block and reservation came back."""
    cache = session.engine.cache
    assert (session.waiting, session.running, cache.rows) == (0, 0, ())
    assert [cache.free_blocks(g.index) for g in cache.groups] == [g.num_blocks - g.null_blocks for g in cache.groups]
    assert session._reserved == [0, 0]


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
    totals = session.stats.report.totals()
    assert (totals["captures"], totals["recompiles"], totals["fallbacks"]) == (len(totals["sizes"]), 0, {})
    assert totals["sizes"] == [2, 3]
