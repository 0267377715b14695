"""The draft-plus-verify step from the cache: the same graph, files and tokens as where it was traced."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

import gemma_npu_compile as gnc
from gemma_npu_compile.compile_cache.ticket import TRACE_HIT
from gemma_npu_compile.dump import dump_to
from gemma_npu_compile.graphs.plan import Plan
from gemma_npu_compile.passes.host_lengths import HostLengths
from gemma_npu_compile.tiny_pair import ASSISTANT_DIR, TARGET_DIR

OPTIONS = {"platform": "ascend910b"}
OTHER = r"\d+(\.\d+(e-\d+)?|e-\d+)|graph \d+/\d+"
"""Times (the shortest ones are written without a point: 9e-05), and Dynamo's number of the graph in this process."""


def _step(pair, options=OPTIONS) -> gnc.Engine:
    engine = gnc.Engine(*pair, 1, max_rows=3, max_model_len=256, options=gnc.Options(**options))
    engine.warm_up()
    return engine


def _tokens(engine: gnc.Engine) -> list:
    """Tokens of three steps of two rows."""
    state, found = engine.prefill([torch.arange(1, 20), torch.arange(3, 30)]), []
    for _ in range(3):
        state, new, _, _ = engine.decode(state)
        found.append(new)
    return found


def _files(folder: Path) -> dict[str, str]:
    """Everything a dump shows that does not change from run to run."""
    found = {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}
    return {name: re.sub(OTHER, "", text) for name, text in found.items()}


@pytest.fixture(scope="module")
def traced(pair, tmp_path_factory):
    """Environment of a cache, and what the process that traced the step got."""
    root = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEMMA_NPU_CACHE", "1")
        patch.setenv("GEMMA_NPU_CACHE_DIR", str(root / "cache"))
        with dump_to(root / "dump"):
            engine = _step(pair)
        (graph,) = engine.report.graphs
        assert graph.cache == "stored"
        yield root, _tokens(engine), graph, patch


def test_a_hit_is_the_same_graph_with_the_same_source_lines(traced, pair, monkeypatch, fresh_dynamo) -> None:
    """Everything a dump shows: the trace, the graph behind each pass, the page with its modules, the plan."""
    root, tokens, graph, _ = traced
    monkeypatch.setattr("torch._dynamo.backends.common.aot_module_simplified", None)
    with dump_to(root / "again"):
        engine = _step(pair)
    (hit,) = engine.report.graphs
    assert hit.cache == TRACE_HIT
    assert f"compile cache: {TRACE_HIT}" in str(engine.report)
    first, second = _files(root / "dump"), _files(root / "again")
    assert first.keys() == second.keys()
    for name, text in first.items():
        assert text == second[name], name
    assert "self_attn" in second["index.html"]
    assert "gemma_npu_compile/step.py" in second["00_traced.py"]
    assert [p.changed for p in hit.passes] == [p.changed for p in graph.passes]
    assert _tokens(engine) == tokens
    assert (hit.sizes, hit.fallbacks, hit.recompile) == (graph.sizes, graph.fallbacks, False)


PROGRAM = """
import importlib.util, json, sys
import torch
spec = importlib.util.spec_from_file_location("test_step", sys.argv[1])
test_step = importlib.util.module_from_spec(spec)
spec.loader.exec_module(test_step)
spec = importlib.util.spec_from_file_location("pairs", sys.argv[2])
pairs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pairs)
import os
os.environ["GEMMA_NPU_CACHE"] = "1"
torch._dynamo.backends.common.aot_module_simplified = None
engine = test_step._step(pairs.build_pair())
print(json.dumps([[graph.cache for graph in engine.report.graphs], test_step._tokens(engine)]))
"""


def test_another_process_hits_whatever_its_hash_seed(traced, pair, fresh_dynamo) -> None:
    """Same tokens, without AOT; the order of sets in another process does not change the key."""
    _step(pair)  # the one before was seen by a dump, which keeps its trace only
    paths = [__file__, str(Path(__file__).parents[1] / "conftest.py")]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [["hit"], traced[1]]


LOWERED = {
    "cpu": {"platform": "cpu"},
    "host lengths": {"platform": "ascend910b", "kv_lens": "host", "merge_weights": True},
    "dense verification": {"platform": "ascend910b", "verify_attention": "dense", "disable_passes": ["clip_to_window"]},
}


def _runners(engine: gnc.Engine) -> list:
    return [runner for run in engine._runs.values() for runner in run.runners]


def _form(value) -> list:
    """Dtypes, sizes and strides of a node's value."""
    return [
        (e.dtype, str(e.shape), str(e.stride())) if isinstance(e, torch.Tensor) else str(e) for e in tree_leaves(value)
    ]


def _slices(plan: Plan) -> tuple[Plan, list[str]]:
    """A plan without its integer slices, which are compared by their code, and those."""
    extras = [replace(each, slice=None) if isinstance(each, HostLengths) else each for each in plan.extras]
    return replace(plan, extras=tuple(extras)), [each.slice.code for each in plan.host]


@pytest.mark.parametrize("name", LOWERED)
def test_a_final_graph_is_captured_without_a_pass(
    monkeypatch, tmp_path, pair, fresh_dynamo, no_aot, no_passes, name: str
) -> None:
    """Same code, values, plan and records; same tokens, updates and captures."""
    monkeypatch.setenv("GEMMA_NPU_CACHE", "1")
    monkeypatch.setenv("GEMMA_NPU_CACHE_DIR", str(tmp_path))
    found = []
    for state in ("stored", "hit"):
        torch._dynamo.reset()
        engine = _step(pair, LOWERED[name])
        (graph,), (runner,) = engine.report.graphs, _runners(engine)
        assert graph.cache == state
        tokens = _tokens(engine)
        values = [_form(node.meta.get("val")) for node in runner.gm.graph.nodes]
        stacks = [node.meta.get("nn_module_stack") or {} for node in runner.gm.graph.nodes]
        modules = [[path for path, _ in stack.values()] for stack in stacks]
        records = [replace(record, seconds=0.0) for record in graph.passes]
        counts = graph.sizes, graph.captures, graph.checked, graph.host_updates, graph.fallbacks, graph.nodes
        found.append((runner.gm.code, values, modules, _slices(graph.plan), records, counts, tokens))
        no_aot()
        no_passes()
    assert graph.seconds["passes"] == 0
    assert not any(record.seconds for record in graph.passes)
    for one, other in zip(*found, strict=True):
        assert one == other
    assert sum(any("target" in path for path in paths) for paths in modules) > 10
    if name == "host lengths":
        assert len(graph.plan.host) > 0
        assert any(each.__class__.__name__ == "MergedWeight" for each in graph.plan.extras)
        assert graph.host_updates > 0


@pytest.mark.slow
def test_numbers_read_from_tensors_are_kept(traced, make_pair, fresh_dynamo) -> None:
    """Ordered embeddings read one (``.item()``): a symbol of the trace that is the size of nothing."""
    tokens = []
    for state in ("stored", "hit"):
        torch._dynamo.reset()
        engine = _step(make_pair(ordered=True))
        (graph,) = engine.report.graphs
        assert (graph.cache, graph.fallbacks) == (state, {})
        tokens.append(_tokens(engine))
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_the_command_line_hits_in_its_second_run(tmp_path) -> None:
    """The bundled pair: equal text and acceptance from two processes; the second loads what the first kept."""
    environment = {**os.environ, "GEMMA_NPU_CACHE": "1", "GEMMA_NPU_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "gemma_npu_compile.cli", "explain", "--json", "--num-draft-tokens", "3"]
    command += ["--model", str(TARGET_DIR), "--assistant", str(ASSISTANT_DIR)]
    answers = []
    for seed in ("1", "2"):
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=500, env={**environment, "PYTHONHASHSEED": seed}
        )
        assert run.returncode == 0, run.stderr
        answers.append(json.loads(run.stdout)["graphs"])
    assert [[graph["cache"] for graph in graphs] for graphs in answers] == [["stored"], ["hit"]]
    first, second = answers[0][0], answers[1][0]
    for key in ("nodes", "bindings", "sizes", "captures", "fallbacks", "breaks"):
        assert first.get(key) == second.get(key), key
    assert second["seconds"]["aot"] < first["seconds"]["aot"] / 3
