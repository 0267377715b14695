"""The fixtures through which tests reach the software ACL, and the rule that CI may not skip them."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest


def _load(name: str) -> Any:
    """A module of this folder by path: tests are no package."""
    spec = importlib.util.spec_from_file_location(f"software_acl_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def counts() -> Any:
    """The module ``counts.py``."""
    return _load("counts")


@pytest.fixture(scope="session")
def software_acl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A ``harness.Runner``; skips with the reason where there can be none, fails instead when CI is set."""
    harness = _load("harness")
    try:
        return harness.prepare(tmp_path_factory.mktemp("software_acl"))
    except harness.UnavailableError as error:
        if os.environ.get("CI"):
            pytest.fail(f"in CI a skip is a failure: {error}")
        pytest.skip(str(error))
