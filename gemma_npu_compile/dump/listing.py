"""The nodes of a graph as lines, sorted by the place in the model they belong to; equal places are folded.

A place is a layer (``target.model.layers.7``), another module (``target.lm_head``), or the step's own code between two
models. Dynamo records which module a node comes from; a node a pass inserted belongs where its users are.
"""

import difflib
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gemma_npu_compile.passes.sites import label

Path = tuple[str, ...]

_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


@dataclass
class Place:
    """The nodes of one place.

    Attributes:
        shown: a line for each node, with the graph's own names.
        form: the same lines with names local to the place; equal in layers of one kind.
    """

    path: str
    shown: list[str] = field(default_factory=list)
    form: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Folded:
    """Places of one kind; ``lines`` are those of the first one."""

    paths: tuple[str, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """What happened to places that changed alike; ``diff`` is the unified diff of the first one."""

    paths: tuple[str, ...]
    diff: tuple[str, ...]


@functools.lru_cache(maxsize=4096)  # the modules of a model come up thousands of times
def clean(source: str) -> str:
    """A Dynamo source expression as a user would write it: ``L['fn']._modules['a'].b`` is ``a.b``."""
    source = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", source)
    source = re.sub(r"^L\['(\w+)'\]", r"\1", source)
    return re.sub(r"^(?:fn|self)(?:\.|$)", "", source)


def _module(node: Node) -> Path | None:
    """The module a node comes from; the first name carries the number of the call of its model (``assistant#1``)."""
    stack = list((node.meta.get("nn_module_stack") or {}).items())
    if not stack:
        return None
    names = [(key, tuple(filter(None, clean(str(path)).split(".")))) for key, (path, _) in stack]
    inner = names[-1][1]
    call = next((key.partition("@")[2] for key, path in names if path), "")
    return (f"{inner[0]}#{call}", *inner[1:]) if inner and call else inner


def _common(paths: Iterable[Path]) -> Path:
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return tuple(shared)


def _modules(nodes: Sequence[Node]) -> dict[Node, Path]:
    """The module of every node; one without a record belongs where all its users do."""
    found: dict[Node, Path] = {}
    for node in reversed(nodes):
        own = _module(node)
        if own is None:
            own = _common([found[user] for user in node.users if user in found]) if node.users else ()
        found[node] = own
    return found


def _place(path: Path) -> Path:
    """The layer a module is part of, or the model's part it is."""
    numbered = [index for index, part in enumerate(path) if part.isdigit()]
    return path[: numbered[-1] + 1] if numbered else path[:2]


class _Text:
    """Renders arguments and values; what a value looks like is computed once."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Any, str]] = {}

    def value(self, fake: Any) -> str:
        if id(fake) not in self._values:
            self._values[id(fake)] = (fake, self._render(fake))
        return self._values[id(fake)][1]

    def _render(self, fake: Any) -> str:
        if isinstance(fake, torch.Tensor):
            name = re.sub("bfloat|float|uint|int|complex", lambda m: _DTYPES[m[0]], str(fake.dtype)[6:])
            return f"{name}[{', '.join(map(str, fake.shape))}]"
        if isinstance(fake, (list, tuple)):
            return f"({', '.join(self.value(each) for each in fake)})"
        return "" if fake is None else type(fake).__name__.replace("SymInt", "int")


def target(node: Node) -> str:
    """The operator of a node as people write it: ``aten.mm``, ``npu.npu_rms_norm``, ``getitem``."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).removesuffix(".default")
    return str(getattr(node.target, "__name__", node.target))


def _argument(arg: Any, names: dict[Node, str], own: str) -> str:
    if isinstance(arg, Node):
        return names[arg]
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(_argument(each, names, own) for each in arg)}]"
    if isinstance(arg, str):
        return repr(_own(arg, own))
    return str(arg).removeprefix("torch.")


def _own(text: str, index: str) -> str:
    """``text`` with the layer's own number as ``*``, and the number of a draft too."""
    text = re.sub(r"\bdraft\.\d+", "draft.*", text)
    return re.sub(rf"(?<!args\[)\b{index}\b", "*", text) if index else text


def _called(node: Node, names: dict[Node, str], own: str) -> str:
    if node.op == "get_attr":
        return f"constant {node.target}"
    if node.op == "output":
        return f"return {_argument(node.args[0], names, own)}"
    given = [_argument(arg, names, own) for arg in node.args]
    given += [f"{name}={_argument(arg, names, own)}" for name, arg in node.kwargs.items()]
    return f"{target(node)}({', '.join(given)})"


def _input(node: Node) -> str:
    """What a placeholder is called in a line."""
    binding = node.meta.get("table")
    return f"block_table[{binding.group}]" if binding is not None else label(node)


class Listing:
    """All places of a graph, in the order of their last nodes."""

    def __init__(self, gm: GraphModule) -> None:
        self.places: dict[str, Place] = {}
        self._text = _Text()
        nodes = [node for node in gm.graph.nodes if node.op != "placeholder"]
        modules = _modules(nodes)
        groups: dict[str, list[Node]] = {}
        after = "inputs"
        for node in nodes:
            place = _place(modules[node])
            if node.op == "get_attr":
                path = "constants"
            else:
                after = place[0] if place else after
                path = ".".join(place) if place else f"step, after {after}"
            groups[path] = groups.pop(path, [])  # places stand in the order of their last nodes: views are hoisted
            groups[path].append(node)
        shown = {node: label(node) if node.op == "placeholder" else node.name for node in gm.graph.nodes}
        for path, members in groups.items():
            self.places[path] = self._list(path, members, shown)

    def _list(self, path: str, members: list[Node], shown: dict[Node, str]) -> Place:
        place, last = Place(path), path.rpartition(".")[2]
        own = last if last.isdigit() else ""
        local: dict[Node, str] = {}
        inside = set(members)
        outside = 0
        for node in members:
            for arg in node.all_input_nodes:
                if arg.op == "placeholder":
                    local[arg] = _own(_input(arg), own)
                elif arg not in local and arg not in inside:
                    local[arg] = f"in{outside}: {self._text.value(arg.meta.get('val'))}"
                    outside += 1
            local.setdefault(node, f"v{len(place.form)}")
            kind = self._text.value(node.meta.get("val"))
            head = f": {kind}" if kind else ""
            place.shown.append(f"{node.name}{head} = {_called(node, shown, '')}")
            place.form.append(f"{local[node]}{head} = {_called(node, local, own)}")
        return place

    def fold(self) -> list[Folded]:
        """Kinds of places, each once, in the order of the graph."""
        kinds: dict[tuple[str, ...], list[Place]] = {}
        for place in self.places.values():
            kinds.setdefault(tuple(place.form), []).append(place)
        return [Folded(tuple(p.path for p in same), tuple(same[0].shown)) for same in kinds.values()]

    def changes(self, before: "Listing") -> list[Change]:
        """What is different from ``before``, places that changed alike together."""
        nothing = Place("")
        alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
        for path in dict.fromkeys((*before.places, *self.places)):
            old, new = before.places.get(path, nothing), self.places.get(path, nothing)
            if old.form != new.form:
                alike.setdefault((tuple(old.form), tuple(new.form)), []).append(path)
        return [Change(tuple(paths), self._diff(before, paths[0])) for paths in alike.values()]

    def _diff(self, before: "Listing", path: str) -> tuple[str, ...]:
        old, new = (each.places[path].shown if path in each.places else [] for each in (before, self))
        return tuple(difflib.unified_diff(old, new, lineterm="", n=2))[2:]


def ranges(numbers: Iterable[int]) -> str:
    """``0-4, 6`` for 0, 1, 2, 3, 4, 6."""
    runs = groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)


_NUMBER = re.compile(r"\d+|{[^}]*}")


def together(paths: Sequence[str]) -> str:
    """Paths that differ in their numbers, as one: ``draft.{0-2}/assistant.layers.{0-3}``."""
    found = list(dict.fromkeys(paths))
    most = max((len(_NUMBER.findall(path)) for path in found), default=0)
    for position in range(most):  # a path's last number first
        families: dict[tuple[str, ...], list[str]] = {}
        for path in found:
            matches = list(_NUMBER.finditer(path))
            if position < len(matches):
                match = matches[-1 - position]
                families.setdefault((path[: match.start()], path[match.end() :]), []).append(match[0])
            else:
                families.setdefault((path,), [])
        found = [_spread(key, numbers) for key, numbers in families.items()]
    return ", ".join(found)


def _spread(around: tuple[str, ...], numbers: list[str]) -> str:
    if len(numbers) < 2:
        return "".join((around[0], *numbers, *around[1:]))
    return f"{around[0]}{{{ranges(map(int, numbers))}}}{around[1]}"
