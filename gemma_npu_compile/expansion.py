"""Running Dynamo's graph at the level of ATen, each kind of call once.

Layers and drafts call the same functions on alike tensors. What ATen makes of a call depends on the function, its
constants, and the layout of its tensors, so a call that was met before becomes copies of the nodes it became then: no
fake tensors are computed, which is most of what tracing takes.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
)
from torch.fx.node import map_aggregate
from torch.fx.traceback import get_current_meta
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLACE = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node")
"""Metadata of a node that says where in the source it comes from."""


@dataclass(eq=False)
class _Value:
    """A tensor of the trace.

    Attributes:
        example: a fake of its layout; that of another call, if this one was copied.
        memory: two values with the same number share memory.
        own: the fake the trace knows under ``node``; made when a new kind of call needs it.
    """

    node: Node
    example: Tensor
    memory: int
    own: Tensor | None = None

    def layout(self) -> tuple[Any, ...]:
        """Hashable."""
        fake = self.example if self.own is None else self.own
        sizes = *fake.shape, None, *fake.stride(), fake.storage_offset()
        plain = (each.node.expr if isinstance(each, torch.SymInt) else each for each in sizes)
        return fake.dtype, fake.device, fake.is_conj(), fake.is_neg(), *plain


@dataclass(frozen=True)
class _Expansion:
    """What one kind of call becomes.

    Attributes:
        given: the nodes of its tensors, in the order the key meets them.
        made: its nodes, without those of sizes, which are the same for every call ...
        memory: ... and whose memory each shows: an index of ``given``, ``-1 - i`` for ``made[i]``, its own included.
        result: its result, of values.
    """

    given: list[Node]
    made: list[Node]
    memory: list[int]
    result: Any


class Expander(Interpreter):
    """Runs a graph inside ``make_fx``.

    Attributes:
        memory: for every node that is a tensor a number; nodes that share memory have the same one.
        copied: calls that were copies.
    """

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        mode = get_proxy_mode()
        assert mode is not None, "run inside make_fx"
        self._tracer: Any = mode.tracer
        self.memory: dict[Node, int] = {}
        self.copied = 0
        self._known: dict[Any, _Expansion] = {}
        self._values: dict[int, _Value] = {}  # by the id of their own fake, which they keep alive
        self._storages: dict[StorageWeakRef, int] = {}
        self._numbers = itertools.count()

    def run_node(self, n: Node) -> Any:
        """Values in place of tensors; the graph's results are tensors."""
        with self._set_current_node(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            if n.op == "output":
                return map_aggregate(args[0], self._tensor)
            if n.op == "placeholder":
                return self._wrapped(self.placeholder(n.target, args, kwargs))  # type: ignore[arg-type]
            given: dict[Node, _Value] = {}
            try:
                key = n.op, n.target, self._described((args, kwargs), given, [])
                known = self._known.get(key)
            except TypeError:  # not hashable
                key, known = None, None
            return self._first(n, args, kwargs, key, given) if known is None else self._again(known, given)

    # ---- values

    def _number(self, tensor: Tensor) -> int:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage not in self._storages:
            self._storages[storage] = next(self._numbers)
        return self._storages[storage]

    def _node(self, value: _Value) -> Node:
        """After a write in place, a tensor is what the write returns."""
        if value.own is not None:
            value.node = get_proxy_slot(value.own, self._tracer).proxy.node
        return value.node

    def _wrapped(self, result: Any) -> Any:
        slot = get_proxy_slot(result, self._tracer, None) if isinstance(result, Tensor) else None
        if slot is None:
            return result
        if id(result) not in self._values:
            node, memory = slot.proxy.node, self._number(result)
            self.memory[node] = memory
            self._values[id(result)] = _Value(node, result, memory, result)
        return self._values[id(result)]

    def _tensor(self, value: Any) -> Any:
        """A tensor ``make_fx`` knows, for a value; anything else itself."""
        if not isinstance(value, _Value):
            return value
        if value.own is None:
            like = value.example
            with disable_proxy_modes_tracing():
                made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
                if not isinstance(like.storage_offset(), int) or like.storage_offset():
                    made = made.as_strided(like.shape, like.stride(), like.storage_offset())
            set_proxy_slot(made, self._tracer, _ProxyTensor(self._tracer.proxy(value.node), None))
            value.own = made
            self._values[id(made)] = value
            self._storages[StorageWeakRef(made.untyped_storage())] = value.memory
        return value.own

    def _described(self, arg: Any, given: dict[Node, _Value], memories: list[int]) -> Any:
        """A key of arguments: constants, sizes, layouts, and which tensors are one, or share memory.

        Raises:
            TypeError: there is none.
        """
        if isinstance(arg, _Value):
            given.setdefault(self._node(arg), arg)
            if arg.memory not in memories:
                memories.append(arg.memory)
            return _Value, list(given).index(arg.node), memories.index(arg.memory), arg.layout()
        if isinstance(arg, Tensor):
            raise TypeError("a constant tensor")
        if isinstance(arg, _NUMBERS):
            return type(arg), arg.node.expr
        if isinstance(arg, slice):
            arg = slice, arg.start, arg.stop, arg.step
        if isinstance(arg, dict):
            arg = dict, *arg.items()
        if isinstance(arg, (tuple, list)):
            return type(arg), tuple(self._described(each, given, memories) for each in arg)
        if isinstance(arg, complex):
            return complex, arg.real.hex(), arg.imag.hex()
        return type(arg), arg.hex() if isinstance(arg, float) else arg  # 1 and 1.0, 0.0 and -0.0 are equal

    # ---- calls

    def _first(self, node: Node, args: Any, kwargs: Any, key: Any, given: dict[Node, _Value]) -> Any:
        graph = self._tracer.graph
        last = graph._root.prev
        result = getattr(self, node.op)(node.target, *(map_aggregate(each, self._tensor) for each in (args, kwargs)))
        made = []
        while last.next is not graph._root:
            last = last.next
            made.append(last)
            if isinstance(last.meta.get("val"), Tensor):
                self.memory[last] = self._number(last.meta["val"])
        result = tree_map(self._wrapped, result)
        if key is not None:
            expansion = self._expansion(list(given), made, result)
            if expansion is not None:
                self._known[key] = expansion
        return result

    def _expansion(self, given: list[Node], made: list[Node], result: Any) -> _Expansion | None:
        """None for what must not be repeated by copying: writes, new unknown sizes, constants, mere numbers, and values
        negated or conjugated lazily, which a fake in their place would not be."""
        for node in made:
            schema = getattr(node.target, "_schema", None)
            if node.op != "call_function" or (schema is not None and schema.is_mutable):
                return None
            if "unbacked_bindings" in node.meta:
                return None
            value = node.meta.get("val")
            if isinstance(value, Tensor) and (value.is_conj() or value.is_neg()):
                return None
        kept = [node for node in made if not isinstance(node.meta.get("val"), _NUMBERS)]
        known = {*given, *kept}
        values = tree_leaves(result)
        if not values or not all(isinstance(each, _Value) and each.node in known for each in values):
            return None
        for node in kept:
            inputs = (each for each in node.all_input_nodes if each not in known)
            if not all(isinstance(each.meta.get("val"), _NUMBERS) for each in inputs):
                return None
        places = {self.memory[node]: -1 - index for index, node in reversed([*enumerate(kept)]) if node in self.memory}
        places.update({self.memory[node]: index for index, node in reversed([*enumerate(given)])})
        memory = [places[self.memory[node]] if node in self.memory else -1 - i for i, node in enumerate(kept)]
        # The values themselves may be written to, also to their shape.
        found = tree_map(lambda each: _Value(each.node, each.node.meta["val"], each.memory), result)
        return _Expansion(given, kept, memory, found)

    def _again(self, known: _Expansion, given: dict[Node, _Value]) -> Any:
        nodes = dict(zip(known.given, given, strict=True))
        graph, meta = self._tracer.graph, get_current_meta()
        place = {name: meta[name] for name in _PLACE if name in meta}
        for node, memory in zip(known.made, known.memory, strict=True):
            copy = nodes[node] = graph.node_copy(node, lambda each: nodes.get(each, each))
            copy.meta = {**{name: each for name, each in node.meta.items() if name not in _PLACE}, **place}
            if node in self.memory:
                shown = nodes[known.given[memory] if memory >= 0 else known.made[-1 - memory]]
                self.memory[copy] = next(self._numbers) if shown is copy else self.memory[shown]
        self.copied += 1

        def value(each: _Value) -> _Value:
            node = nodes[each.node]  # one of the tensors that were given, where nothing was to do
            return given[node] if node in given else _Value(node, each.example, self.memory[node])

        return tree_map(value, known.result)
