"""``gemma-npu acceptance``."""

import argparse
import json
from pathlib import Path
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


def _questions(path: Path | None) -> list[str]:
    if path is None:
        return list(CODING_PROMPTS)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--prompts {path}: {error.strerror}") from None
    questions = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            question = json.loads(line)["question"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise UserError(f'{path}:{number}: a line must be a JSON object {{"question": "..."}}') from None
        if not isinstance(question, str) or not question:
            raise UserError(f"{path}:{number}: question is {question!r}, it must be a non-empty string")
        questions.append(question)
    if not questions:
        raise UserError(f"--prompts {path}: no questions")
    return questions


def acceptance(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Acceptance by position over prompts and repeats."""
    from gemma_npu_compile.stats import merge_acceptance

    questions = _questions(args.prompts)
    loaded = load(args)
    prompts = [encode(loaded.tokenizer, text, args.chat) for text in questions] * args.repeats
    parts = []
    for start in range(0, len(prompts), args.batch):
        say(f"request {start + 1} of {len(prompts)}")
        parts.append(generate_batch(loaded, prompts[start : start + args.batch], args)[1])
    total = merge_acceptance([p.acceptance for p in parts], args.num_draft_tokens)
    answer = {
        "acceptance": total.to_dict(),
        "graphs": totals([p.report for p in parts]),
        "requests": len(prompts),
        "mode": "eager" if args.eager else "captured",
    }
    return answer, 0


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help='lines {"question": "..."}')
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--max-new-tokens", type=positive, default=256, metavar="N")


COMMAND = Command("acceptance", "acceptance by draft position", acceptance, print_acceptance, _arguments)
