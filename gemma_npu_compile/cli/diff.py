"""``gemma-npu diff``: what changed between two dumps."""

import argparse
from pathlib import Path
from typing import Any

from gemma_npu_compile.cli.common import Command


def diff(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Compare two dumps; exit code 1 when anything differs."""
    from gemma_npu_compile.dump.compare import compare, load

    found = compare(load(args.before), load(args.after))
    return {"equal": not found, "differences": found}, 1 if found else 0


def _show(answer: dict[str, Any]) -> None:
    if answer["equal"]:
        print("no differences")
    for each in answer["differences"]:
        print(f"graph {each['graph']}, {each['what']}")
        for line in each["lines"]:
            print(f"  {line}")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, metavar="DIR_A")
    parser.add_argument("after", type=Path, metavar="DIR_B")


COMMAND = Command("diff", "what changed between two dumps; exit 1 if anything did", diff, _show, _arguments, pair=False)
