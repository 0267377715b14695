"""A final graph as plain data, and back: the graph behind the passes, its plan, and what the passes did.

Records are read by the types of their fields, so nothing but a record of these classes can come of an entry.
"""

import math
import types
import typing
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import sympy
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from gemma_npu_compile.compile_cache.names import (
    DamagedError,
    NotCacheableError,
    decode,
    decode_size,
    encode,
    encode_size,
    find_target,
    identifier,
    target_name,
)
from gemma_npu_compile.compile_cache.trace import Trace, from_plain, to_plain
from gemma_npu_compile.graphs.cache_calls import CacheCalls
from gemma_npu_compile.graphs.inputs import Input, dim
from gemma_npu_compile.graphs.plan import Output, Plan, output_of
from gemma_npu_compile.passes import PassRecord
from gemma_npu_compile.passes.host_lengths import HostLengths
from gemma_npu_compile.passes.merge_gate_up import MergedWeight
from gemma_npu_compile.passes.numbers_on_device import HostNumber
from gemma_npu_compile.passes.sites import Attention

_CLASSES = (Plan, Input, Output, CacheCalls, Attention, HostLengths, MergedWeight, HostNumber, PassRecord)
RECORDS: dict[str, type] = {each.__name__: each for each in _CLASSES}
_HINTS = {each: typing.get_type_hints(each) for each in RECORDS.values()}

Symbols = dict[sympy.Symbol, int]


@dataclass(frozen=True)
class Final:
    """What is captured of a trace.

    Attributes:
        trace: with the final graph in place of the one that was traced.
        passes: what each pass did when the graph was made.
    """

    trace: Trace
    plan: Plan
    passes: tuple[PassRecord, ...]


def _slice(graph: GraphModule) -> list[Any]:
    """Nodes of an integer slice, by position."""
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    found = []
    for node in order:
        target = target_name(node.target) if node.op == "call_function" else None
        given = [node.args, list(node.kwargs.items())]
        found.append([node.op, node.name, target, encode(given, order.__getitem__)])
    return found


def _read_slice(plain: Any) -> GraphModule:
    graph, nodes = Graph(), list[Node]()
    for op, name, target, given in plain:
        if op not in ("placeholder", "call_function", "output"):
            raise DamagedError(f"a slice has a {op}")
        args, kwargs = decode(given, nodes)
        called = find_target(target) if op == "call_function" else identifier(name)
        named = {identifier(key): value for key, value in kwargs}
        nodes.append(graph.create_node(op, called, args, named, name=identifier(name)))
        if nodes[-1].name != name:
            raise DamagedError(f"there are two nodes {name!r}, or it is no name")
    graph.lint()
    return GraphModule(torch.nn.Module(), graph)


def write_record(value: Any, symbols: Symbols) -> Any:
    """A record, or what one holds, as JSON.

    Raises:
        NotCacheableError: it holds something that has no plain form; names its type.
    """
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, sympy.Expr):
        return {"size": encode_size(value, symbols)}
    if isinstance(value, (torch.dtype, torch.device)):
        return encode(value, lambda node: None)
    if isinstance(value, tuple):
        return [write_record(each, symbols) for each in value]
    if isinstance(value, Counter):
        return {"counts": [[key, count] for key, count in value.items()]}
    if isinstance(value, GraphModule):
        return {"slice": _slice(value)}
    if type(value) in _HINTS:
        found = [write_record(getattr(value, each.name), symbols) for each in fields(value)]
        return {"record": type(value).__name__, "fields": found}
    raise NotCacheableError(f"a record holds a {type(value).__name__}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a field's type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in args)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        wanted = args[:1] * len(value) if args[1:] == (Ellipsis,) else args
        return len(wanted) == len(value) and all(map(_fits, value, wanted))
    if origin is Counter:
        return isinstance(value, Counter) and all(_fits(key, args[0]) for key in value)
    if hint in (int, bool):
        return type(value) is hint
    if hint is float:
        return type(value) in (int, float)
    return isinstance(value, hint)


def read_record(plain: Any, symbols: list[sympy.Symbol]) -> Any:
    """What :func:`write_record` wrote, in the symbols of this process.

    Raises:
        DamagedError: it wrote nothing like this.
    """
    if plain is None or isinstance(plain, (bool, int, str, float)):
        return plain
    if isinstance(plain, list):
        return tuple(read_record(each, symbols) for each in plain)
    kind, content = next(iter(plain.items()))
    if kind == "size":
        return decode_size(content, symbols)
    if kind == "counts":
        return Counter({str(key): int(count) for key, count in content})
    if kind == "slice":
        return _read_slice(content)
    if kind != "record":
        return decode(plain, [])
    if content not in RECORDS:
        raise DamagedError(f"there is no record {content!r}")
    made = RECORDS[content]
    values = {f.name: read_record(each, symbols) for f, each in zip(fields(made), plain["fields"], strict=True)}
    for name, each in values.items():
        if not _fits(each, _HINTS[made][name]):
            raise DamagedError(f"{content}.{name} is {each!r}")
    return made(**values)


def _sources(plan: Plan) -> list[int | None]:
    return [*(item.source for item in plan.inputs), *(None for _ in plan.extras)]


def _check(plan: Plan, gm: GraphModule, inputs: int) -> None:
    """Whether a plan speaks of this graph."""
    given = gm.graph.find_nodes(op="placeholder")[: len(plan.inputs)]
    (results,) = gm.graph.find_nodes(op="output")[0].args
    for node, item in zip(given, plan.inputs, strict=True):
        fake = node.meta["val"]
        meant = (tuple(map(dim, fake.shape)), fake.dtype) if isinstance(fake, torch.Tensor) else (item.shape, None)
        if node.name != item.name or (item.shape, item.dtype) != meant or (item.padding or 0) >= inputs:
            raise DamagedError(f"its plan has another input {item.name}")
    if any(source >= inputs for extra in plan.extras for source in extra.sources):
        raise DamagedError("its plan makes an input of what there is not")
    if plan.outputs != tuple(map(output_of, results)):  # type: ignore[arg-type]
        raise DamagedError("its plan has other results")


def final_to_plain(final: Final, dynamo: GraphModule, symbols: Symbols) -> dict[str, Any]:
    """A final graph as JSON; arguments as of :func:`to_plain`.

    Raises:
        NotCacheableError: something in it has no plain form; names it.
    """
    return {
        **to_plain(final.trace, dynamo, symbols, _sources(final.plan)),
        "plan": write_record(final.plan, symbols),
        "passes": write_record(final.passes, symbols),
    }


def final_from_plain(
    plain: Any, dynamo: GraphModule, inputs: Sequence[Any], mode: FakeTensorMode, symbols: Symbols
) -> Final:
    """The final graph :func:`final_to_plain` wrote, in terms of the graph at hand; no pass took any time for it.

    Raises:
        DamagedError: the data does not describe a final graph of this graph.
    """
    try:
        plan, passes = (read_record(plain[name], list(symbols)) for name in ("plan", "passes"))
        if not isinstance(plan, Plan) or not _fits(passes, tuple[PassRecord, ...]):
            raise DamagedError("it has no plan")
        trace = from_plain(plain, dynamo, inputs, mode, symbols, _sources(plan))
        given = trace.graph.graph.find_nodes(op="placeholder")
        _check(plan, trace.graph, len(inputs))
    except DamagedError:
        raise
    except Exception as error:  # whatever is wrong with it, it was not written by final_to_plain
        raise DamagedError(f"{type(error).__name__}: {error}") from error
    for node, item in zip(given, plan.inputs, strict=False):
        node.meta.update(source=item.source, label=item.label)
    return Final(trace, plan, tuple(replace(each, seconds=0.0) for each in passes))
