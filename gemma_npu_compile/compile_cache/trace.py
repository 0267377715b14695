"""A trace as plain data, and back: nodes, their values as fakes of the trace in progress, where they come from.

Stack traces and module paths are not kept. An entry says which node of Dynamo's graph a node came from, and takes both
from the graph at hand, so that messages and dumps show today's source lines.
"""

import base64
import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import sympy
import torch
from torch._functorch._aot_autograd.frontend_utils import process_inputs
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import disable_fake_tensor_cache
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils._python_dispatch import _disable_current_modes

from gemma_npu_compile.compile_cache.names import (
    DamagedError,
    NotCacheableError,
    _of_torch,
    decode,
    decode_size,
    encode,
    encode_size,
    find_target,
    identifier,
    index,
    target_name,
)

MAX_CONSTANT, MAX_UNPACKED = 2**16, 2**26
"""Bytes of a tensor a trace may hold, as they are packed and not: masks pack well, weights do not, and no entry has
any."""

_TRACE = ("stack_trace", "nn_module_stack", "source_fn_stack")


@dataclass(frozen=True)
class Trace:
    """An inference graph, and what a call of it takes beside the graph.

    Attributes:
        graph: nodes with ``meta["val"]``.
        static: inputs whose addresses do not change between calls, by index.
        written: inputs the graph writes to, whose version counters a call increments.
        dynamic: dimensions of each result that later traces should take for dynamic; None where nothing is marked.
    """

    graph: GraphModule
    static: tuple[int, ...]
    written: tuple[int, ...]
    dynamic: tuple[tuple[int, ...] | None, ...]


def fake_inputs(inputs: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """What AOT would trace a graph with for the tensors and sizes Dynamo gives with it."""
    config: Any = SimpleNamespace(is_export=False, num_params_buffers=0)
    fakes, _ = process_inputs(list(inputs), config, mode, mode.shape_env)
    return list(fakes)


class _Writer:
    """Collects nodes; values that look alike are kept once."""

    def __init__(self, dynamo: Graph, symbols: dict[sympy.Symbol, int]) -> None:
        self._symbols = symbols
        self._fakes: dict[str, int] = {}
        self.fakes: list[Any] = []
        self._dynamo = {node.name: (place, node) for place, node in enumerate(dynamo.nodes)}
        self._places: dict[str, dict[str, list[int]]] = {key: {} for key in _TRACE}
        for place, node in self._dynamo.values():
            for key in filter(node.meta.__contains__, _TRACE):
                self._places[key].setdefault(str(node.meta[key]), []).append(place)

    def size(self, size: Any) -> Any:
        return encode_size(size, self._symbols)

    def value(self, value: Any) -> Any:
        """The value of a node: a number as it is, ``{"e": int}``, ``{"f": float}``, ``{"v": fake}``, or a list."""
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return {"e" if isinstance(value, torch.SymInt) else "f": self.size(value)}
        if isinstance(value, (list, tuple)):
            return [isinstance(value, tuple), *map(self.value, value)]
        if not isinstance(value, FakeTensor) or value.layout is not torch.strided or value.is_quantized:
            raise NotCacheableError(f"the trace has a value of type {type(value).__name__}")
        sizes = [[self.size(each) for each in sizes] for sizes in (value.shape, value.stride())]
        fake = [str(value.dtype).removeprefix("torch."), str(value.device), *sizes, self.size(value.storage_offset())]
        key = repr(fake)
        if key not in self._fakes:
            self._fakes[key] = len(self.fakes)
            self.fakes.append(fake)
        return {"v": self._fakes[key]}

    def origin(self, node: Node) -> dict[str, int]:
        """Nodes of Dynamo's graph this one has its place in the source from; what passes made may have it from two."""
        wanted = {key: node.meta[key] for key in _TRACE if key in node.meta}
        for source in node.meta.get("from_node", ()) if wanted else ():
            place, found = self._dynamo.get(source.name, (0, None))
            if found is not None and {key: found.meta.get(key) for key in wanted} == wanted:
                return dict.fromkeys(wanted, place)
        alike = {key: self._places[key].get(str(each), []) for key, each in wanted.items()}
        common = set.intersection(*map(set, alike.values())) if alike else set()
        return {key: min(common or places) for key, places in alike.items() if places}


def _constant(tensor: Any) -> dict[str, Any]:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        raise NotCacheableError(f"it holds a {type(tensor).__name__}")
    with _disable_current_modes():  # the trace's fakes have no contents
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    packed = zlib.compress(plain, 1) if len(plain) <= MAX_UNPACKED else plain
    if len(packed) > MAX_CONSTANT:
        raise NotCacheableError(f"it holds a tensor of {len(plain)} bytes")
    dtype, device = str(tensor.dtype).removeprefix("torch."), str(tensor.device)
    return {"dtype": dtype, "device": device, "shape": list(tensor.shape), "data": base64.b64encode(packed).decode()}


def to_plain(
    trace: Trace,
    dynamo: GraphModule,
    symbols: dict[sympy.Symbol, int],
    sources: Sequence[int | None] | None = None,
) -> dict[str, Any]:
    """The trace as JSON.

    Args:
        dynamo: the graph that was traced.
        symbols: its symbols by position (key.py).
        sources: input of Dynamo's graph behind each placeholder, None for what is none; without it, they are the same.

    Raises:
        NotCacheableError: something in the trace has no plain form; names it.
    """
    writer, nodes, constants = _Writer(dynamo.graph, symbols), [], {}
    given = iter(itertools.count() if sources is None else sources)
    order = {node: index for index, node in enumerate(trace.graph.graph.nodes)}
    for node in trace.graph.graph.nodes:
        plain: dict[str, Any] = {"op": node.op, "name": node.name}
        if node.op == "call_function":
            plain["target"] = target_name(node.target)
            plain["args"] = [encode(each, order.__getitem__) for each in node.args]
            plain["kwargs"] = {name: encode(each, order.__getitem__) for name, each in node.kwargs.items()}
            plain["value"], plain["origin"] = writer.value(node.meta.get("val")), writer.origin(node)
        elif node.op == "get_attr":
            plain["target"], plain["value"] = node.target, writer.value(node.meta.get("val"))
            constants[node.target] = _constant(getattr(trace.graph, str(node.target), None))
        elif node.op == "output":
            plain["args"] = [encode(each, order.__getitem__) for each in node.args]
        elif node.op == "placeholder":
            plain["input"] = next(given)
            if plain["input"] is None:
                plain["value"] = writer.value(node.meta.get("val"))  # host lists have none
        else:
            raise NotCacheableError(f"the trace has a {node.op}")
        nodes.append(plain)
    names = trace.graph.graph._graph_namespace  # also of nodes that are gone: names passes make follow from it
    return {
        "nodes": nodes,
        "gone": sorted(names._used_names - {node.name for node in order}),
        "counts": dict(sorted(names._base_count.items())),
        "fakes": writer.fakes,
        "constants": constants,
        "symbols": len(symbols),
        "static": list(trace.static),
        "written": list(trace.written),
        "dynamic": [None if dims is None else list(dims) for dims in trace.dynamic],
    }


class _Reader:
    """Values of this process: fakes of the mode in use, sizes in its symbols."""

    def __init__(self, plain: Sequence[Any], mode: FakeTensorMode, symbols: list[sympy.Symbol]) -> None:
        self._mode, self._symbols = mode, symbols
        self._sizes: dict[str, Any] = {}
        with mode, disable_fake_tensor_cache(mode):  # no two are alike
            self._fakes = [self._fake(*each) for each in plain]

    def size(self, plain: Any, number: type = int) -> Any:
        """A symbolic int, or float; plain ints as they are."""
        if isinstance(plain, int) and not isinstance(plain, bool):
            return plain
        key = f"{number.__name__} {plain!r}"
        if key not in self._sizes:
            expr, env = decode_size(plain, self._symbols), self._mode.shape_env
            if not isinstance(env, ShapeEnv):
                raise DamagedError("a size is symbolic where nothing is")
            hint = None if free_unbacked_symbols(expr) else number(expr.xreplace(env.backed_var_to_val))
            make = env.create_symintnode if number is int else env.create_symfloatnode
            self._sizes[key] = make(expr, hint=hint)
        return self._sizes[key]

    def _fake(self, dtype: Any, device: Any, shape: Any, stride: Any, offset: Any) -> torch.Tensor:
        sizes, steps = [self.size(each) for each in shape], [self.size(each) for each in stride]
        made = torch.empty_strided(sizes, steps, dtype=_of_torch(dtype, torch.dtype), device=torch.device(device))
        return made if offset == 0 else torch.as_strided(made, sizes, steps, self.size(offset))

    def value(self, plain: Any) -> Any:
        if plain is None or isinstance(plain, (bool, int)):
            return plain
        if isinstance(plain, list):
            found = [self.value(each) for each in plain[1:]]
            return tuple(found) if plain[0] else found
        ((kind, content),) = plain.items()
        if kind in ("e", "f"):
            return self.size(content, int if kind == "e" else float)
        if kind == "v":
            return self._fakes[index(content, len(self._fakes))]
        raise DamagedError(f"there is no value of kind {kind!r}")


def _tensor(plain: Any) -> torch.Tensor:
    dtype, shape = _of_torch(plain["dtype"], torch.dtype), [index(size, 2**31) for size in plain["shape"]]
    nbytes, unpacking = index(math.prod(shape) * dtype.itemsize, MAX_UNPACKED + 1), zlib.decompressobj()
    data = bytearray(unpacking.decompress(base64.b64decode(plain["data"], validate=True), nbytes + 1))
    if len(data) != nbytes or not unpacking.eof:
        raise DamagedError("a constant has another size")
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).to(plain["device"])


def from_plain(
    plain: Any,
    dynamo: GraphModule,
    inputs: Sequence[Any],
    mode: FakeTensorMode,
    symbols: dict[sympy.Symbol, int],
    sources: Sequence[int | None] | None = None,
) -> Trace:
    """The trace :func:`to_plain` wrote, in terms of the graph at hand.

    Args:
        dynamo: the graph the key was made of, whose nodes have the source lines and modules.
        inputs: fakes and sizes of its inputs, in ``mode``.
        symbols: its symbols by position.
        sources: as it was written with.

    Raises:
        DamagedError: the data does not describe a trace of this graph.
    """
    try:
        found = [each["input"] for each in plain["nodes"] if each["op"] == "placeholder"]
        if found != list(range(len(inputs)) if sources is None else sources):
            raise DamagedError("it has other inputs")
        return _from_plain(plain, dynamo, inputs, mode, symbols)
    except DamagedError:
        raise
    except Exception as error:  # whatever is wrong with it, it was not written by to_plain
        raise DamagedError(f"{type(error).__name__}: {error}") from error


def _from_plain(
    plain: Any, dynamo: GraphModule, inputs: Sequence[Any], mode: FakeTensorMode, symbols: dict[sympy.Symbol, int]
) -> Trace:
    origins = list(dynamo.graph.nodes)
    if plain["symbols"] != len(symbols):
        raise DamagedError("another number of symbols")
    reader, graph = _Reader(plain["fakes"], mode, list(symbols)), Graph()
    nodes: list[Node] = []
    constants = {identifier(name): _tensor(each) for name, each in plain["constants"].items()}
    for each in plain["nodes"]:
        op, name = each["op"], identifier(each["name"])
        if op == "call_function":
            args = tuple(decode(arg, nodes) for arg in each["args"])
            kwargs = {identifier(key): decode(arg, nodes) for key, arg in each["kwargs"].items()}
            node = graph.create_node(op, find_target(each["target"]), args, kwargs, name=name)
            node.meta["val"] = reader.value(each["value"])
            for key in filter(each["origin"].__contains__, _TRACE):
                node.meta[key] = origins[index(each["origin"][key], len(origins))].meta[key]
        elif op == "get_attr":
            if each["target"] not in constants:
                raise DamagedError(f"there is no constant {each['target']!r}")
            node = graph.create_node(op, each["target"], name=name)
            node.meta["val"] = reader.value(each["value"])
        elif op == "output":
            node = graph.create_node(op, "output", tuple(decode(arg, nodes) for arg in each["args"]), name=name)
        elif op == "placeholder":
            node, place = graph.create_node(op, name, name=name), each["input"]
            found = reader.value(each["value"]) if place is None else inputs[index(place, len(inputs))]
            if found is not None:
                node.meta["val"] = found
        else:
            raise DamagedError(f"there is no node of kind {op!r}")
        if node.name != name:
            raise DamagedError(f"there are two nodes {name!r}, or it is no name")
        nodes.append(node)
    graph.lint()
    module = torch.nn.Module()
    for name, tensor in constants.items():
        module.register_buffer(name, tensor)
    static, written = ([index(each, len(inputs)) for each in plain[key]] for key in ("static", "written"))
    results = len(nodes[-1].args[0])  # type: ignore[arg-type]
    dynamic = [None if dims is None else tuple(index(dim, 64) for dim in dims) for dims in plain["dynamic"]]
    if len(dynamic) != results:
        raise DamagedError("another number of results")
    graph._graph_namespace._used_names.update(map(identifier, plain["gone"]))
    counts = {identifier(base): index(count, 2**31) for base, count in plain["counts"].items()}
    graph._graph_namespace._base_count.update(counts)
    made = _LazyGraphModule(module, graph, "<lambda>")  # as AOT's: code is made when it is asked for
    return Trace(made, tuple(static), tuple(written), tuple(dynamic))
