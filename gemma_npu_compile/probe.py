"""Ask a device what it can do: every row of the capability table, those that say "illegal" too.

Documents, tiling sources and reports disagree between CANN releases, and only a device knows. A hang and a crash are
answers as well, so the questions are asked by another process (probe_cases.py) under a time limit; it is started again
behind the question that ended it.
"""

import contextlib
import importlib.metadata
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

from gemma_npu_compile.capabilities import Platform
from gemma_npu_compile.probe_findings import Answer, Findings, Question, questions

CHILD = (sys.executable, "-m", "gemma_npu_compile.probe_cases")
START_SECONDS = 300.0
MAX_PROCESSES = 40


class ProbeError(RuntimeError):
    """No process could be started that answers questions about the device."""


class _Process:
    """The process that answers, and a queue of its lines; None in the queue is its end."""

    def __init__(self, command: Sequence[str], payload: dict[str, Any], log: Any) -> None:
        read, write = os.pipe()
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with tempfile.TemporaryFile("w+") as asked:  # a pipe would block us until the process reads it
            json.dump(payload, asked)
            asked.seek(0)
            try:
                self.process = subprocess.Popen(
                    [*command, str(write)], stdin=asked, stdout=log, stderr=log, pass_fds=(write,)
                )
            except OSError as error:
                os.close(read)
                raise ProbeError(f"{command[0]}: {error}") from None
            finally:
                os.close(write)
        threading.Thread(target=self._read, args=(read,), daemon=True).start()

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as lines:
            for line in lines:
                with contextlib.suppress(json.JSONDecodeError):  # a crash may leave half a line
                    self.lines.put(json.loads(line))
        self.lines.put(None)

    def end(self) -> str:
        """Kill it if it still runs; how it ended."""
        try:
            code = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that a driver holds cannot be helped
                self.process.wait(timeout=10)
            return "killed"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def ask(
    payload: list[dict[str, Any]], device: str, timeout: float, command: Sequence[str], say: Callable[[str], None]
) -> dict[int, str]:
    """Put questions to ``command``, started as often as it takes.

    Returns:
        Error texts by index, empty for what worked; what was not tried, because the device went away, is missing.

    Raises:
        ProbeError: not one process got as far as the first question.
    """
    answers: dict[int, str] = {}
    started = 0
    with tempfile.TemporaryFile("w+", errors="replace") as log:

        def tail() -> str:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
            return " ".join(log.read().split())[-400:]

        while len(answers) < len(payload) and started < MAX_PROCESSES:
            started += 1
            left = [(index, each) for index, each in enumerate(payload) if index not in answers]
            process = _Process(command, {"device": device, "questions": left}, log)
            current, limit, ready = None, START_SECONDS, False
            try:
                while True:
                    line = process.lines.get(timeout=limit)
                    if line is None:
                        break
                    ready, limit = ready or line.get("ready", False), timeout
                    current = line.get("begin")
                    if "answer" in line:
                        answers[line["answer"]] = line["error"]
                        say(f"{len(answers)} of {len(payload)}")
            except queue.Empty:
                process.process.kill()
                if current is not None:
                    answers[current] = f"no answer within {timeout:g} s"
            how = process.end()
            if current is not None:
                answers.setdefault(current, f"the process died ({how}): {tail()}")
            if not ready:
                if not answers:
                    raise ProbeError(f"the probing process does not start ({how}): {tail()}")
                break  # the device is gone: what is left stays untried
    return answers


def _facts(target: Platform, device: str) -> dict[str, Any]:
    import torch

    soc = torch.get_device_module(device).get_device_name(device)
    facts: dict[str, Any] = {"soc": soc, "cann": None, "torch_npu": None}
    with contextlib.suppress(ImportError, RuntimeError, AttributeError):
        from torch_npu.npu.utils import get_cann_version

        facts["cann"] = get_cann_version(module="CANN")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        facts["torch_npu"] = importlib.metadata.version("torch_npu")
    return {**facts, "platform": target.name}


def probe(
    target: Platform,
    device: str,
    *,
    timeout: float = 60.0,
    asked: Sequence[Question] | None = None,
    command: Sequence[str] = CHILD,
    say: Callable[[str], None] = lambda text: None,
) -> Findings:
    """Try every row of a table on a device.

    Args:
        target: the table of the platform the device is taken for.
        device: ``"npu"`` or ``"npu:N"``.
        timeout: seconds for one question, asked one way.
        asked: the questions; by default :func:`questions`.
        command: what to start; it is given the number of a file descriptor to write its answers to.
        say: is told how far it has come.

    Raises:
        ProbeError: no process could be started that answers.
    """
    wanted = list(questions(target) if asked is None else asked)
    ways = [(question, captured) for question in wanted for captured in (False, True)]
    payload = [{**question.to_dict(), "captured": captured} for question, captured in ways]
    found = ask(payload, device, timeout, command, say)
    answers = {question: Answer() for question in wanted}
    for index, (question, captured) in enumerate(ways):
        setattr(answers[question], "captured" if captured else "eager", found.get(index))
    return Findings(target, answers, _facts(target, device))
