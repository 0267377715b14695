"""torch.compile backend for Gemma 4 speculative decoding on Ascend NPUs.

``passes/`` and ``graphs/`` lie at the root of the repository and install as ``gemma_npu_compile.passes`` and
``gemma_npu_compile.graphs``. In a checkout this package extends its own search path, so the full names work there too.
"""

import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_HERE = Path(__file__).resolve().parent
if not (_HERE / "passes").is_dir() and (_HERE.parent / "passes").is_dir():
    __path__.append(str(_HERE.parent))

# Imported on first use: the backend alone must not cost an import of transformers.
_EXPORTS = {
    "CompileReport": "report",
    "DraftVerifyStep": "step",
    "Engine": "engine",
    "OutOfBlocksError": "kv_cache",
    "Options": "options",
    "PagedKVCache": "kv_cache",
    "Request": "request",
    "Sampling": "sampling",
    "Session": "session",
    "Stats": "stats",
    "compile_loop": "loops",
    "explain": "report",
    "generate": "generation",
    "mark_rows": "step",
}

__all__ = [*sorted(_EXPORTS), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
