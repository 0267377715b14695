"""``paged_attention`` is what everything else trusts, so it is compared with a loop that shares no code with it.

The reference walks one row, one query and one head at a time, fetches the visible keys position by position through the
block table and computes in float64. What must not be read (blocks that no table names) is NaN, what must be masked
(tails, entries past a row's length) is huge but finite: a mask that lets one position through is seen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.ops import paged_attention
from gemma_npu_compile.ops.library import KERNELS

OP = torch.ops.gemma_npu.paged_attention
LAYER = "verify/target.layers.7"
HUGE = 1000.0


@dataclass
class Case:
    """One call: queries (tokens, heads, head_dim), caches, table, lengths; ``counts[b]`` queries of row ``b``."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    table: Tensor
    lens: Tensor
    counts: list[int]
    scale: float
    window: int | None

    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None]:
        return self.query, self.key_cache, self.value_cache, self.table, self.lens, self.scale, self.window

    def query_lens(self) -> Tensor:
        return torch.tensor(self.counts, dtype=torch.int32)


def build(
    lens: list[int],
    counts: list[int],
    block_size: int,
    window: int | None = None,
    heads: tuple[int, int] = (2, 2),
    head_dim: int = 8,
    scale: float = 1.0,
    spare: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A case of ``heads`` = (kv heads, query heads per kv head) with permuted, disjoint tables.

    Block ids are drawn so that at least two blocks belong to nobody; they are NaN. ``spare`` columns past the longest
    row, and the unused columns of shorter rows, name one shared block of huge values.
    """
    generator = torch.Generator().manual_seed(seed)
    kv_heads, per_kv = heads
    needed = [-(-length // block_size) for length in lens]
    width = max([1, *needed]) + spare
    total = sum(needed) + 3
    ids = torch.randperm(total, generator=generator).tolist()
    filler, poisoned = ids[0], ids[1:3]
    free = ids[3:]
    shape = (total, block_size, kv_heads, head_dim)
    caches = [torch.randn(shape, generator=generator) for _ in range(2)]
    table = torch.full((len(lens), width), filler, dtype=torch.int32)
    for cache in caches:
        cache[filler] = HUGE
        cache[poisoned] = torch.nan
    for row, (length, count) in enumerate(zip(lens, needed, strict=True)):
        blocks = [free.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        for cache in caches:
            if length % block_size:
                cache[blocks[-1], length % block_size :] = HUGE
    query = torch.randn(sum(counts), kv_heads * per_kv, head_dim, generator=generator)
    lengths = torch.tensor(lens, dtype=torch.int32)
    return Case(query.to(dtype), *(c.to(dtype) for c in caches), table, lengths, counts, scale, window)


def reference(case: Case) -> Tensor:
    """Attention of every query over the keys it sees, one position at a time, in float64."""
    query, key_cache, value_cache = (t.double().numpy() for t in (case.query, case.key_cache, case.value_cache))
    table, lens = case.table.tolist(), case.lens.tolist()
    block_size, kv_heads = key_cache.shape[1:3]
    per_kv = query.shape[1] // kv_heads
    result = np.zeros_like(query)
    token = 0
    for row, count in enumerate(case.counts):
        for i in range(count):
            last = lens[row] - count + i  # the position of this query; the last query of the row sits at len - 1
            oldest = 0 if case.window is None else max(0, last - case.window + 1)
            places = [(table[row][p // block_size], p % block_size) for p in range(oldest, last + 1)]
            for head in range(query.shape[1]):
                if not places:
                    continue
                keys = np.stack([key_cache[block, offset, head // per_kv] for block, offset in places])
                values = np.stack([value_cache[block, offset, head // per_kv] for block, offset in places])
                scores = keys @ query[token, head] * case.scale
                weights = np.exp(scores - scores.max())
                result[token, head] = weights @ values / weights.sum()
            token += 1
    return torch.from_numpy(result)


def check(result: Tensor, case: Case) -> None:
    tolerance = 1e-5 if case.query.dtype == torch.float32 else 0.015
    assert result.dtype == case.query.dtype
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), reference(case), rtol=tolerance, atol=tolerance)


@st.composite
def cases(draw: st.DrawFn, ragged: bool = False, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> Case:
    rows = draw(st.integers(1, 4))
    lens = draw(st.lists(st.integers(0, 45), min_size=rows, max_size=rows))
    if ragged:
        counts = draw(st.lists(st.integers(0, 17), min_size=rows, max_size=rows))
    else:
        counts = [draw(st.integers(1, 17))] * rows
    return build(
        lens,
        counts,
        block_size=draw(st.sampled_from([1, 3, 8, 16, 32])),
        window=draw(st.one_of(st.none(), st.just(1), st.integers(2, 9), st.integers(10, 40), st.just(1000))),
        heads=draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 2), (3, 2)])),
        head_dim=draw(st.sampled_from([2, 8, 16, 32])),
        scale=draw(st.sampled_from([1.0, 0.25, 0.0])),
        spare=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 2**16)),
        dtype=draw(st.sampled_from(dtypes)),
    )


@settings(max_examples=150)
@given(case=cases())
def test_equals_reference(case: Case) -> None:
    check(paged_attention(*case.args()), case)


@settings(max_examples=150)
@given(case=cases(ragged=True))
def test_ragged_equals_reference(case: Case) -> None:
    check(paged_attention(*case.args(), query_lens=case.query_lens()), case)


@given(case=cases(dtypes=(torch.bfloat16, torch.float16)))
def test_half_precision_equals_reference(case: Case) -> None:
    check(paged_attention(*case.args()), case)


@given(case=cases(dtypes=(torch.float32, torch.bfloat16)))
def test_bnsd_equals_tnd(case: Case) -> None:
    expected = paged_attention(*case.args())
    rows, q_len = len(case.counts), case.counts[0]
    tnd_shape = (rows, q_len, *case.query.shape[1:])
    query = case.query.view(tnd_shape).transpose(1, 2)  # not contiguous: a fused layout change gives it like this
    result = paged_attention(query, *case.args()[1:], layout="BNSD")
    assert result.shape == query.shape
    assert result.is_contiguous()
    assert torch.equal(result.transpose(1, 2).reshape(expected.shape), expected)


@pytest.mark.parametrize("window", [1, 5, 8, 9])
def test_window_moves_by_one_position(window: int) -> None:
    """Values one-hot by position and equal scores: the result shows exactly which positions were read."""
    case = build([21], [3], block_size=8, window=window, heads=(1, 1), head_dim=32, scale=0.0)
    for position in range(21):
        case.value_cache[case.table[0, position // 8], position % 8, 0] = torch.eye(32)[position]
    seen = paged_attention(*case.args())[:, 0] > 0
    for i in range(3):
        last = 18 + i
        assert seen[i].nonzero().flatten().tolist() == list(range(max(0, last - window + 1), last + 1))


@pytest.mark.parametrize("window", [None, 6])
def test_hidden_queries_give_zeros(window: int | None) -> None:
    case = build([0, 2], [4, 4], block_size=8, window=window)
    result = paged_attention(*case.args())
    assert torch.equal(result[:6], torch.zeros_like(result[:6]))
    assert (result[6:] != 0).any(-1).all()
    check(result, case)


def test_negative_length_gives_zeros() -> None:
    case = build([9, 9], [2, 2], block_size=8)
    case.lens[0] = -3
    result = paged_attention(*case.args())
    assert torch.equal(result[:2], torch.zeros_like(result[:2]))
    assert result[2:].isfinite().all()


def test_scores_of_any_size_stay_finite() -> None:
    case = build([9], [2], block_size=8, scale=1e6)
    assert paged_attention(*case.args()).isfinite().all()


def test_non_contiguous_query_and_int64_metadata() -> None:
    case = build([9, 20], [3, 3], block_size=8, window=7)
    expected = paged_attention(*case.args())
    strided = torch.stack([case.query, case.query], dim=-1)[..., 0]
    assert not strided.is_contiguous()
    args = (strided, *case.args()[1:3], case.table.long(), case.lens.long(), case.scale, case.window)
    assert torch.equal(paged_attention(*args), expected)


def variants() -> dict[str, tuple[Case, dict[str, Any]]]:
    """One call of each form: rectangular, ragged with an empty row, BNSD."""
    plain = build([9, 20], [3, 3], block_size=8, window=7)
    ragged = build([9, 20, 4], [5, 0, 2], block_size=8)
    bnsd = build([9, 20], [3, 3], block_size=8)
    bnsd.query = bnsd.query.view(2, 3, 4, 8).transpose(1, 2).contiguous()
    return {
        "TND": (plain, {"layer": LAYER}),
        "ragged": (ragged, {"query_lens": ragged.query_lens(), "layer": LAYER}),
        "BNSD": (bnsd, {"layout": "BNSD", "layer": LAYER}),
    }


@pytest.mark.parametrize("form", ["TND", "ragged", "BNSD"])
def test_out_writes_to_the_given_address(form: str) -> None:
    case, kwargs = variants()[form]
    expected = OP(*case.args(), **kwargs)
    out = torch.full_like(case.query, torch.nan)
    address = out.data_ptr()
    returned = KERNELS[OP.default].run(*case.args(), **kwargs, out=out)
    assert returned.data_ptr() == out.data_ptr() == address
    assert torch.equal(out, expected)


@pytest.mark.parametrize("form", ["TND", "ragged", "BNSD"])
def test_opcheck(form: str) -> None:
    case, kwargs = variants()[form]
    torch.library.opcheck(OP.default, case.args(), kwargs, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("rows", [0, 2])
def test_no_queries_give_an_empty_result(rows: int) -> None:
    case = build([5, 5], [1, 1], block_size=8)
    args = (case.query[:0], case.key_cache, case.value_cache, case.table[:rows], case.lens[:rows], 1.0)
    assert paged_attention(*args).shape == (0, 4, 8)
    counts = torch.zeros(rows, dtype=torch.int32)
    assert paged_attention(*args, query_lens=counts).shape == (0, 4, 8)
    bnsd = paged_attention(torch.zeros(rows, 4, 0, 8), *args[1:], layout="BNSD")
    assert bnsd.shape == (rows, 4, 0, 8)


BAD_ARGUMENTS: dict[str, tuple[dict[str, Callable[[Case], Any]], str]] = {
    "layout": ({"layout": lambda c: "BSH"}, "'BSH'"),
    "TND query of 4 dimensions": ({"query": lambda c: c.query[None]}, r"\(1, 6, 4, 8\)"),
    "BNSD query of 3 dimensions": ({"layout": lambda c: "BNSD"}, r"\(6, 4, 8\)"),
    "flat key cache": ({"key_cache": lambda c: c.key_cache.flatten(0, 1)}, "block_size"),
    "value cache shape": ({"value_cache": lambda c: c.value_cache[1:]}, "block_size"),
    "head_dim": ({"query": lambda c: c.query[..., :6]}, "6 wide"),
    "heads": ({"query": lambda c: c.query[:, :3]}, "3 query heads"),
    "query dtype": ({"query": lambda c: c.query.half()}, "float16"),
    "value dtype": ({"value_cache": lambda c: c.value_cache.bfloat16()}, "bfloat16"),
    "flat table": ({"block_table": lambda c: c.table[0]}, "block_table"),
    "lengths of 2 dimensions": ({"kv_lens": lambda c: c.lens[None]}, "kv_lens"),
}


@pytest.mark.parametrize("fake", [False, True], ids=["cpu", "fake"])
@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_name_the_layer(name: str, fake: bool) -> None:
    changes, message = BAD_ARGUMENTS[name]
    case = build([9, 20], [3, 3], block_size=8)
    names = ("query", "key_cache", "value_cache", "block_table", "kv_lens", "scale", "window")
    arguments = dict(zip(names, case.args(), strict=True)) | {key: change(case) for key, change in changes.items()}
    mode = FakeTensorMode()
    if fake:
        arguments = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    with pytest.raises(ValueError, match=message) as error:
        paged_attention(**arguments, layer=LAYER)
    assert LAYER in str(error.value)


@pytest.mark.parametrize("counts", [None, [3, 2], [7, -1], [6], [2, 2, 2]], ids=str)
def test_counts_that_do_not_fit_name_the_layer(counts: list[int] | None) -> None:
    case = build([9, 20], [3, 3], block_size=8)
    query = case.query if counts else case.query[:5]
    query_lens = torch.tensor(counts) if counts else None
    with pytest.raises(ValueError, match=r"layers\.7"):
        paged_attention(query, *case.args()[1:], layer=LAYER, query_lens=query_lens)


ROW_COUNTS: dict[str, dict[str, Any]] = {
    "more lengths than tables": {"lens": 3},
    "fewer lengths than tables": {"lens": 1},
    "fewer lengths than tables, ragged": {"lens": 1, "query_lens": [3, 3]},
    "more lengths than tables, ragged": {"lens": 3, "query_lens": [3, 3]},
    "queries but no rows": {"lens": 0, "rows": 0},
    "queries but no rows, ragged": {"lens": 0, "rows": 0, "query_lens": []},
    "BNSD rows": {"bnsd": True},
    "BNSD with query_lens": {"bnsd": True, "rows": 3, "lens": 3, "query_lens": [9, 9, 9]},
}


@pytest.mark.parametrize("name", ROW_COUNTS)
def test_row_counts_that_differ_name_the_layer(name: str) -> None:
    change = {"rows": 2, "lens": 2, "bnsd": False, "query_lens": None} | ROW_COUNTS[name]
    case = build([9, 20, 5], [2, 2, 2], block_size=8)
    query = case.query.view(3, 2, 4, 8).transpose(1, 2) if change["bnsd"] else case.query
    counts = None if change["query_lens"] is None else torch.tensor(change["query_lens"], dtype=torch.int32)
    table, lens = case.table[: change["rows"]], case.lens[: change["lens"]]
    layout = "BNSD" if change["bnsd"] else "TND"
    caches = case.key_cache, case.value_cache
    with pytest.raises(ValueError, match=r"layers\.7"):
        paged_attention(query, *caches, table, lens, 1.0, layout=layout, layer=LAYER, query_lens=counts)


def test_traces_once_for_any_number_of_rows(fresh_dynamo: None) -> None:
    compiled = torch.compile(lambda *args: paged_attention(*args, layer=LAYER), backend="eager", dynamic=True)
    # All sizes differ: equal sizes would be taken for one symbol.
    sizes: dict[str, Any] = {"block_size": 8, "window": 9, "heads": (3, 2), "head_dim": 16}
    first = build([9, 33], [7, 7], spare=2, **sizes)
    assert torch.equal(compiled(*first.args()), paged_attention(*first.args()))
    with torch.compiler.set_stance("fail_on_recompile"):
        second = build([4, 30, 17, 0, 8], [4] * 5, **sizes)
        check(compiled(*second.args()), second)


def test_symbolic_trace_keeps_shapes_symbolic() -> None:
    case = build([9, 20, 31], [5, 5, 5], block_size=8)
    graph = make_fx(lambda *args: paged_attention(*args) * 2, tracing_mode="symbolic")(*case.args()[:6])
    nodes = [node for node in graph.graph.nodes if node.target is OP.default]
    assert len(nodes) == 1
    result, query = nodes[0].meta["val"], nodes[0].args[0].meta["val"]
    assert isinstance(result.shape[0], torch.SymInt)
    assert result.shape == query.shape
