"""Runs test scripts on the real torch_npu over the software ACL, each in its own process.

``import torch`` must not find torch_npu in the test's own environment (it would load it and fail without CANN), and an
error on a stream spoils its process: hence a separate folder for the wheel, and a subprocess for each script.

``python harness.py install`` puts the wheel into that folder.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TORCH_NPU = "2.13.0"
FOLDER_VARIABLE = "GEMMA_NPU_TORCH_NPU"


class UnavailableError(RuntimeError):
    """The software ACL cannot be used here; the message says why and what to do."""


def cache_home() -> Path:
    """Where wheels and builds are kept between runs."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "gemma_npu_compile"


def torch_npu_folder() -> Path:
    """The folder that holds the unpacked wheel, by environment variable or below the user's cache."""
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given) if given else cache_home() / f"torch_npu-{TORCH_NPU}"


def install_torch_npu() -> Path:
    """Install the wheel into :func:`torch_npu_folder`, without its dependencies; a no-op when it is there."""
    folder = torch_npu_folder()
    if not (folder / "torch_npu").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, f"torch-npu=={TORCH_NPU}"], check=True)
    return folder


@dataclass(frozen=True)
class Trace:
    """What the software ACL recorded, in the order in which the host asked for it."""

    events: tuple[Mapping[str, Any], ...]

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        """Events of one kind: launch, capture_begin, capture_end, replay, replayed, update, sync, memcpy, error, ...

        Written when a kernel runs, in a replay too: ``copy`` (bytes an operator moved) and ``attention`` (bytes of keys
        and values it read, and from which blocks). ``queued``: whatever else but a kernel went to a stream.
        """
        return [event for event in self.events if event["event"] == kind]

    def between(self, first: str, second: str) -> Trace:
        """The events between two marks that the script made with ``software_acl.mark``."""
        names = [event.get("name") if event["event"] == "mark" else None for event in self.events]
        return Trace(self.events[names.index(first) + 1 : names.index(second)])

    @property
    def captures(self) -> list[Mapping[str, Any]]:
        """Captures that ended without an error: ``graph``, ``tasks``, ``ops`` (a count for each operator)."""
        return [event for event in self.of("capture_end") if event["code"] == 0]

    @property
    def replays(self) -> list[Mapping[str, Any]]:
        """Replays that the host asked for."""
        return self.of("replay")

    @property
    def updates(self) -> list[Mapping[str, Any]]:
        """Task updates that were complete."""
        return self.of("update")

    @property
    def launches(self) -> Counter[str]:
        """Operators launched one by one, that is neither captured nor replayed, by name."""
        return Counter(event["op"] for event in self.of("launch"))

    @property
    def syncs(self) -> Counter[str]:
        """How often the host waited, by what it waited for."""
        return Counter(event["kind"] for event in self.of("sync"))

    @property
    def copies(self) -> Counter[str]:
        """Copies by direction."""
        return Counter(event["kind"] for event in self.of("memcpy"))

    @property
    def error_codes(self) -> list[int]:
        """Codes of the calls that failed."""
        return [event["code"] for event in self.of("error")]


@dataclass(frozen=True)
class Result:
    """One finished script."""

    returncode: int
    stdout: str
    stderr: str
    trace: Trace

    @property
    def last(self) -> Any:
        """The last line of the output, as JSON."""
        return json.loads(self.stdout.strip().splitlines()[-1])


def _read_trace(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # a process that crashed may leave half a line at the end
            return


@dataclass(frozen=True)
class Runner:
    """The built libraries, the wheel, and how to run a script on both."""

    libraries: Path
    torch_npu: Path
    work: Path

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a script: this checkout, nothing of a CANN installation, one thread for each kernel."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("ASCEND", "SOFTWARE_ACL"))
        }
        inherited.pop("TASK_QUEUE_ENABLE", None)
        return {
            **inherited,
            "LD_LIBRARY_PATH": str(self.libraries),
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(self.torch_npu), str(HERE / "inside")]),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "OMP_NUM_THREADS": "1",
            **(extra or {}),
        }

    def run(
        self,
        script: str | Path,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        timeout: float = 120.0,
        check: bool = True,
    ) -> Result:
        """Run a script (its text, or its path) and return its output and trace.

        Args:
            env: on top of :meth:`environment`; SOFTWARE_ACL_SOC and the other settings in the README go here.
            timeout: in seconds; a script that does not end fails the test.
            check: whether a non-zero exit fails the test.
        """
        number = len(list(self.work.glob("*.trace")))
        trace = self.work / f"{number}.trace"
        trace.touch()
        if isinstance(script, str):
            path = self.work / f"{number}.py"
            path.write_text(textwrap.dedent(script), encoding="utf-8")
            script = path
        environment = self.environment({"SOFTWARE_ACL_TRACE": str(trace), **(env or {})})
        try:
            done = subprocess.run(
                [sys.executable, str(script), *arguments],
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            tail = (error.stderr or b"")[-3000:]
            raise AssertionError(f"the script did not end within {timeout:g} s: {tail!r}") from None
        if check and done.returncode != 0:
            raise AssertionError(f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
        return Result(done.returncode, done.stdout, done.stderr, Trace(tuple(_read_trace(trace))))


def _build(cache: Path) -> Path:
    spec = importlib.util.spec_from_file_location("software_acl_build", HERE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return module.build(cache)
    except module.BuildError as error:
        raise UnavailableError(str(error)) from None


def prepare(work: Path) -> Runner:
    """Build what is missing and return a runner whose files go to ``work``.

    Raises:
        UnavailableError: with the reason, where the software ACL cannot be had.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise UnavailableError("the software ACL needs Linux on x86-64")
    version = importlib.metadata.version("torch").split("+")[0]
    if version != TORCH_NPU:
        raise UnavailableError(f"torch_npu {TORCH_NPU} needs torch {TORCH_NPU}, found {version}")
    folder = torch_npu_folder()
    if not (folder / "torch_npu").is_dir():
        raise UnavailableError(
            f"torch_npu {TORCH_NPU} is not in {folder}; `python tests/software_acl/harness.py install` puts it there, "
            f"{FOLDER_VARIABLE} names another folder"
        )
    return Runner(_build(cache_home() / "builds"), folder, work)


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        raise SystemExit("usage: python harness.py install")
    print(install_torch_npu())
