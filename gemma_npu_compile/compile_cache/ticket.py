"""One compilation's way through the cache: looked up, loaded or kept, and the reason where it is neither."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch._functorch._aot_autograd.runtime_wrappers import mark_dynamo_propagated_dynamic_indices
from torch._functorch._aot_autograd.schemas import PlainTensorMeta, ViewAndMutationMeta
from torch._guards import TracingContext
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef

from gemma_npu_compile.compile_cache.files import Folder, enabled
from gemma_npu_compile.compile_cache.final import Final, final_from_plain, final_to_plain
from gemma_npu_compile.compile_cache.key import final_key, make_key, shape_env, versions
from gemma_npu_compile.compile_cache.names import DamagedError, NotCacheableError
from gemma_npu_compile.compile_cache.trace import Trace, fake_inputs, from_plain, to_plain
from gemma_npu_compile.graphs.plan import Plan
from gemma_npu_compile.passes import PassRecord

log = logging.getLogger(__name__)


def _knowledge(among: Collection[sympy.Symbol] | None = None) -> dict[str, Any]:
    """What guards come from; of the symbols ``among``. What AOT adds to it would be missing where a trace is loaded.

    Symbols AOT makes are none of Dynamo's: for a number read from a tensor it makes another and replaces it again.
    """
    context, env = TracingContext.get(), shape_env()
    known: dict[str, Any] = {"aot": len(context.guards_context.aotautograd_guards)}
    if env is not None:
        for name in ("var_to_range", "replacements"):
            each = getattr(env, name)
            known[name] = {symbol: str(each[symbol]) for symbol in each if among is None or symbol in among}
        known["guards"] = [str(guard.expr) for guard in env.guards]
        known["asserts"] = [str(each.expr) for group in env.deferred_runtime_asserts.values() for each in group]
    return known


def _why_not(metadata: ViewAndMutationMeta | None, trace: GraphModule, dynamo: GraphModule) -> str | None:
    """Why a call of the trace is more than a call: what AOT does around it would be missing where it is loaded."""
    if metadata is None:
        return "AOT says nothing about the trace"
    inputs, given = (each.graph.find_nodes(op="placeholder") for each in (trace, dynamo))
    if len(inputs) != len(given):
        return "AOT merged inputs that are one tensor"
    if metadata.mutated_inp_runtime_indices:
        return "AOT changes an input outside of the graph"
    if metadata.aliased_out_indices or metadata.num_intermediate_bases:
        return "a result is an input, or shares memory with an input or another result"
    plain = [*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta]
    if not all(isinstance(each, PlainTensorMeta) for each in plain) or metadata.act_input_indices:
        return "an input or result is a tensor subclass"
    if metadata.tokens or metadata.num_graphsafe_rng_states or metadata.is_rng_op_functionalized:
        return "operators have effects beside the graph"
    if metadata.grad_enabled_mutation is not None:
        return "the function changes the grad mode"
    storages = [
        StorageWeakRef(f.untyped_storage()) for n in given if isinstance(f := n.meta["example_value"], torch.Tensor)
    ]
    written = {
        StorageWeakRef(given[i].meta["example_value"].untyped_storage()) for i in metadata.mutated_graph_handled_indices
    }
    if any(storages.count(each) > 1 for each in written):
        return "an input that is written to shares memory with another"
    return None


TRACE_HIT = "hit in front of the passes"


@dataclass
class Ticket:
    """Attributes:
    state: ``"hit"``, ``"hit in front of the passes"``, ``"stored"``, or why neither; for the report.
    trace: what was loaded or traced.
    final: what was loaded, on a hit.
    """

    state: str
    trace: Trace | None = None
    final: Final | None = None
    _dynamo: GraphModule | None = None
    _folder: Folder | None = None
    _key: str = ""
    _final_key: str | None = None
    _symbols: dict[sympy.Symbol, int] = field(default_factory=dict)
    _before: dict[str, Any] = field(default_factory=dict)

    def keep_aot(self, graph: GraphModule) -> None:
        """Write AOT's trace to the cache, if a call of it is a call and nothing more. Call before any pass."""
        if self._folder is None or self._dynamo is None:
            return
        context = TracingContext.try_get()
        metadata = context.fw_metadata if context is not None else None
        reason = _why_not(metadata, graph, self._dynamo)
        if reason is not None:
            self.state = f"not cached: {reason}"
        else:
            self.keep(_trace(graph, metadata))

    def keep(self, trace: Trace) -> None:
        """Write a trace to the cache, unless it cannot be kept. Call before any pass."""
        if self._folder is not None and self._dynamo is not None:
            dynamo, symbols = self._dynamo, self._symbols
            reason = self._write(self._key, "trace", lambda: to_plain(trace, dynamo, symbols))
            self.trace = trace if reason is None else None
            self.state = "stored" if reason is None else f"not cached: {reason}"

    def keep_final(self, graph: GraphModule, plan: Plan, passes: Sequence[PassRecord]) -> None:
        """Write what the passes made of the trace, where the trace can be kept."""
        if self.trace is None or self._dynamo is None or self._final_key is None:
            return
        dynamo, symbols = self._dynamo, self._symbols
        final = Final(replace(self.trace, graph=graph), plan, tuple(passes))
        reason = self._write(self._final_key, "final", lambda: final_to_plain(final, dynamo, symbols))
        if reason is not None:
            self.state = f"{'stored in front of the passes' if self.state == 'stored' else self.state}: {reason}"

    def _write(self, key: str, stage: str, plain: Callable[[], dict[str, Any]]) -> str | None:
        """Why an entry could not be written, or None."""
        assert self._folder is not None
        assert self._dynamo is not None
        try:
            if _knowledge(self._before.get("var_to_range")) != self._before:
                raise NotCacheableError("tracing added guards" if stage == "trace" else "a pass added guards")
            body = plain()
            self._folder.write(key, {"stage": stage, **_header(self._dynamo, body)}, body)
        except NotCacheableError as reason:
            return str(reason)
        except OSError as error:
            log.warning("compile cache: %s", error)
            return str(error)
        return None


def _trace(graph: GraphModule, metadata: Any) -> Trace:
    dynamic = [None if each.dynamic_dims is None else tuple(sorted(each.dynamic_dims)) for each in metadata.output_info]
    written = metadata.mutated_graph_handled_indices_seen_by_autograd
    return Trace(graph, tuple(metadata.static_input_indices), tuple(written), tuple(dynamic))


def _header(dynamo: GraphModule, body: dict[str, Any]) -> dict[str, Any]:
    """What ``gemma-npu cache ls`` shows of an entry."""
    stacks = (node.meta.get("nn_module_stack") for node in dynamo.graph.nodes)
    kinds = (kind for stack in stacks if stack for _, kind in list(stack.values())[:1])
    kind: Any = next(kinds, None)
    calls = [node for node in body["nodes"] if node["op"] == "call_function"]
    return {
        "versions": versions(),
        "module": getattr(kind, "__name__", kind),
        "nodes": len(body["nodes"]),
        "operators": len({node["target"] for node in calls}),
        "inputs": sum(node["op"] == "placeholder" for node in body["nodes"]),
        "symbols": body["symbols"],
    }


def look_up(
    gm: GraphModule, inputs: Sequence[Any], wanted: bool = True, settings: Callable[[], Mapping[str, Any]] | None = None
) -> Ticket:
    """Look for the final graph of Dynamo's graph, then for its trace.

    An entry that cannot be used is a miss, with one warning, and is replaced.

    Args:
        inputs: the tensors and sizes Dynamo gives with it.
        wanted: False neither reads nor writes (``Options.cache``).
        settings: gives all that the passes consult; None where they have to run.

    Raises:
        CompileError: an environment variable of the cache has an impossible value.
    """
    if not wanted or not enabled():
        return Ticket("off")
    folder = Folder.of_environment()
    refusal = folder.refusal()
    if refusal is not None:
        return Ticket(f"not used: {refusal}")
    try:
        if not all(isinstance(each, (torch.Tensor, torch.SymInt)) for each in inputs):
            raise NotCacheableError("an input is neither a tensor nor a size")
        key, symbols = make_key(gm)
    except NotCacheableError as reason:
        return Ticket(f"not cached: {reason}")
    behind = None if settings is None else final_key(key, settings())
    ticket = Ticket("not cached", None, None, gm, folder, key, behind, symbols, _knowledge())
    mode = TracingContext.get().fake_mode
    if mode is None:
        return ticket

    def load(name: str | None, read: Callable[..., Any]) -> Any:
        try:
            found = folder.read(name) if name is not None else None
            if name is None or found is None:
                return None
            header, body = found
            if header.get("versions") != versions():
                raise DamagedError("it was written by other versions")
            made = read(body, gm, fake_inputs(inputs, mode), mode, symbols)
            folder.touch(name)
            return made
        except (DamagedError, OSError) as error:
            log.warning("compile cache: ignoring %s/%s.json: %s", folder.path, name, error)
            return None

    ticket.final = load(behind, final_from_plain)
    if ticket.final is None:
        ticket.trace = load(key, from_plain)
    if ticket.final is not None or ticket.trace is not None:
        ticket.state = "hit" if ticket.final is not None else TRACE_HIT
    return ticket


def calling(run: Callable[[list[Any]], Sequence[Any]], trace: Trace) -> Callable[..., Any]:
    """What AOT puts around every call: counted writes, no gradients, results marked as dynamic."""

    def forward(*args: Any) -> Any:
        if trace.written:
            torch.autograd.graph.increment_version([args[index] for index in trace.written])
        with torch.no_grad():
            results = run(list(args))
        for result, dims in zip(results, trace.dynamic, strict=True):
            if dims is not None:
                mark_dynamo_propagated_dynamic_indices(result, set(dims))
        return results

    return forward
