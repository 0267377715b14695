"""What the runner needs of a platform's graphs: record once, replay often, memory that can be counted and freed."""

from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from gemma_npu_compile.graphs.host import HostGraph
from gemma_npu_compile.graphs.memory import Pool
from gemma_npu_compile.graphs.plan import Values


class Captured(Protocol):
    """One captured graph. ``outputs`` lie at fixed addresses until the next replay of any graph of the runtime."""

    outputs: list[Any]

    def replay(self) -> None: ...

    def update(self, index: int, values: list[int]) -> int:
        """Refresh host list ``index`` in the tasks that read it; how many were updated, 0 when nothing changed."""
        ...


class Runtime(Protocol):
    """Captures graphs that share memory."""

    def capture(self, gm: GraphModule, args: list[Any], values: Values, name: str) -> Captured:
        """Record ``gm`` on ``args`` without running it; raise CaptureError, naming the node, if that is impossible."""
        ...

    def order(self) -> None:
        """Called first in every call: what it queues comes behind what earlier calls queued."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of intermediates over all captures."""
        ...

    def free(self) -> None:
        """Drop the memory; captures must be gone."""
        ...


class HostRuntime:
    """Graphs on host memory, in one pool."""

    def __init__(self) -> None:
        self._pool = Pool()

    def capture(self, gm: GraphModule, args: list[Any], values: Values, name: str) -> HostGraph:
        return HostGraph(gm, args, values, self._pool, name)

    def order(self) -> None:
        pass

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes

    def free(self) -> None:
        self._pool.free()


def runtime_for(device: torch.device, engine: str = "aclgraph") -> Runtime:
    """The runtime of a device: ACL graphs on an NPU, the host's everywhere else.

    Raises:
        CompileError: (a ValueError) engine ``"torchair"`` where torch_npu's graph compiler is missing.
    """
    if engine == "torchair":
        from gemma_npu_compile.graphs.npugraph_ex import require_npugraph_ex

        require_npugraph_ex(device)
        from gemma_npu_compile.graphs.torchair import TorchairRuntime

        return TorchairRuntime(device)
    if device.type != "npu":
        return HostRuntime()
    from gemma_npu_compile.graphs.acl import AclRuntime

    return AclRuntime(device)
