"""Dumps of programs that know nothing of them, of compilations that fail, and what torch's own trace gets."""

import json
import logging
import os
import runpy

import pytest
import torch

from gemma_npu_compile.dump import current, dump_to, folder
from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.passes import PASSES, PassResult

OPTIONS = {"platform": "cpu"}


def program(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh") * x + 1


def compiled(**options):
    return torch.compile(program, backend="gemma_npu", options={**OPTIONS, **options})


@pytest.fixture
def broken(monkeypatch, fresh_dynamo):
    """A pass that refuses every graph with a product."""

    def refuse(gm: torch.fx.GraphModule) -> PassResult:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            raise CompileError(f"planted: {node.name}")
        return PassResult()

    monkeypatch.setitem(PASSES, "remove_no_ops", refuse)


@torch.no_grad()
def test_a_failing_compilation_leaves_a_script_that_repeats_it(broken, tmp_path):
    out = tmp_path / "dump"
    with pytest.raises(CompileError, match="planted: mul") as caught, dump_to(out):
        compiled(skip_softcap=True)(torch.randn(3, 4))
    script = out / "graphs" / "0" / "repro.py"
    assert f"python {script}" in str(caught.value)
    (graph,) = json.loads((out / "plan.json").read_text())["graphs"]
    assert graph["error"] == "planted: mul"
    assert "planted: mul" in (out / "index.html").read_text()
    names = sorted(p.name for p in script.parent.iterdir())
    assert names[0] == "00_traced.py"
    assert names[-1] == "repro.py"
    assert "remove_no_ops" not in "".join(names)  # the graph as far as it came
    text = script.read_text()
    assert "options={'platform': 'cpu', 'skip_softcap': True}" in text
    torch._dynamo.reset()
    with pytest.raises(CompileError, match="planted: mul"):
        runpy.run_path(str(script), run_name="__main__")


@torch.no_grad()
def test_the_script_runs_where_nothing_is_broken(broken, tmp_path, monkeypatch):
    out = tmp_path / "dump"
    with pytest.raises(CompileError), dump_to(out):
        compiled()(torch.randn(3, 4))
    monkeypatch.undo()
    torch._dynamo.reset()
    runpy.run_path(str(out / "graphs" / "0" / "repro.py"), run_name="__main__")


@torch.no_grad()
def test_an_error_of_another_kind_is_logged_with_the_script(monkeypatch, fresh_dynamo, tmp_path, caplog):
    def crash(gm: torch.fx.GraphModule) -> PassResult:
        raise RuntimeError("planted crash")

    monkeypatch.setitem(PASSES, "fold_views", crash)
    out = tmp_path / "dump"
    with caplog.at_level(logging.ERROR), pytest.raises(Exception, match="planted crash"), dump_to(out):
        compiled()(torch.randn(3, 4))
    assert f"python {out / 'graphs' / '0' / 'repro.py'}" in caplog.text


def test_a_block_that_fails_before_a_graph_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), dump_to(tmp_path / "dump"):
        raise KeyError("x")
    assert list(tmp_path.iterdir()) == []
    assert current() is None


@torch.no_grad()
def test_the_environment_variable_dumps_any_program(monkeypatch, fresh_dynamo, tmp_path):
    monkeypatch.setattr(folder, "_process", {})
    monkeypatch.setattr(folder.atexit, "register", lambda function: None)
    out = tmp_path / "dump"
    monkeypatch.setenv("GEMMA_NPU_DUMP", str(out))
    run = compiled()
    run(torch.randn(3, 4))
    (graph,) = json.loads((out / "plan.json").read_text())["graphs"]  # whole as soon as the graph is there
    assert graph["replays"] == 0
    run(torch.randn(3, 4))
    current().update()
    (graph,) = json.loads((out / "plan.json").read_text())["graphs"]
    assert graph["replays"] == 2
    with dump_to(tmp_path / "own") as own:
        assert current() is own
    monkeypatch.setattr(folder, "_process", {})  # as another process sees it
    assert current().directory == out / str(os.getpid())
    assert not list(tmp_path.rglob("*.part"))


@torch.no_grad()
def test_torchs_trace_gets_one_artifact_per_pass(monkeypatch, fresh_dynamo):
    seen: list[tuple[str, bool]] = []

    def collect(name, metadata_fn, payload_fn):
        seen.append((metadata_fn()["name"], "def forward" in payload_fn()))

    monkeypatch.setattr("gemma_npu_compile.dump.observe.trace_structured", collect)
    run = compiled(disable_passes=["fold_views"])
    run(torch.randn(3, 4))
    expected = ["traced", *(name for name in PASSES if name != "fold_views")]
    assert seen == [(f"gemma_npu_{i:02d}_{name}", True) for i, name in enumerate(expected)]
    run(torch.randn(3, 4))
    assert len(seen) == len(expected)  # at compile time only
