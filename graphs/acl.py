"""Capture and replay as ACL graphs, through torch_npu's ``NPUGraph``.

The final graph is run once inside a capture on a stream of its own, which executes nothing; each replay is one call.
Fused attention goes through its out form with results and a workspace that the runtime owns. Where its lengths come
from a host list, the task can be updated: on one stream that first waits for the stream of the replays and that the
next replay waits for. So an update never races a replay, and a graph holds no event that somebody could forget.
"""

import contextlib
import gc
import operator
import re
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch_npu
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only

from gemma_npu_compile.errors import CaptureError, ReplayError
from gemma_npu_compile.graphs.capturable import refuse_other_devices, refuse_uncapturable
from gemma_npu_compile.passes.fx import where

npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu puts it there
_EXHAUSTED = re.compile(r"\b(207005|207007|207008)\b")
_OUTPUT_OPTIONS = (
    ("input_layout", "quant_scale2", "block_table", "num_heads", "num_key_value_heads", "softmax_lse_flag"),
    ("input_layout", "quant_scale_out", "block_table", "num_query_heads", "num_key_value_heads", "return_softmax_lse"),
)


@dataclass(frozen=True)
class _Fused:
    """The helpers of one version of fused attention."""

    out: Any
    workspace: Any
    outputs: Any
    options: tuple[str, ...]


def _fused(target: Any) -> _Fused | None:
    """The out form of a fused attention operator and what sizes its memory; None for other operators."""
    name = getattr(target, "_opname", None)
    if name not in ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"):
        return None
    ops = torch.ops.npu
    return _Fused(
        getattr(ops, name).out,
        getattr(ops, f"_{name}_get_max_workspace"),
        getattr(ops, f"_{name}_infer_output"),
        (*_OUTPUT_OPTIONS[name.endswith("_v2")], "query_rope"),
    )


@dataclass(frozen=True)
class _Task:
    """A captured call whose host lists can be updated: everything needed to issue it again at the same addresses.

    Its tensors are not owned: what is no input dies behind its last reader, and other tasks, and sizes, use the memory.
    """

    node: str
    handle: Any
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lists: dict[str, int]


def _not_owned(tensor: Tensor) -> Tensor:
    """The same memory, which is given back to the pool whoever holds this: replays come one after the other."""
    return torch_npu._C._weak_ref_tensor(tensor) if tensor.device.type == "npu" else tensor  # type: ignore[no-any-return]


_CAPTURING = threading.Lock()
_ALIVE: "weakref.WeakSet[AclGraph]" = weakref.WeakSet()
_ABANDONED: list[Any] = []
"""Graphs whose capture never began: the host allocator goes on asking them, so they must not go."""


@contextlib.contextmanager
def one_capture() -> Iterator[None]:
    """One capture at a time; and destroying another graph, as a collection may, is not permitted inside."""
    with _CAPTURING:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


class AclRuntime:
    """ACL graphs of one compiled graph: one memory pool, one capture stream, one update stream.

    Args:
        device: an NPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream, self.updates = npu.Stream(device), npu.Stream(device)
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self._workspace: Tensor | None = None
        self.renew()
        self._last: Any = None

    def capture(
        self, gm: GraphModule, args: list[Any], values: dict[sympy.Symbol, int], name: str = "graph"
    ) -> "AclGraph":
        """Record ``gm`` on ``args``; see :class:`AclGraph`."""
        return AclGraph(gm, args, self, name)

    def order(self) -> None:
        """Let the current stream wait for the stream of the last replay, if that was another: buffers are shared."""
        current = npu.current_stream(self.device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current

    def begin(self, graph: Any) -> None:
        """Begin a capture on the current stream; when that fails, the allocator is as it was."""
        if not self.alive:
            self.renew()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except RuntimeError:
            _ABANDONED.append(graph)
            with contextlib.suppress(RuntimeError):
                torch_npu._C._npu_endAllocateToPool(self.device.index, self._pool)
            self.release()
            raise

    def release(self) -> None:
        """Give up a capture's hold on the pool, which torch_npu keeps when beginning or ending it failed."""
        with contextlib.suppress(RuntimeError):
            torch_npu._C._npu_releasePool(self.device.index, self._pool)
        self.renew()

    def renew(self) -> None:
        """A new pool: one that no graph holds is gone for good, and a failure's is not to be trusted."""
        self._pool, self._workspace = npu.graph_pool_handle(), None

    def workspace(self, wanted: Tensor) -> Tensor:
        """One workspace for all tasks, which run one after the other: the largest so far."""
        if self._workspace is None or self._workspace.nbytes < wanted.nbytes:
            self._workspace = wanted
        return self._workspace

    @property
    def nbytes(self) -> int:
        """Bytes the allocator reserved for the pool."""
        segments = npu.memory_snapshot()
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == tuple(self._pool))

    def free(self) -> None:
        """Give the pool back; captures must be gone, each of which waited for its replays."""
        self._last = None
        self.renew()


class AclGraph:
    """One captured ACL graph.

    Args:
        gm: the final graph.
        args: per placeholder a tensor on the device, an int, or a list of host integers. They are owned from here on.
        runtime: whose pool and streams it uses.
        name: for errors, for example ``"capture of 4 rows"``.

    Raises:
        CaptureError: a node cannot be captured, or the device is out of streams or events; names the capture and, where
            one is known, the node. No capture is left open and nothing stays allocated.

    Attributes:
        outputs: the graph's results, at fixed addresses until the next replay of any graph of the runtime.
        host: the host lists as the captured tasks have them now.
    """

    def __init__(self, gm: GraphModule, args: list[Any], runtime: AclRuntime, name: str = "graph") -> None:
        self.name, self._runtime = name, runtime
        args = [list(arg) if isinstance(arg, list) else arg for arg in args]
        self.host: list[list[int] | None] = [arg for arg in args if isinstance(arg, list)]
        self._owned: list[Any] = [args]
        self._readers: list[list[_Task]] = [[] for _ in self.host]
        nodes = list(gm.graph.nodes)
        refuse_uncapturable(nodes, name)
        self._refuse(nodes)
        refuse_other_devices(nodes, args, runtime.device, name)
        self._graph = npu.NPUGraph()
        self._node: Node | None = None
        self._replayed = npu.Event()
        self.outputs: list[Any] = []
        npu.synchronize(runtime.device)
        why = self._capture(gm, nodes, args)
        if why is not None:
            raise CaptureError(why)
        runtime.alive.add(self)
        _ALIVE.add(self)

    def _capture(self, gm: GraphModule, nodes: list[Node], args: list[Any]) -> str | None:
        """Capture; or say why not. An exception is not kept: its frames hold memory of the pool."""
        why = None
        with npu.stream(self._runtime.stream), one_capture():
            try:
                self._runtime.begin(self._graph)
            except RuntimeError as error:
                return self._explain(error)
            try:
                self.outputs = self._run(gm, nodes, args)
            except Exception as error:  # whatever it was: the capture has to be closed
                why = self._explain(error)
            try:
                self._graph.capture_end()
            except RuntimeError as error:
                why = why or self._explain(error)
                self._runtime.release()
        if why is not None:
            self.outputs, self._readers = [], []
            self._graph.reset()
        self.outputs = tree_map_only(Tensor, _not_owned, self.outputs)
        return why

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the interpreter there may be nothing to wait for
            self._replayed.synchronize()  # a replay under way still uses the graph

    def _refuse(self, nodes: list[Node]) -> None:
        """What only this runtime cannot capture: lengths that a kernel reads on the host."""
        for node in nodes:
            if node.target is torch.ops.gemma_npu.paged_attention.default:
                raise CaptureError(
                    f"{self.name}: {where(node)} was not lowered, and its kernel reads lengths on the host"
                )

    def _explain(self, error: Exception) -> str:
        text = str(error).strip()
        code = _EXHAUSTED.search(text)
        if code is not None:
            return (
                f"{self.name}: the device is out of streams or events ({code[1]}) with {len(_ALIVE)} graphs "
                "captured; capture fewer sizes (capture_sizes)"
            )
        at = f" at or shortly before {where(self._node)}" if self._node is not None else ""
        return f"{self.name}: the capture failed{at}: {text.splitlines()[0] if text else type(error).__name__}"

    def _run(self, gm: GraphModule, nodes: list[Node], args: list[Any]) -> list[Any]:
        """Issue every node once; a result is dropped behind its last reader, so that the pool can reuse its memory."""
        last = {used: node for node in nodes for used in node.all_input_nodes}
        dying: dict[Node, list[Node]] = {}
        for used, node in last.items():
            dying.setdefault(node, []).append(used)
        env: dict[Node, Any] = {}
        lists: dict[Node, int] = {}
        inputs = iter(args)
        for node in nodes:
            if node.op == "placeholder":
                env[node] = next(inputs)
                if isinstance(env[node], list):
                    lists[node] = len(lists)
                continue
            if node.op == "get_attr":
                env[node] = operator.attrgetter(str(node.target))(gm)
                self._owned.append(env[node])
                continue
            given, named = tree_map_only(Node, env.__getitem__, (node.args, node.kwargs))
            if node.op == "output":
                return list(given[0])
            self._node = node
            fused = _fused(node.target)
            if fused is None:
                env[node] = node.target(*given, **named)  # type: ignore[operator]
            else:
                env[node] = self._attention(node, fused, given, named, lists)
            for used in dying.get(node, ()):
                env.pop(used)
        raise AssertionError("a graph has an output")

    def _attention(
        self, node: Node, fused: _Fused, args: tuple[Any, ...], kwargs: dict[str, Any], lists: dict[Node, int]
    ) -> tuple[Tensor, Tensor]:
        options = {name: kwargs[name] for name in fused.options if name in kwargs}
        results = fused.outputs(args[0], args[2], **options)
        kwargs = {**kwargs, "workspace": self._runtime.workspace(fused.workspace(*args, **kwargs)), "out": results}
        read = {name: lists[each] for name, each in node.kwargs.items() if isinstance(each, Node) and each in lists}
        if not read:
            fused.out(*args, **kwargs)
            return results
        npu.graph_task_group_begin(self._runtime.stream)
        fused.out(*args, **kwargs)
        handle = npu.graph_task_group_end(self._runtime.stream)
        args, kwargs = tree_map_only(Tensor, _not_owned, (args, kwargs))
        task = _Task(where(node), handle, fused.out, args, kwargs, read)
        for index in read.values():
            self._readers[index].append(task)
        return results

    # ---- replay

    def update(self, index: int, values: list[int]) -> int:
        """Give the tasks that read host list ``index`` new contents; returns how many that were (0: nothing changed).

        Raises:
            ReplayError: the operator refuses the values; the next replay needs them all anew, and nothing was run.
        """
        if self.host[index] == values:
            return 0
        updates, current = self._runtime.updates, npu.current_stream(self._runtime.device)
        updates.wait_stream(current)  # the replay under way still reads the old values
        self.host[index] = None
        with npu.stream(updates):
            for task in self._readers[index]:
                fresh = {name: values if i == index else self.host[i] for name, i in task.lists.items()}
                try:
                    self._reissue(task, {**task.kwargs, **fresh})
                except RuntimeError as error:
                    raise ReplayError(f"{self.name}: {task.node}: {error}; nothing was run") from None
        current.wait_stream(updates)
        self.host[index] = list(values)
        return len(self._readers[index])

    def _reissue(self, task: _Task, kwargs: dict[str, Any]) -> None:
        stream = self._runtime.updates
        npu.graph_task_update_begin(stream, task.handle)
        try:
            task.op(*task.args, **kwargs)
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # an update without its operator is refused, and ends
                npu.graph_task_update_end(stream)
            raise
        npu.graph_task_update_end(stream)  # with a task queue, this is where the operator's errors come out

    def replay(self) -> None:
        """Queue the graph on the current stream; does not wait for it."""
        self._graph.replay()
        self._replayed.record(npu.current_stream(self._runtime.device))
