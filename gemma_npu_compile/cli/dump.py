"""``gemma-npu dump``: a folder to look at, of the bundled pair, a checkpoint, a script, or a published shape."""

import argparse
from pathlib import Path
from typing import Any

from gemma_npu_compile import __version__
from gemma_npu_compile.cli.common import Command, UserError, compile_step, run_script, say, step_sizes


def _shapes(args: argparse.Namespace) -> None:
    from gemma_npu_compile.loading import DTYPES
    from gemma_npu_compile.options import Options
    from gemma_npu_compile.shapes import build, plan_step

    say(f"building {args.shapes} on the meta device")
    target, assistant = build(args.shapes, DTYPES[args.dtype], args.fold)
    say("tracing the step")
    plan_step(
        target,
        assistant,
        args.num_draft_tokens,
        max_rows=args.max_rows,
        max_model_len=args.max_model_len,
        options=Options(platform=args.platform, capture=not args.eager),
    )


def _about(args: argparse.Namespace) -> dict[str, str]:
    what = f"{args.model} and {args.assistant}"
    if args.script:
        return {"script": " ".join(map(str, (args.script, *args.args))), "gemma_npu_compile": __version__}
    if args.shapes:
        from gemma_npu_compile.shapes import SHAPES

        folded = ", one layer of each kind" if args.fold else ""
        what = f"{args.shapes}, shapes only{folded}; its assistant: {SHAPES[args.shapes].source}"
    sizes = f"{args.max_rows} rows of {args.max_model_len} tokens"
    return {
        "model": what,
        "platform": f"{args.platform}, {args.dtype}",
        "step": f"{args.num_draft_tokens} drafts, cache for {sizes}",
        "gemma_npu_compile": __version__,
    }


def dump(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Write the page, the graph after each pass and the plan to a folder."""
    from gemma_npu_compile.dump import dump_to

    if args.shapes and args.script:
        raise UserError("--shapes and --script: give one of them")
    if args.args and not args.script:
        raise UserError(f"unexpected {' '.join(args.args)}: arguments behind -- belong to --script")
    if args.fold and not args.shapes:
        raise UserError("--fold folds the layers of --shapes")
    if args.shapes:
        from gemma_npu_compile.options import choice
        from gemma_npu_compile.shapes import SHAPES

        choice("--shapes", args.shapes, tuple(SHAPES))
    with dump_to(args.out, args.force, _about(args)) as written:
        if args.script:
            run_script(args.script, args.args)
        elif args.shapes:
            _shapes(args)
        else:
            compile_step(args)
    return {"out": str(args.out), "graphs": len(written.graphs)}, 0


def _show(answer: dict[str, Any]) -> None:
    print(f"{answer['graphs']} graphs in {answer['out']}, start with index.html or index.md")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--force", action="store_true", help="replace an earlier dump")
    parser.add_argument("--script", type=Path, metavar="FILE.py", help="run a program, dump every graph it compiles")
    parser.add_argument("--shapes", metavar="NAME", help="a published pair without weights: gemma-4-31b, 26b-a4b, ...")
    parser.add_argument("--fold", action="store_true", help="with --shapes: one layer of each kind")
    parser.add_argument("args", nargs="*", help=argparse.SUPPRESS)
    step_sizes(parser)


COMMAND = Command("dump", "write a page, the graph after each pass and the plan to a folder", dump, _show, _arguments)
