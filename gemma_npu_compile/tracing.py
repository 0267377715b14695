"""Tracing a graph of the step without AOT: once, and without functional tensors.

AOT runs a graph twice, and makes every write functional before the passes make it a write again. The step writes to
nothing but its caches, through an operator made for it, and all it returns is new: one run at the level of ATen gives
the same operators in less than half of the time. Any graph of the dialect of which this is seen to hold goes this way;
all others are AOT's, and :func:`trace_step` says why.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.frontend_utils import _try_get_metadata_from_dynamo
from torch._guards import TracingContext
from torch._subclasses import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.fx.traceback import preserve_node_meta

from gemma_npu_compile.compile_cache.trace import Trace, fake_inputs
from gemma_npu_compile.expansion import Expander
from gemma_npu_compile.ops.library import NAMESPACE

_STORE = torch.ops.gemma_npu.store_kv.default
_NUMBERS = ("item", "tolist")
"""Methods that read numbers from a tensor: their sizes are known from data only."""


def _refusal(gm: GraphModule) -> str | None:
    """Why AOT has to trace Dynamo's graph."""
    if not any(map(_ours, gm.graph.nodes)):
        return "the graph has no operator of the dialect"
    for node in gm.graph.nodes:
        target: Any = node.target
        if node.op in ("call_module", "get_attr"):
            return f"{node.name} is a {node.op}"
        if node.op == "call_method" and target in _NUMBERS:
            return f"{node.name} calls {target}"
        if isinstance(target, torch._ops.HigherOrderOperator):
            return f"{node.name} is a higher-order operator"
        if target is torch._C._set_grad_enabled and node.args[0]:
            return f"{node.name} switches gradients on"
        if target is torch.amp.autocast_mode._enter_autocast:
            return f"{node.name} switches autocast"
    return None


def _ours(node: Node) -> bool:
    return str(node.target).startswith(f"{NAMESPACE}.")


def _new_form(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator of the same arguments that returns what ``op`` writes to the first one; None where there is none."""
    schema = op._schema
    name = schema.name.partition("::")[2]
    writes = [bool(arg.alias_info and arg.alias_info.is_write) for arg in schema.arguments]
    found = getattr(getattr(torch.ops.aten, name[:-1], None), op._overloadname, None)
    if op.namespace != "aten" or not name.endswith("_") or not writes or not writes[0] or any(writes[1:]):
        return None
    if found is None or found._schema.is_mutable or len(found._schema.returns) != 1:
        return None
    plain = [[(arg.name, str(arg.type)) for arg in each._schema.arguments] for each in (op, found)]
    return found if plain[0] == plain[1] and plain[0][0][1] == "Tensor" else None


def _layout(fake: Any) -> tuple[Any, ...]:
    return fake.dtype, str(fake.shape), str(fake.stride()), str(fake.storage_offset())


def _write_anew(graph: Graph, memory: Mapping[Node, int]) -> str | None:
    """Let writes to results nobody else reads make new ones; the first write that has to stay one, or None."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    holders: dict[int, list[Node]] = {}
    for node in order:
        if node in memory:
            holders.setdefault(memory[node], []).append(node)
    for node in order:
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload) or target is _STORE or not target._schema.is_mutable:
            continue
        new, first = _new_form(target), node.args[0]
        if new is None or not isinstance(first, Node) or first.op != "call_function":
            return f"{node.name} writes in place, by {target}"
        before = [each for each in holders[memory[first]] if order[each] < order[node]]
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])  # type: ignore[arg-type]
        made = new(*args, **kwargs)
        # Views, and what is read again, would need the write; so would who was traced with another layout.
        read_again = any(order[user] > order[node] for user in first.users)
        if before != [first] or read_again or _layout(made) != _layout(first.meta["val"]):
            return f"{node.name} writes in place, by {target}"
        node.target = new
        holders[memory[first]].remove(first)
    return None


def _refuse(graph: Graph, results: Sequence[Node], memory: Mapping[Node, int]) -> str | None:
    """Why the trace is more than a function that writes to its caches."""
    inputs = [memory[node] for node in graph.find_nodes(op="placeholder") if node in memory]
    for node in graph.nodes:
        target: Any = node.target
        if node.op == "call_function" and isinstance(target, torch._ops.OpOverload):
            if torch.Tag.nondeterministic_seeded in target.tags:
                return f"{node.name} draws random numbers"
            for cache in node.args[2:4] if target is _STORE else ():
                if cache.op != "placeholder":
                    return "keys are stored in what is no input"
                if inputs.count(memory[cache]) > 1:
                    return "an input that is written to shares memory with another"
        elif node.op not in ("placeholder", "output") and getattr(target, "__module__", "") != "_operator":
            return f"{node.name} is no operator"
    if not all(node in memory for node in results):
        return "a result is no tensor"
    stored = [memory[node] for node in results]
    return "results share memory" if len(set(stored)) < len(stored) or set(stored) & set(inputs) else None


def trace_step(gm: GraphModule, inputs: Sequence[Any]) -> Trace | str:
    """The inference graph of Dynamo's graph of a step, or why it has to be AOT's.

    Args:
        inputs: what Dynamo gives with the graph.
    """
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    if mode is None or not all(isinstance(each, (Tensor, torch.SymInt)) for each in inputs):
        return "an input is neither a tensor nor a size"
    if torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in inputs):
        return "an input requires grad"
    if torch._C._is_any_autocast_enabled():
        return "autocast is on"
    reason = _refusal(gm)
    if reason is not None:
        return reason
    fakes = fake_inputs(inputs, mode)
    if not all(type(each) is FakeTensor for each in fakes if isinstance(each, Tensor)):
        return "an input is a tensor subclass"
    if len({id(each) for each in fakes}) < len(fakes):
        return "two inputs are one tensor"

    memory: dict[Node, int] = {}

    def run(*args: Any) -> Any:
        expander = Expander(gm)
        results = expander.run(*args)
        memory.update(expander.memory)
        return tuple(results)

    try:
        with preserve_node_meta(), mode, torch.no_grad(), enable_python_dispatcher():
            made = make_fx(run)(*fakes)
        made.graph.eliminate_dead_code()
        results = made.graph.find_nodes(op="output")[0].args[0]
        with mode:
            reason = _refuse(made.graph, results, memory) or _write_anew(made.graph, memory)
    except Exception as error:  # AOT can do more, and says what is wrong where it cannot either
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if reason is not None:
        return reason
    _, static = _try_get_metadata_from_dynamo(gm, {}.keys(), len(fakes), [])
    places = {node: index for index, node in enumerate(made.graph.find_nodes(op="placeholder"))}
    stores = made.graph.find_nodes(op="call_function", target=_STORE)
    written = sorted({places[node] for store in stores for node in store.args[2:4]})
    shapes = [node.meta["val"].shape for node in results]
    dynamic = [tuple(i for i, size in enumerate(shape) if isinstance(size, torch.SymInt)) for shape in shapes]
    return Trace(_LazyGraphModule.from_graphmodule(made), tuple(static), tuple(written), tuple(dynamic))
