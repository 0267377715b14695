"""``gemma-npu``: run a pair, measure acceptance, show what was compiled."""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from gemma_npu_compile import __version__
from gemma_npu_compile.errors import CaptureError
from gemma_npu_compile.options import PLATFORMS
from gemma_npu_compile.tiny_pair import ASSISTANT_DIR, CODING_PROMPTS, TARGET_DIR


class UserError(ValueError):
    """Something on the command line cannot be honoured."""


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _say(text: str) -> None:
    """Progress, for people only."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return value


# ---- what the commands share


def _load(args: argparse.Namespace) -> Any:
    from gemma_npu_compile.loading import load_pair

    _say(f"loading {args.model}")
    return load_pair(args.model, args.assistant, args.dtype, args.device)


def _encode(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    if not chat:
        ids = tokenizer(prompt)["input_ids"]
    elif tokenizer.chat_template is None:
        raise UserError("--chat: this tokenizer has no chat template")
    else:
        message = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
    if not ids:
        raise UserError(f"the prompt {prompt!r} has no tokens")
    return list(ids)


def _generate(loaded: Any, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> tuple[list[list[int]], Any]:
    """New tokens of each prompt (EOS included) and the statistics of the call."""
    import torch

    from gemma_npu_compile.generation import eos_ids, generate

    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    output, stats = generate(
        loaded.target,
        ids,
        mask,
        assistant_model=loaded.assistant,
        num_draft_tokens=args.num_draft_tokens,
        max_new_tokens=args.max_new_tokens,
        do_sample=False,  # checkpoints may ship a sampling configuration
        options={"platform": args.platform, "capture": not args.eager},
        return_stats=True,
    )
    eos = eos_ids(loaded.target.generation_config)
    new = []
    for row in output[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        new.append(row[:end])
    return new, stats


def _totals(reports: Sequence[Any]) -> dict[str, Any]:
    """Totals over the engines that were used, each counted once."""
    from gemma_npu_compile.report import CompileReport

    unique = {id(report): report for report in reports}
    return CompileReport([graph for report in unique.values() for graph in report.graphs]).totals()


# ---- commands


def run(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Generate for a batch of prompts."""
    loaded = _load(args)
    texts = args.prompt or list(CODING_PROMPTS)
    prompts = [_encode(loaded.tokenizer, text, args.chat) for text in texts]
    _say(f"generating {args.max_new_tokens} tokens for {len(prompts)} prompts")
    new, stats = _generate(loaded, prompts, args)
    verified, ties = None, 0
    if args.verify:
        from gemma_npu_compile.generation import eos_ids, pad_id
        from gemma_npu_compile.verify import verify

        _say("comparing with plain greedy decoding")
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
        "ties": ties,
        "acceptance": stats.acceptance.to_dict(),
        "graphs": _totals([stats.report]),
        "tokens_per_second": stats.tokens_per_second,
        "step_ms": stats.step_ms,
    }
    return answer, 1 if verified is False else 0


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
    loaded = _load(args)
    prompts = [_encode(loaded.tokenizer, text, args.chat) for text in questions] * args.repeats
    parts = []
    for start in range(0, len(prompts), args.batch):
        _say(f"request {start + 1} of {len(prompts)}")
        parts.append(_generate(loaded, prompts[start : start + args.batch], args)[1])
    total = merge_acceptance([p.acceptance for p in parts], args.num_draft_tokens)
    answer = {
        "acceptance": total.to_dict(),
        "graphs": _totals([p.report for p in parts]),
        "requests": len(prompts),
        "mode": "eager" if args.eager else "captured",
    }
    return answer, 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def env(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Versions and what this machine offers."""
    import torch

    packages = ("torch", "torch-npu", "transformers", "sympy")
    answer = {
        "gemma_npu_compile": __version__,
        "python": platform.python_version(),
        **{package.replace("-", "_"): _version(package) for package in packages},
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": ["cpu"],
        "platform": args.platform,
        "model": str(TARGET_DIR),
        "assistant": str(ASSISTANT_DIR),
    }
    return answer, 0


def _compile(args: argparse.Namespace) -> Any:
    """Compile and capture the step on padded rows; returns its engine."""
    from gemma_npu_compile.engine import Engine
    from gemma_npu_compile.options import Options

    loaded = _load(args)
    engine = Engine(
        loaded.target,
        loaded.assistant,
        args.num_draft_tokens,
        max_rows=args.max_rows,
        max_model_len=args.max_model_len,
        options=Options(platform=args.platform, capture=not args.eager),
    )
    _say("compiling the step")
    engine.warm_up()
    return engine


def explain(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Passes, attention nodes, bindings, captures and memory of the step."""
    report = _compile(args).report
    return {**report.to_dict(), "text": str(report)}, 0


def dump(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Write the graph after each pass, the plan and an index to a folder."""
    from gemma_npu_compile.dump import dump_to

    with dump_to(args.out, args.force) as written:
        _compile(args)
    return {"out": str(args.out), "graphs": len(written.graphs)}, 0


# ---- output


def _percent(rates: Sequence[float]) -> str:
    return " / ".join(f"{100 * rate:.1f}" for rate in rates)


def _print_run(answer: dict[str, Any]) -> None:
    for output in answer["outputs"]:
        print(f"{output['prompt']}{output['text']}\n{'-' * 40}")
    _print_acceptance(answer)
    print(f"speed       {answer['tokens_per_second']:.1f} tokens/s, {answer['step_ms']:.2f} ms per step (median)")
    if answer["verified"] is not None:
        verdict = "equal to plain greedy decoding" if answer["verified"] else "DIFFERENT from plain greedy decoding"
        print(f"verified    {verdict}" + (f" ({answer['ties']} rows tie)" if answer["ties"] else ""))


def _print_acceptance(answer: dict[str, Any]) -> None:
    accepted, graphs = answer["acceptance"], answer["graphs"]
    print(f"acceptance  {_percent(accepted['rate_per_pos'])} % by position, {accepted['drafts']} rounds")
    print(f"            {accepted['accepted_per_step']:.2f} drafts accepted per step")
    print(f"graphs      rows {graphs['sizes']}, {graphs['replays']} replays, {graphs['recompiles']} recompiles")
    for reason, count in graphs["fallbacks"].items():
        print(f"fallback    {count} times: {reason}")


def _print_env(answer: dict[str, Any]) -> None:
    for name, value in answer.items():
        print(f"{name:18} {value}")


def _print_explain(answer: dict[str, Any]) -> None:
    print(answer["text"])


def _print_dump(answer: dict[str, Any]) -> None:
    print(f"{answer['graphs']} graphs in {answer['out']}, start with index.md")


COMMANDS = {
    "explain": (explain, _print_explain),
    "dump": (dump, _print_dump),
    "run": (run, _print_run),
    "acceptance": (acceptance, _print_acceptance),
    "env": (env, _print_env),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    common = Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="one JSON object on stdout")
    common.add_argument("--platform", choices=PLATFORMS, default="ascend910b", help="SoC to compile for")
    pair = Parser(add_help=False)
    pair.add_argument("--model", type=Path, default=TARGET_DIR, help="target directory (default: the bundled pair)")
    pair.add_argument("--assistant", type=Path, default=ASSISTANT_DIR, help="assistant directory")
    pair.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    pair.add_argument("--device", default="cpu")
    pair.add_argument("--num-draft-tokens", type=_positive, default=3, metavar="K")
    pair.add_argument("--eager", action="store_true", help="same step and lowering, not captured")
    pair.add_argument("--chat", action="store_true", help="wrap prompts in the tokenizer's chat template")

    top = Parser(prog="gemma-npu", description=__doc__)
    top.add_argument("--version", action="version", version=f"gemma-npu {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser("run", parents=[common, pair], help="generate for a batch of prompts")
    one.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    one.add_argument("--max-new-tokens", type=_positive, default=128, metavar="N")
    one.add_argument("--verify", action="store_true", help="compare with plain greedy decoding of the target")
    two = commands.add_parser("acceptance", parents=[common, pair], help="acceptance by draft position")
    two.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help='lines {"question": "..."}')
    two.add_argument("--repeats", type=_positive, default=3)
    two.add_argument("--batch", type=_positive, default=1)
    two.add_argument("--max-new-tokens", type=_positive, default=256, metavar="N")
    three = commands.add_parser("explain", parents=[common, pair], help="what was traced, rewritten and captured")
    four = commands.add_parser("dump", parents=[common, pair], help="write the graph after each pass to a folder")
    four.add_argument("--out", type=Path, required=True, metavar="DIR")
    four.add_argument("--force", action="store_true", help="replace an earlier dump")
    for command in (three, four):
        command.add_argument("--max-rows", type=_positive, default=4)
        command.add_argument("--max-model-len", type=_positive, default=1024)
    commands.add_parser("env", parents=[common], help="versions and devices")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns 0 (done), 1 (the answer is no) or 2 (a user's mistake, one line on stderr)."""
    args = parser().parse_args(argv)
    command, show = COMMANDS[args.command]
    try:
        answer, code = command(args)
    except (ValueError, OSError, CaptureError) as error:
        print(f"gemma-npu: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(answer))
    else:
        show(answer)
    return code


if __name__ == "__main__":
    sys.exit(main())
