"""Capture and replay on host memory, with the rules of a device graph.

A capture walks the graph once and records kernel calls; it runs none of them. Addresses and host numbers are frozen in
the record. A replay runs the recorded kernels on those addresses: the function that was compiled, its Python and its
views are gone. What a device capture forbids (a host synchronisation) is an error here too, so a green run on a laptop
says something about the device.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._library._out_variant import get_out_arg_names, to_out_variant
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from gemma_npu_compile.errors import CaptureError, ReplayError
from gemma_npu_compile.graphs.capturable import refuse_uncapturable
from gemma_npu_compile.graphs.memory import Pool, Sizes, Spec, fakes, plan_memory
from gemma_npu_compile.graphs.phases import phase_of
from gemma_npu_compile.modes import without_grad
from gemma_npu_compile.native.aten import COMMANDS
from gemma_npu_compile.native.program import Command, Program
from gemma_npu_compile.ops.library import KERNELS, Kernel
from gemma_npu_compile.passes.fx import is_view, tensors, where

aten = torch.ops.aten

_COPIES = {aten._to_copy.default, aten.clone.default, aten.lift_fresh_copy.default}


@dataclass(frozen=True)
class Task:
    """One recorded kernel call, with frozen arguments; ``commands`` do the same natively, where that is possible."""

    node: str
    kernel: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    check: Callable[..., None] = lambda *args, **kwargs: None
    commands: tuple[Command, ...] = ()


def _calls(tasks: list[Task]) -> list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """What a replay calls, in order: neighbouring native tasks are one program."""
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
    for native, group in groupby(tasks, key=lambda task: bool(task.commands)):
        if native:
            pairs = [(command, task.node) for task in group for command in task.commands]
            calls.append((Program(*zip(*pairs, strict=True)), (), {}))
        else:
            calls.extend((task.kernel, task.args, task.kwargs) for task in group)
    return calls


def _out_form(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The out overload of a functional operator, where there is one."""
    try:
        return to_out_variant(op)
    except RuntimeError:  # it takes operators such as __rshift__ for in-place ones
        return None


def _no_out(op: Callable[..., Any]) -> Callable[..., None]:
    """A kernel without an out form: run it, and copy its results to their fixed addresses."""

    def run(buffers: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        results = tensors(op(*args, **kwargs))
        for buffer, result in zip(buffers, results if buffers else (), strict=True):
            buffer.copy_(result)

    return run


class HostGraph:
    """A graph captured on host memory for one set of sizes.

    Args:
        gm: the final graph.
        args: per placeholder a tensor (a static input, or a view of a stable buffer), an int, or a list of host
            integers. They are owned from here on.
        values: value of each symbol.
        pool: where intermediates live.
        name: for errors, for example ``"size 4"``.

    Raises:
        CaptureError: a node cannot be captured; names it. The pool is as it was.

    Attributes:
        outputs: the graph's results, at fixed addresses until the next replay of any graph of the pool.
        tasks: recorded kernel calls.
        host: the host lists as they are frozen now.
    """

    def __init__(
        self, gm: GraphModule, args: list[Any], values: dict[sympy.Symbol, int], pool: Pool, name: str = "graph"
    ) -> None:
        self.name = name
        self.tasks: list[Task] = []
        args = [list(arg) if isinstance(arg, list) else arg for arg in args]
        self.host: list[list[int]] = [arg for arg in args if isinstance(arg, list)]
        nodes = list(gm.graph.nodes)
        refuse_uncapturable(nodes, name)
        self._native = any(str(node.target).startswith("gemma_npu_cpu.") for node in nodes)
        offsets, peak = plan_memory(nodes, Sizes(values, name))
        block = pool.take(peak)
        self._owned: list[Any] = [args, block]
        env: dict[Node, Any] = {}
        inputs = iter(args)
        for node in nodes:
            if node.op == "placeholder":
                env[node] = next(inputs)
            elif node.op == "get_attr":
                env[node] = operator.attrgetter(node.target)(gm)
                self._owned.append(env[node])
            elif node.op == "call_function":
                env[node] = self._record(node, env, offsets, block)
            else:
                self.outputs: list[Any] = [env[r] if isinstance(r, Node) else r for r in node.args[0]]  # type: ignore
        self._calls = _calls(self.tasks)
        phases = phase_of(nodes)
        self._phases = [phases[task.node] for task in self.tasks]
        self._readers = [
            [task for task in self.tasks if any(each is values for each in (*task.args, *task.kwargs.values()))]
            for values in self.host
        ]

    @without_grad
    def replay(self) -> None:
        """Run the recorded kernels once, in order."""
        if torch.autograd._profiler_enabled():
            self._replay_in_ranges()
            return
        for kernel, args, kwargs in self._calls:
            kernel(*args, **kwargs)

    def _replay_in_ranges(self) -> None:
        """The same under a profiler: each run of tasks of one phase in a range of its name."""
        for phase, tasks in groupby(zip(self._phases, self.tasks, strict=True), key=itemgetter(0)):
            with torch.profiler.record_function(phase):
                for _, task in tasks:
                    task.kernel(*task.args, **task.kwargs)

    def update(self, index: int, values: list[int]) -> int:
        """Give the tasks that read host list ``index`` new contents; returns how many that were (0: nothing changed).

        Raises:
            ReplayError: an operator refuses the new values; nothing was changed.
        """
        current = self.host[index]
        if current == values:
            return 0
        before = list(current)
        current[:] = values
        for task in self._readers[index]:
            try:
                task.check(*task.args, **{name: each for name, each in task.kwargs.items() if name != "out"})
            except (ValueError, RuntimeError) as error:
                current[:] = before
                raise ReplayError(f"{self.name}: {task.node}: {error}; nothing was run") from None
        return len(self._readers[index])

    # ---- capture

    def _check(self, kernel: Kernel, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What an eager call checks every time, once: shapes and host numbers are frozen from here on."""
        try:
            kernel.check(*args, **kwargs)
        except (ValueError, RuntimeError) as error:
            raise CaptureError(f"{self.name}: {where(node)}: {error}") from None

    def _commands(
        self, target: Any, kernel: Kernel | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Command, ...]:
        """Native commands for a call with ``out`` given; none where there are none, or the graph has no native part."""
        if not self._native:
            return ()
        if kernel is not None:
            found = kernel.command(*args, **kwargs) if kernel.command is not None else None
            return () if found is None else (found,)
        return COMMANDS[target](*args, **kwargs) if target in COMMANDS else ()

    def _record(
        self, node: Node, env: dict[Node, Any], offsets: dict[Node, list[tuple[int, Spec]]], block: Tensor
    ) -> Any:
        target: Any = node.target
        args, kwargs = map_arg((node.args, dict(node.kwargs)), env.__getitem__)  # type: ignore[arg-type]
        given = [each for arg in node.all_input_nodes for each in tensors(env[arg])]
        if any(each.is_neg() or each.is_conj() for each in given) and not is_view(node):  # kernels read memory
            raise CaptureError(f"{self.name}: {where(node)} reads a tensor that is negated or conjugated lazily")
        if not isinstance(target, torch._ops.OpOverload) or (not given and not fakes(node)):
            return target(*args, **kwargs)  # host arithmetic and checks on sizes: done once, frozen
        if is_view(node):
            return target(*args, **kwargs)
        kernel = KERNELS.get(target)
        if kernel is not None:  # called without the dispatcher, which knows a schema's names for its positions
            names = [each.name for each in target._schema.arguments if not each.kwarg_only]
            while len(args) < len(names) and names[len(args)] in kwargs:
                kwargs = dict(kwargs)
                args = (*args, kwargs.pop(names[len(args)]))
            self._check(kernel, node, args, kwargs)
        if target._schema.is_mutable:
            run = kernel.run if kernel is not None else target
            self.tasks.append(Task(node.name, run, args, kwargs, commands=self._commands(target, kernel, args, kwargs)))
            written = [a for a, s in zip(args, target._schema.arguments, strict=False) if s.is_write]
            return written[0] if len(written) == 1 else tuple(written)
        if target is aten.sym_size.int:
            return target(*args, **kwargs)
        buffers = [
            block[offset : offset + spec.nbytes].view(spec.dtype).as_strided(spec.size, spec.stride)
            for offset, spec in offsets[node]
        ]
        if buffers and not any(each.numel() for each in buffers):
            pass  # nothing to compute
        elif target in _COPIES:
            commands = self._commands(aten.copy_.default, None, (buffers[0], args[0]), {})
            self.tasks.append(Task(node.name, aten.copy_.default, (buffers[0], args[0]), {}, commands=commands))
        elif kernel is not None:
            into = buffers[0] if len(buffers) == 1 else tuple(buffers)
            kwargs = {**kwargs, "out": into}
            commands = self._commands(target, kernel, args, kwargs)
            self.tasks.append(Task(node.name, kernel.run, args, kwargs, kernel.check, commands))
        elif (out := _out_form(target)) is not None:
            commands = self._commands(target, None, args, {**kwargs, "out": buffers[0]}) if len(buffers) == 1 else ()
            kwargs = {**kwargs, **dict(zip(get_out_arg_names(out), buffers, strict=True))}
            self.tasks.append(Task(node.name, out, args, kwargs, commands=commands))
        else:
            self.tasks.append(Task(node.name, _no_out(target), (buffers, args, kwargs), {}))
        value = node.meta.get("val")
        if value is None:
            return None
        return buffers[0] if isinstance(value, Tensor) else type(value)(buffers)
