"""``gemma-npu dump``."""

import argparse
from pathlib import Path
from typing import Any

from gemma_npu_compile.cli.common import Command, compile_step, step_sizes


def dump(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Write the graph after each pass, the plan and an index to a folder."""
    from gemma_npu_compile.dump import dump_to

    with dump_to(args.out, args.force) as written:
        compile_step(args)
    return {"out": str(args.out), "graphs": len(written.graphs)}, 0


def _show(answer: dict[str, Any]) -> None:
    print(f"{answer['graphs']} graphs in {answer['out']}, start with index.md")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--force", action="store_true", help="replace an earlier dump")
    step_sizes(parser)


COMMAND = Command("dump", "write the graph after each pass to a folder", dump, _show, _arguments)
