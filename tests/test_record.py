"""``options={"record": FILE}``: what the file holds, and that a step can be run again from it."""

import json

import pytest
import torch

from gemma_npu_compile.check_step import trace
from gemma_npu_compile.engine import Engine
from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.graphs.recorder import KEPT
from gemma_npu_compile.options import Options
from gemma_npu_compile.record import cache_like, read
from gemma_npu_compile.step import DraftVerifyStep


@pytest.fixture(scope="module")
def recorded(pair, tmp_path_factory):
    """A record of more steps than it keeps; the last one failed."""
    path = tmp_path_factory.mktemp("record") / "steps.json"
    engine = Engine(*pair, 1, max_rows=3, max_model_len=256, options=Options(record=str(path)))
    state = engine.prefill([torch.arange(139) % 127 + 1, torch.arange(1, 7)])
    states = []
    for _ in range(KEPT + 3):
        states.append((state.token.tolist(), list(state.lengths), engine.cache.block_tables(state.rows)))
        state = engine.decode(state)[0]
    token, hidden, seq_len, tables = state.token, state.hidden, state.seq_len, engine.cache.block_tables(state.rows)
    run = engine._run("greedy")
    (runner,) = run.backend._runners
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(runner), "_run", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            run.call(token, hidden, seq_len, tables, host_len=torch.tensor(state.lengths, dtype=torch.int32))
    states.append((token.tolist(), list(state.lengths), tables))
    return path, states, engine


def test_a_failing_call_is_the_last_of_the_steps_kept(recorded):
    path, states, _ = recorded
    steps = [each.state for each in read(path)]
    assert len(steps) == KEPT
    for step, (tokens, lengths, tables) in zip(steps, states[-KEPT:], strict=True):
        assert step.tokens.tolist() == tokens
        assert step.lengths == lengths
        assert all(torch.equal(a, b) for a, b in zip(step.tables, tables, strict=True))


def test_it_holds_small_integers_only(recorded):
    record = json.loads(recorded[0].read_text())
    assert {each["role"] for step in record["steps"] for each in step} == {"token", "lengths", "block_table"}

    def leaves(values):
        return [x for each in values for x in leaves(each)] if isinstance(values, list) else [values]

    numbers = [x for step in record["steps"] for each in step for x in leaves(each["values"])]
    assert {type(x) for x in numbers} == {int}
    assert len(numbers) < KEPT * 40
    assert [p.name for p in recorded[0].parent.iterdir()] == ["steps.json"]  # no half-written file


def test_the_step_runs_again_in_a_cache_of_the_same_geometry(recorded, pair):
    path, _, engine = recorded
    last = read(path)[-1]
    cache = cache_like(last, pair[0])
    assert [g.block_size for g in cache.groups] == [g.block_size for g in engine.cache.groups]
    assert [t.shape[1] for t in cache.padding_tables] == [t.shape[1] for t in engine.cache.padding_tables]
    highest = [int(table.max()) for table in last.state.tables]
    assert all(top < group.num_blocks for top, group in zip(highest, cache.groups, strict=True))
    checker, start = trace(DraftVerifyStep(*pair, cache, 1), last.state, Options())
    assert start.fault is None
    assert checker.run().fault is None


def test_another_models_record_is_refused(recorded, make_pair):
    with pytest.raises(ValueError, match="was recorded with a cache of"):
        cache_like(read(recorded[0])[-1], make_pair(head_dim=32)[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "not JSON"),
        ("[]", "not a record"),
        ('{"format": "gemma_npu record 1", "steps": []}', "not a record with steps"),
        ('{"format": "gemma_npu record 1", "caches": {}, "steps": [[]]}', "not a record of a draft-plus-verify step"),
    ],
)
def test_a_file_that_is_no_record_is_named(tmp_path, text, message):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)
    with pytest.raises(ValueError, match="no such file"):
        read(tmp_path / "nothing.json")


def test_a_record_without_a_directory_is_refused_at_once(tmp_path):
    with pytest.raises(CompileError, match="there is no directory"):
        Options(record=str(tmp_path / "nowhere" / "r.json"))
