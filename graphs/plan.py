"""The plan: everything a replay needs to know of a graph, computed once from the final FX graph."""

import functools
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from gemma_npu_compile.graphs.cache_calls import CacheCalls, cache_calls
from gemma_npu_compile.graphs.inputs import Dim, Input, Values, dim, evaluate
from gemma_npu_compile.passes.fx import device_of, tensors, written_roots
from gemma_npu_compile.passes.host_lengths import HostLengths
from gemma_npu_compile.passes.merge_gate_up import MergedWeight
from gemma_npu_compile.passes.numbers_on_device import HostNumber
from gemma_npu_compile.passes.sites import Attention, label, record


@dataclass(frozen=True)
class Output:
    """One result of the graph: a tensor's shape, dtype and device, or a host integer (no dtype)."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def empty(self, values: Values) -> Any:
        """The result of a call without rows."""
        shape = [evaluate(d, values) for d in self.shape]
        return shape[0] if self.dtype is None else torch.empty(shape, dtype=self.dtype, device=self.device)

    def cut(self, result: Any, values: Values) -> Any:
        """``result`` without padded rows, a view; ``values`` are the call's own."""
        if self.dtype is None:
            return evaluate(self.shape[0], values) if self.shape else result
        for axis, size in enumerate(self.shape):
            if not isinstance(size, int):
                result = result.narrow(axis, 0, evaluate(size, values))
        return result


@dataclass(frozen=True)
class Plan:
    """Inputs, outputs and sizes of a graph.

    Attributes:
        extras: what the graph takes behind its inputs and how it follows from them: host lists, weights, numbers.
        rows: the symbol of the row count when every input that has rows has declared padding, or when rows were proven
            not to mix (passes/prove_rows.py); else None.
        max_rows: rows the inputs' paddings allow; None when none is declared.
        unpadded: why there is no ``rows``.
        symbols: every symbol that shapes or contents of tensors depend on, in the order of the inputs; captures are
            keyed by their values. A host integer that is only counted on (a cache's length) is none of them.
        device: where the graph runs: an NPU if any tensor it reads is on one.
        calls: which calls of a model with a KV cache are not captured; None for other graphs.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    attention: tuple[Attention, ...]
    extras: tuple[HostLengths | MergedWeight | HostNumber, ...]
    symbols: tuple[sympy.Symbol, ...]
    rows: sympy.Symbol | None
    max_rows: int | None
    unpadded: str | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    calls: CacheCalls | None = None

    @property
    def host(self) -> tuple[HostLengths, ...]:
        """The host lists, in the order of the graph."""
        return tuple(each for each in self.extras if isinstance(each, HostLengths))

    @functools.cached_property
    def _reads(self) -> tuple[tuple[sympy.Symbol, int, int | None], ...]:
        """Where each symbol's value can be read: argument and axis, or a host integer."""
        found: dict[sympy.Symbol, tuple[int, int | None]] = {}
        for item in self.inputs:
            for axis, expr in enumerate(item.shape):
                if isinstance(expr, sympy.Symbol):
                    found[expr] = item.source, None if item.dtype is None else axis
        return tuple((symbol, *place) for symbol, place in found.items())

    def values(self, args: list[Any]) -> Values:
        """Value of every symbol, read from the arguments of a call."""
        return {s: int(args[source] if axis is None else args[source].shape[axis]) for s, source, axis in self._reads}


def _reached(start: Node, targets: tuple[Any, ...], through: tuple[Any, ...]) -> bool:
    """Whether ``start`` is an argument of one of ``targets``, directly or through shape-like operators."""
    queue, seen = [start], {start}
    while queue:
        node = queue.pop()
        for user in node.users:
            if user.target in targets and user.args.index(node) == 1:
                return True
            if user.target in through and user not in seen:
                seen.add(user)
                queue.append(user)
    return False


_SAME_TOKENS = (
    *(getattr(torch.ops.aten, name).default for name in ("stack", "cat", "view", "clone", "_to_copy", "alias")),
    torch.ops.aten.where.self,
    torch.ops.aten.masked_fill.Scalar,
)
"""What token ids may pass through on their way to an embedding: a model with images masks their places."""


def _counts(node: Node) -> bool:
    """Whether a host integer is an operand of an operator on tensors: shapes or contents depend on it."""
    queue, seen = [node], {node}
    while queue:
        for user in queue.pop().users:
            if user.op == "output" or user in seen:
                continue
            if tensors(user.meta.get("val")):
                return True
            seen.add(user)
            queue.append(user)
    return False


def _attention(gm: GraphModule) -> tuple[Attention, ...]:
    """Records of all attention nodes, of the dialect and lowered ones."""
    op = torch.ops.gemma_npu.paged_attention.default
    found = (n.meta.get("attention") or (record(n) if n.target is op else None) for n in gm.graph.nodes)
    return tuple(each for each in found if each is not None)


def output_of(result: Any) -> Output:
    """The record of a result: a node, or a constant."""
    fake = result.meta["val"] if isinstance(result, Node) else result
    if isinstance(fake, torch.Tensor):
        return Output(tuple(dim(s) for s in fake.shape), fake.dtype, fake.device)
    return Output((dim(fake),)) if isinstance(fake, (int, torch.SymInt)) else Output(())


def make_plan(gm: GraphModule, static: set[int]) -> Plan:
    """Plan a final graph.

    Args:
        gm: after the passes; placeholders carry ``meta["source"]`` (argument index).
        static: argument indices whose addresses do not change between calls.
    """
    aten = torch.ops.aten
    everything = gm.graph.find_nodes(op="placeholder")
    extras = tuple(
        n.meta.get("host") or n.meta.get("merged") or n.meta["number"] for n in everything if "source" not in n.meta
    )
    nodes = everything[: len(everything) - len(extras)]
    if any("source" not in n.meta for n in nodes):
        raise AssertionError("host lists, merged weights and numbers must stand behind the inputs")
    written = {n for n in written_roots(gm.graph) if n.op == "placeholder"}
    attention = _attention(gm)
    lengths = {each.kv_len_input for each in attention}
    inputs: list[Input] = []
    symbols: dict[sympy.Symbol, None] = {}
    groups = {n.meta["source"]: n.meta["table"].group for n in nodes if "table" in n.meta}
    read = {source for extra in extras for source in extra.sources}
    mirrors = {n.meta["mirror"] for n in nodes if "mirror" in n.meta}
    paddings = {n.meta["padding"] for n in nodes if "padding" in n.meta}
    for node in nodes:
        fake, binding, padding = node.meta["val"], node.meta.get("table"), node.meta.get("padding")
        group = groups.get(node.meta["source"])
        shape: tuple[Dim, ...] = ()
        if isinstance(fake, torch.Tensor):
            shape = tuple(dim(s) for s in fake.shape)
            role = "other"
            if node in paddings:
                role = "padding"
            elif node in mirrors and node.meta["source"] in read:
                role = "host"
            elif not node.users and binding is None and node.meta["source"] not in read:
                role = "unused"
            elif group is not None:
                role = "block_table"
            elif node in written:
                role = "cache"
            elif node.meta["source"] in static:
                role = "parameter" if node.meta.get("held", True) else "fixed"
            elif node.name in lengths:
                role = "lengths"
            elif fake.dtype != torch.bool and _reached(node, (aten.embedding.default,), _SAME_TOKENS):
                role = "token"
        else:
            shape, role = (
                (dim(fake),) if isinstance(fake, (int, torch.SymInt)) else (),
                "size" if node.users else "unused",
            )
        counts = role != "unused" and (role != "size" or _counts(node))
        for expr in shape:
            if counts and not isinstance(expr, int):
                symbols.update(dict.fromkeys(sorted(expr.free_symbols, key=str)))
        inputs.append(
            Input(
                name=node.name,
                label=label(node),
                source=node.meta["source"],
                role=role,
                static=role == "cache" or node.meta["source"] in static or (role == "padding" and bool(node.users)),
                shape=shape,
                dtype=fake.dtype if isinstance(fake, torch.Tensor) else None,
                padding=padding.meta["source"] if padding is not None else None,
                rows=node.meta.get("rows"),
                given=not node.meta.get("held", True) and "." in label(node),
                layer=binding.layer if binding else None,
                phase=binding.phase if binding else None,
                group=group,
            )
        )
    rows, max_rows, unpadded = _rows(gm, inputs, {n.meta["source"]: n.meta["val"] for n in nodes})
    (results,) = gm.graph.find_nodes(op="output")[0].args
    outputs = tuple(output_of(r) for r in results)
    device, calls = device_of(gm), cache_calls(gm, inputs)
    return Plan(tuple(inputs), outputs, attention, extras, tuple(symbols), rows, max_rows, unpadded, device, calls)


def _rows(
    gm: GraphModule, inputs: list[Input], values: dict[int, Any]
) -> tuple[sympy.Symbol | None, int | None, str | None]:
    """The row symbol and its bound; or why rows cannot be padded.

    Every input whose shape depends on a symbol must have the row symbol in front, and nowhere else, and declared
    padding. Inputs of a fixed shape are the same for every number of rows.
    """
    sized = [i for i in inputs if i.buffer is not None and any(not isinstance(d, int) for d in i.shape)]
    if not sized:
        return None, None, "no input has a symbolic shape (torch.compile saw one size: see mark_rows)"
    if all(item.padding is None for item in inputs) and ("rows" in gm.meta or "rows_mix" in gm.meta):
        return gm.meta.get("rows"), None, gm.meta.get("rows_mix")
    for item in sized:
        if item.padding is None:
            return None, None, f"input {item.label} has no declared padding (gemma_npu::row_padding)"
        if not isinstance(item.shape[0], sympy.Symbol) or item.shape[0] != sized[0].shape[0]:
            return None, None, f"input {item.label} does not have the rows of {sized[0].label}"
        if any(not isinstance(d, int) for d in item.shape[1:]):
            return None, None, f"input {item.label} has symbolic sizes {item.shape[1:]} beside its rows"
    bounds = [values[i.padding].shape[0] for i in sized if i.padding is not None]
    if not all(isinstance(bound, int) for bound in bounds):
        return None, None, "the number of padded rows is symbolic (dynamic=True; see mark_rows)"
    return sized[0].shape[0], min(bounds), None
