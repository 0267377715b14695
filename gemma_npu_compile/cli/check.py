"""``gemma-npu check``: where do the numbers part?"""

import argparse
from pathlib import Path
from typing import Any

from gemma_npu_compile.cli.common import Command, load, positive, say


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a tolerance: a number of 0 or more")
    return value


def check(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Run the step eagerly, as traced, after each pass and captured; exit code 1 when they differ."""
    from gemma_npu_compile.check_step import check_step, random_state
    from gemma_npu_compile.kv_cache import PagedKVCache
    from gemma_npu_compile.options import Options
    from gemma_npu_compile.record import cache_like, read
    from gemma_npu_compile.step import DraftVerifyStep

    recorded = read(args.state) if args.state else None
    loaded = load(args)
    if recorded is None:
        cache = PagedKVCache(
            loaded.target.config,
            max_rows=max(2, len(args.lengths)),
            max_model_len=max(args.max_model_len, *args.lengths),
            dtype=loaded.target.dtype,
            device=loaded.target.device,
        )
    else:
        cache = cache_like(recorded[-1], loaded.target)
    step = DraftVerifyStep(loaded.target, loaded.assistant, cache, args.num_draft_tokens)
    states = [random_state(step, args.lengths, args.seed)] if recorded is None else [r.state for r in recorded]
    options = Options(platform=args.platform, capture=not args.eager, disable_passes=tuple(args.disable_pass))
    for number, state in enumerate(states):
        say(f"checking step {number + 1} of {len(states)}")
        result = check_step(step, state, options, seed=args.seed, tolerance=args.tolerance, bisect=args.bisect)
        if result.fault is not None:
            break
    fault = result.fault
    answer = {
        "equal": fault is None,
        "steps": number + 1,
        "rows": len(state.lengths),
        "stages": [{"stage": name, "error": _number(error)} for name, error in result.stages.items()],
        "fault": None if fault is None else {**vars(fault), "error": _number(fault.error)},
    }
    return answer, 0 if fault is None else 1


def _number(error: float) -> float | str:
    """JSON has no NaN."""
    return error if error == error else "nan"


def _show(answer: dict[str, Any]) -> None:
    for each in answer["stages"]:
        error = each["error"]
        print(f"{each['stage']:34} {error if isinstance(error, str) else f'{error:.2e}'}")
    fault = answer["fault"]
    if fault is None:
        print(f"equal at every stage, {answer['steps']} steps of {answer['rows']} rows")
        return
    print(f"the numbers part at {fault['stage']}: {fault['what']} (largest difference {fault['error']})")
    if fault["node"]:
        print(f"first node: {fault['node']}")
    for each in fault["candidates"]:
        print(f"made by {fault['stage']}: {each}")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bisect", action="store_true", help="name the first node too")
    parser.add_argument("--tolerance", type=_tolerance, help="relative and absolute (default: by dtype)")
    parser.add_argument("--state", type=Path, metavar="FILE", help="steps recorded with options={'record': FILE}")
    parser.add_argument("--lengths", type=positive, nargs="+", default=[5, 140, 300], metavar="N", help="of the rows")
    parser.add_argument("--disable-pass", action="append", default=[], metavar="NAME", help="leave a pass out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-model-len", type=positive, default=1024)


COMMAND = Command("check", "find the pass, and the node, where the numbers part", check, _show, _arguments)
