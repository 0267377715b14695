"""``gemma-npu run``."""

import argparse
from typing import Any

from gemma_npu_compile.cli.common import (
    Command,
    UserError,
    encode,
    generate_batch,
    load,
    positive,
    print_acceptance,
    say,
    totals,
)
from gemma_npu_compile.tiny_pair import CODING_PROMPTS


def run(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Generate for a batch of prompts."""
    half = args.dtype != "float32"
    if args.verify and half and args.eager:
        raise UserError(
            "--verify compares half precision with the uncaptured lowering, which --eager is: leave one out"
        )
    loaded = load(args)
    texts = args.prompt or list(CODING_PROMPTS)
    prompts = [encode(loaded.tokenizer, text, args.chat) for text in texts]
    say(f"generating {args.max_new_tokens} tokens for {len(prompts)} prompts")
    new, stats = generate_batch(loaded, prompts, args)
    verified, ties, against = None, 0, None
    if args.verify and half:  # near-ties may flip against another order of sums, not against itself
        say("comparing with the uncaptured lowering")
        against = "the uncaptured lowering"
        again, _ = generate_batch(loaded, prompts, argparse.Namespace(**{**vars(args), "eager": True}))
        verified = again == new if stats.report.totals()["replays"] else None  # None: all of it fell back
    elif args.verify:
        from gemma_npu_compile.generation import eos_ids, pad_id
        from gemma_npu_compile.verify import verify

        say("comparing with plain greedy decoding")
        against = "plain greedy decoding"
        config = loaded.target.generation_config
        result = verify(loaded.target, prompts, new, args.max_new_tokens, eos_ids(config), pad_id(config))
        verified, ties = result.equal, result.ties
    answer = {
        "model": str(args.model),
        "assistant": str(args.assistant),
        "platform": args.platform,
        "dtype": args.dtype,
        "outputs": [
            {"prompt": text, "text": loaded.tokenizer.decode(tokens, skip_special_tokens=True), "token_ids": tokens}
            for text, tokens in zip(texts, new, strict=True)
        ],
        "verified": verified,
        "verified_against": against,
        "ties": ties,
        "acceptance": stats.acceptance.to_dict(),
        "graphs": totals([stats.report]),
        "tokens_per_second": stats.tokens_per_second,
        "step_ms": stats.step_ms,
    }
    return answer, 1 if verified is False else 0


def _show(answer: dict[str, Any]) -> None:
    for output in answer["outputs"]:
        print(f"{output['prompt']}{output['text']}\n{'-' * 40}")
    print_acceptance(answer)
    print(f"speed       {answer['tokens_per_second']:.1f} tokens/s, {answer['step_ms']:.2f} ms per step (median)")
    if answer["verified"] is not None:
        verdict = "equal to" if answer["verified"] else "DIFFERENT from"
        print(
            f"verified    {verdict} {answer['verified_against']}"
            + (f" ({answer['ties']} rows tie)" if answer["ties"] else "")
        )


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare with plain greedy decoding, in half precision with the uncaptured lowering",
    )


COMMAND = Command("run", "generate for a batch of prompts", run, _show, _arguments)
