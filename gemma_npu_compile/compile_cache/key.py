"""The key of an entry: everything that decides what tracing makes of Dynamo's graph.

Options and the platform are not in it: passes run on a loaded trace as on a new one. They are in the key of the graph
behind the passes. Weights are in neither, they are inputs, nor are source lines, which come from the graph at hand.
"""

import functools
import hashlib
import importlib.metadata
import inspect
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
import torch._functorch.config
import torch.fx.experimental._config
from torch._guards import TracingContext
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import gemma_npu_compile.graphs
import gemma_npu_compile.passes
from gemma_npu_compile import __version__
from gemma_npu_compile.compile_cache.names import NotCacheableError, encode, operator_name

FORMAT = 2
_TORCH = ("torch", "_operator", "math", "builtins")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


_FOLDERS = [Path(each.__path__[0]) for each in (gemma_npu_compile, gemma_npu_compile.graphs, gemma_npu_compile.passes)]
"""Sources of this package; an installed one has the last two in the first."""


@functools.cache
def versions() -> dict[str, Any]:
    """What a graph depends on beside the key: versions, and the sources of this package."""
    sources = hashlib.sha256()
    for folder in _FOLDERS:
        for path in sorted(each for each in folder.rglob("*") if each.suffix in (".py", ".cpp", ".h")):
            sources.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return {
        "format": FORMAT,
        "gemma_npu_compile": __version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "torch_npu": _version("torch-npu"),
        "transformers": _version("transformers"),
        "sympy": sympy.__version__,
        "sources": sources.hexdigest(),
    }


def _settings() -> dict[str, Any]:
    """State of this thread and of torch that tracing consults."""
    if torch._C._is_any_autocast_enabled():
        raise NotCacheableError("autocast is on")
    if _get_current_dispatch_mode_stack() or torch.overrides._get_current_function_mode_stack():
        raise NotCacheableError("a dispatch or function mode is on")
    attention = ("flash", "mem_efficient", "math", "cudnn")
    filling: Any = torch.utils.deterministic
    configs: list[Any] = [torch._functorch.config, torch.fx.experimental._config]
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fill": filling.fill_uninitialized_memory,
        "attention": [getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in attention],
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "configs": [each.get_hash().hex() for each in configs],
    }


def _target(node: Node) -> str:
    """What a node of Dynamo's graph calls, if the versions in the key say what that does."""
    target: Any = node.target
    if node.op == "call_method":
        return str(target)
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return operator_name(target)
    if isinstance(target, torch._ops.OperatorBase):
        raise NotCacheableError(f"Dynamo's graph has the higher-order operator {target.name()}")
    owner = getattr(target, "__self__", None)  # the class of autograd functions, the module of built-in functions
    module = getattr(target, "__module__", None) or getattr(owner, "__name__", "")
    name = f"{module}.{getattr(target, '__qualname__', type(target).__qualname__)}"
    known = inspect.isroutine(target) and not getattr(target, "__closure__", None)
    known = known and not (inspect.isclass(owner) and str(owner.__module__).split(".")[0] not in _TORCH)
    if inspect.isfunction(target):
        known = known and Path(target.__code__.co_filename).is_relative_to(Path(torch.__file__).parent)
    if not known or str(module).split(".")[0] not in _TORCH:
        raise NotCacheableError(f"Dynamo's graph calls {name}, which is not known to be torch's own")
    return name


class Symbols:
    """Symbols by position, first those of the inputs' sizes: names and order are those of one process only."""

    def __init__(self) -> None:
        self.known: dict[sympy.Symbol, int] = {}

    def text(self, expr: Any) -> str:
        """An expression or condition, with symbols named by position."""
        if isinstance(expr, torch.SymInt):
            expr = expr.node.expr
        if not isinstance(expr, sympy.Basic):
            return str(expr)
        if free_unbacked_symbols(expr) - self.known.keys():
            raise NotCacheableError(f"a size depends on data ({expr})")
        for symbol in sorted(expr.free_symbols, key=str):
            self.known.setdefault(symbol, len(self.known))
        return str(expr.xreplace({symbol: sympy.Symbol(f"s{i}", integer=True) for symbol, i in self.known.items()}))


def _tensor(fake: Any, node: Node, symbols: Symbols) -> dict[str, Any]:
    if not isinstance(fake, FakeTensor) or fake.layout is not torch.strided or fake.is_quantized:
        raise NotCacheableError(f"input {node.name} is a {type(fake).__name__}")
    return {
        "dtype": str(fake.dtype),
        "device": str(fake.device),
        "shape": [symbols.text(size) for size in fake.shape],
        "stride": [symbols.text(size) for size in fake.stride()],
        "offset": symbols.text(fake.storage_offset()),
        "flags": [fake.requires_grad, fake.is_leaf, fake.is_inference(), fake.is_conj(), fake.is_neg()],
        "parameter": isinstance(fake, torch.nn.Parameter),
        "static": str(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")),
    }


def _inputs(nodes: Sequence[Node], symbols: Symbols) -> list[Any]:
    found: list[Any] = []
    storages: dict[StorageWeakRef, int] = {}
    for node in nodes:
        fake = node.meta.get("example_value")
        if fake is None:
            raise NotCacheableError("the graph does not come from Dynamo")
        if isinstance(fake, torch.SymInt):
            found.append({"size": symbols.text(fake)})
        else:
            found.append(_tensor(fake, node, symbols))
            found[-1]["storage"] = storages.setdefault(StorageWeakRef(fake.untyped_storage()), len(storages))
    return found


def _shapes(env: ShapeEnv | None, symbols: Symbols) -> Any:
    """What is known of the symbols: tracing decides by it without a new guard."""
    if env is None:
        return None
    guards = [symbols.text(env.replace(guard.expr)) for guard in env.guards]
    asserts = [symbols.text(each.expr) for group in env.deferred_runtime_asserts.values() for each in group]
    ranges = [str(env.var_to_range.get(symbol)) for symbol in symbols.known]
    return {"guards": sorted(set(guards)), "asserts": asserts, "ranges": ranges, "settings": str(env.settings)}


def _modules(node: Node) -> list[str]:
    stack = node.meta.get("nn_module_stack") or {}
    return [f"{str(key).partition('@')[2]}@{path}" for key, (path, _) in stack.items()]


def shape_env() -> ShapeEnv | None:
    """The shapes of the trace in progress."""
    context = TracingContext.try_get()
    return context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None


def make_key(gm: GraphModule) -> tuple[str, dict[sympy.Symbol, int]]:
    """The key of Dynamo's graph, and its symbols by position.

    Raises:
        NotCacheableError: the graph depends on something no key can hold; says what.
    """
    if TracingContext.try_get() is None:
        raise NotCacheableError("the graph does not come from Dynamo")
    if [*gm.parameters(), *gm.buffers(), *gm.children()] or gm.graph.find_nodes(op="get_attr"):
        raise NotCacheableError("Dynamo's graph holds modules or tensors of its own")
    symbols, nodes, order = Symbols(), [], {node: index for index, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            target = _target(node)
            given = encode([node.args, list(node.kwargs.items())], order.__getitem__)
            nodes.append([node.op, target, given, _modules(node)])
        elif node.op == "output":
            nodes.append(["output", encode(node.args, order.__getitem__)])
    inputs = _inputs(gm.graph.find_nodes(op="placeholder"), symbols)
    for node in gm.graph.nodes:  # numbers that are read from tensors
        for symbol in node.meta.get("unbacked_bindings") or ():
            symbols.known.setdefault(symbol, len(symbols.known))
    shapes = _shapes(shape_env(), symbols)
    material = [versions(), _settings(), inputs, shapes, nodes]
    return hashlib.sha256(json.dumps(material, sort_keys=True).encode()).hexdigest(), symbols.known


def final_key(key: str, settings: Mapping[str, Any]) -> str:
    """The key of the graph behind the passes: that of the trace, and all that the passes consult beside it."""
    return hashlib.sha256(json.dumps([key, settings], sort_keys=True).encode()).hexdigest()
