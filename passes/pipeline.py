"""The ordered list of passes and the one place that runs them."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from gemma_npu_compile.capabilities import Platform
from gemma_npu_compile.capabilities import platform as get_platform
from gemma_npu_compile.passes.bind_block_tables import bind_block_tables
from gemma_npu_compile.passes.candidate_argmax import candidate_argmax
from gemma_npu_compile.passes.common_subexpressions import eliminate_common_subexpressions
from gemma_npu_compile.passes.declare_row_padding import declare_row_padding
from gemma_npu_compile.passes.elide_key_rope import elide_key_rope
from gemma_npu_compile.passes.in_place import keep_writes_in_place
from gemma_npu_compile.passes.large_heads_to_bnsd import large_heads_to_bnsd
from gemma_npu_compile.passes.remove_host_syncs import remove_host_syncs
from gemma_npu_compile.passes.remove_no_ops import remove_no_ops
from gemma_npu_compile.passes.result import PassResult

log = logging.getLogger(__name__)

Pass = Callable[..., PassResult]

PASSES: dict[str, Pass] = {
    "keep_writes_in_place": keep_writes_in_place,
    "remove_host_syncs": remove_host_syncs,
    "declare_row_padding": declare_row_padding,
    "remove_no_ops": remove_no_ops,
    "eliminate_common_subexpressions": eliminate_common_subexpressions,
    "elide_key_rope": elide_key_rope,
    "candidate_argmax": candidate_argmax,
    "large_heads_to_bnsd": large_heads_to_bnsd,
    "bind_block_tables": bind_block_tables,
}
"""Every pass by name, in the order in which they run. A pass changes the graph module it is given."""

_ASK_PLATFORM = {"large_heads_to_bnsd"}


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: nodes changed, nodes left alone by reason, time, and the graph's size around it."""

    name: str
    changed: int
    left: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    nodes_before: int = 0
    nodes_after: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, as reports and dumps show it."""
        return {"name": self.name, "changed": self.changed, "seconds": self.seconds, "left": dict(self.left)}

    def __str__(self) -> str:
        left = "".join(f"; left {count}: {reason}" for reason, count in self.left.items())
        nodes = f"{self.nodes_before} -> {self.nodes_after} nodes"
        return f"{self.name}: {self.changed} changed, {nodes}, {self.seconds * 1e3:.1f} ms{left}"


def run_passes(
    gm: GraphModule,
    *,
    platform: Platform | None = None,
    disable: Sequence[str] = (),
    after: Callable[[str, GraphModule], None] | None = None,
) -> list[PassRecord]:
    """Run all passes but those named in ``disable`` on ``gm``, in place; lint after each.

    Args:
        gm: an AOT inference graph; node values in ``meta["val"]``.
        platform: what passes ask for legality; the CPU, which allows everything, by default.
        after: called with the pass's name and the graph after each pass (dumps, checks).

    Returns:
        One record per pass that ran, in order.
    """
    records = []
    target = platform or get_platform("cpu")
    for name, run in PASSES.items():
        if name in disable:
            log.info("%s: disabled", name)
            continue
        before, start = len(gm.graph.nodes), time.perf_counter()
        result = run(gm, platform=target) if name in _ASK_PLATFORM else run(gm)
        gm.graph.lint()
        gm.recompile()
        seconds = time.perf_counter() - start
        records.append(PassRecord(name, result.changed, result.left, seconds, before, len(gm.graph.nodes)))
        log.info("%s", records[-1])
        if after is not None:
            after(name, gm)
    return records
