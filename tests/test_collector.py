"""The collector of cycles is off while a graph is built, and afterwards as the caller had it."""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from gemma_npu_compile.collector import paused


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
