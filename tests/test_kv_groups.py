"""Which layers share a block table is the fact everything hangs on: a wrong or a changing answer reads foreign keys.

Groups of real model shapes are planned here without allocating a pool; the sizes are checked by counting positions.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

import gemma_npu_compile
from gemma_npu_compile.kv_groups import MAX_QUERY_LEN, Capacity, KVGroup, null_row, plan_groups

SLIDING, FULL = "sliding_attention", "full_attention"
SMALL = Capacity(max_rows=2, max_model_len=100, prefill_chunk=64)
BLOCK_SIZES = st.sampled_from([16, 32, 48, 64, 128, 256])


def config(layer_types: list[str], **overrides: Any) -> Gemma4TextConfig:
    sizes: dict[str, Any] = {
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 24,
    }
    return Gemma4TextConfig(**(sizes | overrides))


def plan(
    text: Gemma4TextConfig, num_blocks: Any = 3, block_size: Any = 16, capacity: Capacity = SMALL
) -> tuple[tuple[KVGroup, ...], tuple[int, ...]]:
    return plan_groups(text, capacity, num_blocks, block_size)


@pytest.mark.parametrize(
    ("layer_types", "names", "layers", "layer_groups"),
    [
        ([SLIDING, SLIDING, FULL, SLIDING, FULL], [SLIDING, FULL], [(0, 1, 3), (2, 4)], (0, 0, 1, 0, 1)),
        ([FULL, SLIDING, SLIDING, FULL], [FULL, SLIDING], [(0, 3), (1, 2)], (0, 1, 1, 0)),
        ([FULL, FULL], [FULL], [(0, 1)], (0, 0)),
    ],
)
def test_groups_come_in_the_order_of_first_appearance(
    layer_types: list[str], names: list[str], layers: list[tuple[int, ...]], layer_groups: tuple[int, ...]
) -> None:
    groups, order = plan(config(layer_types))
    assert [g.name for g in groups] == names
    assert [g.layers for g in groups] == layers
    assert [g.index for g in groups] == list(range(len(names)))
    assert [g.window for g in groups] == [24 if name == SLIDING else None for name in names]
    assert order == layer_groups


def test_two_geometries_of_one_layer_type_are_numbered() -> None:
    overrides = {1: {"head_dim": 32}, 2: {"head_dim": 64}, 4: {"num_key_value_heads": 4}, 5: {"head_dim": 64}}
    groups, order = plan(config([SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL], per_layer_config=overrides))
    assert [g.name for g in groups] == [SLIDING, f"{SLIDING}_2", FULL, f"{SLIDING}_3"]
    assert [(g.kv_heads, g.head_dim) for g in groups] == [(2, 16), (2, 32), (2, 64), (4, 16)]
    assert order == (0, 1, 2, 0, 3, 2)


def test_e2b_shape_with_a_shared_tail() -> None:
    """35 layers, the last 20 reuse keys: they own nothing and read the groups of their owners."""
    layer_types = ([SLIDING] * 4 + [FULL]) * 7
    text = config(
        layer_types,
        num_kv_shared_layers=20,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=None,
        attention_k_eq_v=False,
        sliding_window=512,
    )
    groups, order = plan(text)
    assert [g.layers for g in groups] == [(0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13), (4, 9, 14)]
    assert [(g.kv_heads, g.head_dim, g.window) for g in groups] == [(1, 256, 512), (1, 512, None)]
    assert order == tuple(int(kind == FULL) for kind in layer_types)


def test_31b_shape() -> None:
    layer_types = ([SLIDING] * 5 + [FULL]) * 10
    text = config(
        layer_types,
        hidden_size=5376,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=4,
        sliding_window=1024,
    )
    capacity = Capacity(max_rows=4, max_model_len=32768, prefill_chunk=512)
    (sliding, full), order = plan(text, num_blocks=None, block_size=128, capacity=capacity)
    assert (len(sliding.layers), len(full.layers), len(order)) == (50, 10, 60)
    assert (sliding.kv_heads, sliding.head_dim, sliding.window) == (16, 256, 1024)
    assert (full.kv_heads, full.head_dim, full.window) == (4, 512, None)
    sliding_token, full_token = (len(g.layers) * g.kv_heads * g.head_dim for g in (sliding, full))
    assert sliding_token == 10 * full_token
    # Four rows: the window and one chunk (14 blocks each) against the whole length (257 each); one null block.
    assert (sliding.num_blocks, sliding.null_blocks) == (4 * 14 + 1, 1)
    assert (full.num_blocks, full.null_blocks) == (4 * 257 + 1, 1)


def test_sharing_does_not_depend_on_use_cache() -> None:
    layer_types = [SLIDING, FULL, SLIDING, FULL]
    plans = [plan(config(layer_types, num_kv_shared_layers=2, use_cache=use)) for use in (True, False)]
    assert plans[0] == plans[1]
    assert [g.layers for g in plans[0][0]] == [(0,), (1,)]


def test_sizes_by_group_name() -> None:
    groups, _ = plan(config([SLIDING, FULL]), {FULL: 7}, {SLIDING: 64, FULL: 32})
    assert [g.block_size for g in groups] == [64, 32]
    assert groups[1].num_blocks - groups[1].null_blocks == 7
    assert groups[0].num_blocks - groups[0].null_blocks == 2 * 2  # width 2 is less than window and chunk


BAD_PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "block_size 0": ({"block_size": 0}, "block_size.*0"),
    "block_size negative": ({"block_size": -16}, "block_size.*-16"),
    "block_size 24": ({"block_size": 24}, "block_size.*24.*16"),
    "block_size float": ({"block_size": 16.0}, r"block_size.*16\.0"),
    "block_size bool": ({"block_size": True}, "block_size.*True"),
    "block_size of one group": ({"block_size": {SLIDING: 16, FULL: 8}}, f"block_size.*{FULL}.*8"),
    "block_size misses a group": ({"block_size": {SLIDING: 16}}, f"block_size.*{FULL}"),
    "block_size of nobody": ({"block_size": {SLIDING: 16, "ful": 16}}, f"block_size.*'ful'.*{FULL}"),
    "num_blocks 0": ({"num_blocks": 0}, "num_blocks.*0"),
    "num_blocks bool": ({"num_blocks": True}, "num_blocks.*True"),
    "num_blocks float": ({"num_blocks": 2.5}, r"num_blocks.*2\.5"),
    "num_blocks of one group": ({"num_blocks": {FULL: -2}}, f"num_blocks.*{FULL}.*-2"),
    "num_blocks of nobody": ({"num_blocks": {"sliding": 2}}, f"num_blocks.*'sliding'.*{SLIDING}"),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_impossible_sizes_are_named(name: str) -> None:
    arguments, message = BAD_PLANS[name]
    with pytest.raises(ValueError, match=message):
        plan(config([SLIDING, FULL]), **arguments)


def test_config_that_owns_nothing() -> None:
    with pytest.raises(ValueError, match="every layer of this config reuses"):
        plan(config([SLIDING, FULL], num_kv_shared_layers=2))


def test_reuse_layer_without_an_owner() -> None:
    overrides = {1: {"head_dim": 32}, 2: {"head_dim": 64}, 3: {"head_dim": 32}}
    with pytest.raises(ValueError, match="layer 2 reuses keys of a geometry no layer owns"):
        plan(config([SLIDING, FULL, SLIDING, FULL], num_kv_shared_layers=2, per_layer_config=overrides))


# ---- sizes, by counting positions


def group(window: int | None, block_size: int) -> KVGroup:
    return KVGroup(0, SLIDING, (0,), 1, 16, window, block_size, 10, 1)


@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize("window", [1, 24, 128, 300])
def test_first_kept_is_exact(window: int, block_size: int) -> None:
    """The assistant sees ``window + 1`` keys and a verification may lose 16 tokens: those stay, nothing older does."""
    assert group(window, block_size).first_kept(0) == 0
    for length in range(1, 600):
        oldest = next(p for p in range(length) if p >= length - (window + 1) - 16)
        assert group(window, block_size).first_kept(length) == oldest // block_size


@given(block_size=BLOCK_SIZES, length=st.integers(0, 1000))
def test_full_attention_keeps_everything(block_size: int, length: int) -> None:
    assert group(None, block_size).first_kept(length) == 0


@given(
    window=st.one_of(st.none(), st.integers(1, 300)),
    block_size=BLOCK_SIZES,
    max_model_len=st.integers(1, 900),
    prefill_chunk=st.integers(1, 200),
    data=st.data(),
)
def test_default_pool_holds_a_row_at_its_longest(
    window: int | None, block_size: int, max_model_len: int, prefill_chunk: int, data: st.DataObject
) -> None:
    capacity = Capacity(1, max_model_len, prefill_chunk)
    length = data.draw(st.integers(0, max_model_len))
    write = data.draw(st.integers(1, max(prefill_chunk, MAX_QUERY_LEN)))
    end = min(length + write, max_model_len + MAX_QUERY_LEN - 1)
    first = group(window, block_size).first_kept(length)
    held = {p // block_size for p in range(first * block_size, end)}
    assert len(held) <= capacity.blocks_per_row(block_size, window)
    assert max(held) < capacity.width(block_size)


@given(sizes=st.lists(BLOCK_SIZES, min_size=1, max_size=3), padded_rows=st.integers(2, 70))
def test_null_rows_have_slots_of_their_own(sizes: list[int], padded_rows: int) -> None:
    """A padded row has one position in all groups, and its blocks cover every position it may write."""
    starts = []
    for size in sizes:
        slots = []
        for row in range(padded_rows):
            start, blocks = null_row(row, size, min(sizes))
            starts.append((row, start))
            for position in range(start, start + MAX_QUERY_LEN):
                slots.append(blocks[position // size] * size + position % size)
        assert len(set(slots)) == padded_rows * MAX_QUERY_LEN
        assert min(slots) >= 1
    assert len(set(starts)) == padded_rows
    assert min(start for _, start in starts) >= 1


# ---- the same answer in every process

PLAN_SCRIPT = """
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from gemma_npu_compile.kv_groups import Capacity, plan_groups
types = ["sliding_attention", "sliding_attention", "full_attention"] * 4
overrides = {i: {"head_dim": 64 if i % 3 == 2 else 16 * (1 + i % 2)} for i in range(12)}
text = Gemma4TextConfig(num_hidden_layers=12, layer_types=types, per_layer_config=overrides, num_kv_shared_layers=3)
answer = str(plan_groups(text, Capacity(2, 100, 64), None, 16))
print(answer)
"""


def test_plan_does_not_depend_on_the_hash_seed() -> None:
    root = str(Path(gemma_npu_compile.__file__).parent.parent)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PLAN_SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "4242")
    ]
    here: dict[str, Any] = {}
    exec(PLAN_SCRIPT, here)  # this process: a third seed, usually a random one
    answers = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert here["answer"].count("KVGroup(") == 3
    assert answers == [here["answer"]] * 2
