"""The command: scenarios and peers by name, the JSON a run gives, its exit code, its table of targets."""

import json

import pytest

from gemma_npu_compile.bench import restart, scenarios
from gemma_npu_compile.bench import run as bench_run
from gemma_npu_compile.bench.machine import Rates
from gemma_npu_compile.bench.measure import FIELDS, Round, Unavailable
from gemma_npu_compile.bench.targets import check
from gemma_npu_compile.cli import main

STEADY = {"allocations": 0, "recompiles": 0, "stable_bytes": 512, "memory_ratio": 1.0, "task_updates": 0}


class Fake:
    """Takes ``milliseconds`` a step and gives ``tokens``."""

    def __init__(self, work, milliseconds, steps, compile_s=None, change=False):
        self.work, self.milliseconds, self.steps, self.compile_s, self.change = (
            work,
            milliseconds,
            steps,
            compile_s,
            change,
        )

    def first(self):
        return self.compile_s

    def round(self):
        tokens = [[1, 2, 3 + self.change], *[[1, 2, 3]] * (self.work.batch - 1)]
        lengths = [[10 + i] * self.work.batch for i in range(self.steps)]
        return Round([self.milliseconds / 1e3] * self.steps, tokens, 2 * self.work.batch, lengths)

    def facts(self):
        return {"capture_s": 1.5, "host_overhead_us": 100.0, "steady": STEADY} if self.compile_s == 2.0 else {}


@pytest.fixture
def fakes(monkeypatch, pair):
    """A run without models that run: what each subject takes is given, and so is the machine."""

    def install(change=None):
        def makers(work, peers, platform):
            assert platform == "cpu"

            def unavailable():
                raise Unavailable("transformers' assisted generation takes one row")

            every = {
                "ours": lambda: Fake(work, 2.0, 1, compile_s=2.0, change=change == "ours"),
                "eager": lambda: Fake(work, 8.0, 1, change=change == "eager"),
                "inductor": lambda: Fake(work, 4.0, 1, compile_s=10.0),
                "hf_assisted": (lambda: Fake(work, 16.0, 1)) if work.batch == 1 else unavailable,
                "hf_plain": lambda: Fake(work, 5.0, 2),
            }
            return {name: make for name, make in every.items() if name == "ours" or name in peers}

        tokenizer = lambda text: {"input_ids": [1] * 10}  # noqa: E731
        monkeypatch.setattr(scenarios, "load", lambda name: (*pair, tokenizer))
        monkeypatch.setattr(bench_run, "makers", makers)
        monkeypatch.setattr(bench_run, "_warm_compilers", lambda peers, platform: None)
        monkeypatch.setattr(bench_run, "plain_greedy", lambda model, prompt, new, eos, pad: [1, 2, 3])
        monkeypatch.setattr(bench_run, "is_tie", lambda model, prefix, tokens: False)
        monkeypatch.setattr(bench_run, "rates", lambda *scenario: Rates(20.0, 16.0, 5.0, 8.0, 3.0, 4.0, 50.0))
        monkeypatch.setattr(restart, "restart", lambda *scenario: {"first_s": 8.0, "second_s": 2.0, "ratio": 0.25})

    eos, tokens = pair[0].generation_config.eos_token_id, pair[1].generation_config.to_dict()
    yield install
    pair[0].generation_config.eos_token_id = eos
    pair[1].generation_config.update(**tokens)


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(["bench", *arguments])
    except SystemExit as exit_:
        code = exit_.code
    return code, *capsys.readouterr()


def test_the_json_of_a_run(fakes, capsys):
    fakes()
    code, out, _ = call(capsys, "--json")
    assert (code, out.count("\n")) == (0, 1)
    answer = json.loads(out)
    assert answer["platform"] == "cpu"
    assert {"processor", "cpus", "threads", "torch", "transformers"} <= set(answer["machine"])
    (entry,) = answer["scenarios"]
    assert (entry["name"], entry["batch"], entry["context"], entry["rounds"]) == ("tiny-b1", 1, 10, 7)
    assert (entry["tokens_equal"], entry["differences"], entry["hidden_gap"]) == (True, [], None)
    ours = entry["ours"]
    assert set(FIELDS) <= set(ours)
    assert (ours["step_ms"], ours["tokens_per_second"]) == (pytest.approx(2.0), pytest.approx(1000.0))
    assert (ours["compile_s"], ours["capture_s"], ours["host_overhead_us"]) == (2.0, 1.5, 100.0)
    assert list(entry["peers"]) == ["eager", "inductor", "hf_assisted", "hf_plain"]
    for peer in entry["peers"].values():
        assert {"available", "reason", *FIELDS} <= set(peer)
        assert (peer["available"], peer["reason"]) == (True, None)
    assert entry["ratios"] == {
        "eager": {"step_ms": pytest.approx(0.25), "compile_s": None, "tokens_per_second": pytest.approx(4.0)},
        "inductor": {"step_ms": pytest.approx(0.5), "compile_s": 0.2, "tokens_per_second": pytest.approx(2.0)},
        "hf_assisted": {"step_ms": pytest.approx(0.125), "compile_s": None, "tokens_per_second": pytest.approx(8.0)},
        "hf_plain": {"step_ms": None, "compile_s": None, "tokens_per_second": pytest.approx(5.0)},
    }
    roof = entry["roofline"]
    assert roof["copy_gbps"] == 20.0
    assert roof["fraction"] == pytest.approx(roof["bytes_per_step"] / 0.002 / 20e9)


def test_a_second_process_is_measured_when_it_is_asked_for(fakes, capsys):
    fakes()
    for flags, expected in ((["--restart"], (0.25, True)), ([], (None, None))):
        code, out, _ = call(capsys, "--scenario", "tiny-b1", "--json", *flags)
        assert code == 0
        (line,) = [each for each in json.loads(out)["targets"] if each["what"] == "behind Dynamo, second process"]
        assert (line["measured"], line["met"]) == expected
    code, out, _ = call(capsys, "--scenario", "tiny-b1", "--restart")
    assert "behind Dynamo 8.00 s, in a second process 2.00 s: 0.25" in out


@pytest.mark.parametrize("who", ["eager", "ours"])
def test_another_token_fails_the_run(fakes, capsys, who):
    fakes(change=who)
    code, out, _ = call(capsys, "--scenario", "tiny-b4", "--json")
    (entry,) = json.loads(out)["scenarios"]
    assert (code, entry["tokens_equal"]) == (1, False)
    assert entry["differences"][0] == f"{who}: round 0, row 0, token 2 is 4, not 3"
    assert entry["peers"]["hf_assisted"]["reason"] == "transformers' assisted generation takes one row"
    assert entry["ratios"]["hf_assisted"]["step_ms"] is None


def test_the_page_of_a_run(fakes, capsys):
    fakes()
    code, out, _ = call(capsys, "--scenario", "tiny", "--peers", "eager,hf_assisted", "--rounds", "8")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith("tiny-")] == [
        "tiny-b1",
        "tiny-b4",
        "tiny-b8",
    ]
    assert "1 rows, 10 tokens in the cache, tokens equal" in out
    assert "takes one row" in out
    rows = [" ".join(line.split()) for line in out.splitlines() if line.startswith("step against")]
    assert "step against eager tiny-b1 <= 0.25 0.25 yes" in rows
    assert "step against HF assisted tiny-b1 <= 0.15 0.125 yes" in rows
    assert "step against Inductor tiny-b1 <= 0.6 - not measured" in rows
    assert "step against eager medium-c512 <= 0.7 - not measured" in rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--scenario", "medum"), "did you mean 'medium'?"),
        (("--scenario", "tiny-b2"), "--scenario is 'tiny-b2'"),
        (("--peers", "eger"), "did you mean 'eager'?"),
        (("--rounds", "6"), "--rounds is 6, a median needs at least 7"),
        (("--rounds", "0"), "'0' is not a positive integer"),
        (("--bandwidth", "100"), "--bandwidth: only with --estimate"),
        (("--estimate", "--restart", "--shapes", "e2b"), "--restart and --estimate: give one of them"),
        (("--estimate", "--task-us", "-1", "--shapes", "e2b"), "'-1' is not a positive number"),
    ],
)
def test_refusals(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(scenarios, "load", lambda name: pytest.fail("nothing is loaded"))
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_groups_and_names_are_each_run_once_in_the_order_of_their_mention():
    names = [s.name for s in scenarios.select(["medium-b8-c512", "tiny", "tiny-b4", "medium"])]
    assert names[:4] == ["medium-b8-c512", "tiny-b1", "tiny-b4", "tiny-b8"]
    assert sorted(names[4:]) == sorted(
        f"medium-b{b}-c{c}" for b in (1, 8) for c in (512, 4096, 16384) if (b, c) != (8, 512)
    )
    assert [s.name for s in scenarios.select([])] == ["tiny-b1"]


def entry(name, **changes):
    ours = {"step_ms": 10.0, "capture_s": 5.0, "host_overhead_us": 400.0, "steady": STEADY}
    roof = {"fraction": 0.7, "predicted_over_measured": 1.3}
    return {"name": name, "ours": ours, "roofline": roof, "ratios": {"inductor": {"step_ms": 0.4}}, **changes}


def test_targets_speak_of_the_scenarios_they_name():
    lines = check([entry("medium-b1-c512"), entry("medium-b8-c16384")])
    met = {(line["what"], line["scenario"]): (line["measured"], line["met"]) for line in lines}
    assert met["step against Inductor", "medium-b1-c512"] == (0.4, True)
    assert met["step against Inductor, unclipped", "medium-b8-c16384"] == (0.4, False)
    assert met["passes, lowering, capture (s)", "medium-b1-c512"] == (5.0, True)
    assert met["passes, lowering, capture (s)", "tiny"] == (None, None)
    assert met["host overhead of the step", "medium-b1-c512"] == (pytest.approx(0.04), True)
    assert met["fraction of the copy bandwidth", "medium-b1-c512"] == (0.7, False)
    assert met["cost model, off by", "medium-b1-c512"] == (pytest.approx(0.3), False)
    assert met["bytes into stable buffers", "medium-b8-c16384"] == (512, True)
    assert met["step against eager", "medium-b1-c512"] == (None, None)
    assert ("fraction of the copy bandwidth", "medium-b8-c16384") not in met
