"""Runs torch_npu's own aclgraph tests on the software ACL: an outside check that this double behaves as they expect.

``python tests/software_acl/upstream.py REPOSITORY`` takes a clone of github.com/Ascend/pytorch (a bare one will do).
Its tests are copied to a temporary folder for the run and never into this repository. A test that fails is tried once
more in a process of its own, because an error on a stream spoils the process for those after it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

NEEDS = ("expecttest",)  # what torch_npu's tests import beyond this project's own test requirements
FILES = ("test/npu/test_aclgraph*.py", "test/npu/test_npugraph_handler.py", "test/npu/test_compile_aclgraph_update.py")
FILES_RANDOM = "test/npu/test_aclnn_random_aclgraph.py"
FILES_COMPILE = ("test/dynamo/test_npugraphs.py", "test/dynamo/test_npugraph_ex.py")


def _runner(work: Path) -> Any:
    """The harness is loaded by path: tests are no package."""
    spec = importlib.util.spec_from_file_location("software_acl_harness", Path(__file__).with_name("harness.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.prepare(work)


def _install_needs(folder: Path) -> Path:
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *NEEDS], check=True)
    return folder


def _export(repository: Path, work: Path) -> Path:
    """The repository's test folder, as of its HEAD, below ``work``."""
    archive = work / "tests.tar"
    subprocess.run(["git", "-C", repository, "archive", "-o", archive, "HEAD", "test"], check=True)
    subprocess.run(["tar", "-C", work, "-xf", archive], check=True)
    return work / "test"


def _run(runner: Any, target: str, folder: Path, needs: Path, timeout: float) -> dict[str, tuple[str, str]]:
    """Outcome and message of each test of ``target``, a file or a single test."""
    report = runner.work / "report.xml"
    report.unlink(missing_ok=True)
    pytest = [sys.executable, "-m", "pytest", target, "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    environment = runner.environment()
    environment["PYTHONPATH"] += f":{needs}"
    try:
        done = subprocess.run(
            pytest, cwd=folder, env=environment, timeout=timeout, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return {target: ("failed", f"no end within {timeout:g} s")}
    if not report.exists():
        return {target: ("failed", f"exit code {done.returncode}: {done.stderr[-300:] or done.stdout[-300:]}")}
    results: dict[str, tuple[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{target.split('::')[0]}::{str(case.get('classname')).split('.')[-1]}::{case.get('name')}"
        outcome = "passed"
        message = ""
        for kind, called in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
            found = case.find(kind)
            if found is not None:
                outcome, message = called, str(found.get("message"))
        results[name] = outcome, message
    return results


def main() -> int:
    """Run, retry, report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("repository", type=Path)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one file")
    parser.add_argument("--only", default="", help="run only files whose name contains this")
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    arguments = parser.parse_args()
    results: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        runner, tests = _runner(work), _export(arguments.repository.resolve(), work)
        needs = _install_needs(sys.modules["software_acl_harness"].cache_home() / "upstream-needs")
        patterns = [*FILES, FILES_RANDOM, *FILES_COMPILE]
        files = sorted({path for pattern in patterns for path in work.glob(pattern)})
        for path in files:
            if arguments.only not in path.name:
                continue
            found = _run(runner, path.name, path.parent, needs, arguments.timeout)
            for test, (outcome, _) in list(found.items()):
                if outcome == "failed" and "::" in test:
                    found.update(_run(runner, test, path.parent, needs, min(arguments.timeout, 90.0)))
            results.update(found)
            counts = Counter(outcome for outcome, _ in found.values())
            print(f"{path.relative_to(tests)}: {dict(counts)}", flush=True)
            for test, (outcome, message) in found.items():
                if outcome != "passed":
                    print(f"    {outcome}: {test.split('::', 1)[-1]}: {' '.join(message.split())[:240]}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    counts = Counter(outcome for outcome, _ in results.values())
    ran = counts["passed"] + counts["failed"]
    print(f"{counts['passed']} of {ran} passed, {counts['skipped']} skipped by their own conditions")
    return 0 if counts["failed"] == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
