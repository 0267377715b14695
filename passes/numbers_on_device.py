"""A host integer that an operator reads as a number becomes a tensor on the device.

A cache that counts its tokens in Python hands the graph an integer that is another one in every call. A capture would
freeze it, and every token would need one of its own. As a tensor it is an input like any other.
"""

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from gemma_npu_compile.passes.fx import add_input, call, copy_trace, placeholders, tensors
from gemma_npu_compile.passes.result import PassResult

aten = torch.ops.aten


@dataclass(frozen=True)
class HostNumber:
    """A 0-d int64 tensor that holds what ``expression`` gives for the host integers of a call.

    Attributes:
        sources: argument indices of those integers.
    """

    sources: tuple[int, ...]
    expression: sympy.Expr
    device: torch.device

    def __call__(self, values: dict[sympy.Symbol, int]) -> int:
        return int(self.expression.xreplace(values))


def _size_symbols(gm: GraphModule) -> set[Any]:
    """Symbols that the size of any tensor of the graph depends on."""
    found: set[Any] = set()
    for node in gm.graph.nodes:
        for fake in tensors(node.meta.get("val")):
            for size in (*fake.shape, *fake.stride()):
                if not isinstance(size, int):
                    found |= size.node.expr.free_symbols
    return found


def _tensor_form(op: Any) -> Any:
    """``lt.Tensor`` for ``lt.Scalar``; the operator itself where its operand may be a tensor already; or None."""
    if op._overloadname == "Scalar":
        return getattr(op.overloadpacket, "Tensor", None)
    return op if op._overloadname == "Tensor" else None


def numbers_on_device(gm: GraphModule) -> PassResult:
    """Give pointwise operators a tensor input for each host integer they read; sizes stay integers."""
    result = PassResult()
    sources = {
        node.meta["val"].node.expr: node.meta["source"]
        for node in placeholders(gm)
        if isinstance(node.meta.get("val"), torch.SymInt)
    }
    if not sources:
        return result
    sizes = _size_symbols(gm)
    made: dict[Any, Node] = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            continue
        numbers = [arg for arg in node.args if isinstance(arg, Node) and isinstance(arg.meta.get("val"), torch.SymInt)]
        if not numbers:
            continue
        form, number = _tensor_form(node.target), numbers[0]
        expression = number.meta["val"].node.expr
        symbols = expression.free_symbols
        if form is None or len(numbers) != 1 or len(node.args) != 2 or node.args[1] is not number:
            result.left[f"{node.target} takes no tensor in place of the number"] += 1
        elif not symbols <= set(sources) or symbols & sizes:
            result.left["the number follows from a size"] += 1
        else:
            device = node.meta["val"].device
            if (key := (expression, device)) not in made:
                made[key] = add_input(gm, f"number_{len(made)}")
                mode = node.meta["val"].fake_mode
                made[key].meta["val"] = mode.from_tensor(torch.zeros((), dtype=torch.int64)).to(device)
                made[key].meta["number"] = HostNumber(
                    tuple(sorted(sources[each] for each in symbols)), expression, device
                )
            with gm.graph.inserting_before(node):
                new = call(gm.graph, form, node.args[0], made[key], **node.kwargs)
            if new.meta["val"].dtype != node.meta["val"].dtype:
                gm.graph.erase_node(new)
                result.left["a tensor in place of the number would change the result's dtype"] += 1
                continue
            copy_trace(new, node)
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
            result.changed += 1
    for each in made.values():
        if not each.users:
            gm.graph.erase_node(each)
    return result
