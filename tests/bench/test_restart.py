"""The second process of a scenario: what is divided by what, and that a cache that was not used is no figure."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from gemma_npu_compile.bench import restart as module


def processes(monkeypatch, *answers):
    """Stands in for the processes; returns what they were started with."""
    started, left = [], iter(answers)

    def run(command, **how):
        started.append((command[1:], how["env"]["GEMMA_NPU_CACHE_DIR"], how["env"]["GEMMA_NPU_CACHE"]))
        return next(left)

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=run))
    return started


def said(cache, *seconds):
    line = json.dumps({"cache": cache, "seconds": dict(zip(("aot", "passes", "capture"), seconds, strict=True))})
    return subprocess.CompletedProcess([], 0, f"something else\n{line}\n", "")


def test_everything_behind_dynamo_is_divided(monkeypatch):
    started = processes(monkeypatch, said("stored", 6.0, 1.0, 1.0), said("hit", 0.5, 1.0, 0.5))
    assert module.restart("tiny-b1", "cpu") == {"first_s": 8.0, "second_s": 2.0, "ratio": 0.25}
    assert [each[0] for each in started] == [["-m", "gemma_npu_compile.bench.restart", "tiny-b1", "cpu"]] * 2
    assert started[0][1:] == started[1][1:], "they share a cache, of their own"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (said("stored", 1.0, 1.0, 1.0), "second_s: the compile cache says 'stored', not 'hit'"),
        (subprocess.CompletedProcess([], 1, "", "Traceback\nKeyError: 1\n"), r"second_s: \['KeyError: 1'\]"),
    ],
)
def test_what_is_no_second_start_is_no_figure(monkeypatch, second, message):
    processes(monkeypatch, said("stored", 6.0, 1.0, 1.0), second)
    with pytest.raises(RuntimeError, match=message):
        module.restart("tiny-b1", "cpu")


@pytest.mark.slow
def test_the_bundled_pair_is_traced_once():
    found = module.restart("tiny-b1", "cpu")
    assert 0 < found["second_s"] < found["first_s"]
