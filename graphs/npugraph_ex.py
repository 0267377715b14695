"""torch_npu's own graph compiler: whether it can be had here, and what its import must not leave behind."""

import importlib
import importlib.util
import signal
import threading
from typing import Any

import torch

from gemma_npu_compile.errors import CompileError


def require_npugraph_ex(device: torch.device) -> Any:
    """torch_npu's graph compiler.

    Its import replaces the handlers of SIGINT and SIGTERM in this process; they are put back.

    Raises:
        CompileError: (a ValueError) the graph is not on an NPU, or this torch_npu has no such compiler.
    """
    wanted = "engine is 'torchair': that is torch_npu's own graph compiler"
    if importlib.util.find_spec("torch_npu") is None:
        raise CompileError(f"{wanted}, and torch_npu is not installed here; use engine='aclgraph'")
    if device.type != "npu":
        raise CompileError(f"{wanted}, for tensors on an NPU, and this graph runs on {device}; use engine='aclgraph'")
    here = threading.current_thread() is threading.main_thread()
    kept = [(each, signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM)] if here else []
    try:
        return importlib.import_module("npugraph_ex")
    except ImportError as error:
        raise CompileError(f"{wanted} (npugraph_ex), which this torch_npu does not have: {error}") from None
    finally:
        for each, handler in kept:
            signal.signal(each, handler)
