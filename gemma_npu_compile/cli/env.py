"""``gemma-npu env``."""

import argparse
import importlib.metadata
import os
import platform
from typing import Any

from gemma_npu_compile import __version__
from gemma_npu_compile.cli.common import Command
from gemma_npu_compile.tiny_pair import ASSISTANT_DIR, TARGET_DIR


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _npus() -> list[str]:
    import torch

    npu: Any = torch.npu  # type: ignore[attr-defined]
    return [f"npu:{index} ({npu.get_device_name(index)})" for index in range(npu.device_count())]


def env(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Versions and what this machine offers."""
    import torch

    packages = ("torch", "torch-npu", "transformers", "sympy")
    answer = {
        "gemma_npu_compile": __version__,
        "python": platform.python_version(),
        **{package.replace("-", "_"): _version(package) for package in packages},
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": ["cpu"] if args.device == "cpu" else ["cpu", *_npus()],
        "platform": args.platform,
        "model": str(TARGET_DIR),
        "assistant": str(ASSISTANT_DIR),
    }
    return answer, 0


def _show(answer: dict[str, Any]) -> None:
    for name, value in answer.items():
        print(f"{name:18} {value}")


COMMAND = Command("env", "versions and devices", env, _show, pair=False)
