"""The cache case by case: what runs out, what is refused and in which words, what padded rows and owning layers get.

test_kv_cache_books.py checks the bookkeeping as a whole, over random histories.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

from gemma_npu_compile.kv_cache import OutOfBlocksError, PagedKVCache
from gemma_npu_compile.kv_groups import MAX_QUERY_LEN

SLIDING, FULL = "sliding_attention", "full_attention"


def config(layer_types: tuple[str, ...] = (SLIDING, FULL), **overrides: Any) -> Gemma4TextConfig:
    sizes: dict[str, Any] = {
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "global_head_dim": 4,
        "sliding_window": 24,
    }
    return Gemma4TextConfig(**(sizes | overrides))


CONFIG = config()


def build(text: Gemma4TextConfig = CONFIG, **overrides: Any) -> PagedKVCache:
    sizes: dict[str, Any] = {"max_rows": 2, "max_model_len": 100, "block_size": 16, "prefill_chunk": 32}
    return PagedKVCache(text, **(sizes | overrides))


def snapshot(cache: PagedKVCache) -> Any:
    """Everything a user can see of the books."""
    tables = [table.tolist() for table in cache.block_tables(cache.rows)]
    free = [cache.free_blocks(group.index) for group in cache.groups]
    return cache.rows, [cache.length(row) for row in cache.rows], tables, free


@pytest.mark.parametrize("back", [1, 16])
def test_rollback_of_a_verification_is_possible_at_every_length(back: int) -> None:
    """Every key a step at the shorter length needs is still there, see test_kv_cache_books.py."""
    cache = build()
    for length in range(back, 101):
        row = cache.allocate(length)
        cache.set_length(row, length)
        cache.set_length(row, length - back)
        cache.release(row)


def test_rollback_behind_the_window_is_refused() -> None:
    cache = build()
    row = cache.allocate(100)
    cache.set_length(row, 100)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=f"row {row} cannot have length 50: block . of KV group '{SLIDING}' was given"):
        cache.set_length(row, 50)
    assert snapshot(cache) == before


def test_negative_length_is_refused() -> None:
    cache = build()
    row = cache.allocate(5)
    with pytest.raises(ValueError, match="-5"):
        cache.set_length(row, -5)


def test_sliding_rows_keep_the_window_and_nothing_else() -> None:
    """Token by token: 24 + 1 keys of the window and 16 a verification may lose, rounded to whole blocks."""
    cache = build()
    row = cache.allocate()
    for length in range(1, 101):
        cache.extend(row, length)
        cache.set_length(row, length)
        sliding, full = (table[0].nonzero().flatten().tolist() for table in cache.block_tables([row]))
        assert sliding == sorted({p // 16 for p in range(max(0, length - 41), length)})
        assert full == sorted({p // 16 for p in range(length)})


def test_default_pools_hold_all_rows_at_full_length() -> None:
    """Prefill in chunks, then verifications up to the last position, all rows side by side."""
    cache = build(max_model_len=200, max_rows=3, prefill_chunk=48)
    rows = [cache.allocate() for _ in range(3)]
    lengths = [*range(48, 145, 48), *range(144, 200, 5), 200]
    for before, after in zip([0, *lengths], [*lengths, 200], strict=True):
        for row in rows:
            cache.extend(row, max(after, before + MAX_QUERY_LEN - 1))
        for row in rows:
            cache.set_length(row, after)


def test_out_of_blocks_names_group_and_sizes_and_takes_nothing() -> None:
    cache = build(num_blocks={SLIDING: 6, FULL: 4})
    row = cache.allocate(60)
    before = snapshot(cache)
    with pytest.raises(OutOfBlocksError, match=rf"'{FULL}' has 0 free blocks, row {row} needs 1 more.*num_blocks=4"):
        cache.extend(row, 65)
    assert snapshot(cache) == before
    assert cache.free_blocks(0) == 2
    with pytest.raises(OutOfBlocksError, match=FULL):
        cache.allocate(1)
    assert snapshot(cache) == before
    cache.release(row)
    assert cache.free_blocks(1) == 4
    assert cache.allocate(64) == row


def test_all_rows_in_use() -> None:
    cache = build(max_rows=1)
    cache.allocate()
    with pytest.raises(OutOfBlocksError, match="max_rows=1"):
        cache.allocate()


@pytest.mark.parametrize("call", ["length", "extend", "set_length", "release", "block_tables"])
def test_unknown_row_is_named(call: str) -> None:
    cache = build()
    cache.allocate(3)
    arguments = {"extend": (7, 1), "set_length": (7, 1), "block_tables": ([0, 7],)}.get(call, (7,))
    with pytest.raises(ValueError, match=r"row 7 is not allocated.*\[0\]"):
        getattr(cache, call)(*arguments)


@pytest.mark.parametrize("length", [-1, 117])
def test_impossible_allocation_takes_no_row(length: int) -> None:
    cache = build()
    with pytest.raises(ValueError, match=f"{length} tokens.*max_model_len is 100"):
        cache.allocate(length)
    assert cache.rows == ()
    assert cache.allocate(116) == 0


def test_tables_come_in_the_order_asked_for_and_are_copies() -> None:
    cache = build()
    rows = [cache.allocate(20), cache.allocate(40)]
    forward, backward = cache.block_tables(rows), cache.block_tables(rows[::-1])
    for table, flipped in zip(forward, backward, strict=True):
        assert torch.equal(table, flipped.flip(0))
        assert not torch.equal(table[0], table[1])
    before = snapshot(cache)
    forward[0].fill_(99)
    assert snapshot(cache) == before
    assert [tuple(t.shape) for t in cache.block_tables([])] == [(0, 8), (0, 8)]


# ---- null blocks


@given(
    sizes=st.tuples(*[st.sampled_from([16, 32, 48, 64, 128, 256])] * 2),
    max_rows=st.integers(1, 20),
    max_model_len=st.integers(1, 300),
)
def test_padded_rows_write_slots_of_their_own(sizes: tuple[int, int], max_rows: int, max_model_len: int) -> None:
    cache = build(
        block_size=dict(zip((SLIDING, FULL), sizes, strict=True)),
        max_rows=max_rows,
        max_model_len=max_model_len,
        num_blocks=1,
    )
    assert cache.padded_rows == max(2, max_rows)
    lens = cache.padding_lens.tolist()
    assert len(lens) == cache.padded_rows
    assert min(lens) >= 1
    assert cache.padding_lens.dtype == torch.int32
    for group, table, size in zip(cache.groups, cache.padding_tables, sizes, strict=True):
        assert table.dtype == torch.int32
        assert table.shape == (cache.padded_rows, -(-(max_model_len + MAX_QUERY_LEN) // size))
        assert 0 <= table.min() <= table.max() < group.null_blocks
        slots = [
            int(table[row, p // size]) * size + p % size
            for row in range(cache.padded_rows)
            for p in range(lens[row], lens[row] + MAX_QUERY_LEN)
        ]
        assert len(set(slots)) == cache.padded_rows * MAX_QUERY_LEN
        assert cache.free_blocks(group.index) == 1


# ---- pools, owners and transformers' Cache


def paged(cache: PagedKVCache, slots: list[list[int]]) -> dict[str, Any]:
    """The keyword arguments transformers hands to ``update``."""
    return {"kwargs": {"paged": SimpleNamespace(slots=tuple(torch.tensor(s, dtype=torch.int32) for s in slots))}}


@pytest.mark.parametrize(("layer", "width"), [(0, 2), (1, 4)])
def test_update_writes_the_slots_of_the_layers_group(layer: int, width: int) -> None:
    cache = build(config(num_key_value_heads=3))
    address = cache.key_pools[layer].data_ptr()
    keys, values = torch.randn(2, 3, 4, width), torch.randn(2, 3, 4, width)
    slots = [[64, 65, 66, 67, 90, 91, 80, 81], [70, 71, 72, 73, 93, 92, 85, 99]]
    pools = cache.update(keys, values, layer, **paged(cache, slots))
    assert pools[0] is cache.key_pools[layer]
    assert pools[1] is cache.value_pools[layer]
    assert pools[0].data_ptr() == address
    for pool, states in zip(pools, (keys, values), strict=True):
        flat = pool.view(-1, 3, width)
        assert torch.equal(flat[slots[layer]].view(2, 4, 3, width), states.transpose(1, 2))
        assert flat.count_nonzero() == states.numel()
    assert not cache.key_pools[1 - layer].any()


def test_update_without_the_paged_context() -> None:
    cache = build()
    states = torch.zeros(1, 1, 1, 2)
    for kwargs in ({}, {"kwargs": {}}):
        with pytest.raises(ValueError, match="block tables"):
            cache.update(states, states, 0, **kwargs)


def test_e2b_like_tail_owns_nothing() -> None:
    layer_types = (SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING, FULL)
    cache = build(config(layer_types, num_kv_shared_layers=2))
    assert [g.layers for g in cache.groups] == [(0, 1, 3), (2, 4)]
    assert cache.layer_groups == (0, 0, 1, 0, 1, 0, 1)
    assert len(cache) == 7
    assert set(cache.key_pools) == set(cache.value_pools) == {0, 1, 2, 3, 4}
    assert cache.owners == {SLIDING: 3, FULL: 4}
    before = [pool.clone() for pool in cache.key_pools.values()]
    for layer, width in ((5, 2), (6, 4)):
        states = torch.ones(1, 1, 1, width)
        with pytest.raises(ValueError, match=f"layer {layer} reuses"):
            cache.update(states, states, layer, **paged(cache, [[20], [20]]))
    assert all(torch.equal(a, b) for a, b in zip(before, cache.key_pools.values(), strict=True))


def test_31b_pools() -> None:
    text = config(
        ((SLIDING,) * 5 + (FULL,)) * 10,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
        sliding_window=1024,
    )
    cache = build(text, max_rows=1, num_blocks=1, block_size=128, dtype=torch.bfloat16, device="meta")
    assert len(cache.key_pools) == 60
    assert {tuple(cache.key_pools[i].shape) for i in cache.groups[0].layers} == {(2, 128, 16, 256)}
    assert {tuple(cache.value_pools[i].shape) for i in cache.groups[1].layers} == {(2, 128, 4, 512)}
    assert cache.owners == {SLIDING: 58, FULL: 59}
    assert cache.nbytes() == 2 * 2 * 2 * 128 * (50 * 16 * 256 + 10 * 4 * 512)


def test_pools_start_finite_and_keep_their_addresses() -> None:
    cache = build(dtype=torch.float16)
    pools = [*cache.key_pools.values(), *cache.value_pools.values()]
    assert all(pool.dtype == torch.float16 and not pool.any() for pool in pools)
    addresses = [pool.data_ptr() for pool in pools]
    assert len(set(addresses)) == 4
    row = cache.allocate(50)
    cache.set_length(row, 50)
    cache.reset()
    assert cache.rows == ()
    assert cache.get_seq_length() == 0
    assert [cache.free_blocks(g.index) for g in cache.groups] == [g.num_blocks - g.null_blocks for g in cache.groups]
    assert [pool.data_ptr() for pool in [*cache.key_pools.values(), *cache.value_pools.values()]] == addresses
    assert cache.get_max_length() == 100


@pytest.mark.parametrize("name", ["max_rows", "max_model_len", "prefill_chunk"])
@pytest.mark.parametrize("value", [0, -3, True, 2.0, "8", None])
def test_impossible_capacity_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        build(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 24}, "block_size.*24"),
        ({"block_size": {SLIDING: 16, FULL: 8}}, f"block_size.*{FULL}.*8"),
        ({"num_blocks": 0}, "num_blocks.*0"),
        ({"num_blocks": {"other": 4}}, "num_blocks.*'other'"),
    ],
    ids=["block_size", "block_size of a group", "num_blocks", "unknown group"],
)
def test_impossible_sizes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_sizes_are_static_also_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own marking does nothing then; a second cache would make the sizes of pools symbolic."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    cache = build()
    marked = (*cache.key_pools.values(), *cache.value_pools.values(), cache.padding_lens, *cache.padding_tables)
    for tensor in marked:
        assert tensor._dynamo_static_indices == set(range(tensor.dim()))
        assert tensor._dynamo_static_input_type == "unguarded"


def test_tables_are_made_anew_only_when_blocks_move() -> None:
    cache = build()
    rows = [cache.allocate(), cache.allocate()]
    for row in rows:
        cache.extend(row, 5)
    first = cache.block_tables(rows)
    kept = [each.clone() for each in first]
    assert all(a is b for a, b in zip(first, cache.block_tables(rows), strict=True))
    cache.extend(rows[0], 6)  # still inside the block it has
    assert cache.block_tables(rows)[0] is first[0]
    cache.extend(rows[0], cache.groups[0].block_size + 1)
    second = cache.block_tables(rows)
    assert second[0][0, 1] != 0
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True)), "what was handed out stays as it was"
    assert torch.equal(cache.block_tables(rows[::-1])[0], second[0].flip(0))
    cache.release(rows[1])
    assert cache.block_tables(rows[:1])[0].shape[0] == 1
