"""One pair, decoded by this package's own graphs and by npugraph_ex; prints what must be equal and what may differ."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import software_acl
import torch
import torch_npu  # noqa: F401
from conftest import build_pair

import gemma_npu_compile as gnc

ENGINES = {"ours": "aclgraph", "theirs": "torchair"}
target, assistant = (model.npu() for model in build_pair())
# The first row's keys fill its second block on the way, so a host length moves.
prompts = [torch.randint(1, 128, (n,), generator=torch.Generator().manual_seed(n)).npu() for n in (120, 9, 14)]


def run(name: str) -> dict[str, object]:
    options = gnc.Options(capture_sizes=(2, 4), on_fallback="error", engine=ENGINES[name])
    # Many blocks: one clone of one layer's cache would outgrow everything else a capture holds.
    engine = gnc.Engine(target, assistant, 1, max_rows=4, max_model_len=512, num_blocks=600, options=options)
    state = engine.prefill(prompts)
    tokens: list[list[int]] = [[] for _ in prompts]
    for step in range(12):
        if step == 8:
            state = state.select([0, 1])  # two rows: the other capture
        if step in (2, 3):
            torch.npu.synchronize()
            software_acl.mark(f"{name} {step}")
        state, new, _, _ = engine.decode(state)
        for row, more in zip(tokens, new, strict=False):
            row.extend(more)
    (report,) = engine.report.graphs
    return {
        "tokens": tokens,
        "captures": report.captures,
        "checked": report.checked,
        "replays": report.replays,
        "updates": report.host_updates,
        "pool": report.pool_bytes,
        "cache": min(pool.nbytes for pool in engine.cache.key_pools.values()),
    }


if __name__ == "__main__":
    found = {}
    for name in ENGINES:
        software_acl.mark(f"{name} start")
        found[name] = run(name)
    software_acl.mark("end")
    torch._dynamo.reset()
    print(json.dumps({**found, "graphs": software_acl.live_graphs()}))
