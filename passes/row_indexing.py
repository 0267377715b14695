"""Rules of the row analysis for operators that index."""

from collections.abc import Callable
from typing import Any

import torch

from gemma_npu_compile.passes.row_state import Call, Rows, State

aten = torch.ops.aten


def _index(call: Call, state: Rows) -> Rows:
    """Rows of an index. A row's own number is none: that of a padded row may lie outside of what is indexed."""
    if state.numbered:
        raise call.refuse("it uses row numbers as an index into something without rows")
    return state


def embedding(call: Call) -> State:
    if call.states["weight"] is not None:
        raise call.refuse("its table has rows")
    return _index(call, call.states["indices"])


def index_select(call: Call) -> State:
    state, index, dim = call.states["self"], call.states["index"], call.dim("dim")
    if state is None:
        return _index(call, index).at(dim)
    if index is not None or dim == state.axis:
        raise call.refuse("it picks rows")
    return state.values()


def gather(call: Call) -> State:
    state, index, dim = call.states["self"], call.states["index"], call.dim("dim")
    if state is None and index is not None and index.axis == dim:
        return _index(call, index)
    if state is None or index is None or (state.axis, state.block) != (index.axis, index.block) or dim == state.axis:
        raise call.refuse("it picks rows")
    return _index(call, index).values()


def _placed(call: Call) -> tuple[list[int], int, int]:
    """Indexed axes, rank of the broadcast indices, and where that stands in the result."""
    indices = call.args["indices"]
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    rank = max(indices[axis].meta["val"].dim() for axis in axes)
    together = axes == list(range(axes[0], axes[0] + len(axes)))
    return axes, rank, axes[0] if together else 0


def _common_index(call: Call, axes: list[int], rank: int, counting: int | None) -> Rows:
    """The rows of the broadcast indices; the index at axis ``counting`` counts them."""
    found: Rows | None = None
    for axis in axes:
        state, fake = call.states["indices"][axis], call.args["indices"][axis].meta["val"]
        if fake.dtype == torch.bool:
            raise call.refuse("its mask makes a size that depends on data")
        if state is None:
            continue
        if axis != counting:
            _index(call, state)
        aligned = Rows(state.axis + rank - fake.dim(), state.block)
        if found is not None and found != aligned:
            raise call.refuse("its indices have rows on several axes")
        found = aligned
    if found is None:
        raise call.refuse("it picks rows")
    return found


def index(call: Call) -> State:
    """``x[...]`` with tensors: of each row something, or of each row what its index says."""
    axes, rank, place = _placed(call)
    state, indices = call.states["self"], call.states["indices"]
    if state is not None and state.axis in axes:
        if indices[state.axis] is None or not indices[state.axis].counts or state.block != 1:
            raise call.refuse("it picks rows")
        found = _common_index(call, axes, rank, state.axis)
        return Rows(found.axis + place, 1, state.numbered)
    if state is None:
        found = _common_index(call, axes, rank, None)
        return found.at(found.axis + place)
    if any(each is not None for each in indices):
        raise call.refuse("it picks of each row what the index of another says")
    before = sum(axis not in axes for axis in range(state.axis))
    return state.values().at(before + (rank if state.axis > place or place == 0 else 0))


def index_put(call: Call) -> State:
    """Rows of a value written into the same rows of a copy."""
    axes, rank, place = _placed(call)
    state, indices, values = call.states["self"], call.states["indices"], call.states["values"]
    if state is None:
        raise call.refuse("it writes rows into something without rows")
    if state.axis in axes:
        if indices[state.axis] is None or not indices[state.axis].counts or state.block != 1:
            raise call.refuse("it writes rows into others")
        target = _common_index(call, axes, rank, state.axis).axis + place
    else:
        if any(each is not None for each in indices):
            raise call.refuse("it writes rows into others")
        target = sum(axis not in axes for axis in range(state.axis))
        target += rank if state.axis > place or place == 0 else 0
    result_rank = len(call.shape("self")) - len(axes) + rank
    if values is not None and values.axis + result_rank - len(call.shape("values")) != target:
        raise call.refuse("it writes rows into others")
    return state.values()


def along_index(source: str) -> Callable[[Call], State]:
    """``index_copy`` and the like: the index is the same for all rows and lies on another axis."""

    def rule(call: Call) -> State:
        state, dim = call.states["self"], call.dim("dim")
        given = call.states.get(source)
        if state is None or call.states.get("index") is not None or dim == state.axis:
            raise call.refuse("it writes rows into others")
        if given is not None and (given.axis, given.block) != (state.axis, state.block):
            raise call.refuse("it writes rows into others")
        return Rows(state.axis, state.block, state.numbered or (given is not None and given.numbered))

    return rule


def scatter(call: Call) -> State:
    state, index, dim = call.states["self"], call.states["index"], call.dim("dim")
    given = call.states.get("src")
    for each in (index, given):
        if each is None and each is given:
            continue
        if state is None or each is None or (each.axis, each.block) != (state.axis, state.block):
            raise call.refuse("it writes rows into others")
    if dim == state.axis:
        raise call.refuse("it writes rows into others")
    _index(call, index)
    return Rows(state.axis, state.block, state.numbered or (given is not None and given.numbered))


INDEXING: dict[Any, Callable[[Call], State]] = {
    aten.embedding.default: embedding,
    aten.index_select.default: index_select,
    aten.gather.default: gather,
    aten.index.Tensor: index,
    aten.index_put.default: index_put,
    aten.index_copy.default: along_index("source"),
    aten.index_add.default: along_index("source"),
    aten.index_fill.int_Scalar: along_index("value"),
    aten.slice_scatter.default: along_index("src"),
    aten.scatter.src: scatter,
    aten.scatter.value: scatter,
    aten.scatter_add.default: scatter,
}
