"""Stand-ins for a user's modules: new module objects, the same weights.

Whatever is set on a stand-in (a compiled forward, an attribute, a hook) is not set on the original, in this thread or
in another, and there is nothing to put back when a call fails.
"""

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule

_ORIGINALS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def original_of(module: nn.Module) -> nn.Module:
    """The module a stand-in was made of; another module itself (without the wrapper ``torch.compile`` gave it)."""
    if isinstance(module, OptimizedModule):
        module = module._orig_mod
    known = _ORIGINALS.get(module)
    found = known() if known is not None else None
    return module if found is None else found


def _own(name: str, attribute: Any) -> Any:
    """An instance attribute as a stand-in has it: hooks in dicts of its own, weights in the original's."""
    hooks = isinstance(attribute, dict) and "hooks" in name
    return attribute.copy() if hooks else attribute


class Shadows:
    """Stand-ins for the modules of one call. A module met twice, or shared by two models, has one."""

    def __init__(self) -> None:
        self._made: dict[nn.Module, nn.Module] = {}

    def of(self, module: nn.Module) -> nn.Module:
        """The stand-in of a module; its children are stand-ins too."""
        if module not in self._made:
            made = module.__new__(type(module))
            self._made[module] = made
            dropped = {"_compiled_call_impl", "_modules"}
            if hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable"):
                dropped.add("forward")
            made.__dict__.update({k: _own(k, v) for k, v in module.__dict__.items() if k not in dropped})
            made.__dict__["_modules"] = {
                name: None if child is None else self.of(child) for name, child in module._modules.items()
            }
            _ORIGINALS[made] = weakref.ref(module)
        return self._made[module]

    def back(self, module: nn.Module) -> nn.Module:
        """The original of a stand-in of this call; any other module itself."""
        known = original_of(module)
        return known if self._made.get(known) is module else module


def replace(value: Any, swap: Callable[[nn.Module], nn.Module]) -> Any:
    """``value`` with every module in it swapped, also inside lists, tuples and dicts; itself when nothing changes."""
    if isinstance(value, nn.Module):
        return swap(value)
    if type(value) in (list, tuple):
        items = [replace(each, swap) for each in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else type(value)(items)
    if type(value) is dict:
        found = {name: replace(each, swap) for name, each in value.items()}
        return value if all(found[name] is value[name] for name in value) else found
    return value


_PLAIN = (Tensor, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, str, bytes)
DEPTH = 4
"""How far :func:`kept_in` looks: attributes of attributes."""


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object refers to, and how a user would write that."""
    if isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        return
    if isinstance(value, functools.partial):
        yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", each) for key, each in list(value.items()))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{index}]", each) for index, each in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from (("", each) for each in value)
    given = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    slots = [name for names in given for name in ([names] if isinstance(names, str) else names)]
    own = getattr(value, "__dict__", {})
    for name in [*(own if isinstance(own, dict) else ()), *(s for s in slots if s != "__dict__")]:
        try:
            yield f".{name}", own[name] if name in own else getattr(value, name)
        except AttributeError:  # a slot without a value
            continue


def kept_in(value: Any) -> str | None:
    """Where an object keeps a module that :func:`replace` does not reach, or None: ``.model``, ``[2].model`` of a
    list's third item, ``.__self__`` of a method of a module. Looks :data:`DEPTH` attributes deep."""
    seen: set[int] = set()
    level = [("", value, True)]  # place, object, whether replace() gets there
    for _ in range(DEPTH + 1):
        deeper = []
        for place, each, reached in level:
            if isinstance(each, nn.Module):
                if not reached:
                    return place
                continue
            if each is None or isinstance(each, (bool, int, float, *_PLAIN)) or id(each) in seen:
                continue
            seen.add(id(each))
            swapped = reached and type(each) in (list, tuple, dict)
            deeper += [(place + part, inner, swapped) for part, inner in _parts(each)]
        level = deeper
    return None


def holds_module(value: Any) -> bool:
    """Whether a module is in ``value`` or in a list, tuple or dict in it."""
    if type(value) is dict:
        value = list(value.values())
    return isinstance(value, nn.Module) or (type(value) in (list, tuple) and any(map(holds_module, value)))
