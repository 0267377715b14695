"""The best candidate is the token an argmax over the whole vocabulary gives, ties included."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.passes.candidate_argmax import candidate_argmax

aten = torch.ops.aten
VOCAB = 40


def choose(ids, scores):
    """What transformers' masked embedder and a greedy choice do."""
    background = (scores.min() - 1.0).expand(ids.shape[0], 1, VOCAB).clone()
    return background.scatter(-1, ids, scores)[:, 0].argmax(-1)


def inputs(rows: int, count: int, levels: int, seed: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:count] for _ in range(rows)])[:, None]
    scores = torch.randint(-levels, levels + 1, (rows, 1, count), generator=generator).to(dtype)
    return ids, scores


@given(st.integers(1, 5), st.integers(1, 30), st.integers(0, 4), st.integers(0, 10**6), st.booleans())
def test_same_token_with_ties(rows, count, levels, seed, half):
    ids, scores = inputs(rows, count, levels, seed, torch.bfloat16 if half else torch.float32)
    gm = make_fx(choose, tracing_mode="fake")(ids, scores)
    expected = gm(ids, scores)
    assert candidate_argmax(gm).changed == 1
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(gm(ids, scores), expected)
    assert not gm.graph.find_nodes(op="call_function", target=aten.scatter.src)
    assert candidate_argmax(gm).changed == 0


def test_logits_that_are_returned_stay():
    def both(ids, scores):
        background = (scores.min() - 1.0).expand(ids.shape[0], 1, VOCAB).clone()
        logits = background.scatter(-1, ids, scores)
        return logits, logits[:, 0].argmax(-1)

    args = inputs(3, 8, 2, 0)
    gm = make_fx(both, tracing_mode="fake")(*args)
    expected = gm(*args)
    assert candidate_argmax(gm).changed == 1
    gm.recompile()
    assert all(torch.equal(a, b) for a, b in zip(gm(*args), expected, strict=True))


def test_what_is_left_and_why():
    args = inputs(3, 8, 2, 0)

    def computed(ids, scores):
        return torch.randn(3, 1, VOCAB).mul(2.0).scatter(-1, ids, scores)[:, 0].argmax(-1)

    def over_rows(ids, scores):
        return torch.full((3, 1, VOCAB), -torch.inf).scatter(-1, ids, scores)[:, 0].argmax(0)

    def over_zeros(ids, scores):
        return torch.full((3, 1, VOCAB), 0.0).scatter(-1, ids, scores)[:, 0].argmax(-1)

    lower = "values that need not be lower"
    for fn, reason in ((computed, lower), (over_zeros, lower), (over_rows, "not over the vocabulary")):
        result = candidate_argmax(make_fx(fn, tracing_mode="fake")(*args))
        assert result.changed == 0
        assert [r for r in result.left if reason in r]
    assert candidate_argmax(make_fx(lambda x: x.argmax(-1), tracing_mode="fake")(args[1])).left == {}
