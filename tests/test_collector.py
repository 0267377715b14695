"""The collector of cycles is off while a graph is built, and afterwards as the caller had it."""

import gc
import importlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from gemma_npu_compile.collector import paused
from gemma_npu_compile.graphs.host import HostGraph

backend = importlib.import_module("gemma_npu_compile.backend")  # the package has an object of this name


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    was = gc.isenabled()
    yield
    (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_afterwards_what_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with paused():
        assert not gc.isenabled()
        with paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is enabled


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_that_was_forked_within_collects() -> None:
    gc.enable()
    with paused():
        child = os.fork()
        if child == 0:
            good = gc.isenabled()
            with paused():
                good = good and not gc.isenabled()
            os._exit(0 if good and gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.isenabled()


def test_a_graph_is_built_and_captured_without_collections(fresh_dynamo, monkeypatch) -> None:
    """And where that fails, they are on again."""
    seen = []
    build, capture = backend.make_plan, HostGraph.__init__
    monkeypatch.setattr(backend, "make_plan", lambda *args: (seen.append(gc.isenabled()), build(*args))[1])
    monkeypatch.setattr(HostGraph, "__init__", lambda *args: (seen.append(gc.isenabled()), capture(*args))[1])
    gc.enable()
    made = torch.compile(lambda x: x + 1, backend=backend.Backend(), options={"platform": "cpu"})
    with torch.no_grad():
        made(torch.ones(3))
    assert seen == [False, False]
    assert gc.isenabled()
    refused = torch.compile(lambda x: x + 2, backend=backend.Backend(), options={"platform": "cpu", "kv_lens": "x"})
    with pytest.raises(ValueError, match="kv_lens"):
        refused(torch.ones(3))
    assert gc.isenabled()


def test_an_error_ends_the_pause() -> None:
    gc.enable()
    with pytest.raises(KeyError), paused():
        raise KeyError
    assert gc.isenabled()


def test_the_last_of_several_threads_ends_it() -> None:
    gc.enable()
    inside, one_left = Barrier(2), Barrier(2)

    def first() -> None:
        with paused():
            inside.wait()
        one_left.wait()

    def second() -> bool:
        with paused():
            inside.wait()
            one_left.wait()
            return gc.isenabled()

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(first), pool.submit(second)]
        assert [each.result(timeout=30) for each in done] == [None, False]
    assert gc.isenabled()
