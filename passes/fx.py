"""Small helpers on FX graphs that several passes share."""

import contextlib
import operator
import re
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves


def placeholders(gm: GraphModule) -> list[Node]:
    """Inputs of the graph, in order."""
    return gm.graph.find_nodes(op="placeholder")


def add_input(gm: GraphModule, name: str) -> Node:
    """A new placeholder behind the inputs there are, named ``name`` where that makes an identifier nobody has."""
    with gm.graph.inserting_after(placeholders(gm)[-1]):
        made = gm.graph.placeholder(re.sub(r"\W", "_", name))
    made.target = made.name  # unique, while the name asked for may occur twice
    return made


def order_of(graph: Graph) -> dict[Node, int]:
    """Position of every node."""
    return {node: index for index, node in enumerate(graph.nodes)}


_UNDECLARED = (torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default)
"""Views whose schema does not say so."""


def is_view(node: Node) -> bool:
    """Whether the result shares memory with an argument (views, and elements of a tuple of views)."""
    if node.target in _UNDECLARED:
        return True
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return is_view(node.args[0])
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def root(node: Node) -> Node:
    """The value a view shows, through any number of views."""
    while node.op == "call_function" and is_view(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def written_args(node: Node) -> list[Node]:
    """Arguments an operator call writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    found = [argument(node, name) for name in names]
    flat = [each for arg in found for each in (arg if isinstance(arg, (list, tuple)) else [arg])]
    return [each for each in flat if isinstance(each, Node)]


def written_roots(graph: Graph) -> set[Node]:
    """Values that an operator of the graph writes to, directly or through a view."""
    return {root(arg) for node in graph.nodes for arg in written_args(node)}


def argument(node: Node, name: str) -> Any:
    """Argument ``name`` of an operator call, its default when not given."""
    for index, schema in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if schema.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name, schema.default_value)
    raise KeyError(name)


def arguments(node: Node) -> dict[str, Any]:
    """All arguments of an operator call by name, in the order of its schema; defaults when not given."""
    return {each.name: argument(node, each.name) for each in node.target._schema.arguments}  # type: ignore[union-attr]


def value(arg: Any) -> Any:
    """The fake value of a node, or the argument itself."""
    return arg.meta["val"] if isinstance(arg, Node) else arg


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a value: itself, or those in a tree of any depth."""
    if isinstance(value, torch.Tensor):  # almost always, and trees are slow
        return [value]
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


_fakes: weakref.WeakKeyDictionary[Graph, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _facts(arg: Any) -> Any:
    """What a fake result depends on: dtype, device and sizes of tensors, numbers as they are. Adds no guard."""
    if isinstance(arg, torch.Tensor):
        sizes = (*arg.shape, *arg.stride())
        return arg.dtype, arg.device, arg.dim(), *(s if isinstance(s, int) else s.node.expr for s in sizes)
    if isinstance(arg, torch.SymInt):
        return "size", arg.node.expr
    if isinstance(arg, (list, tuple)):
        return tuple(map(_facts, arg))
    if isinstance(arg, dict):
        return tuple((name, _facts(each)) for name, each in sorted(arg.items()))
    return type(arg), arg


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call at the graph's insertion point, with its fake value computed.

    Layers repeat: a call like an earlier one has its fake value, which costs milliseconds with symbolic sizes.
    """
    node = graph.call_function(target, args, kwargs)
    fake_args, fake_kwargs = torch.fx.node.map_arg((args, kwargs), value)
    known, key = _fakes.setdefault(graph, {}), (target, _facts(fake_args), _facts(fake_kwargs))
    if key not in known:
        mode = detect_fake_mode(tensors(fake_args))
        if mode is None:  # no tensor among the arguments (arange): the mode of the graph's inputs
            mode = detect_fake_mode([n.meta.get("val") for n in graph.find_nodes(op="placeholder")])
        with mode if mode is not None else contextlib.nullcontext():
            known[key] = target(*fake_args, **fake_kwargs)
    node.meta["val"] = known[key]
    return node


def is_last(dim: Any, node: Node) -> bool:
    """Whether ``dim`` names the last axis of ``node``."""
    return isinstance(dim, int) and dim in (-1, node.meta["val"].dim() - 1)


def same_layout(new: Node, old: Node) -> bool:
    """Whether two results lie the same in memory: a view of one is a view of the other. Adds no guards."""
    a, b = new.meta["val"], old.meta["val"]
    return str(tuple(a.shape)) == str(tuple(b.shape)) and all(
        str(left) == str(right)
        for left, right, size in zip(a.stride(), b.stride(), a.shape, strict=True)
        if str(size) != "1"
    )


def known_len(size: Any) -> int | None:
    """A length as rules ask for it: itself, 2 for any number above one, None where one is possible. Adds no guard."""
    if isinstance(size, int):
        return size
    return 2 if statically_known_true(size > 1) else None


def size_of(graph: Graph, tensor: Node, axis: int) -> Any:
    """The size of an axis as an argument: an int, or a node where it is symbolic."""
    known = tensor.meta["val"].shape[axis]
    return known if isinstance(known, int) else call(graph, torch.ops.aten.sym_size.int, tensor, axis)


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether a fake tensor is contiguous, as far as its expressions say; adds no guard."""
    step: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if str(size) != "1" and str(stride) != str(step):
            return False
        step = step * size
    return True


def packed(graph: Graph, tensor: Node) -> Node:
    """The value, contiguous: fused attention takes no strided inputs."""
    if is_packed(tensor.meta["val"]):
        return tensor
    return call(graph, torch.ops.aten.clone.default, tensor, memory_format=torch.contiguous_format)


def copy_trace(new: Node, old: Node) -> None:
    """Let ``new`` point at the source line and module ``old`` came from."""
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten"):
        if key in old.meta:
            new.meta.setdefault(key, old.meta[key])


def launches(graph: Graph) -> int:
    """Kernels one run of the graph launches: operators on tensors that are no views, and have elements."""

    def launched(node: Node) -> bool:
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or is_view(node):
            return False
        results = tensors(node.meta.get("val"))
        return target._schema.is_mutable or any(all(str(size) != "0" for size in each.shape) for each in results)

    return sum(map(launched, graph.nodes))


def where(node: Node) -> str:
    """``name (target)`` and the user's source line, for messages."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip()]
    files = [i for i, line in enumerate(lines) if line.startswith("File ")]
    if not files:
        return f"{node.name} ({node.target})"
    last = files[-1]
    code = lines[last + 1] if last + 1 < len(lines) else ""
    return f"{node.name} ({node.target}) at {lines[last].removeprefix('File ')}: {code}"


def device_of(gm: GraphModule) -> torch.device:
    """Where a graph runs: the first device other than the CPU among its inputs, else the CPU."""
    return device_among(node.meta.get("val") for node in placeholders(gm))


def device_among(values: Iterable[Any]) -> torch.device:
    """The first device other than the CPU among the tensors of ``values``, else the CPU."""
    devices = (each.device for each in values if isinstance(each, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
