"""``gemma-npu explain``."""

import argparse
from typing import Any

from gemma_npu_compile.cli.common import Command, compile_step, step_sizes


def explain(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Passes, attention nodes, bindings, captures and memory of the step."""
    report = compile_step(args).report
    return {**report.to_dict(), "text": str(report)}, 0


def _show(answer: dict[str, Any]) -> None:
    print(answer["text"])


COMMAND = Command("explain", "what was traced, rewritten and captured", explain, _show, step_sizes)
