"""A scenario's step compiled twice, in processes of their own that share a compile cache: what the second one saves."""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from gemma_npu_compile.bench.peers import Ours
from gemma_npu_compile.bench.run import make_work
from gemma_npu_compile.bench.scenarios import load, select

SECONDS = 900


def restart(scenario: str, platform: str) -> dict[str, Any]:
    """Seconds behind Dynamo (trace or cache, passes, capture) of a first process and of a second, and their ratio.

    Raises:
        RuntimeError: a process failed, or one did not do with the cache what it had to; with its last words.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "GEMMA_NPU_CACHE": "1", "GEMMA_NPU_CACHE_DIR": folder}
        for name, state in (("first_s", "stored"), ("second_s", "hit")):
            done = subprocess.run(
                [sys.executable, "-m", __name__, scenario, platform],
                capture_output=True,
                text=True,
                timeout=SECONDS,
                env=environment,
            )
            if done.returncode:
                raise RuntimeError(f"--restart, {name}: {done.stderr.strip().splitlines()[-1:]}")
            answer = json.loads(done.stdout.splitlines()[-1])
            if answer["cache"] != state:
                raise RuntimeError(f"--restart, {name}: the compile cache says {answer['cache']!r}, not {state!r}")
            found[name] = sum(answer["seconds"].values())
    return {**found, "ratio": found["second_s"] / found["first_s"]}


def main(scenario: str, platform: str) -> None:
    """One of the processes: warm up, say what it took."""
    (chosen,) = select([scenario])
    subject = Ours(make_work(chosen, load(chosen.pair)), platform, cache=True)
    subject.engine.warm_up()
    (graph,) = subject.engine.report.graphs
    print(json.dumps({"cache": graph.cache, "seconds": graph.seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
