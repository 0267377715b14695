"""Keep the last calls' small inputs, so that a failure in production can be run again somewhere else.

Only integers that say where things are: tokens, lengths, block tables. No weights, no hidden states, no keys, no text.
The file is JSON, replaced in one piece: once a second at most while all is well, at once when a call fails, at exit.
"""

import atexit
import json
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from gemma_npu_compile.graphs.plan import Input, Plan

KEPT = 8
"""Calls a file holds."""

ROLES = ("token", "lengths", "block_table")
FORMAT = "gemma_npu record 1"


class Recorder:
    """The ring of one compiled graph.

    Args:
        path: of the file; its directory must exist.
        plan: of the graph; says which inputs are small integers.
    """

    def __init__(self, path: str, plan: Plan) -> None:
        self._path = Path(path)
        roles: dict[int, Input] = {}
        for item in plan.inputs:
            if item.role in ROLES and not item.static:
                roles.setdefault(item.source, item)
        self._inputs = list(roles.values())
        self._caches = {i.label: list(i.shape) for i in plan.inputs if i.role == "cache"}
        self._ring: deque[list[Tensor]] = deque(maxlen=KEPT)
        self._written = float("-inf")
        atexit.register(_flush, weakref.ref(self))

    def call(self, run: Callable[[list[Any]], list[Any]], args: list[Any]) -> list[Any]:
        """Keep the call's small inputs and run it; a failure is in the file before it is raised."""
        self._ring.append([args[item.source].clone() for item in self._inputs])
        try:
            results = run(args)
        except BaseException:
            self.write()
            raise
        if time.monotonic() - self._written > 1:
            self.write()
        return results

    def write(self) -> None:
        """Write the file now."""
        self._written = time.monotonic()
        steps = [
            [
                {"label": item.label, "role": item.role, "group": item.group, "values": value.tolist()}
                for item, value in zip(self._inputs, values, strict=True)
            ]
            for values in self._ring
        ]
        record = {"format": FORMAT, "caches": self._caches, "steps": steps}
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        part.write_text(json.dumps(record) + "\n", encoding="utf-8")
        part.replace(self._path)


def _flush(reference: "weakref.ref[Recorder]") -> None:
    recorder = reference()
    if recorder is not None and recorder._ring:
        recorder.write()
