"""The emulated ``npu_fused_infer_attention_score`` against a loop that shares no code with it.

The reference walks one query and one head at a time in float64 over the keys a predicate says are visible. Whatever
must not be read is poisoned: keys at or past a row's length and blocks of nobody are NaN, table entries past the last
needed block name no block at all.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gemma_npu_compile.capabilities import platform
from gemma_npu_compile.ops import attention, npu, paged_attention
from gemma_npu_compile.ops.library import KERNELS

V1 = torch.ops.npu.npu_fused_infer_attention_score
V2 = torch.ops.npu.npu_fused_infer_attention_score_v2
RENAMED = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse",
}
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
NOWHERE = 1_000_000


@dataclass
class Case:
    """Queries, keys and values row by row, and how they are handed over.

    Attributes:
        queries: per row ``(count, heads, head_dim)``; ``q_len`` is the padded count of a rectangular layout.
        keys, values: per row ``(length, kv_heads, head_dim)``.
        form: ``"BnBsH"``, ``"BnNBsD"`` or ``"dense"``.
    """

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    layout: str
    form: str
    block_size: int = 16
    scale: float = 0.4
    q_len: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    hidden: Callable[[int, int, int], bool] = lambda row, query, key: False

    @property
    def counts(self) -> list[int]:
        return [len(q) for q in self.queries]

    @property
    def lengths(self) -> list[int]:
        return [len(k) for k in self.keys]

    def call(self) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """Arguments of v1."""
        _, heads, head_dim = self.queries[0].shape
        kv_heads, layout = self.keys[0].shape[1], self.layout.split("_")[0]
        options: dict[str, Any] = {
            "num_heads": heads,
            "num_key_value_heads": kv_heads,
            "scale": self.scale,
            "input_layout": self.layout,
            **self.options,
        }
        if layout == "TND":
            query = torch.cat(self.queries)
            options["actual_seq_lengths"] = np.cumsum(self.counts).tolist()
        else:
            q_len = self.q_len or max(self.counts)
            query = torch.full((len(self.queries), q_len, heads, head_dim), torch.nan, dtype=self.queries[0].dtype)
            for row, q in enumerate(self.queries):
                query[row, : len(q)] = q
            query = rectangular(query, layout)
            if q_len > 1 and set(self.counts) != {q_len}:
                options["actual_seq_lengths"] = self.counts
        if self.form == "dense":
            return (query, *(self.dense(x, layout, options) for x in (self.keys, self.values))), options
        needed = [-(-length // self.block_size) for length in self.lengths]
        ids = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(1)).tolist()
        table = torch.full((len(needed), max(needed) + 1), NOWHERE, dtype=torch.int32)
        for row, count in enumerate(needed):
            table[row, :count] = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int32)
        caches = [self.cache(x, table, sum(needed) + 2, needed) for x in (self.keys, self.values)]
        options |= {
            "block_table": table,
            "block_size": self.block_size,
            "actual_seq_lengths_kv": self.lengths,
        }
        return (query, *caches), options

    def cache(self, rows: list[Tensor], table: Tensor, blocks: int, needed: list[int]) -> Tensor:
        _, kv_heads, head_dim = rows[0].shape
        cache = torch.full((blocks, self.block_size, kv_heads, head_dim), torch.nan, dtype=rows[0].dtype)
        for row, x in enumerate(rows):
            for block in range(needed[row]):
                part = x[block * self.block_size : (block + 1) * self.block_size]
                cache[table[row, block], : len(part)] = part
        return cache.transpose(1, 2).contiguous() if self.form == "BnNBsD" else cache.flatten(2)

    def dense(self, rows: list[Tensor], layout: str, options: dict[str, Any]) -> Tensor:
        if layout == "TND":
            options["actual_seq_lengths_kv"] = np.cumsum(self.lengths).tolist()
            return torch.cat(rows)
        options["actual_seq_lengths_kv"] = self.lengths
        padded = torch.full((len(rows), max(self.lengths), *rows[0].shape[1:]), torch.nan, dtype=rows[0].dtype)
        for row, x in enumerate(rows):
            padded[row, : len(x)] = x
        return rectangular(padded, layout)

    def reference(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Result ``(count, heads, head_dim)`` and log-sum-exp ``(count, heads)`` of every row."""
        results, sums = [], []
        for row, (q, k, v) in enumerate(zip(self.queries, self.keys, self.values, strict=True)):
            q, k, v = (x.double().numpy() for x in (q, k, v))
            result, total = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
            per_kv = q.shape[1] // k.shape[1] if len(k) else 1
            for i in range(len(q)):
                seen = [j for j in range(len(k)) if not self.hidden(row, i, j)]
                for head in range(q.shape[1] if seen else 0):
                    scores = k[seen, head // per_kv] @ q[i, head] * self.scale
                    weights = np.exp(scores - scores.max())
                    result[i, head] = weights @ v[seen, head // per_kv] / weights.sum()
                    total[i, head] = np.log(weights.sum()) + scores.max()
            results.append(result)
            sums.append(total)
        return results, sums

    def split(self, out: Tensor, lse: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The operator's results in the form of the reference, and what it gave for padding queries."""
        if self.layout == "TND":
            return list(out.split(self.counts)), list(lse[..., 0].split(self.counts)), []
        after = {"BNSD_BSND": "BSND"}.get(self.layout, self.layout)
        heads = self.queries[0].shape[1]
        out = out.transpose(1, 2) if after == "BNSD" else out.unflatten(2, (heads, -1)) if after == "BSH" else out
        rows, padding = zip(*((o[:n], o[n:]) for o, n in zip(out, self.counts, strict=True)), strict=True)
        return list(rows), [s[:, :n, 0].t() for s, n in zip(lse, self.counts, strict=True)], list(padding)


def rectangular(x: Tensor, layout: str) -> Tensor:
    """``(rows, length, heads, head_dim)`` in a layout, contiguous."""
    return x.transpose(1, 2).contiguous() if layout == "BNSD" else x.flatten(2) if layout == "BSH" else x


def build(
    counts: list[int],
    lengths: list[int],
    layout: str,
    form: str,
    heads: tuple[int, int] = (2, 2),
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Case:
    """Random rows; ``heads`` is (kv heads, query heads per kv head)."""
    generator = torch.Generator().manual_seed(len(counts) * 100 + sum(lengths))

    def rows(sizes: list[int], count: int) -> list[Tensor]:
        return [torch.randn(n, count, head_dim, generator=generator).to(dtype) for n in sizes]

    queries = rows(counts, heads[0] * heads[1])
    return Case(queries, rows(lengths, heads[0]), rows(lengths, heads[0]), layout, form, **more)


def check(case: Case, op: Any = V1) -> None:
    args, options = case.call()
    if op is V2:
        options = {RENAMED.get(name, name): value for name, value in options.items()}
    flag = "return_softmax_lse" if op is V2 else "softmax_lse_flag"
    out, lse = op(*args, **options, **{flag: True})
    plain, nothing = op(*args, **options)
    assert torch.equal(plain, out)
    assert (nothing.shape, nothing.dtype) == ((0,), torch.float32)
    assert out.dtype == case.queries[0].dtype
    assert out.is_contiguous()
    tolerance = 2e-5 if out.dtype == torch.float32 else 0.01
    rows, sums, padding = case.split(out, lse)
    for mine, total, result, log_sum in zip(rows, sums, *case.reference(), strict=True):
        np.testing.assert_allclose(mine.double().numpy(), result, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(total.double().numpy(), log_sum, rtol=1e-4, atol=1e-4)
    assert all((each == 0).all() for each in padding)


FORMS = [
    *(("TND", form) for form in ("BnBsH", "BnNBsD", "dense")),
    *(("BNSD", form) for form in ("BnBsH", "BnNBsD", "dense")),
    *((layout, form) for layout in ("BSND", "BSH") for form in ("BnBsH", "dense")),
    ("BNSD_BSND", "BnBsH"),
]


def with_mode(case: Case, mode: int, before: int, after: int, integer: bool) -> Case:
    """Give the case a sparse mode and say independently what it hides."""
    counts, lengths = case.counts, case.lengths
    triangle = TRIANGLE.to(torch.int8) if integer else TRIANGLE
    single = max(counts) == 1

    def age(row: int, query: int, key: int) -> int:
        """How much older a key is than the query, the newest of both being of one age."""
        return (lengths[row] - key) - (counts[row] - query)

    rules: dict[int, Callable[[int, int, int], bool]] = {
        2: lambda row, query, key: key > query,
        3: lambda row, query, key: age(row, query, key) < 0,
        4: lambda row, query, key: age(row, query, key) > before or age(row, query, key) < -after,
    }
    if mode in rules:
        case.options |= {"atten_mask": triangle, "sparse_mode": mode, "pre_tokens": before, "next_tokens": after}
        if not single:
            case.hidden = rules[mode]
    return case


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout, form = draw(st.sampled_from(FORMS))
    rows = draw(st.integers(1, 4))
    longest = draw(st.sampled_from([1, 2, 5]))
    longest = 2 if layout == "BNSD_BSND" and longest == 1 else longest
    counts = [longest, *draw(st.lists(st.integers(0, longest), min_size=rows - 1, max_size=rows - 1))]
    if longest == 1 and layout != "TND":
        counts = [1] * rows
    # Few different lengths: neighbouring rows of one length are a batch.
    lengths = draw(st.lists(st.sampled_from([0, 1, 7, 16, 33, 40]), min_size=rows, max_size=rows))
    case = build(
        counts,
        lengths,
        layout,
        form,
        heads=draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 2), (3, 2)])),
        head_dim=draw(st.sampled_from([16, 32])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        scale=draw(st.sampled_from([1.0, 0.25, 0.0])),
        block_size=draw(st.sampled_from([16, 48])),
        q_len=longest + draw(st.integers(0, 1)) * (longest > 1),
    )
    mode = draw(st.sampled_from([0, 2, 3, 4]))
    return with_mode(case, mode, draw(st.integers(-2, 20)), draw(st.integers(-2, 8)), draw(st.booleans()))


@settings(max_examples=200)
@given(case=cases(), op=st.sampled_from([V1, V2]))
def test_equals_reference(case: Case, op: Any) -> None:
    with npu.emulate(platform("cpu")):  # numbers, not limits
        check(case, op)


MASKS = {
    # shape of an explicit mask for rows, queries, keys
    "B,1,S,K": lambda rows, q_len, keys: (rows, 1, q_len, keys),
    "1,1,S,K": lambda rows, q_len, keys: (1, 1, q_len, keys),
    "1,S,K": lambda rows, q_len, keys: (1, q_len, keys),
    "S,K or B,K": lambda rows, q_len, keys: (q_len if q_len > 1 else rows, keys),
}


@given(data=st.data())
def test_explicit_masks_equal_reference(data: st.DataObject) -> None:
    layout, form = data.draw(st.sampled_from([pair for pair in FORMS if pair[0] in ("BNSD", "BSND", "BSH")]))
    q_len, rows = data.draw(st.sampled_from([1, 3])), data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.sampled_from([1, 16, 21]), min_size=rows, max_size=rows))
    counts = [q_len] * (rows - 1) + [data.draw(st.integers(1, q_len))]
    case = build(counts, lengths, layout, form, q_len=q_len, block_size=16)
    width = max(lengths) if form == "dense" else (-(-max(lengths) // 16) + 1) * 16
    width += data.draw(st.integers(0, 3))
    shape = MASKS[data.draw(st.sampled_from(sorted(MASKS)))](rows, q_len, width)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(width)) < data.draw(st.sampled_from([0.4, 1.0]))
    mode = data.draw(st.sampled_from([0, 1]))
    before, after = data.draw(st.sampled_from([(2147483647, 2147483647), (4, 9), (2147483647, 0)]))
    dtype = data.draw(st.sampled_from([torch.bool, torch.int8, torch.uint8]))
    case.options = {"atten_mask": mask.to(dtype), "sparse_mode": mode, "pre_tokens": before, "next_tokens": after}
    flat = mask.reshape(-1, q_len, width)

    def hidden(row: int, query: int, key: int) -> bool:
        banded = mode == 0 and q_len > 1 and not -before <= key - query <= after  # counted from the first of both
        return bool(flat[row if len(flat) > 1 else 0, query, key]) or banded

    case.hidden = hidden
    with npu.emulate(platform("cpu")):
        check(case)


@pytest.mark.parametrize("window", [1, 5, 30, 400])
@pytest.mark.parametrize("layout", ["BNSD", "TND"])
def test_a_window_of_transformers_is_a_band_of_one_less(layout: str, window: int) -> None:
    lengths, q_len = [200, 40, 129], 4
    case = build([q_len] * 3, lengths, layout, "BnBsH", head_dim=64, block_size=128)
    case.options = {"atten_mask": TRIANGLE, "sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0}
    args, options = case.call()
    out, _ = V1(*args, **options)
    caches = [torch.nan_to_num(x).view(-1, 128, 2, 64) for x in args[1:]]
    table = options["block_table"]
    table = torch.where(table == NOWHERE, table[0, 0], table)
    lens = torch.tensor(lengths, dtype=torch.int32)
    expected = paged_attention(args[0], *caches, table, lens, case.scale, window, layout)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_one_query_ignores_mode_window_and_its_own_length_but_not_an_explicit_mask() -> None:
    """A sliding layer that decodes one token and trusts the band reads everything: so does the device."""
    case = build([1, 1], [40, 17], "BNSD", "BnBsH")
    args, options = case.call()
    everything, _ = V1(*args, **options)
    band = {"atten_mask": TRIANGLE, "sparse_mode": 4, "pre_tokens": 3, "next_tokens": 0}
    assert torch.equal(V1(*args, **options, **band)[0], everything)
    assert torch.equal(V1(*args, **options, pre_tokens=3, next_tokens=0)[0], everything)
    assert torch.equal(V1(*args, **options, actual_seq_lengths=[0, 0])[0], everything)
    mask = torch.ones(2, 1, 1, 64, dtype=torch.bool)
    mask[:, ..., 5:9] = False
    seen, _ = V1(*args, **options, **{**band, "atten_mask": mask})
    case.hidden = lambda row, query, key: not 5 <= key < 9
    for mine, expected in zip(seen, case.reference()[0], strict=True):
        np.testing.assert_allclose(mine[:, 0].double().numpy(), expected[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(seen, everything)


@pytest.mark.parametrize("keys", [1, 2, 100])
def test_equal_rows_are_fetched_in_parts_that_fit_the_cache(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = build([2] * 5, [33, 33, 33, 7, 7], "BNSD", "BnNBsD")
    fetched, gather = [], attention._gather
    monkeypatch.setattr(attention, "_CHUNK", keys * 33 * 2 * 16 * 4)  # bytes of so many rows of 33 keys
    monkeypatch.setattr(attention, "_gather", lambda x, blocks: fetched.append(len(blocks)) or gather(x, blocks))
    with npu.emulate(platform("cpu")):
        check(case)
    # Blocks of 16 of two heads; keys and values; twice, because the check calls twice.
    rows = {1: [1, 1, 1, 2], 2: [2, 1, 2], 100: [3, 2]}[keys]
    lengths = {1: [3, 3, 3, 1], 2: [3, 3, 1], 100: [3, 1]}[keys]
    assert fetched == [n * blocks * 2 for n, blocks in zip(rows, lengths, strict=True)] * 4


def test_results_round_once() -> None:
    """Half precision in, float32 inside: a result is the exact one, rounded."""
    case = build([3, 3], [40, 40], "BNSD", "BnBsH", dtype=torch.bfloat16, scale=1.0)
    args, options = case.call()
    with npu.emulate(platform("cpu")):
        out, _ = V1(*args, **options)
    exact = torch.tensor(np.stack(case.reference()[0])).transpose(1, 2)
    assert torch.equal(out, exact.to(torch.bfloat16))


@pytest.mark.parametrize("layout", ["TND", "BNSD", "BSH"])
def test_out_is_written_where_it_lies(layout: str) -> None:
    case = build([2, 2], [40, 7], layout, "BnBsH")
    args, options = case.call()
    options["softmax_lse_flag"] = True
    kernel = KERNELS[V1.default]
    with npu.emulate(platform("cpu")):
        expected = V1(*args, **options)
        kernel.check(*args, **options)
    out = tuple(torch.full_like(each, torch.nan) for each in expected)
    addresses = [each.data_ptr() for each in out]
    returned = kernel.run(*args, **options, out=out)
    assert [each.data_ptr() for each in returned] == addresses
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))


@pytest.mark.parametrize("layout", ["TND", "BNSD"])
def test_no_keys_give_zeros_and_no_queries_nothing(layout: str) -> None:
    case = build([2, 2], [0, 0], layout, "dense", head_dim=64)
    args, options = case.call()
    out, lse = V1(*args, **options, softmax_lse_flag=True)
    assert torch.equal(out, torch.zeros_like(args[0]))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    options |= {"actual_seq_lengths": [0, 0]} if layout == "TND" else {}
    empty = args[0][:0] if layout == "TND" else args[0][:, :, :0]
    assert V1(empty, *args[1:], **options)[0].shape == empty.shape


def test_grad_mode_is_no_obstacle() -> None:
    """Outside no_grad, with a query that depends on parameters."""
    case = build([2, 2], [40, 7], "BNSD", "BnBsH", block_size=128)
    args, options = case.call()
    expected, _ = V1(*args, **options)
    assert torch.equal(V1(args[0].requires_grad_(), *args[1:], **options)[0].detach(), expected)


def test_lengths_are_read_at_each_run() -> None:
    """A captured task keeps its list; a host update changes the contents."""
    case = build([1, 1], [40, 20], "BNSD", "BnBsH")
    args, options = case.call()
    lengths = options["actual_seq_lengths_kv"] = [40, 20]
    kernel, out = KERNELS[V1.default], tuple(torch.empty_like(x) for x in V1(*args, **options))
    kernel.run(*args, **options, out=out)
    first = out[0].clone()
    lengths[:] = [40, 11]
    kernel.run(*args, **options, out=out)
    assert torch.equal(out[0][0], first[0])
    case.keys[1], case.values[1] = case.keys[1][:11], case.values[1][:11]
    expected = case.reference()[0][1][0]
    np.testing.assert_allclose(out[0][1, :, 0].double().numpy(), expected, rtol=1e-5, atol=1e-5)
