"""Plain JSON for what graphs are made of: operators, arguments, sizes. What is read back is not trusted.

Nothing is unpickled, imported or evaluated: an operator is found by name in ``torch.ops``, in the namespaces listed
here, a size is a tree of the sympy functions listed here, and everything else is a number, a string or a container.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.fx import Node
from torch.utils._sympy import functions

NAMESPACES = ("aten", "prims", "gemma_npu", "gemma_npu_cpu", "npu")
"""Namespaces whose operators the versions and sources in the key stand for."""

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

_NUMBERS = ("add", "sub", "mul", "floordiv", "mod", "neg", "pow", "eq", "ne", "lt", "le", "gt", "ge")
_SYMBOLIC = ("sym_max", "sym_min", "sym_not")
FUNCTIONS: dict[str, Any] = {
    **{f"operator.{name}": getattr(operator, name) for name in ("getitem", *_NUMBERS)},
    **{f"torch.{name}": getattr(torch, name) for name in _SYMBOLIC},
    "higher_order.auto_functionalized_v2": auto_functionalized_v2,
}
"""Targets of a trace that are no operators: arithmetic on sizes, elements of results, functional writes."""
_FUNCTION_NAMES = {function: name for name, function in FUNCTIONS.items()}

_SIZES: dict[str, Any] = {
    **{each.__name__: each for each in (sympy.Add, sympy.Mul, sympy.Pow)},
    **{
        name: getattr(functions, name) for name in ("FloorDiv", "Mod", "PythonMod", "CleanDiv", "CeilDiv", "Max", "Min")
    },
    **{name: getattr(functions, name) for name in ("ModularIndexing", "PowByNatural")},
}
_POWERS = ("Pow", "PowByNatural")
_KINDS: dict[type, str] = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
    torch.device: "device",
}


class NotCacheableError(Exception):
    """Why a graph is not cached; the message is the reason a report shows."""


class DamagedError(Exception):
    """An entry does not say what an entry can say."""


def operator_name(op: Any) -> str:
    """``namespace::name.overload``, or the namespace and name of a packet.

    Raises:
        NotCacheableError: an operator of another namespace, whose sources the key does not know.
    """
    packet = isinstance(op, torch._ops.OpOverloadPacket)
    name = op._qualified_op_name if packet else f"{op._schema.name}.{op._overloadname}"
    if name.split("::")[0] not in NAMESPACES:
        raise NotCacheableError(f"operator {name} is of neither torch nor this package")
    return str(name)


def find_operator(name: Any) -> torch._ops.OpOverload:
    """The operator named ``namespace::name.overload``."""
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    if space not in NAMESPACES or not (IDENTIFIER.fullmatch(packet) and IDENTIFIER.fullmatch(overload)):
        raise DamagedError(f"{name!r} names no operator")
    found = getattr(getattr(getattr(torch.ops, space), packet, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise DamagedError(f"there is no operator {name!r}")
    return found


def target_name(target: Any) -> str:
    """Name of what a node of a trace calls.

    Raises:
        NotCacheableError: it is neither a known operator nor one of :data:`FUNCTIONS`.
    """
    if isinstance(target, torch._ops.OpOverload):
        return operator_name(target)
    try:
        return _FUNCTION_NAMES[target]
    except (KeyError, TypeError):
        raise NotCacheableError(f"the trace calls {getattr(target, '__name__', target)}") from None


def find_target(name: Any) -> Any:
    """The operator or function of :func:`target_name`."""
    return FUNCTIONS[name] if name in FUNCTIONS else find_operator(name)


def encode_size(size: Any, symbols: Mapping[sympy.Symbol, int]) -> Any:
    """A number, ``{"s": i}`` for symbol ``i``, or ``[function, *arguments]``.

    Raises:
        NotCacheableError: a symbol Dynamo's graph does not have, or another function.
    """
    if isinstance(size, int):
        return size
    expr = size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else size
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Float) and math.isfinite(expr):
        return float(expr)
    if isinstance(expr, sympy.Symbol):
        if expr not in symbols:
            raise NotCacheableError(f"size {expr} is made by the trace")
        return {"s": symbols[expr]}
    name = type(expr).__name__
    if _SIZES.get(name) is not type(expr):
        raise NotCacheableError(f"size {expr} uses {name}")
    return [name, *(encode_size(each, symbols) for each in expr.args)]


def decode_size(plain: Any, symbols: list[sympy.Symbol], depth: int = 0) -> sympy.Expr:
    """The expression of :func:`encode_size`, in the symbols of this process."""
    if isinstance(plain, int) and not isinstance(plain, bool) and abs(plain) < 2**63:
        return sympy.Integer(plain)
    if isinstance(plain, float):
        return sympy.Float(plain)
    if isinstance(plain, dict) and set(plain) == {"s"}:
        return symbols[index(plain["s"], len(symbols))]
    if not isinstance(plain, list) or depth > 32 or not isinstance(plain[0], str) or plain[0] not in _SIZES:
        raise DamagedError(f"{plain!r} is no size")
    args = [decode_size(each, symbols, depth + 1) for each in plain[1:]]
    if plain[0] in _POWERS and not (len(args) == 2 and args[1].is_Integer and 0 <= args[1] <= 8):
        raise DamagedError(f"{plain!r} is no size")
    return _SIZES[plain[0]](*args)


def identifier(name: Any) -> str:
    """``name`` if it is one: FX writes names of nodes and keywords into the code it compiles."""
    if not isinstance(name, str) or not IDENTIFIER.fullmatch(name):
        raise DamagedError(f"{name!r} is no identifier")
    return name


def index(value: Any, length: int) -> int:
    """``value`` if it counts into ``length`` things."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < length:
        raise DamagedError(f"{value!r} is no index below {length}")
    return value


def encode(arg: Any, node: Callable[[Node], Any]) -> Any:
    """An argument of a node; other nodes become what ``node`` says.

    Raises:
        NotCacheableError: an argument of a type that has no plain form; names the type.
    """
    if arg is None or isinstance(arg, (bool, int, str)):
        return arg
    if isinstance(arg, float):
        return arg if math.isfinite(arg) else {"float": repr(arg)}
    if isinstance(arg, Node):
        return {"n": node(arg)}
    if isinstance(arg, tuple):
        return {"tuple": [encode(each, node) for each in arg]}
    if isinstance(arg, list):
        return [encode(each, node) for each in arg]
    if isinstance(arg, slice):
        return {"slice": [encode(each, node) for each in (arg.start, arg.stop, arg.step)]}
    if arg is Ellipsis:
        return {"ellipsis": True}
    if isinstance(arg, torch._ops.OpOverload):
        return {"op": operator_name(arg)}
    kind = _KINDS.get(type(arg))
    if kind is None:
        raise NotCacheableError(f"an argument is a {type(arg).__name__}")
    return {kind: str(arg).removeprefix("torch.")}


def _of_torch(name: Any, kind: type) -> Any:
    found = getattr(torch, name, None) if IDENTIFIER.fullmatch(name) else None
    if not isinstance(found, kind):
        raise DamagedError(f"there is no torch.{name}")
    return found


def decode(plain: Any, nodes: list[Node]) -> Any:
    """The argument of :func:`encode`, for arguments of a trace."""
    if plain is None or isinstance(plain, (bool, int, str, float)):
        return plain
    if isinstance(plain, list):
        return [decode(each, nodes) for each in plain]
    ((kind, value),) = plain.items()
    if kind == "n":
        return nodes[index(value, len(nodes))]
    if kind == "tuple":
        return tuple(decode(each, nodes) for each in value)
    if kind == "float":
        return float(value)
    if kind == "op":
        return find_operator(value)
    if kind == "device":
        return torch.device(value)
    for known, name in _KINDS.items():
        if kind == name:
            return _of_torch(value, known)
    raise DamagedError(f"there is no argument of kind {kind!r}")
