"""What the commands of ``gemma-npu`` share: their form, flags, loading a pair, progress."""

import argparse
import contextlib
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gemma_npu_compile.options import PLATFORMS
from gemma_npu_compile.tiny_pair import ASSISTANT_DIR, TARGET_DIR


class UserError(ValueError):
    """Something on the command line cannot be honoured."""


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


@dataclass(frozen=True)
class Command:
    """One command; a module of this package names its own ``COMMAND``.

    Attributes:
        run: takes the parsed flags; returns the JSON answer and the exit code (0 done, 1 the answer is no).
        show: prints the answer for people.
        arguments: adds the command's own flags to its parser.
        pair: whether it takes the flags of a model pair (``--model``, ``--dtype``, ...).
    """

    name: str
    help: str
    run: Callable[[argparse.Namespace], tuple[dict[str, Any], int]]
    show: Callable[[dict[str, Any]], None]
    arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    pair: bool = True


def positive(text: str) -> int:
    """An argument that is a positive integer."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return value


def common_flags() -> Parser:
    """Flags of every command."""
    flags = Parser(add_help=False)
    flags.add_argument("--json", action="store_true", help="one JSON object on stdout")
    flags.add_argument("--platform", choices=PLATFORMS, help="SoC to compile for (default: the device's)")
    return flags


def pair_flags() -> Parser:
    """Flags of commands that load a pair."""
    flags = Parser(add_help=False)
    flags.add_argument("--model", type=Path, default=TARGET_DIR, help="target directory (default: the bundled pair)")
    flags.add_argument("--assistant", type=Path, default=ASSISTANT_DIR, help="assistant directory")
    flags.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32, bfloat16 on an NPU"
    )
    flags.add_argument("--device", help="cpu, npu or npu:N (default: npu where there is one)")
    flags.add_argument("--num-draft-tokens", type=positive, default=3, metavar="K")
    flags.add_argument("--eager", action="store_true", help="same step and lowering, not captured")
    flags.add_argument("--chat", action="store_true", help="wrap prompts in the tokenizer's chat template")
    return flags


def resolve(args: argparse.Namespace) -> None:
    """Fill in the device and the platform where the user named none."""
    import torch

    from gemma_npu_compile.devices import default_device, platform_for

    device = getattr(args, "device", None) or default_device()
    if device.partition(":")[0] not in ("cpu", default_device()):
        raise UserError(f"--device is {device!r}, torch finds {' and '.join({'cpu', default_device()})} here")
    place = torch.device(device)
    args.device, args.platform = device, platform_for(place, args.platform)
    if getattr(args, "dtype", "") is None:
        shapes = getattr(args, "shapes", None)  # not run: what an NPU would compute in
        args.dtype = "float32" if place.type == "cpu" and not shapes else "bfloat16"


def say(text: str) -> None:
    """Progress, for people only."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def load(args: argparse.Namespace) -> Any:
    """The pair the flags name."""
    from gemma_npu_compile.loading import load_pair

    say(f"loading {args.model}")
    return load_pair(args.model, args.assistant, args.dtype, args.device)


def step_sizes(parser: argparse.ArgumentParser) -> None:
    """Flags of commands that compile a step without running prompts."""
    parser.add_argument("--max-rows", type=positive, default=4)
    parser.add_argument("--max-model-len", type=positive, default=1024)


def compile_step(args: argparse.Namespace) -> Any:
    """Compile and capture the step on padded rows; returns its engine."""
    from gemma_npu_compile.engine import Engine
    from gemma_npu_compile.options import Options

    loaded = load(args)
    engine = Engine(
        loaded.target,
        loaded.assistant,
        args.num_draft_tokens,
        max_rows=args.max_rows,
        max_model_len=args.max_model_len,
        options=Options(platform=args.platform, capture=not args.eager),
    )
    say("compiling the step")
    engine.warm_up()
    return engine


def encode(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    """Token ids of a prompt, verbatim or in the chat template."""
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


def generate_batch(
    loaded: Any, prompts: Sequence[Sequence[int]], args: argparse.Namespace
) -> tuple[list[list[int]], Any]:
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


def totals(reports: Sequence[Any]) -> dict[str, Any]:
    """Totals over the engines that were used, each counted once."""
    from gemma_npu_compile.report import CompileReport

    unique = {id(report): report for report in reports}
    return CompileReport([graph for report in unique.values() for graph in report.graphs]).totals()


def print_acceptance(answer: dict[str, Any]) -> None:
    """Acceptance and graphs, for people."""
    accepted, graphs = answer["acceptance"], answer["graphs"]
    rates = " / ".join(f"{100 * rate:.1f}" for rate in accepted["rate_per_pos"])
    print(f"acceptance  {rates} % by position, {accepted['drafts']} rounds")
    print(f"            {accepted['accepted_per_step']:.2f} drafts accepted per step")
    print(f"graphs      rows {graphs['sizes']}, {graphs['replays']} replays, {graphs['recompiles']} recompiles")
    for reason, count in graphs["fallbacks"].items():
        print(f"fallback    {count} times: {reason}")


@contextlib.contextmanager
def _arguments_of(script: Path, given: list[str]) -> Iterator[None]:
    """``sys.argv`` and the import path as ``python script given...`` has them; output goes to stderr."""
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [str(script), *given], str(script.resolve().parent)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv, sys.path[:] = argv, path


def run_script(script: Path, given: list[str]) -> None:
    """Run a program as ``python script given...`` would.

    Raises:
        UserError: there is no such file, or it exits with an error.
    """
    if not script.is_file():
        raise UserError(f"--script {script}: no such file")
    with _arguments_of(script, given):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as error:
            if error.code:
                raise UserError(f"--script {script}: exited with {error.code}") from None
