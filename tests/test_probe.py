"""``gemma-npu probe`` where there is no NPU: how it asks, what answers become, and that it says so without one."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemma_npu_compile.capabilities import platform
from gemma_npu_compile.cli import main
from gemma_npu_compile.probe import ProbeError, ask
from gemma_npu_compile.probe_findings import BLOCK_SIZE, Answer, Findings, Question, questions

A2 = platform("ascend910b")
ASKED = questions(A2)

CHILD = """
import json, os, signal, sys, time
asked = json.load(sys.stdin)["questions"]
out = os.fdopen(int(sys.argv[1]), "w")
def say(**line):
    print(json.dumps(line), file=out, flush=True)
with open(__file__ + ".starts", "a") as starts:
    starts.write("x")
say(ready=True)
for index, question in asked:
    say(begin=index)
    if question == "hang":
        time.sleep(600)
    if question == "crash":
        print("the driver is unhappy", file=sys.stderr, flush=True)
        out.write('{"answ')
        out.flush()
        os.kill(os.getpid(), signal.SIGSEGV)
    say(answer=index, error=question)
    if question == "spoils the context":
        sys.exit(1)
"""


def child(tmp_path, source: str = CHILD) -> list[str]:
    path = tmp_path / "child.py"
    path.write_text(source)
    return [sys.executable, str(path)]


def test_a_hang_and_a_crash_are_answers_and_cost_only_themselves(tmp_path):
    payload = ["", "hang", "561002", "crash", "spoils the context", "", "hang"]
    progress: list[str] = []
    found = ask(payload, "npu", 1.0, child(tmp_path), progress.append)
    assert [found[i] for i in (0, 2, 4, 5)] == ["", "561002", "spoils the context", ""]
    assert found[1] == found[6] == "no answer within 1 s"
    assert found[3].startswith("the process died (signal SIGSEGV): ")
    assert "the driver is unhappy" in found[3]
    assert (tmp_path / "child.py.starts").read_text() == "xxxx", "started anew behind what ended it, and only then"
    assert progress[-1] == "6 of 7"


def test_a_device_that_goes_away_leaves_the_rest_untried(tmp_path):
    gone = CHILD.replace("say(ready=True)", "say(ready=os.path.getsize(__file__ + '.starts') == 1)")
    gone = gone.replace("for index", "for index", 1).replace(
        "say(begin=index)", "if os.path.getsize(__file__ + '.starts') > 1: sys.exit(3)\n    say(begin=index)"
    )
    assert ask(["", "crash", "", ""], "npu", 5.0, child(tmp_path, gone), print).keys() == {0, 1}
    with pytest.raises(ProbeError, match=r"does not start \(exit code 1\): .*ModuleNotFoundError"):
        ask([""], "npu", 5.0, child(tmp_path, "import no_such_module"), print)


def answers(refused: set[Question]) -> dict[Question, Answer]:
    return {each: Answer("", "561002: no" if each in refused else "") for each in ASKED}


@given(st.sets(st.sampled_from(ASKED), max_size=12))
def test_the_file_says_what_the_device_said(tmp_path_factory, changed):
    """Wherever the table is wrong, either way; and nothing that was refused is ever called legal."""
    refused = {each for each in ASKED if each.expected(A2) == (each in changed)}
    findings = Findings(A2, answers(refused), {"soc": "Ascend910B3"})
    assert set(findings.differences) == changed
    path = tmp_path_factory.mktemp("probe") / "capabilities.json"
    findings.write(path)
    overridden = platform("ascend910b", path)
    for each in ASKED:
        legal = each.expected(overridden)
        assert not (legal and each in refused), each
        if each.attention is not None and each.attention.block_size in (None, BLOCK_SIZE):
            assert legal == (each not in refused), each
    assert [each.name for each in path.parent.iterdir()] == ["capabilities.json"]


def test_a_missing_operator_is_not_lowered_to(tmp_path):
    missing = {each for each in ASKED if each.operator == "npu_geglu"}
    refused = missing | {each for each in ASKED if not each.expected(A2)}
    findings = Findings(A2, answers(refused), {"soc": "Ascend910B3", "cann": "8.5.0"})
    findings.write(tmp_path / "capabilities.json")
    data = json.loads((tmp_path / "capabilities.json").read_text())
    source = "gemma-npu probe, soc Ascend910B3, cann 8.5.0"
    expected = {"name": "npu_geglu", "source": source, "legal": False, "error": "captured: 561002: no"}
    assert (data["attention"], data["operators"]) == ([], [expected])
    assert len(data["probe"]["answers"]) == len(ASKED)
    verdict = platform("ascend910b", tmp_path / "capabilities.json").operator("npu_geglu", 64)
    assert (verdict.legal, verdict.rule, verdict.source) == (False, "captured: 561002: no", source)


def test_what_was_not_tried_is_no_finding():
    half = Findings(A2, {each: Answer("", None) for each in ASKED})
    assert half.differences == []
    assert len(half.untried) == len(ASKED)
    assert half.overrides()["attention"] == []


def test_without_an_npu_it_says_so(tmp_path, capsys):
    assert main(["probe", "--out", str(tmp_path / "capabilities.json")]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "gemma-npu: probe asks an NPU what it can do, torch finds none here\n")
    assert list(tmp_path.iterdir()) == []
