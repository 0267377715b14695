"""Thirty-two requests at every number of rows from 1 to 12; against plain greedy or the uncaptured lowering."""

import json
import sys

import pairs
import software_acl
import torch

import gemma_npu_compile as gnc
from gemma_npu_compile.verify import plain_greedy

BATCHES = (12, 1, 7, 5, 4, 3)
NEW = 12
dtype = getattr(torch, sys.argv[1])
lengths = [5 + (7 * i) % 40 for i in range(sum(BATCHES))]
target, assistant = pairs.build_pair()
given = [torch.randint(1, 128, (n,), generator=torch.Generator().manual_seed(i)) for i, n in enumerate(lengths)]
expected = [plain_greedy(target, each.tolist(), NEW, [], 0) for each in given] if dtype == torch.float32 else []
target, assistant = target.to("npu", dtype), assistant.to("npu", dtype)


def run(capture: bool) -> tuple[list[list[int]], gnc.Engine, int]:
    options = gnc.Options(capture=capture, capture_sizes=tuple(range(1, 13)), on_fallback="error")
    engine = gnc.Engine(target, assistant, 3, max_rows=12, max_model_len=256, options=options)
    engine.warm_up()
    engine.report.graphs[0].replays = 0  # the warm-up's
    torch.npu.synchronize()
    software_acl.mark("ready" if capture else "uncaptured ready")
    found, start, prefills = [], 0, 0
    for rows in range(1, 13 if capture else 1):  # every number of rows once
        pairs.tokens(engine, [each.npu() for each in given[:rows]], 2)
        prefills += len(set(lengths[:rows]))
    for count in BATCHES:
        found += pairs.tokens(engine, [each.npu() for each in given[start : start + count]], NEW)
        prefills += len(set(lengths[start : start + count]))
        start += count
    software_acl.mark("done" if capture else "uncaptured done")
    return found, engine, prefills


found, engine, prefills = run(capture=True)
(report,) = engine.report.graphs
if dtype != torch.float32:
    expected, _, _ = run(capture=False)
print(
    json.dumps(
        {
            "equal": sum(a == b for a, b in zip(found, expected, strict=True)),
            "captures": report.captures,
            "checked": report.checked,
            "replays": report.replays,
            "fallbacks": dict(report.fallbacks),
            "prefill_attention": 2 * prefills,  # a layer's prefill: one call for each number of queries in the chunk
        }
    )
)
