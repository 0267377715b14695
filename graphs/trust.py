"""Before a capture is trusted: one replay with other contents, in scratch rows, against the uncaptured graph.

What a capture froze by mistake (a length, a table, a slot) gives the right answer as long as nothing changes. So the
replay gets what padded rows hold, in another order, with other tokens and longer rows. It goes first: what it should
have written and did not is then missing when it reads. What scratch blocks held is put back before the uncaptured
graph runs, and behind it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from gemma_npu_compile.errors import CaptureError
from gemma_npu_compile.graphs.buffers import StableBuffers
from gemma_npu_compile.graphs.inputs import Values
from gemma_npu_compile.graphs.memory import Sizes, fakes
from gemma_npu_compile.graphs.plan import Plan
from gemma_npu_compile.passes.fx import root, tensors, written_args

_SLOT_WRITES = ("gemma_npu::store_kv", "gemma_npu_cpu::store_kv", "npu::npu_scatter_pa_kv_cache")


def why_unchecked(gm: GraphModule, plan: Plan) -> str | None:
    """Why no replay of this graph may be made on the side, or None when one may.

    With declared row padding, padded rows are scratch, if all the graph writes goes to slots of its rows. Without, the
    caller's own inputs are all there is, so the graph must write to none of them. It must draw no random numbers.
    """
    for node in gm.graph.nodes:
        target: Any = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in target.tags:
            return f"{node.name} draws random numbers"
        if all(root(each).op == "call_function" for each in written_args(node)):
            continue  # nothing, or the graph's own memory
        if plan.rows is None:
            return f"{node.name} writes to an input, and no row is known to be scratch"
        if target._schema.name not in _SLOT_WRITES:
            return f"{node.name} writes to an input other than by slots of its rows"
        if not any(item.role == "block_table" and item.padding is not None for item in plan.inputs):
            return f"{node.name} writes to slots, and no block table says which are scratch"
    return None


class Scratch:
    """Contents of the blocks that padded rows name, in every cache; :meth:`restore` puts them back."""

    def __init__(self, plan: Plan, args: list[Any]) -> None:
        tables = {i.padding for i in plan.inputs if i.role == "block_table" and i.padding is not None}
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []
        if not tables:
            return
        named = {block for table in tables for block in args[table].flatten().tolist()}
        for cache in {item.source: args[item.source] for item in plan.inputs if item.role == "cache"}.values():
            blocks = torch.tensor(sorted(b for b in named if b < cache.shape[0]), device=cache.device)
            self._kept.append((cache, blocks, cache[blocks]))

    def restore(self) -> None:
        for cache, blocks, contents in self._kept:
            cache.index_copy_(0, blocks, contents)


def load_scratch(plan: Plan, buffers: StableBuffers, args: list[Any], size: int) -> None:
    """Fill the first ``size`` rows of the buffers with the padding of other rows, other tokens and longer rows.

    A row grows by whole blocks of its scratch table, which repeats: its slots stay its own.
    """
    blocks = [args[item.source].shape[1] for item in plan.inputs if item.role == "cache" and len(item.shape) == 4]
    step = max(blocks, default=0)
    room = min((host.capacity for host in plan.host), default=0)
    odd = torch.arange(size) % 2
    for item in buffers.inputs:
        if item.padding is None:
            continue
        buffer, padding = buffers.view(item, size), args[item.padding][:size]
        contents = padding.roll(1, 0)
        if item.role in ("lengths", "host") and int(padding.max()) + 2 * step <= room:
            contents = contents + (odd * step).to(contents)
        elif item.role == "token":
            contents = ((odd + size) % 2).to(contents).view(-1, *[1] * (contents.dim() - 1)).expand_as(contents)
        elif contents.is_floating_point():
            contents = torch.arange(contents.numel()).add(size).cos().view(contents.shape).to(contents)
        buffer.copy_(contents)


class _OneRow(Interpreter):
    """Runs a graph that was traced for two rows or more on one, and looks whether every shape is the one meant."""

    def __init__(self, gm: GraphModule, sizes: Sizes) -> None:
        super().__init__(gm)
        self.wrong: str | None = None
        self._sizes = sizes

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if self.wrong is None:
            found = [tuple(each.shape) for each in tensors(result)]
            meant = [tuple(self._sizes.number(size, n) for size in fake.shape) for fake in fakes(n)]
            if n.op == "call_function" and found != meant:
                self.wrong = f"{n.name} has shape {found} for one row, it would have to be {meant}"
        return result


def run_one_row(
    gm: GraphModule,
    plan: Plan,
    buffers: StableBuffers,
    args: list[Any],
    arguments: Callable[[], list[Any]],
    sizes: Values,
) -> list[Any]:
    """Results of the uncaptured graph on one row of scratch, if it may be run on one row.

    torch takes a symbolic size for two or more: an operator may drop or stretch an axis of one, and nothing that was
    decided while tracing says so. Where every shape is as traced, with a one put in, each operator does what it does
    for many rows. Ask :func:`why_unchecked` whether the graph may be run on the side.

    Args:
        args: of the call.
        arguments: what the graph is given for ``sizes`` with what lies in the buffers when it is asked.

    Raises:
        CaptureError: the first node that does not treat one row as one of many.
    """
    load_scratch(plan, buffers, args, 1)
    scratch, run = Scratch(plan, args), _OneRow(gm, Sizes(sizes))
    try:
        results = list(run.run(*arguments()))
    except Exception as error:  # whatever it is, two rows can do without
        raise CaptureError(f"{type(error).__name__}: {error}") from None
    finally:
        scratch.restore()
    if run.wrong is not None:
        raise CaptureError(run.wrong)
    return results


def first_difference(found: list[Any], expected: list[Any]) -> int | None:
    """Index of the first output that is not equal bit for bit (any NaN equals any other), or None."""
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(one, Tensor):
            continue
        same = one == other
        if one.is_floating_point():
            same = torch.logical_or(same, torch.logical_and(one != one, other != other))
        if not bool(same.all()):
            return index
    return None
