"""A compile cache of each test's own, and compilations that each start from nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.compile_cache import Folder
from gemma_npu_compile.report import GraphReport, collect


def _entry(folder: Folder, stage: str) -> Path:
    """The one entry of a stage: a ``trace``, in front of the passes, or a ``final`` graph, behind them."""
    (found,) = (each.key for each in folder.entries() if each.header and each.header["stage"] == stage)
    return folder.path / f"{found}.json"


@pytest.fixture
def entry() -> Callable[[Folder, str], Path]:
    """Finds the entry of a stage."""
    return _entry


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Folder:
    """An empty cache, switched on."""
    monkeypatch.setenv("GEMMA_NPU_CACHE", "1")
    monkeypatch.setenv("GEMMA_NPU_CACHE_DIR", str(tmp_path))
    return Folder.of_environment()


Compile = Callable[..., tuple[Any, GraphReport]]


@pytest.fixture
def compiled(fresh_dynamo: None) -> Compile:
    """Compiles a function as a new process would, calls it, and returns the result and the report."""

    def run(fn: Callable[..., Any], *args: Any, grad: bool = False, **options: Any) -> tuple[Any, GraphReport]:
        torch._dynamo.reset()
        dynamic = options.pop("dynamic", None)
        made = torch.compile(fn, backend=Backend(), dynamic=dynamic, options={"platform": "cpu", **options})
        with collect() as report, torch.set_grad_enabled(grad):
            result = made(*args)
        (graph,) = report.graphs
        return result, graph

    return run


@pytest.fixture
def no_aot(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and tracing with AOT is an error from then on."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("AOT was called")

    return lambda: monkeypatch.setattr("torch._dynamo.backends.common.aot_module_simplified", refuse)


@pytest.fixture
def no_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and running passes is an error from then on."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("passes ran")

    return lambda: monkeypatch.setattr("gemma_npu_compile.backend.run_passes", refuse)
