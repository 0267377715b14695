"""``gemma-npu replay-check``: do the runtime's invariants hold over random replays?"""

import argparse
from typing import Any

from gemma_npu_compile.cli.common import Command, load, positive, say


def replay_check(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Replay random rows and look at addresses, padding, tables, lengths and results; exit code 1 on a violation."""
    from gemma_npu_compile.kv_cache import PagedKVCache
    from gemma_npu_compile.options import Options
    from gemma_npu_compile.replay_check import ReplayChecker
    from gemma_npu_compile.step import DraftVerifyStep

    loaded = load(args)
    cache = PagedKVCache(
        loaded.target.config,
        max_rows=args.max_rows,
        max_model_len=args.max_model_len,
        dtype=loaded.target.dtype,
        device=loaded.target.device,
    )
    step = DraftVerifyStep(loaded.target, loaded.assistant, cache, args.num_draft_tokens)
    say(f"{args.replays} replays")
    checker = ReplayChecker(step, Options(platform=args.platform, capture=not args.eager))
    found = checker.run(args.replays, args.seed)
    return {"replays": args.replays, "violations": [vars(each) for each in found]}, 1 if found else 0


def _show(answer: dict[str, Any]) -> None:
    seen: dict[tuple[str, str], list[int]] = {}
    for each in answer["violations"]:
        seen.setdefault((each["invariant"], each["what"]), []).append(each["replay"])
    for (invariant, what), replays in seen.items():
        print(f"{invariant}: {what} (replay {replays[0]}{f' and {len(replays) - 1} more' if replays[1:] else ''})")
    if not seen:
        print(f"every invariant held in {answer['replays']} replays")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replays", type=positive, default=50, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-rows", type=positive, default=6)
    parser.add_argument("--max-model-len", type=positive, default=1024)


COMMAND = Command("replay-check", "the runtime's invariants over random replays", replay_check, _show, _arguments)
