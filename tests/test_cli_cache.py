"""``gemma-npu cache``: what lies there, whether it serves here, and removal of just that."""

import json
import os
import time

import pytest
import torch

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.cli import main
from gemma_npu_compile.compile_cache import Folder, versions


class Twice(torch.nn.Sequential):
    pass


@pytest.fixture
def folder(monkeypatch, tmp_path, fresh_dynamo) -> Folder:
    """A trace of this version, used an hour ago, one of another, one that is damaged."""
    monkeypatch.setenv("GEMMA_NPU_CACHE", "1")
    monkeypatch.setenv("GEMMA_NPU_CACHE_DIR", str(tmp_path))
    folder = Folder.of_environment()
    with torch.no_grad():
        torch.compile(Twice(torch.nn.Tanh()), backend=Backend(), options={"platform": "cpu"}, dynamic=True)(
            torch.ones(3, 4)
        )
    for entry in folder.entries():
        if entry.header["stage"] == "final":
            (folder.path / f"{entry.key}.json").unlink()
    (path,) = folder.path.iterdir()
    os.utime(path, (time.time() - 3600,) * 2)
    folder.write("a" * 64, {"versions": {**versions(), "torch": "1.0", "sources": "0"}, "module": "Old"}, {})
    folder.write("b" * 64, {}, {})
    (folder.path / f"{'b' * 64}.json").write_text("x")
    return folder


def test_ls_says_what_each_entry_is_and_whether_it_serves_here(folder: Folder, capsys) -> None:
    assert main(["cache", "ls", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    entries = {each["key"][0] if each["key"][1:] == each["key"][:-1] else "own": each for each in answer["entries"]}
    own, old, damaged = entries["own"], entries["a"], entries["b"]
    assert (own["usable"], own["why_not"], own["versions"]) == (True, None, versions())
    assert own["graph"] == {"module": "Twice", "stage": "trace", "nodes": 5, "operators": 1, "inputs": 3, "symbols": 2}
    assert 3600 <= own["age_seconds"] < 3700
    assert (old["usable"], old["why_not"]) == (False, "written by torch 1.0, other sources")
    assert (damaged["usable"], damaged["why_not"]) == (False, "the checksum does not match")
    assert answer["bytes"] == sum(path.stat().st_size for path in folder.path.iterdir())
    assert (answer["path"], answer["limit"], answer["enabled"]) == (str(folder.path), 2**30, True)


def test_ls_for_people(folder: Folder, capsys, monkeypatch) -> None:
    monkeypatch.setenv("GEMMA_NPU_CACHE", "0")
    assert main(["cache", "ls"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{folder.path} (off: GEMMA_NPU_CACHE=0): 3 entries")
    assert "used 1 h ago  Twice, trace, 5 nodes, 3 inputs" in lines[0]
    assert lines[1].endswith("not usable: written by torch 1.0, other sources")


def test_clear_removes_entries_only(folder: Folder, capsys) -> None:
    (folder.path / "notes.txt").write_text("mine")
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out.startswith("removed 3 entries")
    assert os.listdir(folder.path) == ["notes.txt"]
    assert main(["cache", "ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"] == []


def test_mistakes_are_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setenv("GEMMA_NPU_CACHE_SIZE", "lots")
    assert main(["cache", "ls"]) == 2
    assert capsys.readouterr().err == (
        "gemma-npu: GEMMA_NPU_CACHE_SIZE is 'lots', it must be bytes, or a number with K, M or G\n"
    )
