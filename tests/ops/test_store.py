"""``store_kv`` and ``slot_mapping``: a key in the wrong slot is another row's corrupted text.

So every slot is accounted for: the named ones hold the new keys, all others keep their bits, and nothing moves.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gemma_npu_compile.ops import slot_mapping, store_kv

OP = torch.ops.gemma_npu.store_kv.default


def caches(blocks: int = 5, block_size: int = 4, kv_heads: int = 2, head_dim: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (blocks, block_size, kv_heads, head_dim)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def tokens(count: int, kv_heads: int = 2, head_dim: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = (count, kv_heads, head_dim)
    return torch.randn(shape, generator=generator) + 10, torch.randn(shape, generator=generator) - 10


@given(
    slots=st.lists(st.integers(0, 19), unique=True, max_size=20),
    index_type=st.sampled_from([torch.int32, torch.int64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_writes_the_named_slots_and_nothing_else(slots: list[int], index_type: torch.dtype, dtype: torch.dtype) -> None:
    pools = tuple(cache.to(dtype) for cache in caches())
    before = [pool.clone() for pool in pools]
    addresses = [pool.data_ptr() for pool in pools]
    new = tuple(t.to(dtype) for t in tokens(len(slots)))
    assert store_kv(*new, *pools, torch.tensor(slots, dtype=index_type)) is None
    assert [pool.data_ptr() for pool in pools] == addresses
    for pool, old, states in zip(pools, before, new, strict=True):
        for slot in range(20):
            written = states[slots.index(slot)] if slot in slots else old[slot // 4, slot % 4]
            assert torch.equal(pool[slot // 4, slot % 4], written)


def test_keys_that_are_not_contiguous() -> None:
    """Models hand over transposed views."""
    key, value = tokens(3)
    transposed = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (key, value)]
    assert not transposed[0].is_contiguous()
    expected, pools = caches(), caches()
    slots = torch.tensor([19, 0, 7])
    store_kv(key, value, *expected, slots)
    store_kv(*transposed, *pools, slots)
    assert all(torch.equal(a, b) for a, b in zip(pools, expected, strict=True))


@pytest.mark.parametrize("slot", [-1, 20])
def test_slot_out_of_range(slot: int) -> None:
    pools = caches()
    before = [pool.clone() for pool in pools]
    with pytest.raises(IndexError):
        store_kv(*tokens(2), *pools, torch.tensor([slot, 3]))
    assert all(torch.equal(a, b) for a, b in zip(pools, before, strict=True))


def test_cache_that_is_not_contiguous_is_refused() -> None:
    """A silent copy would lose the write."""
    key_cache, value_cache = caches()
    strided = key_cache.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(RuntimeError):
        store_kv(*tokens(2), strided, value_cache, torch.tensor([0, 1]))


SLOTS = torch.tensor([4, 9])
BAD_ARGUMENTS = {
    "flat cache": (lambda k, v, kc, vc: (k, v, kc.flatten(0, 1), vc.flatten(0, 1), SLOTS), r"\(20, 2, 8\)"),
    "caches differ": (lambda k, v, kc, vc: (k, v, kc, vc[1:], SLOTS), r"\(4, 4, 2, 8\)"),
    "key heads": (lambda k, v, kc, vc: (k[:, :1], v[:, :1], kc, vc, SLOTS), r"\(2, 1, 8\)"),
    "head_dim": (lambda k, v, kc, vc: (k[..., :4], v[..., :4], kc, vc, SLOTS), r"\(2, 2, 4\)"),
    "value shape": (lambda k, v, kc, vc: (k, v[:1], kc, vc, SLOTS), r"\(1, 2, 8\)"),
    "fewer slots": (lambda k, v, kc, vc: (k, v, kc, vc, SLOTS[:1]), r"\(1,\) for 2 tokens"),
    "slots of 2 dimensions": (lambda k, v, kc, vc: (k, v, kc, vc, SLOTS[:, None]), r"\(2, 1\) for 2 tokens"),
    "key dtype": (lambda k, v, kc, vc: (k.half(), v, kc, vc, SLOTS), "float16"),
    "value dtype": (lambda k, v, kc, vc: (k, v.half(), kc, vc, SLOTS), "float16"),
    "cache dtype": (lambda k, v, kc, vc: (k, v, kc, vc.bfloat16(), SLOTS), "bfloat16"),
}


@pytest.mark.parametrize("fake", [False, True], ids=["cpu", "fake"])
@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments(name: str, fake: bool) -> None:
    change, message = BAD_ARGUMENTS[name]
    pools = caches()
    before = [pool.clone() for pool in pools]
    arguments = change(*tokens(2), *pools)
    if fake:
        mode = FakeTensorMode()
        arguments = tuple(mode.from_tensor(t) for t in arguments)
    with pytest.raises(ValueError, match=f"store_kv.*{message}"):
        store_kv(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(pools, before, strict=True))


@pytest.mark.parametrize("count", [0, 3])
def test_opcheck(count: int) -> None:
    slots = torch.tensor([19, 0, 7], dtype=torch.int32)[:count]
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OP, (*tokens(count), *caches(), slots), test_utils=utils)


def test_compiled_write_stays_in_place(fresh_dynamo: None) -> None:
    compiled = torch.compile(store_kv, backend="aot_eager", fullgraph=True, dynamic=True)
    expected, pools = caches(), caches()
    address = pools[0].data_ptr()
    slots = torch.tensor([19, 0, 7])
    store_kv(*tokens(3), *expected, slots)
    compiled(*tokens(3), *pools, slots)
    assert pools[0].data_ptr() == address
    assert all(torch.equal(a, b) for a, b in zip(pools, expected, strict=True))


@given(data=st.data())
def test_slot_mapping_equals_a_loop(data: st.DataObject) -> None:
    rows, count, width = (data.draw(st.integers(low, 5)) for low in (0, 0, 1))
    block_size = data.draw(st.sampled_from([1, 3, 16, 128]))
    table = [data.draw(st.lists(st.integers(0, 4000), min_size=width, max_size=width)) for _ in range(rows)]
    position = st.integers(0, width * block_size - 1)
    positions = [data.draw(st.lists(position, min_size=count, max_size=count)) for _ in range(rows)]
    expected = []
    for row in range(rows):
        for p in positions[row]:
            block, offset = divmod(p, block_size)
            expected.append(table[row][block] * block_size + offset)
    index_type = data.draw(st.sampled_from([torch.int32, torch.int64]))
    slots = slot_mapping(
        torch.tensor(table, dtype=torch.int32).view(rows, width),
        torch.tensor(positions, dtype=index_type).view(rows, count),
        block_size,
    )
    assert slots.dtype == torch.int32
    assert slots.shape == (rows * count,)
    assert slots.tolist() == expected
