"""Read what ``options={"record": FILE}`` kept, to run it again (``gemma-npu check --state FILE``)."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from gemma_npu_compile.check_step import StepState
from gemma_npu_compile.graphs.recorder import FORMAT, ROLES
from gemma_npu_compile.kv_cache import PagedKVCache
from gemma_npu_compile.kv_groups import MAX_QUERY_LEN


@dataclass(frozen=True)
class Recorded:
    """One step of a record, and the shapes of the caches it ran on."""

    state: StepState
    caches: dict[str, list[int]]


def read(path: Path) -> list[Recorded]:
    """The steps of a record, oldest first.

    Raises:
        ValueError: it is no record, or not one of a draft-plus-verify step.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--state {path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"--state {path}: not JSON, so not a record") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT or not record.get("steps"):
        raise ValueError(f"--state {path}: not a record with steps ({FORMAT})")
    found = []
    for step in record["steps"]:
        by_role = {role: [each for each in step if each["role"] == role] for role in ROLES}
        if len(by_role["token"]) != 1 or len(by_role["lengths"]) != 1 or not by_role["block_table"]:
            raise ValueError(f"--state {path}: not a record of a draft-plus-verify step")
        tables = sorted(by_role["block_table"], key=lambda each: each["label"])
        state = StepState(
            torch.tensor(by_role["token"][0]["values"], dtype=torch.long),
            list(by_role["lengths"][0]["values"]),
            tuple(torch.tensor(each["values"], dtype=torch.int32) for each in tables),
        )
        found.append(Recorded(state, record["caches"]))
    return found


def cache_like(recorded: Recorded, target: PreTrainedModel) -> PagedKVCache:
    """A cache of the recorded geometry for ``target``.

    Raises:
        ValueError: the record's caches are not those of this model.
    """
    shapes = {int(label.rpartition("[")[2].rstrip("]")): shape for label, shape in recorded.caches.items()}
    rows = max(2, len(recorded.state.lengths))
    probe = PagedKVCache(target.config, max_rows=2, max_model_len=16, device="meta", dtype=target.dtype)
    sizes, blocks = {}, {}
    for group, table in zip(probe.groups, recorded.state.tables, strict=False):
        shape = shapes.get(group.layers[0], [])
        if shape[2:] != [group.kv_heads, group.head_dim]:
            raise ValueError(
                f"--state: layer {group.layers[0]} was recorded with a cache of {shape}, this model has "
                f"{group.kv_heads} kv heads of {group.head_dim}"
            )
        sizes[group.name], blocks[group.name] = shape[1], shape[0]
        length = table.shape[1] * shape[1] - MAX_QUERY_LEN
    return PagedKVCache(
        target.config,
        max_rows=rows,
        max_model_len=length,
        num_blocks=blocks,
        block_size=sizes,
        dtype=target.dtype,
        device=target.device,
    )
