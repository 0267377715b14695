"""The ordered list of passes and the one place that runs them."""

import inspect
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
from gemma_npu_compile.passes.clip_to_window import clip_to_window
from gemma_npu_compile.passes.common_subexpressions import eliminate_common_subexpressions
from gemma_npu_compile.passes.declare_host_mirrors import declare_host_mirrors
from gemma_npu_compile.passes.declare_row_padding import declare_row_padding
from gemma_npu_compile.passes.drop_softcap import drop_softcap
from gemma_npu_compile.passes.elide_key_rope import elide_key_rope
from gemma_npu_compile.passes.fia_to_bnsd import fia_to_bnsd
from gemma_npu_compile.passes.fold_constants import fold_constants
from gemma_npu_compile.passes.fold_views import fold_views
from gemma_npu_compile.passes.fuse_gated_gelu import fuse_gated_gelu
from gemma_npu_compile.passes.fuse_rms_norm import fuse_rms_norm
from gemma_npu_compile.passes.fuse_rotary import fuse_rotary
from gemma_npu_compile.passes.fx import launches
from gemma_npu_compile.passes.in_place import keep_writes_in_place
from gemma_npu_compile.passes.large_heads_to_bnsd import large_heads_to_bnsd
from gemma_npu_compile.passes.lower_attention import lower_attention
from gemma_npu_compile.passes.lower_native import lower_native
from gemma_npu_compile.passes.lower_operators import lower_operators
from gemma_npu_compile.passes.merge_gate_up import merge_gate_up
from gemma_npu_compile.passes.numbers_on_device import numbers_on_device
from gemma_npu_compile.passes.prove_rows import prove_rows
from gemma_npu_compile.passes.remove_host_syncs import remove_host_syncs
from gemma_npu_compile.passes.remove_no_ops import remove_no_ops
from gemma_npu_compile.passes.result import PassResult
from gemma_npu_compile.passes.sdpa_to_fia import sdpa_to_fia

log = logging.getLogger(__name__)

Pass = Callable[..., PassResult]

PASSES: dict[str, Pass] = {
    "keep_writes_in_place": keep_writes_in_place,
    "remove_host_syncs": remove_host_syncs,
    "declare_row_padding": declare_row_padding,
    "declare_host_mirrors": declare_host_mirrors,
    "prove_rows": prove_rows,
    "remove_no_ops": remove_no_ops,
    "eliminate_common_subexpressions": eliminate_common_subexpressions,
    "elide_key_rope": elide_key_rope,
    "candidate_argmax": candidate_argmax,
    "drop_softcap": drop_softcap,
    "fuse_rms_norm": fuse_rms_norm,
    "fuse_rotary": fuse_rotary,
    "fuse_gated_gelu": fuse_gated_gelu,
    "large_heads_to_bnsd": large_heads_to_bnsd,
    "fia_to_bnsd": fia_to_bnsd,
    "sdpa_to_fia": sdpa_to_fia,
    "bind_block_tables": bind_block_tables,
    "numbers_on_device": numbers_on_device,
    "merge_gate_up": merge_gate_up,
    "clip_to_window": clip_to_window,
    "lower_attention": lower_attention,
    "lower_operators": lower_operators,
    "lower_native": lower_native,
    "fold_constants": fold_constants,
    "fold_views": fold_views,
}
"""Every pass by name, in the order in which they run. A pass changes the graph module it is given."""

_OWN = tuple(PASSES.items())


def only_own() -> bool:
    """Whether ``PASSES`` is as this package made it: its sources say what the passes do."""
    return tuple(PASSES.items()) == _OWN


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: nodes changed, nodes left alone by reason, time, and the graph's size around it.

    Attributes:
        launches_after: kernels a run of the graph launches behind the pass.
    """

    name: str
    changed: int
    left: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    nodes_before: int = 0
    nodes_after: int = 0
    launches_after: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, as reports and dumps show it."""
        return {
            "name": self.name,
            "changed": self.changed,
            "seconds": self.seconds,
            "left": dict(self.left),
            "nodes_before": self.nodes_before,
            "nodes": self.nodes_after,
            "launches": self.launches_after,
        }

    def __str__(self) -> str:
        left = "".join(f"; left {count}: {reason}" for reason, count in self.left.items())
        nodes = f"{self.nodes_before} -> {self.nodes_after} nodes, {self.launches_after} launches"
        return f"{self.name}: {self.changed} changed, {nodes}, {self.seconds * 1e3:.1f} ms{left}"


def run_passes(
    gm: GraphModule,
    *,
    platform: Platform | None = None,
    kv_lens: str = "device",
    verify_attention: str = "paged",
    skip_softcap: bool = False,
    merge_weights: bool = False,
    disable: Sequence[str] = (),
    after: Callable[[str, GraphModule], None] | None = None,
) -> list[PassRecord]:
    """Run all passes but those named in ``disable`` on ``gm``, in place; lint behind each that changed something.

    Args:
        gm: an AOT inference graph; node values in ``meta["val"]``.
        platform: what passes ask for legality; the CPU, which allows everything, by default.
        kv_lens, verify_attention, skip_softcap, merge_weights: as in :class:`Options`.
        after: called with the pass's name and the graph after each pass (dumps, checks).

    Returns:
        One record per pass that ran, in order.
    """
    records: list[PassRecord] = []
    settings = {
        "platform": platform or get_platform("cpu"),
        "kv_lens": kv_lens,
        "verify_attention": verify_attention,
        "skip_softcap": skip_softcap,
        "merge_weights": merge_weights,
    }
    for name, run in PASSES.items():
        if name in disable:
            log.info("%s: disabled", name)
            continue
        before, start = len(gm.graph.nodes), time.perf_counter()
        wanted = inspect.signature(run).parameters
        result = run(gm, **{key: value for key, value in settings.items() if key in wanted})
        touched = result.changed or len(gm.graph.nodes) != before
        if touched:
            gm.graph.lint()
            gm.recompile()
        seconds = time.perf_counter() - start
        counted = launches(gm.graph) if touched or not records else records[-1].launches_after
        size = before, len(gm.graph.nodes), counted
        records.append(PassRecord(name, result.changed, result.left, seconds, *size))
        log.info("%s", records[-1])
        if after is not None:
            after(name, gm)
    return records
