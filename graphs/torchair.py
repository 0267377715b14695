"""Capture and replay by torch_npu's own compiler (``npugraph_ex``, the captured mode of torchair): a second opinion.

It is handed the final graph, one size at a time and so that nothing is left to copy: every tensor it reads is declared
static, which makes it capture addresses instead of cloning inputs at each replay (a cache that is only read included),
cache writes are in place already, and host lists are spread into the integers it knows how to update. Row padding,
stable buffers, sizes and the check of a capture are those of every runtime.

What differs behind that: it makes the tasks of fused attention wait in every replay and updates all of them each time,
changed or not, and it does so behind the replay: an update that the operator refuses leaves the replay waiting.
"""

import contextlib
import importlib
import operator
from typing import Any

import sympy
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_any, tree_map_only

from gemma_npu_compile.errors import CaptureError
from gemma_npu_compile.graphs.acl import AclRuntime, npu, one_capture
from gemma_npu_compile.graphs.capturable import refuse_other_devices, refuse_uncapturable
from gemma_npu_compile.graphs.npugraph_ex import require_npugraph_ex


class _Specialiser:
    """Writes a graph anew for one set of arguments: fixed sizes, and nothing but static tensors and integers as inputs.

    Attributes:
        graph: the new graph.
        inputs: its arguments: tensors, and integers of host lists.
        fakes: the same without contents.
        lists: for each host list the positions of its integers.
    """

    def __init__(self, gm: GraphModule, args: list[Any], mode: FakeTensorMode) -> None:
        self.graph, self.mode = Graph(), mode
        self.inputs: list[Any] = []
        self.fakes: list[Any] = []
        self.lists: list[list[int]] = []
        self._new: dict[Node, Any] = {}  # what stands for a node: a new node, a list of such, or a constant
        self._fake: dict[Node, Any] = {}
        given = iter(args)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, next(given))
            elif node.op == "get_attr":
                self._placeholder(node, operator.attrgetter(node.target)(gm))
            elif node.op == "output":
                self.graph.output(self._mapped(node.args[0], self._new))
            else:
                self._call(node)

    def _mapped(self, structure: Any, env: dict[Node, Any]) -> Any:
        return tree_map_only(Node, env.__getitem__, structure)

    def _input(self, name: str, value: Any) -> Node:
        made = self.graph.placeholder(name)
        fake = self.mode.from_tensor(value) if isinstance(value, Tensor) else value
        if isinstance(fake, Tensor):
            fake._torchair_is_parameter = True  # type: ignore[attr-defined]
        made.meta["val"] = fake
        self.inputs.append(value)
        self.fakes.append(fake)
        return made

    def _placeholder(self, node: Node, value: Any) -> None:
        if isinstance(value, list):
            first = len(self.inputs)
            self.lists.append(list(range(first, first + len(value))))
            self._new[node] = [self._input(f"{node.name}_{index}", each) for index, each in enumerate(value)]
            self._fake[node] = list(value)
        elif isinstance(value, Tensor) and node.users:
            self._new[node] = self._input(node.name, value)
            self._fake[node] = self.fakes[-1]
        else:
            self._new[node] = self._fake[node] = value

    def _call(self, node: Node) -> None:
        target: Any = node.target
        args, kwargs = self._mapped((node.args, node.kwargs), self._fake)
        with self.mode:
            value = self._fake[node] = target(*args, **kwargs)
        schema = getattr(target, "_schema", None)
        if not tree_any(lambda each: isinstance(each, Tensor), value) and not (schema and schema.is_mutable):
            self._new[node] = value  # host arithmetic, and checks that are done with
            return
        args, kwargs = self._mapped((node.args, node.kwargs), self._new)
        made = self.graph.call_function(target, args, kwargs)
        made.meta["val"] = value
        self._new[node] = made


class TorchairRuntime(AclRuntime):
    """Graphs of one compiled graph, captured by ``npugraph_ex`` in one pool on one stream.

    Args:
        device: an NPU.
    """

    def capture(  # type: ignore[override]
        self, gm: GraphModule, args: list[Any], values: dict[sympy.Symbol, int], name: str = "graph"
    ) -> "TorchairGraph":
        """Record ``gm`` on ``args``; see :class:`TorchairGraph`."""
        return TorchairGraph(gm, args, self, name)

    def compile(self, graph: Graph, mode: FakeTensorMode, fakes: list[Any]) -> Any:
        """npugraph_ex's ``AclGraph``: its ``compile`` captures, calling it replays."""
        npugraph_ex = require_npugraph_ex(self.device)
        compiler = importlib.import_module("npugraph_ex.npu_fx_compiler")
        config = npugraph_ex.CompilerConfig()
        config.use_graph_pool = tuple(self._pool)
        config.reuse_graph_pool_in_same_fx = False  # one graph each; results stay where they are
        config.capture_error_mode = "thread_local"
        config.remove_noop_ops = False  # takes a graph without writes for granted: a copy before a write is none
        with tracing(TracingContext(mode)):
            compiled = npugraph_ex.get_compiler(config)(GraphModule({}, graph), fakes)
            module = compiler._compile_py_code(compiled.get_code())
        module.aclgraph_cache_info.stream = self.stream
        module.acl_graph.load(module.aclgraph_cache_info)
        return module.acl_graph


class TorchairGraph:
    """One graph of fixed sizes, captured by npugraph_ex.

    Args:
        gm: the final graph.
        args: per placeholder a tensor on the device, an int, or a list of host integers. They are owned from here on.
        runtime: whose pool and stream it uses.
        name: for errors, for example ``"capture of 4 rows"``.

    Raises:
        CaptureError: a node cannot be captured, or npugraph_ex cannot take the graph; names the capture.

    Attributes:
        outputs: the graph's results, at fixed addresses.
        host: the host lists of the next replay.
    """

    def __init__(self, gm: GraphModule, args: list[Any], runtime: TorchairRuntime, name: str = "graph") -> None:
        self.name, self._device, self._replayed = name, runtime.device, npu.Event()
        self.host = [list(arg) for arg in args if isinstance(arg, list)]
        nodes = list(gm.graph.nodes)
        refuse_uncapturable(nodes, name)
        refuse_other_devices(nodes, args, runtime.device, name)
        lists = [node for node, arg in zip(nodes, args, strict=False) if isinstance(arg, list)]
        self._readers = [len(node.users) for node in lists]
        npu.synchronize(runtime.device)
        try:
            mode = FakeTensorMode()
            special = _Specialiser(gm, args, mode)
            self._inputs, self._lists = special.inputs, special.lists
            with one_capture():
                if not runtime.alive:
                    runtime.renew()
                self._graph = runtime.compile(special.graph, mode, special.fakes)
                key = self._graph.compile(*self._inputs)
                self.outputs: list[Any] = list(self._graph.graphs_meta[key].retained_outputs)
        except Exception as error:
            runtime.renew()
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CaptureError(f"{name}: npugraph_ex (engine='torchair') cannot capture it: {text}") from error
        runtime.alive.add(self)

    def __del__(self) -> None:
        if not hasattr(self, "_graph"):
            return
        with contextlib.suppress(Exception):  # at the end of the interpreter there may be nothing to wait for
            self._replayed.synchronize()  # a replay under way still uses the graph
        for each in self._graph.graphs_meta.values():  # only a collection would free them: they lie in a cycle
            each.acl_graph.reset()
        self._graph.graphs_meta.clear()

    def update(self, index: int, values: list[int]) -> int:
        """New contents of a host list, for the next replay; returns how many tasks it updates: all readers, always."""
        self.host[index] = list(values)
        for position, value in zip(self._lists[index], values, strict=True):
            self._inputs[position] = value
        return self._readers[index]

    def replay(self) -> None:
        """Queue the graph and its updates; does not wait for them."""
        self.outputs = list(self._graph(*self._inputs))
        self._replayed.record(npu.current_stream(self._device))
