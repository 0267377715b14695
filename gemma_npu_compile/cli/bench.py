"""``gemma-npu bench``: the step against its peers in one process, or an estimate for a device that is not here."""

import argparse
from typing import Any

from gemma_npu_compile.cli.common import Command, UserError, positive, say


def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from gemma_npu_compile.bench.machine import describe
    from gemma_npu_compile.bench.peers import parse_peers
    from gemma_npu_compile.bench.restart import restart
    from gemma_npu_compile.bench.run import run_scenario
    from gemma_npu_compile.bench.scenarios import load, select
    from gemma_npu_compile.bench.targets import check

    scenarios, peers = select(args.scenario), parse_peers(args.peers)
    found, pairs = [], {}
    for scenario in scenarios:
        if scenario.pair not in pairs:
            pairs = {scenario.pair: load(scenario.pair)}
        found.append(run_scenario(scenario, pairs[scenario.pair], peers, args.rounds, args.platform, say))
        if args.restart:
            say(f"{scenario.name}: compiling in two more processes")
            found[-1]["ours"]["restart"] = restart(scenario.name, args.platform)
    answer = {"machine": describe(), "platform": args.platform, "scenarios": found, "targets": check(found)}
    return answer, int(any(entry["tokens_equal"] is False for entry in found))


_ESTIMATE_FLAGS = ("shapes", "soc", "bandwidth", "tflops", "task_us", "tasks", "context", "accepted")


def _refuse_mixed(args: argparse.Namespace) -> None:
    """Flags of an estimate and of a measurement do not go together."""
    given = [f"--{name.replace('_', '-')}" for name in _ESTIMATE_FLAGS if getattr(args, name) is not None]
    if given and not args.estimate:
        raise UserError(f"{', '.join(given)}: only with --estimate")
    if args.estimate and args.restart:
        raise UserError("--restart and --estimate: give one of them")
    if args.estimate and args.scenario:
        raise UserError("--scenario and --estimate: give one of them")
    if args.estimate and args.shapes is None:
        raise UserError("--estimate needs --shapes NAME: gemma-4-31b, 26b-a4b, ...")


def _estimate(args: argparse.Namespace) -> dict[str, Any]:
    from gemma_npu_compile.bench import estimate

    say("tracing the step" if args.tasks is None else "estimating")
    return estimate.estimate(
        args.shapes,
        args.soc or "ascend910b",
        bandwidth_gbps=args.bandwidth,
        tflops=args.tflops,
        task_us=args.task_us,
        tasks=args.tasks,
        contexts=args.context or estimate.CONTEXTS,
        acceptance=args.accepted or estimate.ACCEPTANCE,
    )


def bench(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Measure scenarios, or estimate."""
    from gemma_npu_compile.bench.measure import MIN_ROUNDS

    _refuse_mixed(args)
    if args.estimate:
        return _estimate(args), 0
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
    if "restart" in ours:
        again = ours["restart"]
        print(
            f"  behind Dynamo {again['first_s']:.2f} s, in a second process {again['second_s']:.2f} s: "
            f"{again['ratio']:.2f}"
        )
    print(
        f"  reads {roof['bytes_per_step'] / 1e6:.1f} MB a step: {roof['fraction']:.2f} of {roof['copy_gbps']:.1f} GB/s "
        f"copied (read plus written; {roof['read_gbps']:.1f} GB/s read), at most {roof['fraction_at_most']:.2f} with "
        f"{roof['gflops']:.0f} GFLOP/s"
    )
    print(f"  cost model: {roof['predicted_ms']:.2f} ms, {roof['predicted_over_measured']:.2f} of the measured step")
    for line in entry["differences"]:
        print(f"  DIFFERENT   {line}")


def _show_estimate(answer: dict[str, Any]) -> None:
    print(f"ESTIMATE, nothing was measured: {answer['shapes']} on {answer['soc']}, {answer['drafts']} drafts\n")
    for each in answer["inputs"]:
        print(f"{each['name']:14} {each['value']:g} {each['unit']:14} {each['source']}")
    for each in answer["formulas"]:
        print(f"\n{each['name']} ({each['unit']})\n  = {each['formula']}\n  = {each['filled']}")
    rates = "".join(f"{f'tokens/s at {each:g}':>18}" for each in answer["acceptance"])
    print(f"\n{'rows':>5} {'context':>8} {'weights GB':>11} {'KV GB':>8} {'launch ms':>10} {'ms/step':>9}{rates}")
    for line in answer["table"]:
        cells = "".join(f"{each:>18.1f}" for each in line["tokens_per_second"])
        print(
            f"{line['rows']:>5} {line['context']:>8} {line['weight_bytes'] / 1e9:>11.2f} "
            f"{line['kv_bytes'] / 1e9:>8.2f} {line['launch_ms']:>10.2f} {line['step_ms']:>9.2f}{cells}"
            + ("" if line["fits"] is not False else f"  does not fit: {line['memory_bytes'] / 1e9:.0f} GB")
        )


def _show(answer: dict[str, Any]) -> None:
    if answer.get("estimate"):
        _show_estimate(answer)
        return
    machine = answer["machine"]
    print(f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}")
    for entry in answer["scenarios"]:
        _show_scenario(entry)
    print(f"\n{'target':40} {'scenario':18} {'asked':>9} {'measured':>10}  met")
    for line in answer["targets"]:
        verdict = {True: "yes", False: "NO", None: "not measured"}[line["met"]]
        measured = _number(line["measured"], ".3g")
        print(f"{line['what']:40} {line['scenario']:18} {line['target']:>9} {measured:>10}  {verdict}")


def _above_zero(text: str) -> float:
    """An argument that is a positive, finite number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(platform="cpu", device="cpu")
    parser.add_argument(
        "--scenario", action="append", default=[], metavar="NAME", help="may be given several times; default: tiny-b1"
    )
    parser.add_argument("--peers", default="eager,inductor,hf_assisted,hf_plain", help="comma-separated")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="at least 7")
    parser.add_argument("--restart", action="store_true", help="compile in two more processes that share a cache")
    parser.add_argument("--estimate", action="store_true", help="a cost model for a device that is not here")
    parser.add_argument("--shapes", metavar="NAME", help="the pair to estimate: gemma-4-31b, 26b-a4b, ...")
    parser.add_argument("--soc", metavar="NAME", help="the device: ascend910b (default), ascend910_93, ascend950")
    parser.add_argument("--bandwidth", type=_above_zero, metavar="GB/S", help="instead of the published peak")
    parser.add_argument("--tflops", type=_above_zero, help="instead of the published peak")
    parser.add_argument(
        "--task-us", type=_above_zero, metavar="US", help="microseconds a captured task costs beside its work"
    )
    parser.add_argument("--tasks", type=positive, metavar="N", help="tasks of a step, instead of tracing it")
    parser.add_argument("--context", type=positive, action="append", metavar="N", help="may be given several times")
    parser.add_argument("--accepted", type=_above_zero, action="append", metavar="X", help="drafts accepted per step")


COMMAND = Command("bench", "measure the step against its peers, or estimate it", bench, _show, _arguments, pair=False)
