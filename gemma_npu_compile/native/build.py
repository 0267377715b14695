"""Compile the C++ kernels once per machine, and load them.

The library depends on nothing but the C++ standard library: no torch headers, so it compiles in seconds and any torch
can use it. It lies in the user's cache directory under a hash of its source, compiler, flags and processor.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = tuple(sorted(SOURCE.parent.glob("*.h")))
# The sources say where a multiply-add rounds once. A compiler that may choose chooses by the shape of a loop, and a row
# alone would no longer give what it gives beside others.
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-pthread")


class NoKernelsError(Exception):
    """Why there are no native kernels here, in one sentence."""


def cache_dir() -> Path:
    """Where this package keeps what it may lose: ``$XDG_CACHE_HOME/gemma_npu_compile``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemma_npu_compile"


def _processor() -> str:
    """The machine and its instruction sets: a home directory may be shared by several."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return platform.machine() + next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _output(command: list[str]) -> str:
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernelsError(f"{command[0]} failed: {error}") from None
    if found.returncode:
        last = (found.stderr.strip().splitlines() or ["no message"])[-1]
        raise NoKernelsError(f"{command[0]} failed with exit code {found.returncode}: {last}")
    return found.stdout


def build() -> Path:
    """The compiled library, compiled now if it is not in the cache. Safe to run in several processes at once.

    Raises:
        NoKernelsError: no C++ compiler (``$CXX``, c++, g++, clang++), or it fails.
    """
    named = os.environ.get("CXX")
    compiler = shlex.split(named) if named else [next(filter(shutil.which, ("c++", "g++", "clang++")), "")]
    if not compiler[0]:
        raise NoKernelsError("no C++ compiler was found (c++, g++, clang++; CXX is not set)")
    flags = [*FLAGS, "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"]
    facts = [
        *(each.read_text() for each in (SOURCE, *HEADERS)),
        _output([*compiler, "--version"]),
        *compiler,
        *flags,
        _processor(),
    ]
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]
    path = cache_dir() / "native" / f"{key}.so"
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            _output([*compiler, *flags, "-o", str(made), str(SOURCE)])
            os.replace(made, path)
    except OSError as error:
        raise NoKernelsError(f"{path.parent} cannot be written: {error}") from None
    return path


@functools.cache
def _load() -> "ctypes.CDLL | NoKernelsError":
    try:
        library = ctypes.CDLL(str(build()))
    except NoKernelsError as reason:
        return reason
    except OSError as error:
        return NoKernelsError(f"the compiled kernels cannot be loaded: {error}")
    library.gemma_npu_run.restype = ctypes.c_int64
    library.gemma_npu_run.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3]
    library.gemma_npu_chunk.restype = ctypes.c_int64
    return library


def loaded() -> bool:
    """Whether this process has asked for the kernels: somebody needs them, and asking again costs nothing."""
    return _load.cache_info().currsize > 0


def library() -> ctypes.CDLL:
    """The kernels, compiled at the first call of a process that finds none in the cache.

    Raises:
        NoKernelsError: they cannot be had; the reason is the same for the life of the process.
    """
    found = _load()
    if isinstance(found, NoKernelsError):
        raise found
    return found


def why_no_kernels() -> str | None:
    """The reason of :class:`NoKernelsError`, or None where there are kernels."""
    found = _load()
    return str(found) if isinstance(found, NoKernelsError) else None
