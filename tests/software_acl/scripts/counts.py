"""One pair, run step by step in three ways; prints tokens, memory, and which blocks each verification has to see."""

import json
import sys
from typing import Any

import pairs
import software_acl
import torch
from peers import SUBJECTS, Subject

from gemma_npu_compile.bench.pairs import layer_types
from gemma_npu_compile.state import State


def visible(subject: Subject, state: State) -> list[dict[str, Any]]:
    """For each layer with a cache of its own: the blocks that hold a key some query of the next verification sees."""
    cache, found = subject.engine.cache, []
    for row, length in zip(state.rows, state.lengths, strict=True):
        cache.extend(row, length + subject.width)
    tables = [table.tolist() for table in cache.block_tables(state.rows)]
    for group, table in zip(cache.groups, tables, strict=True):
        # The first query sits at position `length` and sees `window` keys, itself included.
        oldest = [0 if group.window is None else max(0, length + 1 - group.window) for length in state.lengths]
        newest = [length + subject.width - 1 for length in state.lengths]
        spans = [range(a // group.block_size, b // group.block_size + 1) for a, b in zip(oldest, newest, strict=True)]
        blocks = [[row[i] for i in span] for row, span in zip(table, spans, strict=True)]
        for layer in group.layers:
            keys, values = cache.key_pools[layer], cache.value_pools[layer]
            found.append(
                {
                    "layer": layer,
                    "keys": keys.data_ptr(),
                    "blocks": blocks,
                    "block_bytes": keys[0].nbytes + values[0].nbytes,
                    "pool_bytes": keys.nbytes,
                }
            )
    return found


def run(subject: Subject, prompts: list[torch.Tensor], steps: int) -> dict[str, Any]:
    """Decode; every step between two marks."""
    state = subject.engine.prefill(prompts)
    tokens, seen = [[token] for token in state.token.tolist()], []
    for number in range(steps):
        seen = visible(subject, state)
        torch.npu.synchronize()
        software_acl.mark(f"{subject.name} {number}")
        state, new = subject.step(state)  # reads its results, so what it queued is done
        software_acl.mark(f"{subject.name} {number} end")
        for row, more in zip(tokens, new, strict=True):
            row.extend(more)
    return {"tokens": tokens, "memory": subject.memory, "visible": seen}


def main() -> None:
    """Settings come as JSON in the first argument."""
    given = json.loads(sys.argv[1])
    types = layer_types(given["layers"])
    pair = pairs.on_device(
        getattr(torch, given["dtype"]),
        layer_types=types,
        draft_layer_types=types if len(types) < 4 else layer_types(4),
        head_dim=256,
        global_head_dim=512,
        sliding_window=given["window"],
    )
    prompts = pairs.prompts(*given["prompts"])
    found = {}
    for make in SUBJECTS:
        subject = make(pair, given["drafts"], tuple(given["sizes"]), given["model_len"])
        found[make.name] = run(subject, prompts, given["steps"])
        del subject
        torch._dynamo.reset()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
