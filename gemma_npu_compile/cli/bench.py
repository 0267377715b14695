"""``gemma-npu bench``: the step against its peers in one process, or an estimate for a device that is not here."""

import argparse
from typing import Any

from gemma_npu_compile.cli.common import Command, UserError, positive, say


def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from gemma_npu_compile.bench.machine import describe
    from gemma_npu_compile.bench.peers import parse_peers
    from gemma_npu_compile.bench.run import run_scenario
    from gemma_npu_compile.bench.scenarios import load, select
    from gemma_npu_compile.bench.targets import check

    scenarios, peers = select(args.scenario), parse_peers(args.peers)
    found, pairs = [], {}
    for scenario in scenarios:
        if scenario.pair not in pairs:
            pairs = {scenario.pair: load(scenario.pair)}
        found.append(run_scenario(scenario, pairs[scenario.pair], peers, args.rounds, args.platform, say))
    answer = {"machine": describe(), "platform": args.platform, "scenarios": found, "targets": check(found)}
    return answer, int(any(entry["tokens_equal"] is False for entry in found))


def bench(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Measure scenarios, or estimate."""
    from gemma_npu_compile.bench.measure import MIN_ROUNDS

    if args.rounds < MIN_ROUNDS:
        raise UserError(f"--rounds is {args.rounds}, a median needs at least {MIN_ROUNDS}")
    return _measure(args)


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _show_scenario(entry: dict[str, Any]) -> None:
    equal = {True: "equal", False: "DIFFERENT", None: "not compared"}[entry["tokens_equal"]]
    print(f"\n{entry['name']}  {entry['batch']} rows, {entry['context']} tokens in the cache, tokens {equal}")
    print(
        f"  {'':12} {'ms/step':>9} {'ours/peer':>9} {'tokens/s':>9} {'compile s':>9} {'ours/peer':>9} {'peak MiB':>9}"
    )
    for name, each in (("ours", entry["ours"]), *entry["peers"].items()):
        if each.get("reason"):
            print(f"  {name:12} {each['reason']}")
            continue
        own = entry["ratios"].get(name, {})
        cells = (
            _number(each["step_ms"]),
            _number(own.get("step_ms")),
            _number(each["tokens_per_second"], ".1f"),
            _number(each["compile_s"], ".1f"),
            _number(own.get("compile_s")),
            _number(each["peak_rss_mb"], ".0f"),
        )
        print(f"  {name:12} " + " ".join(f"{cell:>9}" for cell in cells))
    ours, roof = entry["ours"], entry["roofline"]
    print(
        f"  capture {ours['capture_s']:.2f} s, host overhead {ours['host_overhead_us']:.0f} us a step, steady state: "
        + ", ".join(f"{name} {value:g}" for name, value in ours["steady"].items())
    )
    print(
        f"  reads {roof['bytes_per_step'] / 1e6:.1f} MB a step: {roof['fraction']:.2f} of {roof['copy_gbps']:.1f} GB/s "
        f"copied (read plus written; {roof['read_gbps']:.1f} GB/s read)"
    )
    print(f"  cost model: {roof['predicted_ms']:.2f} ms, {roof['predicted_over_measured']:.2f} of the measured step")
    for line in entry["differences"]:
        print(f"  DIFFERENT   {line}")


def _show(answer: dict[str, Any]) -> None:
    machine = answer["machine"]
    print(f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}")
    for entry in answer["scenarios"]:
        _show_scenario(entry)
    print(f"\n{'target':40} {'scenario':18} {'asked':>9} {'measured':>10}  met")
    for line in answer["targets"]:
        verdict = {True: "yes", False: "NO", None: "not measured"}[line["met"]]
        measured = _number(line["measured"], ".3g")
        print(f"{line['what']:40} {line['scenario']:18} {line['target']:>9} {measured:>10}  {verdict}")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(platform="cpu", device="cpu")
    parser.add_argument(
        "--scenario", action="append", default=[], metavar="NAME", help="may be given several times; default: tiny-b1"
    )
    parser.add_argument("--peers", default="eager,inductor,hf_assisted,hf_plain", help="comma-separated")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="at least 7")


COMMAND = Command("bench", "measure the step against its peers, or estimate it", bench, _show, _arguments, pair=False)
