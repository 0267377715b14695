"""The folder: whole files or none, the least recently used go first, nothing of anybody else is touched."""

import dataclasses
import multiprocessing
import os
import stat
import time

import pytest

from gemma_npu_compile.compile_cache import Folder
from gemma_npu_compile.compile_cache.files import enabled
from gemma_npu_compile.compile_cache.names import DamagedError, NotCacheableError
from gemma_npu_compile.errors import CompileError

A, B, C = (letter * 64 for letter in "abc")


@pytest.mark.parametrize(("size", "limit"), [("12", 12), ("3K", 3072), ("2M", 2**21), ("1G", 2**30), ("", 2**30)])
def test_the_limit_has_units(folder: Folder, monkeypatch, size: str, limit: int) -> None:
    monkeypatch.setenv("GEMMA_NPU_CACHE_SIZE", size)
    assert Folder.of_environment().limit == limit


@pytest.mark.parametrize("size", ["much", "-1", "1GB", "1.5G", "G"])
def test_an_impossible_limit_is_named(monkeypatch, size: str) -> None:
    monkeypatch.setenv("GEMMA_NPU_CACHE_SIZE", size)
    with pytest.raises(CompileError, match=f"GEMMA_NPU_CACHE_SIZE is {size!r}"):
        Folder.of_environment()


def test_the_switch_is_0_or_1(monkeypatch) -> None:
    monkeypatch.delenv("GEMMA_NPU_CACHE", raising=False)
    assert enabled()
    monkeypatch.setenv("GEMMA_NPU_CACHE", "0")
    assert not enabled()
    monkeypatch.setenv("GEMMA_NPU_CACHE", "no")
    with pytest.raises(CompileError, match="GEMMA_NPU_CACHE is 'no'"):
        enabled()


def test_the_default_is_the_users_cache_directory(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("GEMMA_NPU_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Folder.of_environment().path == tmp_path / "gemma_npu_compile" / "graphs"


def test_what_is_written_is_read(folder: Folder) -> None:
    assert folder.read(A) is None
    folder.write(A, {"nodes": 2}, [1, {"x": 0.1}])
    assert folder.read(A) == ({"nodes": 2}, [1, {"x": 0.1}])
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.path / f"{A}.json").stat().st_mode) == 0o600
    assert os.listdir(folder.path) == [f"{A}.json"]


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: b"", lambda d: d[:40] + b"X" + d[41:], lambda d: d + b" "]
)
def test_damage_is_found(folder: Folder, damage) -> None:
    folder.write(A, {"nodes": 2}, list(range(20)))
    path = folder.path / f"{A}.json"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DamagedError, match="checksum"):
        folder.read(A)
    (entry,) = folder.entries()
    assert (entry.key, entry.header) == (A, None)
    assert "checksum" in str(entry.damage)


def test_the_least_recently_used_goes_first(folder: Folder) -> None:
    for age, key in ((300, A), (200, B)):
        folder.write(key, {}, "x" * 1000)
        os.utime(folder.path / f"{key}.json", (time.time() - age,) * 2)
    folder.touch(A)
    dataclasses.replace(folder, limit=2500).write(C, {}, "x" * 1000)
    assert {entry.key for entry in folder.entries()} == {A, C}


def test_what_is_just_written_stays(folder: Folder) -> None:
    folder.write(A, {}, "x" * 1000)
    os.utime(folder.path / f"{A}.json", (time.time() + 1000,) * 2)  # another machine's clock
    dataclasses.replace(folder, limit=1500).write(B, {}, "x" * 1000)
    assert [entry.key for entry in folder.entries()] == [B]


def test_an_entry_larger_than_the_limit_is_not_written(folder: Folder) -> None:
    with pytest.raises(NotCacheableError, match="GEMMA_NPU_CACHE_SIZE allows 100"):
        dataclasses.replace(folder, limit=100).write(A, {}, "x" * 1000)
    assert not folder.path.exists()


def test_files_of_others_are_left_alone(folder: Folder) -> None:
    """And unfinished ones of this cache, until nobody can be writing them any more."""
    folder.write(A, {}, 1)
    kept, fresh, stale = "notes.json", "gemma-npu-fresh.tmp", "gemma-npu-stale.tmp"
    for name in (kept, fresh, stale):
        (folder.path / name).write_text("x")
    os.utime(folder.path / kept, (0, 0))
    os.utime(folder.path / stale, (time.time() - 7200,) * 2)
    dataclasses.replace(folder, limit=120).write(B, {}, 1)
    assert set(os.listdir(folder.path)) == {f"{B}.json", kept, fresh}
    assert folder.clear()[0] == 1
    assert os.listdir(folder.path) == [kept]


def test_a_folder_others_may_write_to_is_not_read(folder: Folder) -> None:
    assert folder.refusal() is None
    folder.write(A, {}, 1)
    assert folder.refusal() is None
    folder.path.chmod(0o770)
    assert folder.refusal() == f"others may write to {folder.path}"


def _write_often(folder: Folder, letter: str) -> None:
    for _ in range(150):
        folder.write(A, {"by": letter}, letter * 20000)
        folder.write(letter * 64, {}, letter * 20000)


def test_two_processes_write_at_once(folder: Folder) -> None:
    """Whoever reads finds one writer's entry as a whole, while both remove what is beyond the limit."""
    small = dataclasses.replace(folder, limit=50000)
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_write_often, args=(small, letter)) for letter in "de"]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        found = small.read(A)
        if found is not None:
            header, body = found
            assert body == header["by"] * 20000
            seen.add(header["by"])
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen == {"d", "e"}
    assert not [name for name in os.listdir(folder.path) if name.endswith(".tmp")]
