"""``gemma-npu``: run a pair, measure acceptance, show what was compiled. One module per command."""

import json
import sys
from collections.abc import Sequence

from gemma_npu_compile import __version__
from gemma_npu_compile.cli import acceptance, bench, cache, check, diff, dump, env, explain, probe, replay_check, run
from gemma_npu_compile.cli.common import Parser, common_flags, pair_flags, resolve
from gemma_npu_compile.errors import CaptureError

COMMANDS = {
    each.COMMAND.name: each.COMMAND
    for each in (run, acceptance, explain, dump, diff, check, replay_check, probe, bench, cache, env)
}


def parser() -> Parser:
    """The command line."""
    top = Parser(prog="gemma-npu", description="run a pair, measure acceptance, show what was compiled")
    top.add_argument("--version", action="version", version=f"gemma-npu {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for each in COMMANDS.values():
        parents = [common_flags(), *([pair_flags()] if each.pair else [])]  # a command may change their defaults
        each.arguments(commands.add_parser(each.name, parents=parents, help=each.help))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns 0 (done), 1 (the answer is no) or 2 (a user's mistake, one line on stderr)."""
    args = parser().parse_args(argv)
    command = COMMANDS[args.command]
    try:
        resolve(args)
        answer, code = command.run(args)
    except (ValueError, OSError, CaptureError) as error:
        message, _, _ = str(error).partition("\nSet TORCHDYNAMO_VERBOSE")  # Dynamo's advice on its own errors
        print(f"gemma-npu: {' '.join(message.split())}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(answer))
    else:
        command.show(answer)
    return code
