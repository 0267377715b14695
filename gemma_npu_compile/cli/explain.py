"""``gemma-npu explain``: the report of a model's step, or of a program."""

import argparse
from pathlib import Path
from typing import Any

from gemma_npu_compile.cli.common import Command, UserError, compile_step, run_script, step_sizes


def explain(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Passes, attention nodes, bindings, captures and memory."""
    from gemma_npu_compile.report import collect

    if args.args and not args.script:
        raise UserError(f"unexpected {' '.join(args.args)}: arguments behind -- belong to --script")
    if args.script:
        with collect() as report:
            run_script(args.script, args.args)
    else:
        report = compile_step(args).report
    return {**report.to_dict(), "text": str(report)}, 0


def _show(answer: dict[str, Any]) -> None:
    print(answer["text"])


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--script", type=Path, metavar="FILE.py", help="run a program, report every graph it compiles")
    parser.add_argument("args", nargs="*", help=argparse.SUPPRESS)
    step_sizes(parser)


COMMAND = Command("explain", "what was traced, rewritten and captured", explain, _show, _arguments)
