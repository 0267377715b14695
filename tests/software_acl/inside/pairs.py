"""What the scripts of the backend's tests share: the random pairs of tests/conftest.py, on the device."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import torch_npu  # noqa: F401

_PATH = Path(__file__).parents[2] / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("pairs_of_the_tests", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _MODULE
_SPEC.loader.exec_module(_MODULE)
build_pair = _MODULE.build_pair


def on_device(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """A random pair on the device."""
    target, assistant = build_pair(**options)
    return target.to("npu", dtype), assistant.to("npu", dtype)


def prompts(*lengths: int, vocabulary: int = 128) -> list[torch.Tensor]:
    """One prompt per length, different for each."""
    made = [torch.randint(1, vocabulary, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    return [each.npu() for each in made]


def tokens(engine: Any, given: list[torch.Tensor], count: int) -> list[list[int]]:
    """``count`` new tokens of each prompt."""
    state = engine.prefill(given)
    found = [[token] for token in state.token.tolist()]
    while min(map(len, found)) < count:
        state, new, _, _ = engine.decode(state)
        for row, more in zip(found, new, strict=True):
            row.extend(more)
    for row in state.rows:
        engine.cache.release(row)
    return [row[:count] for row in found]
