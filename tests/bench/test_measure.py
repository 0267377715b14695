"""Rounds by turns, medians, what may be divided, what counts as a difference: with subjects that measure nothing."""

import pytest
import torch

from gemma_npu_compile.bench.measure import (
    FIELDS,
    Measured,
    Round,
    Unavailable,
    differences,
    hidden_gap,
    prepare,
    ratios,
    run_rounds,
)


class Fake:
    """Takes the times it is given, round by round."""

    def __init__(self, name, log, rounds, compile_s=None, tokens=((1, 2),)):
        self.name, self.log, self.rounds, self.compile_s = name, log, iter(rounds), compile_s
        self.tokens = [list(row) for row in tokens]

    def first(self):
        return self.compile_s

    def round(self):
        self.log.append(self.name)
        seconds = next(self.rounds)
        return Round(list(seconds), self.tokens, counted=6)

    def facts(self):
        return {"capture_s": 0.5} if self.name == "ours" else {}


def failing(error):
    def make():
        raise error

    return make


def test_rounds_alternate_and_the_first_place_moves_on():
    log: list[str] = []
    times = [(0.001,)] * 4
    found = prepare({name: lambda name=name: Fake(name, log, times) for name in ("ours", "eager", "hf_plain")})
    assert log == ["ours", "eager", "hf_plain"]
    del log[:]
    done: list[int] = []
    run_rounds(found, 3, done.append)
    assert log == ["ours", "eager", "hf_plain", "eager", "hf_plain", "ours", "hf_plain", "ours", "eager"]
    assert done == [1, 2, 3]
    assert [len(m.rounds) for m in found.values()] == [3, 3, 3]


def test_figures_are_medians_over_rounds_and_the_untimed_round_is_not_among_them():
    # the untimed one, then rounds of 2, 5 and 3 ms a step; one round has a slow step
    rounds = [(9.0, 9.0), (0.002, 0.002), (0.001, 0.009), (0.003, 0.003)]
    found = prepare({"ours": lambda: Fake("ours", [], rounds, compile_s=4.0)})
    run_rounds(found, 3)
    answer = found["ours"].to_dict()
    assert answer["step_ms"] == pytest.approx(3.0)
    assert answer["tokens_per_second"] == pytest.approx(6 / 0.006)
    assert (answer["compile_s"], answer["capture_s"], answer["available"]) == (4.0, 0.5, True)


def test_a_peer_that_fails_is_a_reason_and_takes_no_part():
    log: list[str] = []
    found = prepare(
        {
            "ours": lambda: Fake("ours", log, [(1.0,)] * 3),
            "inductor": failing(TypeError("no such thing\nand a page more")),
            "hf_assisted": failing(Unavailable("one row only")),
            "hf_plain": failing(KeyError()),
        }
    )
    run_rounds(found, 2)
    assert log == ["ours"] * 3
    assert found["inductor"].reason == "TypeError: no such thing"
    assert found["hf_assisted"].reason == "one row only"
    assert found["hf_plain"].reason == "KeyError: no message"
    answer = found["inductor"].to_dict()
    assert answer["available"] is False
    assert {answer[field] for field in FIELDS} == {None}


def test_ours_must_not_fail():
    with pytest.raises(TypeError, match="broken"):
        prepare({"ours": failing(TypeError("broken"))})


def test_only_rows_of_one_meaning_are_divided():
    peer = {"available": True, "step_ms": 4.0, "tokens_per_second": 50.0, "compile_s": 20.0}
    ours = {"step_ms": 1.0, "tokens_per_second": 100.0, "compile_s": 5.0}
    missing = {"available": False, "step_ms": None, "tokens_per_second": None, "compile_s": None}
    names = ("eager", "inductor", "hf_assisted", "hf_plain")
    found = ratios(ours, dict.fromkeys(names, peer))
    assert found["inductor"] == {"step_ms": 0.25, "compile_s": 0.25, "tokens_per_second": 2.0}
    assert found["eager"] == {"step_ms": 0.25, "compile_s": None, "tokens_per_second": 2.0}
    assert found["hf_assisted"] == found["eager"]
    # a plain step yields one token, ours several
    assert found["hf_plain"] == {"step_ms": None, "compile_s": None, "tokens_per_second": 2.0}
    assert set(ratios(ours, {"inductor": missing})["inductor"].values()) == {None}


def rounds_of(**tokens):
    return {name: Measured(rounds=[Round([1.0], rows, 1) for rows in each]) for name, each in tokens.items()}


def test_every_round_of_every_subject_is_compared_with_the_reference():
    right, late = [[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 6]]
    assert differences(rounds_of(ours=[right], eager=[right, right]), right) == []
    assert differences(rounds_of(ours=[right], eager=[right, late]), right) == [
        "eager: round 1, row 1, token 1 is 6, not 5"
    ]
    assert differences(rounds_of(ours=[late]), right) == ["ours: round 0, row 1, token 1 is 6, not 5"]
    assert differences(rounds_of(ours=[[[1, 2], [4, 5]]]), right) == ["ours: round 0, row 0, token 2 is -1, not 3"]
    # without a reference ours is it
    assert differences(rounds_of(ours=[right], eager=[late]), None) == ["eager: round 0, row 1, token 1 is 6, not 5"]


def test_a_tie_is_excused_where_it_is_and_nowhere_else():
    found = rounds_of(ours=[[[1, 9, 9], [4, 7]]])
    seen = []

    def excused(*place):
        seen.append(place)
        return place == (0, 1, 2, 9)

    assert differences(found, [[1, 2, 3], [4, 5]], excused) == ["ours: round 0, row 1, token 1 is 7, not 5"]
    assert seen == [(0, 1, 2, 9), (1, 1, 5, 7)]


@pytest.mark.parametrize(("change", "equal"), [(0.04, True), (0.06, False), (float("nan"), False)])
def test_hidden_states_are_compared_too(change, equal):
    hidden = torch.tensor([[[2.0, -4.0]]])
    other = hidden.clone()
    other[0, 0, 0] += 4 * change
    found = {
        "ours": Measured(rounds=[Round([1.0], [[1]], 1, hidden=hidden)]),
        "eager": Measured(rounds=[Round([1.0], [[1]], 1, hidden=other)]),
    }
    wrong = differences(found, None)
    assert (wrong == []) is equal
    assert equal or "eager: round 0, hidden states differ by" in wrong[0]
    if change == change:
        assert hidden_gap(found) == pytest.approx(change)


def test_memory_of_a_subject_is_what_it_added_at_its_fullest(monkeypatch):
    from gemma_npu_compile.bench import measure

    now = iter([100.0, 100.0, 150.0, 130.0, 200.0])  # before all; before and at the peak of each
    monkeypatch.setattr(measure, "resident_mb", lambda peak=False: next(now))
    monkeypatch.setattr(measure, "forget_peak", lambda: True)
    found = prepare({name: lambda name=name: Fake(name, [], [(1.0,)]) for name in ("ours", "eager")})
    assert [m.peak_rss_mb for m in found.values()] == [150.0, 170.0]
