"""One compilation's way through the cache: looked up, loaded or kept, and the reason where it is neither."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._functorch._aot_autograd.runtime_wrappers import mark_dynamo_propagated_dynamic_indices
from torch._functorch._aot_autograd.schemas import PlainTensorMeta, ViewAndMutationMeta
from torch._guards import TracingContext
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef

from gemma_npu_compile.compile_cache.files import Folder, enabled
from gemma_npu_compile.compile_cache.key import make_key, shape_env, versions
from gemma_npu_compile.compile_cache.names import DamagedError, NotCacheableError
from gemma_npu_compile.compile_cache.trace import Trace, fake_inputs, from_plain, to_plain

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


@dataclass
class Ticket:
    """Attributes:
    state: ``"hit"``, ``"stored"``, or why neither; for the report.
    trace: what was loaded, on a hit.
    """

    state: str
    trace: Trace | None = None
    _dynamo: GraphModule | None = None
    _folder: Folder | None = None
    _key: str = ""
    _symbols: dict[sympy.Symbol, int] = field(default_factory=dict)
    _before: dict[str, Any] = field(default_factory=dict)

    def keep_aot(self, graph: GraphModule) -> None:
        """Write AOT's trace to the cache, if a call of it is a call and nothing more. Call before any pass."""
        if self._folder is None or self._dynamo is None or self.trace is not None:
            return
        context = TracingContext.try_get()
        metadata = context.fw_metadata if context is not None else None
        reason = _why_not(metadata, graph, self._dynamo)
        if reason is not None:
            self.state = f"not cached: {reason}"
        else:
            self.keep(_trace(graph, metadata))

    def keep(self, trace: Trace) -> None:
        """Write a trace to the cache, unless it was loaded from there or cannot be kept. Call before any pass."""
        if self._folder is None or self._dynamo is None or self.trace is not None:
            return
        try:
            if _knowledge(self._before.get("var_to_range")) != self._before:
                raise NotCacheableError("tracing added guards")
            body = to_plain(trace, self._dynamo, self._symbols)
            self._folder.write(self._key, _header(self._dynamo, body), body)
            self.state = "stored"
        except NotCacheableError as reason:
            self.state = f"not cached: {reason}"
        except OSError as error:
            self.state = f"not cached: {error}"
            log.warning("compile cache: %s", error)


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


def _load(body: Any, gm: GraphModule, inputs: Sequence[Any], symbols: dict[sympy.Symbol, int]) -> Trace:
    """The trace of an entry, on fakes AOT would trace with."""
    mode = TracingContext.get().fake_mode
    if mode is None:
        raise DamagedError("the trace in progress has no fakes")
    return from_plain(body, gm, fake_inputs(inputs, mode), mode, symbols)


def look_up(gm: GraphModule, inputs: Sequence[Any], wanted: bool = True) -> Ticket:
    """Look for the trace of Dynamo's graph. An entry that cannot be used is a miss, with one warning, and is replaced.

    Args:
        inputs: the tensors and sizes Dynamo gives with it.
        wanted: False neither reads nor writes (``Options.cache``).

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
    before = _knowledge()
    ticket = Ticket("not cached", None, gm, folder, key, symbols, before)
    try:
        found = folder.read(key)
        if found is not None:
            header, body = found
            if header.get("versions") != versions():
                raise DamagedError("it was written by other versions")
            ticket.trace = _load(body, gm, inputs, symbols)
            ticket.state = "hit"
            folder.touch(key)
    except (DamagedError, OSError) as error:
        log.warning("compile cache: ignoring %s/%s.json: %s", folder.path, key, error)
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
