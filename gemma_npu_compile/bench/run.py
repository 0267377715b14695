"""One scenario from start to result."""

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gemma_npu_compile.bench.costs import Costs, costs_of, most_read
from gemma_npu_compile.bench.machine import Rates, middle, rates
from gemma_npu_compile.bench.measure import Measured, differences, hidden_gap, prepare, ratios, run_rounds
from gemma_npu_compile.bench.peers import makers
from gemma_npu_compile.bench.scenarios import NEW_TOKENS, PATTERN, Scenario
from gemma_npu_compile.bench.work import ForcedWork, TextWork, Work, text_work
from gemma_npu_compile.verify import is_tie, plain_greedy

Say = Callable[[str], None]


def make_work(scenario: Scenario, pair: tuple[Any, Any, Any]) -> Work:
    """The scenario's work on a loaded pair."""
    if scenario.context is None:
        return text_work(pair, scenario.batch, NEW_TOKENS)
    return ForcedWork(pair[0], pair[1], scenario.batch, scenario.context, PATTERN[: scenario.steps])


def _wrong(work: Work, found: Mapping[str, Measured]) -> list[str]:
    """What differs from plain greedy decoding, or between peers where weights are random."""
    if not isinstance(work, TextWork):
        return differences(found, None)
    prompts = work.prompts
    reference = [plain_greedy(work.target, prompt, work.new_tokens, (), 0) for prompt in prompts]

    def excused(row: int, position: int, expected: int, got: int) -> bool:
        return is_tie(work.target, [*prompts[row], *reference[row][:position]], (expected, got))

    return differences(found, reference, excused)


def roofline(costs: Costs, drafts: int, lengths: list[list[int]], step_ms: float, machine: Rates) -> dict[str, Any]:
    """Bytes a step has to read, against what the machine copies in that time; and the time the cost model expects.

    It expects weights at the rate products of so many rows read them, keys and values at that of so many queries.
    ``fraction_at_most``: with nothing beside products and attention, which read at the rate of the copy or compute at
    that of a large product, whichever takes longer (attention of four queries has some operations for every byte).

    Args:
        lengths: tokens in the cache at each step of a round, row by row.
    """
    rows = len(lengths[0])
    weights = costs.weights(rows, 0, drafts)
    read = {n: (costs.kv(1, n, drafts), costs.kv(1, n + drafts, 0)) for step in lengths for n in step}
    kv, seen = (sum(read[n][i] for step in lengths for n in step) / len(lengths) for i in range(2))
    mean = sum(map(sum, lengths)) // (rows * len(lengths))
    flops = costs.flops(rows, mean, drafts)
    seconds, total, verified = step_ms / 1e3, weights + kv, costs.weights(rows, 0, 0)
    queries = rows * (1 + drafts)
    attended = costs.attention(rows, mean, drafts), (1 + drafts) * costs.attention(rows, mean + drafts, 0)
    products = flops - attended[0], costs.flops(queries, 0, 0) - costs.attention(queries, 0, 0)
    parts = (  # bytes, arithmetic, the rate of the model: of products and attention, in verification and drafts
        (verified, products[1], machine.verify),
        (weights - verified, products[0] - products[1], machine.draft),
        (seen, attended[1], machine.attend_verify),
        (kv - seen, attended[0] - attended[1], machine.attend_draft),
    )
    predicted = sum(nbytes / rate for nbytes, _, rate in parts) / 1e9
    least = sum(max(nbytes / machine.copy, work / machine.gflops) for nbytes, work, _ in parts) / 1e9
    return {
        "bytes_per_step": round(total),
        "weight_bytes": round(weights),
        "kv_bytes": round(kv),
        "flops": round(flops),
        "copy_gbps": machine.copy,
        "read_gbps": machine.read,
        "verify_gbps": machine.verify,
        "draft_gbps": machine.draft,
        "attend_verify_gbps": machine.attend_verify,
        "attend_draft_gbps": machine.attend_draft,
        "gflops": machine.gflops,
        "fraction": total / seconds / 1e9 / machine.copy,
        "fraction_at_most": total / least / 1e9 / machine.copy,
        "predicted_ms": 1e3 * predicted,
        "predicted_over_measured": predicted / seconds,
    }


def summary(
    scenario: Scenario,
    work: Work,
    found: Mapping[str, Measured],
    wrong: list[str],
    costs: Costs,
    machine: Rates,
) -> dict[str, Any]:
    """The scenario's entry in the results."""
    lengths = found["ours"].rounds[0].lengths
    ours = found["ours"].to_dict()
    peers = {name: measured.to_dict() for name, measured in found.items() if name != "ours"}
    compared = [name for name, measured in found.items() if measured.reason is None]
    return {
        "name": scenario.name,
        "batch": scenario.batch,
        "context": max(lengths[0]),
        "rounds": len(found["ours"].rounds),
        "steps": len(lengths),
        "tokens_equal": not wrong if scenario.context is None or len(compared) > 1 else None,
        "differences": wrong,
        "hidden_gap": hidden_gap(found),
        "ours": {field: each for field, each in ours.items() if field not in ("available", "reason")},
        "peers": peers,
        "ratios": ratios(ours, peers),
        "roofline": roofline(costs, work.drafts, lengths, ours["step_ms"], machine),
    }


def run_scenario(
    scenario: Scenario, pair: tuple[Any, Any, Any], peers: tuple[str, ...], rounds: int, platform: str, say: Say
) -> dict[str, Any]:
    """Compile every subject, measure them by turns, compare what they gave.

    Args:
        pair: of :func:`gemma_npu_compile.bench.scenarios.load`.
        peers: names of :data:`gemma_npu_compile.bench.peers.PEERS`.
        platform: ours is compiled for.
        say: progress.
    """
    work = make_work(scenario, pair)
    costs = costs_of(work.target, work.assistant)
    say(f"{scenario.name}: compiling")
    _warm_compilers(peers, platform)
    try:
        found = prepare(makers(work, peers, platform))
        geometry = most_read(work.target, work.model_len)
        measured = scenario.batch, work.drafts, geometry, work.target.dtype, platform
        machine: list[Rates] = []

        def after(done: int) -> None:
            machine.append(rates(*measured))
            say(f"{scenario.name}: round {done} of {rounds}")

        run_rounds(found, rounds, after)
        return summary(scenario, work, found, _wrong(work, found), costs, middle(machine))
    finally:
        torch._dynamo.reset()
        gc.collect()


def _warm_compilers(peers: tuple[str, ...], platform: str) -> None:
    """What is paid once (imports, the C++ kernels of a machine, compilers looked up) is nobody's compile time."""
    from gemma_npu_compile.backend import Backend

    backends: list[tuple[Any, dict[str, Any] | None]] = [(Backend(), {"platform": platform})]
    if "inductor" in peers:
        backends.append(("inductor", None))
    for backend, options in backends:
        with torch.no_grad():
            compiled = torch.compile(  # type: ignore[call-overload]
                lambda x: (x + 1).sum(-1), backend=backend, options=options, isolate_recompiles=True
            )
            compiled(torch.zeros(2, 3))
