"""``gemma-npu probe``."""

import argparse
from pathlib import Path
from typing import Any

from gemma_npu_compile.cli.common import Command, UserError, positive, say


def run(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Try every row of the capability table on the device and write the override file."""
    from gemma_npu_compile.capabilities import platform
    from gemma_npu_compile.probe import ProbeError, probe

    if args.device.partition(":")[0] != "npu":
        raise UserError("probe asks an NPU what it can do, torch finds none here")
    if not args.out.parent.is_dir():
        raise UserError(f"--out is {args.out}, there is no directory {args.out.parent}")
    try:
        findings = probe(platform(args.platform), args.device, timeout=args.timeout, say=say)
    except ProbeError as error:
        raise UserError(str(error)) from error
    findings.write(args.out)
    differences = findings.differences
    answer = {
        "out": str(args.out),
        **findings.facts,
        "tried": len(findings.answers) - len(findings.untried),
        "untried": [str(question) for question in findings.untried],
        "refused": sum(answer.legal is False for answer in findings.answers.values()),
        "differences": [
            {
                "call": str(question),
                "table": "legal" if question.expected(findings.target) else "illegal",
                "error": findings.answers[question].error,
            }
            for question in differences
        ],
    }
    return answer, 0


def _show(answer: dict[str, Any]) -> None:
    print(f"{answer['soc']}, CANN {answer['cann']}, torch_npu {answer['torch_npu']}: table of {answer['platform']}")
    print(f"{answer['tried']} calls tried, {answer['refused']} refused; {len(answer['differences'])} unlike the table")
    for each in answer["differences"]:
        print(f"  {each['call']}: {each['error'] or 'works'}")
    if answer["untried"]:
        print(f"not tried, because the device went away: {len(answer['untried'])} calls")
    print(f"written to {answer['out']}; use it with options={{'capabilities': {answer['out']!r}}}")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="override file to write")
    parser.add_argument("--device", help="npu or npu:N (default: npu)")
    parser.add_argument("--timeout", type=positive, default=60, metavar="SECONDS", help="for each call (default 60)")


COMMAND = Command("probe", "try every row of the capability table on the device", run, _show, _arguments, pair=False)
