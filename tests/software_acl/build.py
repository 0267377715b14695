"""Builds the software ACL: a few small shared libraries under the names that torch_npu was linked against.

Run as ``python build.py DIRECTORY``. The result is keyed by the sources, the torch version and the compiler, so a
second call returns at once; the tests call :func:`build` themselves.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
RUNTIME = ("trace.cpp", "memory.cpp", "stream.cpp", "events.cpp", "capture.cpp", "device.cpp")
OPERATORS = (
    "opapi_types.cpp",
    "ops_pointwise.cpp",
    "ops_reduce.cpp",
    "ops_index.cpp",
    "ops_fused.cpp",
    "ops_attention.cpp",
    "attention_limits.cpp",
)
# Libraries that the wheel needs by name. What it looks up in them is in a library that they depend on.
EMPTY = dict.fromkeys(("hccl", "ge_runner", "graph", "acl_op_compiler", "acl_tdt_channel"), "ascendcl")
EMPTY["nnopbase"] = "opapi"


class BuildError(RuntimeError):
    """The software ACL cannot be built here; the message says why."""


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed:\n{done.stderr[-6000:]}")
    return done.stdout


def _compiler() -> str:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BuildError(f"{compiler} is not installed (a C++20 compiler is needed to build the software ACL)")
    return compiler


def _torch_flags() -> tuple[list[str], list[str], str]:
    """Compile flags, link flags and version of the installed torch, found without importing it."""
    import importlib.metadata
    import importlib.util

    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed")
    root = Path(spec.origin).parent
    include = root / "include"
    flags = [f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]
    libraries = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    return flags, libraries, importlib.metadata.version("torch")


def _key(compiler: str, torch_version: str) -> str:
    digest = hashlib.sha256()
    for path in [Path(__file__), *sorted(SOURCES.iterdir())]:
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(torch_version.encode() + _run([compiler, "--version"]).encode())
    return digest.hexdigest()[:16]


def build(cache: Path) -> Path:
    """Return a directory for LD_LIBRARY_PATH, building into ``cache`` when the sources changed."""
    compiler = _compiler()
    torch_flags, torch_libraries, torch_version = _torch_flags()
    target = cache / f"software-acl-{_key(compiler, torch_version)}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    try:
        common = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-pthread"]

        def compile_one(name: str) -> str:
            flags = torch_flags if name in OPERATORS else []
            made = str(work / name.replace(".cpp", ".o"))
            _run([compiler, *common, *flags, "-c", str(SOURCES / name), "-o", made])
            return made

        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            objects = dict(zip(RUNTIME + OPERATORS, pool.map(compile_one, RUNTIME + OPERATORS), strict=True))

        def link(library: str, parts: list[str]) -> None:
            output = str(work / f"lib{library}.so")
            soname = f"-Wl,-soname,lib{library}.so"
            _run(
                [
                    compiler,
                    "-shared",
                    "-pthread",
                    "-Wl,--no-as-needed",
                    "-Wl,--no-undefined",
                    soname,
                    "-o",
                    output,
                    *parts,
                ]
            )

        beside = [f"-L{work}", "-Wl,-rpath,$ORIGIN"]
        link("ascendcl", [objects[name] for name in RUNTIME])
        link("opapi", [*(objects[name] for name in OPERATORS), *beside, "-lascendcl", *torch_libraries])
        for library, holder in EMPTY.items():
            link(library, [*beside, f"-l{holder}"])
        for made in objects.values():
            os.unlink(made)
        os.replace(work, target)
    except OSError:
        if not target.is_dir():  # else another process built the same thing first
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def main() -> int:
    """Build from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path, help="where to put the libraries")
    arguments = parser.parse_args()
    try:
        print(build(arguments.directory))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
