"""The folder of the compile cache: whole files with a checksum, replaced in one step, the oldest removed.

A file is three lines: the checksum of the rest, a header (what ``gemma-npu cache ls`` shows) and the graph, both JSON.
Processes need no lock: a file is written under another name and moved into place, and one that vanishes was not there.
The checksum finds damage, not malice; against that the folder belongs to the user alone.
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_npu_compile.compile_cache.names import DamagedError, NotCacheableError
from gemma_npu_compile.errors import CompileError

DEFAULT_SIZE = "1G"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_ENTRY, _UNFINISHED = re.compile(r"[0-9a-f]{64}\.json"), re.compile(r"gemma-npu-\w+\.tmp")
_STALE_SECONDS = 3600.0  # nobody writes one file for so long


def enabled() -> bool:
    """Whether ``GEMMA_NPU_CACHE`` leaves the cache on.

    Raises:
        CompileError: it is set to something else than 0 or 1.
    """
    value = os.environ.get("GEMMA_NPU_CACHE", "1")
    if value not in ("0", "1"):
        raise CompileError(f"GEMMA_NPU_CACHE is {value!r}, it must be 0 (off) or 1 (on)")
    return value == "1"


@dataclass(frozen=True)
class Entry:
    """One file. ``header`` is None, and ``damage`` says why, where it cannot be read."""

    key: str
    size: int
    used: float
    header: dict[str, Any] | None
    damage: str | None = None


@dataclass(frozen=True)
class Folder:
    """Where entries lie, and how many bytes they may take together."""

    path: Path
    limit: int

    @classmethod
    def of_environment(cls) -> "Folder":
        """``GEMMA_NPU_CACHE_DIR`` or the user's cache directory, and ``GEMMA_NPU_CACHE_SIZE`` (bytes, or 500M, 1G).

        Raises:
            CompileError: a size that is none; names it.
        """
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        path = os.environ.get("GEMMA_NPU_CACHE_DIR") or Path(cache) / "gemma_npu_compile"
        size = os.environ.get("GEMMA_NPU_CACHE_SIZE") or DEFAULT_SIZE
        found = re.fullmatch(r"(\d+)([KMG]?)", size)
        if found is None:
            raise CompileError(f"GEMMA_NPU_CACHE_SIZE is {size!r}, it must be bytes, or a number with K, M or G")
        return cls(Path(path) / "graphs", int(found[1]) * _UNITS[found[2]])

    def refusal(self) -> str | None:
        """Why this folder is not read: others can write to it."""
        with contextlib.suppress(FileNotFoundError):
            status = self.path.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                return f"others may write to {self.path}"
        return None

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.json"

    def read(self, key: str) -> tuple[dict[str, Any], Any] | None:
        """Header and graph of an entry; None where there is none.

        Raises:
            DamagedError: the file is not what was written.
            OSError: it cannot be read.
        """
        try:
            data = self._file(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        header, body = _parts(data)
        try:
            return json.loads(header), json.loads(body)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"not JSON: {error}") from None

    def touch(self, key: str) -> None:
        """Note that an entry was used: the least recently used go first."""
        with contextlib.suppress(OSError):
            os.utime(self._file(key))

    def write(self, key: str, header: dict[str, Any], body: Any) -> None:
        """Write an entry, then remove the least recently used ones beyond the limit.

        Raises:
            NotCacheableError: the entry alone is larger than the limit.
            OSError: the folder cannot be written to.
        """
        text = f"{json.dumps(header)}\n{json.dumps(body, separators=(',', ':'), allow_nan=False)}".encode()
        data = hashlib.sha256(text).hexdigest().encode() + b"\n" + text
        if len(data) > self.limit:
            raise NotCacheableError(f"it takes {len(data)} bytes, GEMMA_NPU_CACHE_SIZE allows {self.limit}")
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.path, prefix="gemma-npu-", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(name, self._file(key))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        self._trim(keep=self._file(key))

    def _files(self, names: re.Pattern[str] = _ENTRY) -> list[tuple[float, int, Path]]:
        """Time of use, size and path of every file that is still there, the least recently used first.

        Files of other names are not the cache's: the folder may be any the user named.
        """
        found = []
        for path in self.path.glob("*"):
            if not names.fullmatch(path.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        return sorted(found)

    def _trim(self, keep: Path) -> None:
        files = self._files()
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total > self.limit and path != keep:
                path.unlink(missing_ok=True)
                total -= size
        for written, _, path in self._files(_UNFINISHED):  # of a process that was killed
            if time.time() - written > _STALE_SECONDS:
                path.unlink(missing_ok=True)

    def entries(self) -> Iterator[Entry]:
        """Every entry, the least recently used first."""
        for used, size, path in self._files():
            try:
                header = json.loads(_parts(path.read_bytes())[0])
                if not isinstance(header, dict):
                    raise DamagedError("no header")
                yield Entry(path.stem, size, used, header)
            except FileNotFoundError:
                continue
            except (DamagedError, OSError, ValueError, RecursionError) as error:
                yield Entry(path.stem, size, used, None, str(error))

    def clear(self) -> tuple[int, int]:
        """Remove every entry; how many, and their bytes."""
        files = self._files()
        for _, _, path in [*files, *self._files(_UNFINISHED)]:
            path.unlink(missing_ok=True)
        return len(files), sum(size for _, size, _ in files)


def _parts(data: bytes) -> tuple[bytes, bytes]:
    """Header and graph of a file whose checksum holds."""
    digest, _, text = data.partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise DamagedError("the checksum does not match")
    header, _, body = text.partition(b"\n")
    return header, body
