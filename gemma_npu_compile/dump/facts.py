"""What a dump says of one graph, as JSON-ready facts; pages, ``plan.json`` and ``diff`` are made from them."""

from collections import Counter
from math import prod
from typing import Any

from torch.fx import GraphModule

from gemma_npu_compile.dump.listing import Listing, target
from gemma_npu_compile.errors import CaptureError, CompileError
from gemma_npu_compile.graphs.memory import Sizes, plan_memory
from gemma_npu_compile.graphs.plan import Dim, Input, Plan, Values, evaluate
from gemma_npu_compile.graphs.sizes import capture_sizes
from gemma_npu_compile.options import Options
from gemma_npu_compile.report import GraphReport


def address(item: Input) -> str:
    """How a captured graph finds an input: ``fixed``, ``buffer`` (copied in at each replay), ``host`` or ``unread``."""
    if item.role in ("unused", "padding") and not item.static:
        return "unread" if item.role == "unused" else "host"
    if item.role == "size":
        return "host"
    return "fixed" if item.static else "buffer"


def _shape(shape: tuple[Dim, ...]) -> list[int | str]:
    return [size if isinstance(size, int) else str(size) for size in shape]


def _nbytes(item: Input, values: "Values | None") -> int | None:
    """Bytes of an input at the largest size; None where a size is not known."""
    if item.dtype is None:
        return None
    if values is None and any(not isinstance(size, int) for size in item.shape):
        return None
    return prod(evaluate(size, values or {}) for size in item.shape) * item.dtype.itemsize


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Inputs, attention nodes and host parameters of a plan, JSON-ready; symbolic sizes as text."""
    largest = None if plan.rows is None or plan.max_rows is None else {plan.rows: plan.max_rows}
    return {
        "inputs": [
            {
                "name": item.name,
                "label": item.label,
                "role": item.role,
                "layer": item.layer,
                "phase": item.phase,
                "group": item.group,
                "shape": _shape(item.shape),
                "dtype": None if item.dtype is None else str(item.dtype).removeprefix("torch."),
                "buffer": item.buffer,
                "address": address(item),
                "bytes": _nbytes(item, largest),
            }
            for item in plan.inputs
        ],
        "attention": [
            {
                "layer": node.layer,
                "phase": node.phase,
                "layout": node.layout,
                "heads": node.heads,
                "head_dim": node.head_dim,
                "window": node.window,
                "scale": node.scale,
                "group": node.group,
                "block_table": node.block_table,
                "kv_len_source": node.kv_len_source,
                "lengths": node.lengths,
            }
            for node in plan.attention
        ],
        "host_parameters": [
            {
                "name": host.name,
                "inputs": [item.label for item in plan.inputs if item.source in host.sources and item.layer is None],
                "tasks": list(host.sites),
                "bucket": host.block_size,
                "capacity": host.capacity,
            }
            for host in plan.host
        ],
    }


def captures(gm: GraphModule, plan: Plan, options: Options, fewest: int) -> tuple[list[dict[str, int]], str | None]:
    """Bytes of intermediates for every size that would be captured, and why there are none.

    The pool is the largest of them: sizes share it. ``fewest`` are the rows of the smallest call.
    """
    if plan.rows is None or plan.max_rows is None:
        return [], plan.unpadded
    nodes = list(gm.graph.nodes)
    found, smallest = [], 1
    try:
        for rows in capture_sizes(options.capture_sizes, plan.max_rows, fewest):
            peak = plan_memory(nodes, Sizes({plan.rows: rows}, f"capture of {rows} rows"))[1]
            found.append({"rows": rows, "from_rows": smallest, "intermediate_bytes": peak})
            smallest = rows + 1
    except (CaptureError, CompileError) as error:
        return [], str(error)
    return found, None


def memory(inputs: list[dict[str, Any]], sizes: list[dict[str, int]]) -> dict[str, int | None]:
    """Bytes by what they are for; inputs with one address are counted once."""
    buffers = {i["buffer"]: i["bytes"] or 0 for i in inputs if i["buffer"] is not None}

    def total(role: str) -> int:
        return sum({i["label"]: i["bytes"] or 0 for i in inputs if i["role"] == role}.values())

    return {
        "parameters": total("parameter"),
        "caches": total("cache"),
        "intermediates": max((size["intermediate_bytes"] for size in sizes), default=None),
        "stable_inputs": sum(buffers.values()),
    }


def kinds(gm: GraphModule) -> dict[str, int]:
    """Nodes of the graph by operator, most frequent first."""
    calls = Counter(target(node) for node in gm.graph.nodes if node.op == "call_function")
    return dict(sorted(calls.items(), key=lambda pair: (-pair[1], pair[0])))


def graph_facts(gm: GraphModule, listing: Listing, report: GraphReport, options: Options) -> dict[str, Any]:
    """Facts of a final graph that do not change when it runs."""
    plan = report.plan
    assert plan is not None
    facts = plan_to_dict(plan)
    by_size, why = captures(gm, plan, options, report.smallest)
    return {
        **facts,
        "captures": by_size,
        "no_captures": why,
        "memory": memory(facts["inputs"], by_size),
        "kinds": kinds(gm),
        "places": [{"paths": list(each.paths), "nodes": len(each.lines)} for each in listing.fold()],
    }
