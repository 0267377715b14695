"""Fused attention, eager and captured, against attention written out over each query's visible keys.

Prints, as JSON, the largest difference of each case; the reference runs in float32 on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch_npu

BLOCK = 128
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


@dataclass
class Problem:
    """One batch of queries over a paged cache, all of it on the CPU."""

    queries: torch.Tensor  # (B, N, S, D)
    keys: torch.Tensor  # (blocks, block_size, KV_N, D)
    values: torch.Tensor
    table: torch.Tensor  # (B, width) int32
    lengths: list[int]
    window: int | None

    @staticmethod
    def make(
        lengths: Sequence[int],
        queries: int,
        head_dim: int,
        dtype: torch.dtype,
        heads: int = 4,
        kv_heads: int = 2,
        window: int | None = None,
        seed: int = 0,
    ) -> Problem:
        """Random tensors; blocks that no row owns hold a value that any read would show."""
        generator = torch.Generator().manual_seed(seed)
        width = max(-(-length // BLOCK) for length in lengths) + 1
        blocks = len(lengths) * width + 3
        order = torch.randperm(blocks, generator=generator)[: len(lengths) * width]
        keys = torch.randn(blocks, BLOCK, kv_heads, head_dim, generator=generator) / head_dim**0.5
        values = torch.randn(blocks, BLOCK, kv_heads, head_dim, generator=generator)
        unowned = torch.ones(blocks, dtype=torch.bool)
        unowned[order] = False
        keys[unowned], values[unowned] = 1e4, 1e4
        return Problem(
            torch.randn(len(lengths), heads, queries, head_dim, generator=generator).to(dtype),
            keys.to(dtype),
            values.to(dtype),
            order.view(len(lengths), width).to(torch.int32),
            list(lengths),
            window,
        )

    def expected(self) -> torch.Tensor:
        """Row by row, query by query, in float32."""
        rows, heads, count, head_dim = self.queries.shape
        out = torch.empty(rows, heads, count, head_dim)
        for row, length in enumerate(self.lengths):
            keys = self.keys[self.table[row].long()].flatten(0, 1).float()
            values = self.values[self.table[row].long()].flatten(0, 1).float()
            for index in range(count):
                end = length - count + index + 1
                start = 0 if self.window is None else max(0, end - self.window)
                for head in range(heads):
                    kv_head = head * keys.shape[1] // heads
                    scores = keys[start:end, kv_head] @ self.queries[row, head, index].float()
                    out[row, head, index] = scores.softmax(0) @ values[start:end, kv_head]
        return out

    def options(self) -> dict[str, object]:
        """Keyword arguments of the operator, BNSD over a (blocks, block_size, H) cache."""
        count = self.queries.shape[2]
        band = {"sparse_mode": 4, "pre_tokens": (self.window or 1) - 1, "next_tokens": 0}
        mode = {} if count == 1 else band if self.window is not None else {"sparse_mode": 3}
        mask = {} if count == 1 else {"atten_mask": TRIANGLE.npu()}
        return {
            "actual_seq_lengths_kv": self.lengths,
            "block_table": self.table.npu(),
            "num_heads": self.queries.shape[1],
            "num_key_value_heads": self.keys.shape[2],
            "input_layout": "BNSD",
            "scale": 1.0,
            "block_size": BLOCK,
            **mask,
            **mode,
        }

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The caches on the device, flat as the operator takes them."""
        return self.keys.flatten(2).npu(), self.values.flatten(2).npu()


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu().float() - expected).abs().max())


def eager() -> dict[str, float]:
    """Every combination that the decode step and its verification use."""
    results = {}
    for dtype in (torch.float16, torch.bfloat16):
        for head_dim in (256, 512):
            for queries, window in ((1, None), (4, None), (4, 64)):
                problem = Problem.make([5, 130, 300], queries, head_dim, dtype, window=window)
                found, _ = torch_npu.npu_fused_infer_attention_score(
                    problem.queries.npu(), *problem.caches(), **problem.options()
                )
                results[f"{dtype}-D{head_dim}-Q{queries}-W{window}"] = _difference(found, problem.expected())
    return results


def captured() -> dict[str, float]:
    """One capture, replayed with other queries, caches, tables, and, through a task update, lengths."""
    first = Problem.make([5, 130, 300], 4, 512, torch.float16)
    second = Problem.make([290, 7, 131], 4, 512, torch.float16, seed=1)
    query, (keys, values), options = first.queries.npu(), first.caches(), first.options()
    table = options["block_table"]
    operator = torch_npu.npu_fused_infer_attention_score
    workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace(query, keys, values, **options)
    out, lse = torch.empty_like(query), torch.empty(0, dtype=torch.float32, device="npu")
    graph, event, stream = torch.npu.NPUGraph(), torch.npu.ExternalEvent(), torch.npu.Stream()
    with torch.npu.graph(graph):
        capturing = torch.npu.current_stream()
        event.wait(capturing)
        event.reset(capturing)
        torch.npu.graph_task_group_begin(capturing)
        operator.out(query, keys, values, workspace=workspace, out=[out, lse], **options)
        handle = torch.npu.graph_task_group_end(capturing)

    def replay(problem: Problem, update: bool) -> float:
        query.copy_(problem.queries)
        keys.copy_(problem.keys.flatten(2))
        values.copy_(problem.values.flatten(2))
        table.copy_(problem.table)
        stream.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(stream):
            if update:
                options["actual_seq_lengths_kv"] = problem.lengths
                torch.npu.graph_task_update_begin(stream, handle)
                operator.out(query, keys, values, workspace=workspace, out=[out, lse], **options)
                torch.npu.graph_task_update_end(stream)
            event.record(stream)
        graph.replay()
        torch.npu.synchronize()
        return _difference(out, problem.expected())

    return {
        "captured": replay(first, update=False),
        "stale": replay(second, update=False),
        "updated": replay(second, update=True),
    }


if __name__ == "__main__":
    print(json.dumps({"eager": eager(), "captured": captured()}))
