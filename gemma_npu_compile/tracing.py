"""Tracing a graph of the step without AOT: once, and without functional tensors.

AOT runs a graph twice, and makes every write functional before the passes make it a write again. The step writes to
nothing but its caches, through an operator made for it, and all it returns is new: one run at the level of ATen gives
the same operators in a third of the time. Whatever else a graph does is AOT's: :func:`trace_step` then says why.
"""

import operator
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.frontend_utils import _try_get_metadata_from_dynamo, process_inputs
from torch._guards import TracingContext
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.fx.traceback import preserve_node_meta
from torch.multiprocessing.reductions import StorageWeakRef

from gemma_npu_compile.compile_cache.trace import Trace
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
    return None


def _ours(node: Node) -> bool:
    return str(node.target).startswith(f"{NAMESPACE}.")


def _storage(fake: Any) -> StorageWeakRef:
    return StorageWeakRef(fake.untyped_storage())


def _functional(node: Node, order: dict[Node, int]) -> bool:
    """Let a write to a result nobody reads any more make a new one instead; False where that is wrong.

    Args:
        order: place of every node of the graph.
    """
    target: Any = node.target
    schema = target._schema
    name = schema.name.partition("::")[2]
    written = [index for index, arg in enumerate(schema.arguments) if arg.alias_info and arg.alias_info.is_write]
    makes = getattr(getattr(torch.ops.aten, name[:-1], None), target._overloadname, None)
    if (
        target.namespace != "aten"
        or not name.endswith("_")
        or written != [0]
        or makes is None
        or makes._schema.is_mutable
    ):
        return False
    memory = _storage(node.meta["val"])
    for other in order:
        shares = isinstance(other.meta.get("val"), Tensor) and _storage(other.meta["val"]) == memory
        if other is node or not shares or order[other] > order[node]:
            continue
        if other.op == "placeholder" or any(order[user] > order[node] for user in other.users):
            return False
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])  # type: ignore[arg-type]
    if makes(*args, **kwargs).dtype != node.meta["val"].dtype:
        return False
    node.target = makes
    return True


def _check(graph: GraphModule, results: Sequence[Any], fakes: Sequence[Any]) -> str | None:
    """Why the trace is more than a function that writes to its caches."""
    inputs = [_storage(each) for each in fakes if isinstance(each, Tensor)]
    written = []
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    for node in order:
        target: Any = node.target
        if node.op != "call_function":
            if node.op not in ("placeholder", "output"):
                return f"{node.name} is a {node.op}"
            continue
        if not isinstance(target, torch._ops.OpOverload):
            if target is not operator.getitem and getattr(target, "__module__", "") != "_operator":
                return f"{node.name} is no operator"
            continue
        if target is _STORE:
            written += node.args[2:4]
        elif target._schema.is_mutable and not _functional(node, order):
            return f"{node.name} writes in place, by {target}"
        elif torch.Tag.nondeterministic_seeded in target.tags:
            return f"{node.name} draws random numbers"
    if any(node.op != "placeholder" for node in written):
        return "keys are stored in what is no input"
    if any(inputs.count(_storage(node.meta["val"])) > 1 for node in written):
        return "an input that is written to shares memory with another"
    if not all(isinstance(each, Tensor) for each in results):
        return "a result is no tensor"
    stored = [_storage(each) for each in results]
    if len(set(stored)) < len(stored) or set(stored) & set(inputs):
        return "results share memory"
    return None


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
    reason = _refusal(gm)
    if reason is not None:
        return reason
    config: Any = SimpleNamespace(is_export=False, num_params_buffers=0)
    fakes, _ = process_inputs(list(inputs), config, mode, mode.shape_env)
    if not all(type(each) is FakeTensor for each in fakes if isinstance(each, Tensor)):
        return "an input is a tensor subclass"
    if len({id(each) for each in fakes}) < len(fakes):
        return "two inputs are one tensor"

    def run(*args: Any) -> Any:
        return tuple(Interpreter(gm).run(*args))

    try:
        with preserve_node_meta(), mode, torch.no_grad(), enable_python_dispatcher():
            made = make_fx(run)(*fakes)
    except Exception as error:  # AOT can do more, and says what is wrong where it cannot either
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    made.graph.eliminate_dead_code()
    values = [node.meta["val"] for node in made.graph.find_nodes(op="output")[0].args[0]]
    with mode:
        reason = _check(made, values, fakes)
    if reason is not None:
        return reason
    _, static = _try_get_metadata_from_dynamo(gm, {}.keys(), len(fakes), [])
    places = {node: index for index, node in enumerate(made.graph.find_nodes(op="placeholder"))}
    stores = made.graph.find_nodes(op="call_function", target=_STORE)
    written = sorted({places[node] for store in stores for node in store.args[2:4]})
    dynamic = [tuple(i for i, size in enumerate(each.shape) if isinstance(size, torch.SymInt)) for each in values]
    return Trace(_LazyGraphModule.from_graphmodule(made), tuple(static), tuple(written), tuple(dynamic))
