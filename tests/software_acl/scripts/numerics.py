"""Paged attention through capture and replay, with everything changed at fixed addresses, against float32."""

import json

import pairs  # noqa: F401  (loads torch_npu)
import torch

from gemma_npu_compile.ops import paged_attention

HEADS, KV_HEADS, BLOCK, WIDTH, ROWS = 4, 2, 128, 4, 3


def reference(query, keys, values, table, lens, window):
    """Row by row, query by query, over each query's visible prefix."""
    out = torch.empty_like(query, dtype=torch.float32)
    count = query.shape[0] // ROWS
    for row, length in enumerate(lens.tolist()):
        k, v = (cache[table[row].long()].flatten(0, 1).float() for cache in (keys, values))
        for index in range(count):
            end = length - count + 1 + index
            start = 0 if window is None else max(0, end - window)
            shown = [each[start:end].transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, v)]
            q = query[row * count + index].float().unsqueeze(1)
            out[row * count + index] = torch.nn.functional.scaled_dot_product_attention(q, *shown, scale=0.1)[:, 0]
    return out


def contents(head_dim, count, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(ROWS * count, HEADS, head_dim, generator=generator).to(dtype)
    keys, values = (
        torch.randn(1 + ROWS * WIDTH, BLOCK, KV_HEADS, head_dim, generator=generator).to(dtype) for _ in range(2)
    )
    table = 1 + torch.randperm(ROWS * WIDTH, generator=generator).int().view(ROWS, WIDTH)
    lens = torch.randint(count, WIDTH * BLOCK, (ROWS,), generator=generator, dtype=torch.int32)
    return query, keys, values, table, lens


errors, replays = {}, 0
for dtype in (torch.float16, torch.bfloat16):
    for head_dim in (256, 512):
        for count in (1, 4):
            for window in (None, 200):

                def attend(query, keys, values, table, lens, count=count, window=window):
                    layer = "verify/target.layers.0"
                    return paged_attention(query, keys, values, table, lens, 0.1, window, "TND", layer)

                first = [each.npu() for each in contents(head_dim, count, dtype, 0)]
                for cache in first[1:3]:
                    torch._dynamo.mark_static_address(cache, guard=False)
                torch._dynamo.reset()
                compiled = torch.compile(attend, backend="gemma_npu", options={"on_fallback": "error"}, dynamic=False)
                worst = 0.0
                with torch.no_grad():
                    for seed in range(3):
                        fresh = contents(head_dim, count, dtype, seed)
                        for into, value in zip(first, fresh, strict=True):
                            into.copy_(value)
                        found, wanted = compiled(*first).cpu().float(), reference(*fresh, window)
                        worst = max(worst, float(((found - wanted).abs() / (1 + wanted.abs())).max()))
                        replays += 1
                errors[f"{dtype} D{head_dim} Q{count} W{window}"] = worst
print(json.dumps({"errors": errors, "replays": replays}))
