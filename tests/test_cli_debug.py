"""The debugging commands: programs of a user's own, exit codes and text of ``check`` and ``replay-check``."""

import json

import pytest

from gemma_npu_compile import check_step, replay_check
from gemma_npu_compile.check import Fault, Result
from gemma_npu_compile.cli import main, parser
from gemma_npu_compile.cli.common import resolve
from gemma_npu_compile.replay_check import Violation

PROGRAM = """
import sys, torch
print("from the program", sys.argv[1:], __name__)
f = torch.compile(lambda x: x * 2 + 1, backend="gemma_npu", options={"platform": "cpu"})
with torch.no_grad():
    f(torch.ones(3))
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path, fresh_dynamo) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_a_program_is_dumped_with_its_own_arguments(program, tmp_path, capsys):
    out = tmp_path / "d"
    assert main(["dump", "--json", "--out", str(out), "--script", program, "--", "0", "--port", "1"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"out": str(out), "graphs": 1}
    assert "from the program ['0', '--port', '1'] __main__" in printed.err
    plan = json.loads((out / "plan.json").read_text())
    assert plan["about"]["script"] == f"{program} 0 --port 1"
    assert plan["graphs"][0]["replays"] == 1


def test_a_program_that_fails_leaves_its_dump(program, tmp_path, capsys):
    assert main(["dump", "--out", str(tmp_path / "d"), "--script", program, "--", "3"]) == 2
    assert capsys.readouterr().err.endswith(f"gemma-npu: --script {program}: exited with 3\n")
    assert len(json.loads((tmp_path / "d" / "plan.json").read_text())["graphs"]) == 1


def test_a_program_is_explained(program, capsys):
    assert main(["explain", "--script", program, "--json", "--", "0"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["captures"], answer["replays"], len(answer["graphs"])) == (1, 1, 1)


MISTAKES = [
    (["dump", "--out", "{out}", "--script", "/nowhere.py"], "--script /nowhere.py: no such file"),
    (["dump", "--out", "{out}", "--script", "x.py", "--shapes", "e2b"], "give one of them"),
    (["dump", "--out", "{out}", "--fold"], "--fold folds the layers of --shapes"),
    (["dump", "--out", "{out}", "--", "x"], "arguments behind -- belong to --script"),
    (["explain", "--", "x"], "arguments behind -- belong to --script"),
    (["check", "--state", "/nowhere.json"], "--state /nowhere.json: no such file"),
    (["check", "--tolerance", "-1"], "'-1' is not a tolerance"),
    (["check", "--disable-pass", "fold_view"], "did you mean 'fold_views'?"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_2(arguments, message, tmp_path, capsys):
    try:
        code = main([each.format(out=tmp_path / "d") for each in arguments])
    except SystemExit as exit_:
        code = exit_.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_check_says_where_the_numbers_part(monkeypatch, capsys):
    fault = Fault("fuse_rotary", "result 4", float("nan"), "mul_3 (aten.mul.Tensor) at here", ["rotary_1 (new)"])
    result = Result({"trace": 0.0, "fuse_rotary": float("nan")}, fault)
    seen = {}
    monkeypatch.setattr(check_step, "check_step", lambda step, state, options, **given: seen.update(given) or result)
    arguments = ["check", "--lengths", "5", "9", "--bisect", "--tolerance", "0.5"]
    assert main([*arguments, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["equal"], answer["rows"], answer["fault"]["stage"], answer["fault"]["error"]) == (
        False,
        2,
        "fuse_rotary",
        "nan",
    )
    assert (seen["bisect"], seen["tolerance"]) == (True, 0.5)
    assert main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [
        "the numbers part at fuse_rotary: result 4 (largest difference nan)",
        "first node: mul_3 (aten.mul.Tensor) at here",
        "made by fuse_rotary: rotary_1 (new)",
    ]
    result.fault = None
    assert main(arguments) == 0
    assert capsys.readouterr().out.endswith("equal at every stage, 1 steps of 2 rows\n")


def test_replay_check_counts_what_does_not_hold(monkeypatch, capsys):
    found = [Violation(1, "stale rows", "args[0]"), Violation(4, "stale rows", "args[0]")]
    monkeypatch.setattr(replay_check.ReplayChecker, "run", lambda self, replays, seed: found)
    assert main(["replay-check", "--replays", "5"]) == 1
    assert capsys.readouterr().out == "stale rows: args[0] (replay 1 and 1 more)\n"
    found.clear()
    assert main(["replay-check", "--replays", "5"]) == 0
    assert capsys.readouterr().out == "every invariant held in 5 replays\n"


def test_shapes_are_traced_in_the_dtype_of_an_npu():
    kinds = {}
    for arguments in ([], ["--shapes", "e2b"], ["--shapes", "e2b", "--dtype", "float16"]):
        args = parser().parse_args(["dump", "--out", "d", *arguments])
        resolve(args)
        kinds[" ".join(arguments)] = args.dtype
    assert list(kinds.values()) == ["float32", "bfloat16", "float16"]
