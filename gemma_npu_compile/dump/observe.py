"""What looks at the graph behind each pass: a dump, and torch's structured trace (``TORCH_TRACE``, for tlparse)."""

from collections.abc import Callable
from itertools import count

from torch._logging._internal import trace_structured
from torch.fx import GraphModule

from gemma_npu_compile.dump.folder import GraphDump


def observers(files: GraphDump | None) -> Callable[[str, GraphModule], None]:
    """Called with a pass's name and the graph after it; the trace costs nothing unless one is being written."""
    numbers = count()

    def after(name: str, gm: GraphModule) -> None:
        number = next(numbers)
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"gemma_npu_{number:02d}_{name}", "encoding": "string"},
            payload_fn=lambda: gm.print_readable(print_output=False),
        )
        if files is not None:
            files.write(name, gm)

    return after
