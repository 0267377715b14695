"""What operators do with rows: a table from operator to rule.

A rule is given the states of the arguments and returns the state of the result, or raises MixedRowsError with what is
wrong. Whoever calls it has dealt with calls that no argument brings rows to, and checks the sizes of the result.
"""

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.utils._pytree import tree_leaves

from gemma_npu_compile.passes.row_indexing import INDEXING
from gemma_npu_compile.passes.row_state import Call, MixedRowsError, Rows, State, depends, expression

aten = torch.ops.aten
Rule = Callable[[Call], State]


def _only(call: Call, name: str = "self") -> Rows:
    """The rows of one argument; every other one must have none."""
    others = [n for n, given in call.states.items() if n != name and any(tree_leaves(given))]
    state = call.states[name]
    if others or not isinstance(state, Rows):
        raise call.refuse(f"rows in its argument {(others or [name])[0]}")
    return state


def pointwise(call: Call) -> State:
    """Elementwise with broadcasting: rows must lie on one axis, counted from the back."""
    rank = call.result.dim()
    found: Rows | None = None
    for name, state in call.states.items():
        for each, arg in [(state, call.args[name])] if not isinstance(state, list) else []:
            if each is None:
                continue
            aligned = each.values().at(each.axis + rank - arg.meta["val"].dim())
            if found is not None and (found.axis, found.block) != (aligned.axis, aligned.block):
                raise call.refuse("it brings rows on one axis together with rows on another")
            numbered = aligned.numbered or (found is not None and found.numbered)
            found = Rows(aligned.axis, aligned.block, numbered)
    return found


def same(call: Call) -> State:
    return _only(call)


def permute(call: Call) -> State:
    rank = len(call.shape("self"))
    if "dims" in call.args:
        order = [d % rank for d in call.args["dims"]]
    elif "dim0" in call.args:
        order = list(range(rank))
        a, b = call.dim("dim0"), call.dim("dim1")
        order[a], order[b] = order[b], order[a]
    else:
        order = list(range(rank))[::-1]
    state = _only(call)
    return state.at(order.index(state.axis))


def view(call: Call) -> State:
    """Rows stay together when all in front of them stays in front, and nothing else joins in."""
    state = _only(call)
    before, after = call.shape("self"), [expression(size) for size in call.result.shape]
    found = [(axis, count) for axis, size in enumerate(after) if (count := call.counted(size)) is not None]
    if len(found) != 1:
        raise call.refuse("it takes rows apart")
    axis, count = found[0]
    if sympy.simplify(sympy.prod(before[: state.axis]) - sympy.prod(after[:axis])) != 0:
        raise call.refuse("it merges rows with the axis in front of them")
    return state.at(axis, count) if count == state.block else state.values().at(axis, count)


def expand(call: Call) -> State:
    """Broadcast; a value without rows gets the same contents in each."""
    rank = call.result.dim()
    found = [(axis, n) for axis, size in enumerate(call.result.shape) if (n := call.counted(size)) is not None]
    state = call.states["self"]
    if state is not None:
        return state.at(state.axis + rank - len(call.shape("self")))
    return Rows(*found[0]) if len(found) == 1 else None


def make(call: Call) -> State:
    """A tensor made of numbers, the same in every row."""
    for name, arg in call.args.items():
        if name != "size" and name != "self" and depends(arg, call.symbol):
            raise call.refuse("it reads the number of rows")
    found = [(axis, n) for axis, size in enumerate(call.result.shape) if (n := call.counted(size)) is not None]
    if len(found) > 1:
        raise call.refuse("its result has rows on two axes")
    return Rows(*found[0]) if found else None


def arange(call: Call) -> State:
    start, step = call.args.get("start", 0), call.args.get("step", 1)
    if depends(start, call.symbol) or expression(step) != 1:
        raise call.refuse("it counts from, or in steps of, the number of rows")
    count = call.counted(call.result.shape[0])
    if count is None:
        raise call.refuse("it reads the number of rows")
    return Rows(0, count, numbered=True, counts=count == 1 and expression(start) == 0)


def unsqueeze(call: Call) -> State:
    state, dim = _only(call), int(call.args["dim"]) % call.result.dim()
    return state.at(state.axis + (dim <= state.axis))


def _removed(call: Call, state: Rows, dims: list[int]) -> Rows:
    if state.axis in dims:
        raise call.refuse("it works across rows")
    return state.at(state.axis - sum(d < state.axis for d in dims))


def squeeze(call: Call) -> State:
    dims = call.args.get("dim", [])
    rank = len(call.shape("self"))
    given = [d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
    if "dim" not in call.args:
        given = list(range(rank))
    return _removed(call, _only(call), [d for d in given if call.shape("self")[d] == 1])


def select(call: Call) -> State:
    return _removed(call, _only(call), [call.dim("dim")])


def along(name: str, keeps: bool = True, argument: str = "self") -> Rule:
    """An operator that works along the axes of argument ``name``, which must not be the rows'.

    Args:
        keeps: whether those axes stay; an argument ``keepdim`` decides when there is one.
    """

    def rule(call: Call) -> State:
        state, rank = _only(call, argument).values(), len(call.shape(argument))
        given = call.args[name]
        if given is None or given == []:
            raise call.refuse("it works across all axes, rows too")
        dims = [d % rank for d in (given if isinstance(given, (list, tuple)) else [given])]
        if state.axis in dims:
            raise call.refuse("it works across rows")
        return state if call.args.get("keepdim", keeps) else _removed(call, state, dims)

    return rule


def trailing(argument: str) -> Rule:
    """A norm over the last axes, as many as ``normalized_shape`` has."""

    def rule(call: Call) -> State:
        state = _only(call, argument).values()
        if state.axis >= len(call.shape(argument)) - len(call.args["normalized_shape"]):
            raise call.refuse("it normalises across rows")
        return state

    return rule


def _listed(call: Call, name: str) -> Rows:
    """The common rows of a list of tensors."""
    states = call.states[name]
    if any(each is None or (each.axis, each.block) != (states[0].axis, states[0].block) for each in states):
        raise call.refuse("it joins rows with something that has none, or has them elsewhere")
    return Rows(states[0].axis, states[0].block, any(each.numbered for each in states))


def cat(call: Call) -> State:
    state = _listed(call, "tensors")
    if int(call.args["dim"]) % call.result.dim() == state.axis:
        raise call.refuse("it puts other rows behind the rows")
    return state


def stack(call: Call) -> State:
    state, dim = _listed(call, "tensors"), int(call.args["dim"]) % call.result.dim()
    return state.at(state.axis + (dim <= state.axis))


def repeat(call: Call) -> State:
    state, times = _only(call), [expression(each) for each in call.args["repeats"]]
    axis = state.axis + len(times) - len(call.shape("self"))
    if times[axis] != 1:
        raise call.refuse("it repeats the rows as a whole")
    return state.at(axis)


def pad(call: Call) -> State:
    state, pads = _only(call), [expression(each) for each in call.args["pad"]]
    place = 2 * (len(call.shape("self")) - 1 - state.axis)
    if any(each != 0 for each in pads[place : place + 2]):
        raise call.refuse("it shifts or pads the rows")
    return state.values()


def _product(call: Call, left: str, right: str, batch: int) -> State:
    """``(batch..., n, k) x (batch..., k, m)``: rows among the batches of both, among n, or among m."""
    a, b = call.states[left], call.states[right]
    if a is not None and b is not None:
        if a.axis == b.axis < batch and a.block == b.block:
            return Rows(a.axis, a.block, a.numbered or b.numbered)
        raise call.refuse("it multiplies rows with rows")
    state, outer = (a, batch) if a is not None else (b, batch + 1)
    if state.axis != outer:
        raise call.refuse("it sums over rows")
    return state.values()


def mm(call: Call) -> State:
    return _product(call, "self", "mat2", 0)


def bmm(call: Call) -> State:
    return _product(call, "self", "mat2", 1)


def _with_addend(call: Call, product: State) -> State:
    addend = call.states["self"]
    if addend is None or product is None:
        return product if addend is None else _refuse(call)
    aligned = addend.axis + call.result.dim() - len(call.shape("self"))
    if (aligned, addend.block) != (product.axis, product.block):
        raise call.refuse("it adds rows on one axis to rows on another")
    return Rows(product.axis, product.block, product.numbered or addend.numbered)


def _refuse(call: Call) -> State:
    raise call.refuse("it brings rows to a product without rows")


def addmm(call: Call) -> State:
    return _with_addend(call, _product(call, "mat1", "mat2", 0))


def baddbmm(call: Call) -> State:
    return _with_addend(call, _product(call, "batch1", "batch2", 1))


def attention(call: Call) -> State:
    """Scaled dot product attention of ``(rows, heads, tokens, head_dim)``."""
    for name in ("query", "key", "value"):
        state = call.states[name]
        if state is None or (state.axis, state.block) != (0, 1):
            raise call.refuse(f"its {name} has no rows of its own on axis 0")
    if call.args.get("dropout_p", 0.0):
        raise call.refuse("it draws random numbers")
    for name in ("attn_mask", "attn_bias"):
        state = call.states.get(name)
        if state is not None and (state.axis, len(call.shape(name))) != (0, 4):
            raise call.refuse("its mask has the rows elsewhere")
    return Rows(0, 1, any(s.numbered for s in call.states.values() if isinstance(s, Rows)))


def paged_attention(call: Call) -> State:
    """The dialect's attention: tokens of a row lie one after the other, caches are the same for all."""
    query = call.states["query"]
    for name in ("block_table", "kv_lens"):
        if call.states[name] is None or call.states[name].axis != 0 or call.states[name].numbered:
            raise call.refuse(f"its {name} has no rows of its own")
    if query is None or query.axis != 0 or call.args.get("query_lens") is not None:
        raise call.refuse("its queries are not the same number for each row")
    if call.states["key_cache"] is not None or call.states["value_cache"] is not None:
        raise call.refuse("its cache has rows")
    return query.values()


def _table() -> dict[Any, Rule]:
    rules: dict[Any, Rule] = {
        aten.mm.default: mm,
        aten.bmm.default: bmm,
        aten.addmm.default: addmm,
        aten.baddbmm.default: baddbmm,
        aten.cat.default: cat,
        aten.stack.default: stack,
        aten.repeat.default: repeat,
        aten.constant_pad_nd.default: pad,
        aten.select.int: select,
        aten.unbind.int: select,
        aten.native_layer_norm.default: trailing("input"),
        aten._fused_rms_norm.default: trailing("input"),
        torch.ops.gemma_npu.paged_attention.default: paged_attention,
        **INDEXING,
    }
    groups: list[tuple[Rule, str]] = [
        (same, "clone _to_copy alias detach lift_fresh_copy view_as_real slice.Tensor"),
        (permute, "t transpose.int permute numpy_T"),
        (view, "view _unsafe_view reshape _reshape_alias unflatten.int"),
        (expand, "expand"),
        (make, "full zeros ones empty.memory_format new_zeros new_ones new_full new_empty zeros_like ones_like"),
        (make, "full_like empty_like scalar_tensor"),
        (arange, "arange arange.start arange.start_step"),
        (unsqueeze, "unsqueeze"),
        (squeeze, "squeeze squeeze.dim squeeze.dims"),
        (along("dim"), "_softmax _log_softmax softmax.int cumsum cumprod logcumsumexp cummax cummin sort sort.stable"),
        (along("dim"), "topk split.Tensor split_with_sizes glu"),
        (along("dims"), "flip roll"),
        (along("dim", keeps=False), "sum.dim_IntList mean.dim amax amin argmax argmin max.dim min.dim any.dim all.dim"),
        (along("dim", keeps=False), "any.dims all.dims prod.dim_int var.correction std.correction var_mean.correction"),
        (along("dim", keeps=False), "logsumexp linalg_vector_norm norm.ScalarOpt_dim median.dim kthvalue mode nansum"),
        (attention, "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention"),
        (attention, "_scaled_dot_product_efficient_attention scaled_dot_product_attention"),
    ]
    for rule, names in groups:
        for name in names.split():
            packet, _, overload = name.partition(".")
            rules[getattr(getattr(aten, packet), overload or "default")] = rule
    return rules


RULES = _table()


def rule_for(target: Any) -> Rule:
    """The rule of an operator.

    Raises:
        MixedRowsError: none is known.
    """
    tags = getattr(target, "tags", ())
    if target in RULES:
        return RULES[target]
    if torch.Tag.nondeterministic_seeded in tags:
        raise MixedRowsError("it draws random numbers")
    if torch.Tag.pointwise in tags:
        return pointwise
    raise MixedRowsError("what it does with rows is not known")
