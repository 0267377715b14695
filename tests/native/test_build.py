"""Building the library: once per machine, never half, and a reason where it cannot be had."""

import concurrent.futures
import subprocess
import sys

import pytest
import torch
from torch import nn

import gemma_npu_compile as gnc
from gemma_npu_compile.backend import Backend
from gemma_npu_compile.native import build


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gemma_npu_compile" / "native"


def _compiler(folder, body: str) -> str:
    """A compiler that answers ``--version`` and then does what ``body`` says."""
    path = folder / "cxx"
    path.write_text(f'#!/bin/sh\ncase "$*" in *--version*) echo 1; exit 0;; esac\n{body}\n')
    path.chmod(0o755)
    return str(path)


def test_two_processes_build_once_each_and_keep_one_file(cache, tmp_path, monkeypatch):
    log = tmp_path / "log"
    copy = 'while [ "$1" != -o ]; do shift; done; echo built >> ' + str(log) + '; sleep 0.2; echo library > "$2"'
    monkeypatch.setenv("CXX", _compiler(tmp_path, copy))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: build.build(), range(2))
    assert first == second
    assert [each.name for each in cache.iterdir()] == [first.name]
    assert build.build() == first
    assert log.read_text().count("built") <= 2


def test_source_compiler_and_flags_are_the_key(cache, tmp_path, monkeypatch):
    copy = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'
    monkeypatch.setenv("CXX", _compiler(tmp_path, copy))
    paths = {build.build()}
    monkeypatch.setenv("CXX", f"{_compiler(tmp_path, copy)} -DOTHER")
    paths.add(build.build())
    monkeypatch.setattr(build, "FLAGS", build.FLAGS[:-1])
    paths.add(build.build())
    source = tmp_path / "other.cpp"
    source.write_text("// other")
    monkeypatch.setattr(build, "SOURCE", source)
    paths.add(build.build())
    assert len(paths) == 4


def test_reasons(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    with pytest.raises(build.NoKernelsError, match=r"missing failed: .*No such file"):
        build.build()
    monkeypatch.setenv("CXX", _compiler(tmp_path, "echo 'kernels.cpp:1: error: no' >&2; exit 3"))
    with pytest.raises(build.NoKernelsError, match=r"cxx failed with exit code 3: kernels\.cpp:1: error: no"):
        build.build()
    assert not list(cache.iterdir()), "nothing half-built stays"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(build.NoKernelsError, match=r"no C\+\+ compiler was found"):
        build.build()
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("CXX", _compiler(tmp_path, "exit 0"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(build.NoKernelsError, match="cannot be written"):
        build.build()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gnc.ops.rms_norm(self.linear(x))


@torch.no_grad()
def test_without_a_compiler_the_graph_runs_on_aten_and_says_why(monkeypatch, fresh_dynamo):
    from gemma_npu_compile.passes import lower_native as module

    def missing():
        raise build.NoKernelsError("no C++ compiler was found")

    reports = []
    model, x = Small(), torch.randn(3, 16)
    expected = model(x)
    run = torch.compile(model, backend=Backend(reports.append), options={"platform": "cpu"})
    monkeypatch.setattr(module, "library", missing)
    torch.testing.assert_close(run(x), expected)
    record = next(each for each in reports[0].passes if each.name == "lower_native")
    assert (record.changed, dict(record.left)) == (0, {"no C++ compiler was found": 1})
    monkeypatch.undo()
    torch._dynamo.reset()
    run = torch.compile(model, backend=Backend(reports.append), options={"platform": "cpu"})
    torch.testing.assert_close(run(x), expected)
    record = next(each for each in reports[1].passes if each.name == "lower_native")
    assert (record.changed, dict(record.left)) == (2, {})


def test_a_child_of_a_fork_has_threads_of_its_own():
    program = """
import os, torch
import gemma_npu_compile.ops.native
torch.set_num_threads(2)
x, w = torch.ones(2, 64), torch.ones(5, 64)
expected = torch.ops.gemma_npu_cpu.linear(x, w)
child = os.fork()
if not child:
    os._exit(0 if torch.equal(torch.ops.gemma_npu_cpu.linear(x, w), expected) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
