"""Prove that rows do not mix, so that a graph can run with padded rows.

The row axis is followed through every node. A node is let through when the rule of its operator says that a row of its
result needs this row of its arguments and no other, and when every size that depends on the number of rows is a fixed
number of entries for each. The first node of which that cannot be said is named, and the graph runs unpadded.
"""

import operator
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from gemma_npu_compile.passes.fx import placeholders, root, tensors, where, written_args, written_roots
from gemma_npu_compile.passes.result import PassResult
from gemma_npu_compile.passes.row_rules import rule_for
from gemma_npu_compile.passes.row_state import Call, MixedRowsError, Rows, State, depends, entries, expression

_SIZES = {"size", "end", "start", "split_size", "split_sizes", "repeats"}
"""Arguments that may depend on the number of rows; the sizes of the result tell whether that does harm."""


def _candidates(inputs: list[Node]) -> list[sympy.Symbol]:
    """Symbols that may be the number of rows, the first axis of the first input first."""
    found: dict[Any, None] = {}
    for front in (True, False):
        for node in inputs:
            sizes = node.meta["val"].shape[:1] if front else node.meta["val"].shape
            for size in map(expression, sizes):
                if isinstance(size, sympy.Basic):
                    found.update(dict.fromkeys(sorted(size.free_symbols, key=str)))
    return list(found)


def _state_of_input(node: Node, symbol: sympy.Symbol, written: set[Node]) -> State:
    axes = [(axis, entries(expression(size), symbol)) for axis, size in enumerate(node.meta["val"].shape)]
    found = [(axis, count) for axis, count in axes if count is not None]
    if not found:
        return None
    if node in written:
        raise MixedRowsError("it is written in place and has the rows: a padded row has no place in it")
    if node.meta.get("static"):
        raise MixedRowsError("it is read where it lies and has the rows: a padded row has no place in it")
    if len(found) > 1:
        raise MixedRowsError("it has rows on two axes")
    return Rows(*found[0])


def _check_sizes(node: Node, state: Any, symbol: sympy.Symbol) -> None:
    """Every tensor of a result has its rows where the rule says, and nowhere else."""
    fakes = tensors(node.meta.get("val"))
    for fake in fakes:
        for axis, size in enumerate(fake.shape):
            wanted = state.block if state is not None and axis == state.axis else None
            if entries(expression(size), symbol) != wanted:
                raise MixedRowsError(f"axis {axis} of its result has {expression(size)} entries")
    if state is not None and any(fake.dim() <= state.axis for fake in fakes):
        raise MixedRowsError("its result has no axis of rows")


def _visit(node: Node, env: dict[Node, Any], symbol: sympy.Symbol) -> State:
    target: Any = node.target
    if target is operator.getitem and isinstance(node.args[0], Node) and node.args[0] in env:
        return env[node.args[0]]
    if not tensors(node.meta.get("val")):
        read = [each for each in node.all_input_nodes if env.get(each) is not None]
        if read and target is not torch.ops.aten.sym_size.int:
            raise MixedRowsError("it reads rows on the host")
        return None  # a number, or a check of one
    if not isinstance(target, torch._ops.OpOverload):
        if all(env.get(each) is None for each in node.all_input_nodes):
            return None
        raise MixedRowsError("it is not an operator")
    rows = any(env.get(each) is not None for each in node.all_input_nodes)
    sizes = any(depends(each, symbol) for each in node.all_input_nodes if not isinstance(each.meta["val"], Tensor))
    if target._schema.is_mutable:
        if rows or sizes:
            names = ", ".join(str(root(each).meta.get("label", root(each).name)) for each in written_args(node))
            raise MixedRowsError(f"it writes rows into {names}, where padded rows would write too")
        return None
    if not rows and not sizes:
        return None
    call = Call.of(node, env, symbol)
    for name, arg in call.args.items():
        leaves = [each for each in tree_leaves(arg) if isinstance(each, Node) and each not in env]
        if name not in _SIZES and any(depends(each, symbol) for each in leaves):
            raise MixedRowsError("it reads the number of rows")
    return rule_for(target)(call)


def _follow(gm: GraphModule, symbol: sympy.Symbol) -> dict[Node, Rows]:
    """The rows of the inputs.

    Raises:
        MixedRowsError: names the first node that stands against it.
    """
    env: dict[Node, Any] = {}
    found: dict[Node, Rows] = {}
    written = written_roots(gm.graph)
    for node in gm.graph.nodes:
        if node.op == "output":
            break
        try:
            if node.op == "placeholder":
                if isinstance(node.meta.get("val"), Tensor) and node.users:
                    env[node] = _state_of_input(node, symbol, written)
                    if env[node] is not None:
                        found[node] = env[node]
            elif node.op == "get_attr":
                env[node] = None
            else:
                state = _visit(node, env, symbol)
                if tensors(node.meta.get("val")):
                    _check_sizes(node, state, symbol)
                    env[node] = state
        except MixedRowsError as error:
            name = f"input {node.meta.get('label', node.name)}" if node.op == "placeholder" else where(node)
            raise MixedRowsError(f"{name}: {error}") from None
    return found


def prove_rows(gm: GraphModule) -> PassResult:
    """Set ``gm.meta["rows"]``, the symbol of the row count, and ``meta["rows"]`` of each input that has rows, its
    ``(axis, entries a row)``; or ``gm.meta["rows_mix"]``, the first node that mixes rows and why.

    Does nothing where padding is declared, and where no size is symbolic. ``meta["static"]`` marks inputs that are
    read at their own addresses.
    """
    result = PassResult()
    inputs = [node for node in placeholders(gm) if isinstance(node.meta.get("val"), Tensor)]
    if any("padding" in node.meta for node in inputs):
        return result
    for symbol in _candidates([node for node in inputs if node.users]):
        try:
            found = _follow(gm, symbol)
        except MixedRowsError as error:
            gm.meta.setdefault("rows_mix", f"rows are not independent at {error}")
            continue
        gm.meta["rows"] = symbol
        gm.meta.pop("rows_mix", None)
        for node, state in found.items():
            node.meta["rows"] = (state.axis, state.block)
            result.changed += 1
        return result
    if "rows_mix" in gm.meta:
        result.left[gm.meta["rows_mix"]] += 1
    return result
