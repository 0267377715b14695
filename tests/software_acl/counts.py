"""What one step asks of a device, counted: this package, npugraph_ex, and plain eager launches.

``python tests/software_acl/counts.py`` decodes the same prompts with the same pair (random weights, heads of 256 and
512) in the three ways of ``inside/peers.py``, in one process on the software ACL, insists on equal tokens, and prints
what the trace and the allocator say of the last step. "npugraph_ex" is ``torch.compile(step, backend="npugraph_ex")``
on the step itself, with its defaults and without this package's passes; only its attention kernel is another one,
because the dialect's reads lengths on the host, which cannot be captured.

Counts say what is asked of a device, not how long it takes. Memory comes in the allocator's segments of 2 MiB and more.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEERS = ("ours", "npugraph_ex", "eager")
SETTINGS: dict[str, Any] = {
    "layers": 12,
    "drafts": 3,
    "dtype": "bfloat16",
    "window": 256,
    # No length passes a block or a bucket within these steps: the last one is a step of the steady state.
    "prompts": [700, 530, 400, 90],
    "steps": 5,
    "sizes": list(range(1, 13)),
    "model_len": 1024,
}
ROWS = {
    "tasks": "tasks per step",
    "host_calls": "host API calls per step",
    "updates": "task updates per step",
    "copied_around": "bytes copied around the replay",
    "copied_inside": "bytes copied by captured tasks",
    "largest_copy": "largest single copy, bytes",
    "kv_read": "KV bytes read by verification",
    "kv_visible": "  of blocks with a visible key",
    "memory_largest": "device memory, largest size, bytes",
    "memory_all": "device memory, all sizes, bytes",
}


def _verification(events: list[Mapping[str, Any]], found: Mapping[str, Any], width: int) -> dict[str, Any]:
    """KV bytes the verification's attention read, and how often each visible block was read."""
    events = [event for event in events if event["queries"] == width]
    times: Counter[int] = Counter()
    for layer in found["visible"]:
        mine = [event["blocks"] for event in events if event["keys"] == layer["keys"]]
        for row, blocks in enumerate(layer["blocks"]):
            read = Counter(block for each in mine for block in each[row])
            times.update(read[block] for block in blocks)
    blocks = sum(len(row) * layer["block_bytes"] for layer in found["visible"] for row in layer["blocks"])
    return {
        "kv_read": sum(event["bytes"] for event in events),
        "kv_visible": blocks,
        "kv_times": dict(times),  # blocks by how often they were read; an eager step reads gathered copies: 0
    }


def count(trace: Any, name: str, number: int, found: Mapping[str, Any], width: int) -> dict[str, Any]:
    """What step ``number`` of a subject asked for.

    Args:
        trace: a ``harness.Trace``.
        found: the subject's part of what ``scripts/counts.py`` printed.
        width: queries of a verification.
    """
    step = trace.between(f"{name} {number}", f"{name} {number} end")
    graphs = [event["graph"] for event in step.replays]
    captured = [event for event in trace.captures if event["graph"] in graphs]
    copies = step.of("copy")
    sent = [event["bytes"] for event in step.of("memcpy")]
    around = [event["bytes"] for event in copies if not event["graph"]]
    inside = [event["bytes"] for event in copies if event["graph"]]
    before, largest, every = found["memory"]
    # A copy that does not wait is among what was queued; an update's operators are calls as well.
    waits = sum(step.syncs.values()) + len([event for event in step.of("memcpy") if event.get("synchronous")])
    launched, updates = sum(step.launches.values()), step.updates
    return {
        "tasks": sum(event["tasks"] for event in captured) if captured else launched,
        "ops": dict(sum((Counter(event["ops"]) for event in captured), Counter()) if captured else step.launches),
        "replays": len(graphs),
        "host_calls": launched + len(step.of("queued")) + waits + sum(event["tasks"] for event in updates),
        "updates": len(updates),
        "copied_around": sum(around) + sum(sent),
        "copied_inside": sum(inside),
        "largest_copy": max([*around, *inside, *sent], default=0),
        "smallest_pool": min(layer["pool_bytes"] for layer in found["visible"]),
        **_verification(step.of("attention"), found, width),
        "memory_largest": largest - before,
        "memory_all": every - before,
    }


def targets(counted: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """The project's four targets, and whether this package holds them."""
    ours, peer = counted["ours"], counted["npugraph_ex"]
    return {
        "tasks at most half of npugraph_ex": ours["tasks"] <= 0.5 * peer["tasks"],
        "no task update in steady state": ours["updates"] == 0,
        "no copy of a KV cache": ours["largest_copy"] < ours["smallest_pool"],
        "verification reads each visible KV block once": set(ours["kv_times"]) == {1},
    }


def measure(runner: Any, **changed: Any) -> dict[str, Any]:
    """Run the three and count their last steps.

    Args:
        runner: a ``harness.Runner``.
        changed: other values for :data:`SETTINGS`.

    Raises:
        AssertionError: the tokens differ, or something failed.
    """
    settings = {**SETTINGS, **changed}
    # float32 attention is the software ACL's one exception, for exact comparisons.
    env = {"SOFTWARE_ACL_FP32": "1"} if settings["dtype"] == "float32" else {}
    result = runner.run(HERE / "scripts" / "counts.py", json.dumps(settings), env=env, timeout=1800)
    found = result.last
    if any(found[name]["tokens"] != found["ours"]["tokens"] for name in PEERS):
        raise AssertionError(f"tokens differ: { {name: found[name]['tokens'] for name in PEERS} }")
    width, last = 1 + settings["drafts"], settings["steps"] - 1
    counted = {name: count(result.trace, name, last, found[name], width) for name in PEERS}
    return {
        "settings": settings,
        "tokens": found["ours"]["tokens"],
        "counts": counted,
        "targets": targets(counted),
        "errors": result.trace.error_codes,
    }


def table(report: Mapping[str, Any]) -> str:
    """The report for people."""
    settings, counts = report["settings"], report["counts"]
    shape = f"{settings['layers']} layers, {settings['drafts']} drafts, {len(settings['prompts'])} rows"
    lines = [
        f"{shape}, {settings['dtype']}, sizes {settings['sizes'][0]} to {settings['sizes'][-1]}, equal tokens",
        "npugraph_ex: torch.compile on the step itself, its own passes on, none of ours; attention by a kernel that",
        "can be captured, which the dialect's cannot: it reads lengths on the host (107027, 107030)",
        f"{'':36}{'ours':>12}{'npugraph_ex':>13}{'eager':>12}{'ours/ex':>9}{'ours/eager':>11}",
    ]
    for key, title in ROWS.items():
        values = [counts[name][key] for name in PEERS]
        ratios = [f"{values[0] / other:.3f}" if other else "-" for other in values[1:]]
        lines.append(f"{title:36}{values[0]:>12}{values[1]:>13}{values[2]:>12}{ratios[0]:>9}{ratios[1]:>11}")
    lines.append("eager verifies on gathered copies of the keys; its memory is the peak of a step of the largest size")
    lines += [f"{'held' if held else 'missed'}: {name}" for name, held in report["targets"].items()]
    return "\n".join(lines)


def main() -> int:
    """From the command line; exit code 1 where a target is missed."""
    import harness

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in ("layers", "drafts"):
        parser.add_argument(f"--{name}", type=int, default=SETTINGS[name])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default=SETTINGS["dtype"])
    parser.add_argument("--json", action="store_true", help="all counts, also by operator, as one JSON object")
    arguments = vars(parser.parse_args())
    as_json = arguments.pop("json")
    with tempfile.TemporaryDirectory() as work:
        try:
            runner = harness.prepare(Path(work))
        except harness.UnavailableError as error:
            raise SystemExit(str(error)) from None
        report = measure(runner, **arguments)
    print(json.dumps(report) if as_json else table(report))
    return 0 if all(report["targets"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
