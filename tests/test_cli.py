"""The command line: exit codes, one line per mistake, JSON that is only JSON. Pairs are random and small."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gemma_npu_compile import __version__
from gemma_npu_compile.cli import main


@pytest.fixture(scope="module")
def directories(make_pair, tmp_path_factory) -> tuple[str, str]:
    """A saved pair with a tokenizer of single characters."""
    target, assistant = make_pair()
    root = tmp_path_factory.mktemp("pair")
    target.save_pretrained(root / "target")
    assistant.save_pretrained(root / "assistant")
    vocabulary = {chr(i): i for i in range(128)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(root / "target")
    return str(root / "target"), str(root / "assistant")


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    return code, out, err


def pair(directories, *arguments: str) -> list[str]:
    return [*arguments, "--model", directories[0], "--assistant", directories[1], "--num-draft-tokens", "1"]


@pytest.mark.slow
def test_run_verifies_and_prints_json(directories, capsys):
    arguments = pair(directories, "run", "--prompt", "ab", "--prompt", "hello", "--max-new-tokens", "20")
    code, out, err = call(capsys, *arguments, "--verify", "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert out.count("\n") == 1
    assert [o["prompt"] for o in answer["outputs"]] == ["ab", "hello"]
    assert all(len(o["token_ids"]) == 20 for o in answer["outputs"])
    assert (answer["verified"], answer["ties"], answer["platform"], answer["dtype"]) == (
        True,
        0,
        "ascend910b",
        "float32",
    )
    assert answer["graphs"]["replays"] > 0
    assert (answer["graphs"]["fallbacks"], answer["graphs"]["recompiles"]) == ({}, 0)
    assert answer["acceptance"]["drafts"] > 0
    assert answer["tokens_per_second"] > 0
    assert answer["step_ms"] > 0

    code, out, _ = call(capsys, *arguments, "--eager", "--json")
    eager = json.loads(out)
    assert code == 0
    assert (eager["graphs"]["captures"], eager["graphs"]["replays"], eager["verified"]) == (0, 0, None)
    assert [o["token_ids"] for o in eager["outputs"]] == [o["token_ids"] for o in answer["outputs"]]
    assert eager["acceptance"] == answer["acceptance"]

    code, out, _ = call(capsys, *arguments)
    assert code == 0
    assert "% by position" in out


def test_run_says_no_when_tokens_differ(directories, capsys, monkeypatch):
    from gemma_npu_compile import verify

    monkeypatch.setattr(verify, "plain_greedy", lambda model, prompt, n, eos, pad: [1] * n)
    monkeypatch.setattr(verify, "is_tie", lambda model, prefix, tokens: False)
    code, out, _ = call(
        capsys, *pair(directories, "run", "--prompt", "a", "--max-new-tokens", "3", "--verify", "--json")
    )
    assert code == 1
    assert json.loads(out)["verified"] is False


def test_acceptance_counts_requests(directories, capsys, tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "abc"}\n\n{"question": "x", "other": 1}\n{"question": "hello"}\n')
    options = ("--prompts", str(questions), "--repeats", "2", "--batch", "4", "--max-new-tokens", "10", "--json")
    code, out, _ = call(capsys, *pair(directories, "acceptance", *options))
    answer = json.loads(out)
    assert code == 0
    assert (answer["requests"], answer["mode"]) == (6, "captured")
    accepted = answer["acceptance"]
    assert accepted["rate_per_pos"] == [accepted["accepted_per_pos"][0] / accepted["drafts"]]
    assert accepted["aggregate"] == accepted["accepted_per_step"] == accepted["rate_per_pos"][0]


@pytest.mark.slow
def test_explain_and_dump(directories, capsys, tmp_path):
    code, out, _ = call(capsys, *pair(directories, "explain"))
    assert code == 0
    assert "attention draft.0/assistant.layers.1: BNSD, head size 32" in out

    folder = tmp_path / "dump"
    code, _, _ = call(capsys, *pair(directories, "dump", "--out", str(folder)))
    assert code == 0
    assert {p.name for p in folder.iterdir()} == {"graphs", "index.html", "index.md", "plan.json"}
    files = sorted(p.name for p in (folder / "graphs" / "0").iterdir())
    assert files[:2] == ["00_traced.py", "01_keep_writes_in_place.py"]
    assert files[-1].endswith("fold_views.py")
    (graph,) = json.loads((folder / "plan.json").read_text())["graphs"]
    assert [(a["phase"], a["layer"], a["layout"], a["group"]) for a in graph["attention"]] == [
        ("draft.0", "assistant.layers.0", "BNSD", "g0"),
        ("draft.0", "assistant.layers.1", "BNSD", "g1"),
        ("verify", "target.layers.0", "BNSD", "g0"),
        ("verify", "target.layers.1", "BNSD", "g1"),
    ]
    assert graph["sizes"] == [1, 2, 4]
    assert len(graph["passes"]) == len(files) - 1
    roles = {i["role"] for i in graph["inputs"]}
    assert {"cache", "block_table", "lengths", "token", "parameter"} <= roles
    assert "npu_scatter_pa_kv_cache" in (folder / "graphs" / "0" / files[-1]).read_text()
    assert "gemma_npu.store_kv" in (folder / "graphs" / "0" / files[0]).read_text()

    note = folder / "note.txt"
    note.write_text("mine")
    code, _, err = call(capsys, *pair(directories, "dump", "--out", str(folder)))
    assert code == 2
    assert "is not empty" in err
    code, _, _ = call(capsys, *pair(directories, "dump", "--out", str(folder), "--force"))
    assert code == 0
    assert note.read_text() == "mine"
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".dump-")] == []


def test_env_and_version(capsys):
    code, out, _ = call(capsys, "env", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["torch"] == torch.__version__.split("+")[0] or answer["torch"] == torch.__version__
    assert answer["gemma_npu_compile"] == __version__
    assert answer["devices"] == ["cpu"]
    code, out, _ = call(capsys, "--version")
    assert (code, out) == (0, f"gemma-npu {__version__}\n")


MISTAKES = [
    (["run", "--max-new-tokens", "0"], "'0' is not a positive integer"),
    (["run", "--platform", "ascend910"], "invalid choice: 'ascend910'"),
    (["run", "--model", "/nowhere"], "/nowhere is not a model directory"),
    (["run", "--device", "npu"], "device is 'npu'"),
    (["run", "--verify", "--eager", "--dtype", "bfloat16"], "leave one out"),
    (["run", "--prompt", ""], "has no tokens"),
    (["run", "--chat"], "has no chat template"),
    (["run", "--num-draft-tokens", "17"], "num_draft_tokens is 17"),
    (["acceptance", "--prompts", "/nowhere.jsonl"], "/nowhere.jsonl: No such file"),
    (["frobnicate"], "invalid choice: 'frobnicate'"),
    ([], "required: COMMAND"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_2(directories, capsys, arguments, message):
    if arguments and arguments[0] == "run":
        models = [] if "--model" in arguments else ["--model", directories[0]]
        arguments = [*arguments, *models, "--assistant", directories[1]]
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", ":1: a line must be a JSON object"),
        ('{"question": ""}', ":1: question is ''"),
        ("", "no questions"),
    ],
)
def test_a_bad_question_file_names_its_line(capsys, tmp_path, line, message):
    path = tmp_path / "q.jsonl"
    path.write_text(line + "\n")
    code, _, err = call(capsys, "acceptance", "--prompts", str(path))
    assert code == 2
    assert message in err
