"""What a step would take on a device that is not here: a cost model, not a measurement.

A step takes as long as reading its bytes or computing its products, whichever is longer, and its tasks' launches on
top. Peaks are vendors' peaks, so this is a bound: give measured numbers instead where you have them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from gemma_npu_compile.bench.costs import ACCEPTED, ROWS, Costs, costs_of
from gemma_npu_compile.options import Options, choice

GUIDE = "CANN's cross_platform_migration_guide.md, table of generations, as quoted in gitcode.com/cann/ops-cv issue 997"
FIELD = "public figures for gemma-4-31b with three drafts: five coding prompts / an agent's work"


@dataclass(frozen=True)
class Input:
    """A number of the model and where it is from."""

    name: str
    value: float
    unit: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"name": self.name, "value": self.value, "unit": self.unit, "source": self.source}


@dataclass(frozen=True)
class Soc:
    """Published peaks of a SoC; None where no source is known."""

    bandwidth_gbps: float | None
    tflops: float | None
    memory_gib: float | None


SOCS = {
    "ascend910b": Soc(1600, 353.9, 64),
    "ascend910_93": Soc(None, None, None),
    "ascend950": Soc(1600, 432, 128),
}
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (1024, 8192, 32768)
ACCEPTANCE = (2.85, 1.9)
BANDWIDTH, PEAK, TASKS, TASK = sympy.symbols("bandwidth peak tasks task", positive=True)
READ, COMPUTE = sympy.symbols("bytes flop", positive=True)

STEP = sympy.Max(READ / BANDWIDTH, COMPUTE / PEAK) + TASKS * TASK
"""Seconds of a step; ``task`` is what one costs beside its work."""
TOKENS = ROWS * (1 + ACCEPTED) / STEP
"""Tokens a second: the accepted drafts and the bonus token of every row."""


def inputs_of(
    soc: str, bandwidth_gbps: float | None, tflops: float | None, task_us: float | None, tasks: int, counted: bool
) -> list[Input]:
    """The device's numbers, the user's before the published ones.

    Args:
        counted: whether ``tasks`` was counted on the traced step, or given.

    Raises:
        ValueError: there is no such SoC, or no source for a number nobody gave.
    """
    choice("--soc", soc, tuple(SOCS))
    known = SOCS[soc]
    found = []
    for name, given, published, unit, flag in (
        ("bandwidth", bandwidth_gbps, known.bandwidth_gbps, "GB/s", "--bandwidth"),
        ("peak", tflops, known.tflops, "TFLOP/s", "--tflops"),
    ):
        value = published if given is None else given
        if value is None:
            raise ValueError(f"no published {name} of {soc} is known here: give {flag} (in {unit})")
        found.append(Input(name, value, unit, GUIDE if given is None else flag))
    found.append(Input("tasks", tasks, "", "launches of the traced step" if counted else "--tasks"))
    nothing = "no source is known: launches are left out; --task-us counts them"
    found.append(Input("task", task_us or 0.0, "us", nothing if task_us is None else "--task-us"))
    return found


def numbers(inputs: Sequence[Input]) -> dict[sympy.Symbol, float]:
    """Inputs in bytes, operations and seconds."""
    units = {"GB/s": 1e9, "TFLOP/s": 1e12, "us": 1e-6, "": 1.0}
    symbols = {str(symbol): symbol for symbol in (BANDWIDTH, PEAK, TASKS, TASK)}
    return {symbols[each.name]: each.value * units[each.unit] for each in inputs}


def table(
    costs: Costs,
    device: Mapping[sympy.Symbol, float],
    memory: float | None,
    drafts: int,
    contexts: Sequence[int],
    acceptance: Sequence[float],
) -> list[dict[str, Any]]:
    """Bytes, milliseconds and tokens a second for every batch of :data:`BATCHES` and every context.

    Args:
        device: of :func:`numbers`.
        memory: bytes of the device; None where unknown.
    """
    lines = []
    for context in contexts:
        for rows in BATCHES:
            weights, kv = (each(rows, context, drafts) for each in (costs.weights, costs.kv))
            put_in = {**device, READ: weights + kv, COMPUTE: costs.flops(rows, context, drafts), ROWS: rows}
            needed = costs.stored + costs.kept(rows, context, drafts)
            lines.append(
                {
                    "rows": rows,
                    "context": context,
                    "weight_bytes": round(weights),
                    "kv_bytes": round(kv),
                    "flops": round(put_in[COMPUTE]),
                    "launch_ms": float(1e3 * device[TASKS] * device[TASK]),
                    "step_ms": float(1e3 * STEP.subs(put_in)),
                    "tokens_per_second": [float(TOKENS.subs({**put_in, ACCEPTED: each})) for each in acceptance],
                    "memory_bytes": round(needed),
                    "fits": None if memory is None else needed <= memory,
                }
            )
    return lines


def count_tasks(target: Any, assistant: Any, drafts: int, platform: str) -> int:
    """Kernels a captured step launches on ``platform``, counted on the traced and rewritten graph."""
    from gemma_npu_compile.shapes import plan_step

    report = plan_step(target, assistant, drafts, max_rows=4, max_model_len=1024, options=Options(platform=platform))
    return report.graphs[0].passes[-1].launches_after


def estimate(
    shapes: str,
    soc: str,
    *,
    bandwidth_gbps: float | None = None,
    tflops: float | None = None,
    task_us: float | None = None,
    tasks: int | None = None,
    drafts: int = 3,
    contexts: Sequence[int] = CONTEXTS,
    acceptance: Sequence[float] = ACCEPTANCE,
) -> dict[str, Any]:
    """The estimate for a published pair in bfloat16, JSON-ready.

    Args:
        shapes: of :data:`gemma_npu_compile.shapes.SHAPES`.
        tasks: launches of a step; None traces the step and counts them, which takes a minute for the largest pair.
        acceptance: drafts accepted per step, without the bonus token.

    Raises:
        ValueError: a name is unknown, or a number has no source and was not given.
    """
    from gemma_npu_compile.shapes import build

    inputs_of(soc, bandwidth_gbps, tflops, task_us, 0, False)  # refused before anything takes a minute
    target, assistant = build(shapes, torch.bfloat16)
    costs = costs_of(target, assistant)
    counted = count_tasks(target, assistant, drafts, soc) if tasks is None else tasks
    inputs = inputs_of(soc, bandwidth_gbps, tflops, task_us, counted, tasks is None)
    memory = SOCS[soc].memory_gib
    capacity = None if memory is None else memory * 2**30
    formulas = [each.to_dict() for each in (costs.weights, costs.kv, costs.flops, costs.kept)]
    for name, unit, expr in (("step", "seconds", STEP), ("tokens", "tokens/s", TOKENS)):
        filled = str(expr.subs(numbers(inputs)))
        formulas.append({"name": name, "unit": unit, "formula": str(expr), "numbers": {}, "filled": filled})
    if memory is not None:
        inputs.append(Input("memory", memory, "GiB", GUIDE))
    shown = [Input("accepted", each, "drafts a step", FIELD) for each in acceptance if each in ACCEPTANCE]
    return {
        "estimate": True,
        "shapes": shapes,
        "soc": soc,
        "drafts": drafts,
        "inputs": [each.to_dict() for each in (*inputs, *shown)],
        "formulas": formulas,
        "acceptance": list(acceptance),
        "table": table(costs, numbers(inputs[:4]), capacity, drafts, contexts, acceptance),
    }
