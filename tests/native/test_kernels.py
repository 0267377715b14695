"""The C++ kernels against the dialect's, and what they promise beyond: no result depends on its neighbours."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gemma_npu_compile.ops.native  # noqa: F401
from gemma_npu_compile.native import program
from gemma_npu_compile.native.aten import COMMANDS
from gemma_npu_compile.native.program import Program
from gemma_npu_compile.ops.library import KERNELS

native, dialect, aten = torch.ops.gemma_npu_cpu, torch.ops.gemma_npu, torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: {"rtol": 2e-5, "atol": 2e-6}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-3}}
floats, seeds = st.sampled_from(DTYPES), st.integers(0, 999)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def command_of(name: str, *args, **kwargs) -> program.Command:
    """The native command of an operator; a test that gets none tests nothing."""
    found = KERNELS[getattr(native, name).default].command(*args, **kwargs)
    assert found is not None
    return found


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, **TOLERANCE[found.dtype])


@given(seeds, floats, st.integers(1, 9), st.integers(1, 37), st.integers(1, 9), st.booleans())
def test_linear(seed, dtype, rows, width, eights, strided):
    x = random(seed, rows, 8 * eights + 8, dtype=dtype)[:, : 8 * eights]
    x = x if strided else x.contiguous()
    weight = random(seed + 1, width, 8 * eights, dtype=dtype)
    command_of("linear", x, weight, out=x.new_empty(rows, width))
    found = native.linear(x, weight)
    agree(found, (x.double() @ weight.double().t()).to(dtype))
    assert all(torch.equal(native.linear(x[i : i + 1], weight)[0], found[i]) for i in range(rows))


@given(seeds, floats, st.sampled_from([None, "same", "wide"]), st.integers(1, 5), st.integers(1, 40), st.booleans())
def test_norms(seed, dtype, weighted, rows, width, strided):
    x, residual = (random(seed + i, 2, rows, width + 3, dtype=dtype) for i in (0, 1))
    x = x[..., :width] if strided else x[..., :width].contiguous()
    residual = residual[..., :width].contiguous()
    weight = None if weighted is None else random(7, width, dtype=torch.float32 if weighted == "wide" else dtype)
    command_of("rms_norm", x, weight, 1e-6, out=torch.empty_like(residual))
    agree(native.rms_norm(x, weight, 1e-6), dialect.rms_norm(x, weight, 1e-6))
    found, expected = (each.add_rms_norm(x, residual, weight, 1e-6) for each in (native, dialect))
    agree(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@given(seeds, floats, st.booleans(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_rotary(seed, dtype, wide_tables, tokens, heads, sixteens):
    x = random(seed, tokens, heads + 1, 16 * sixteens, dtype=dtype)[:, :heads]
    tables = torch.float32 if wide_tables else dtype
    cos, sin = (random(seed + i, tokens, 16 * sixteens, dtype=tables) for i in (1, 2))
    command_of("rotary", x, cos, sin, out=torch.empty(x.shape, dtype=dtype))
    agree(native.rotary(x, cos, sin), dialect.rotary(x, cos, sin))


@given(seeds, floats, st.integers(1, 5), st.integers(1, 20), st.sampled_from([0.1, 1.0, 30.0]))
def test_gated_gelu(seed, dtype, rows, eights, size):
    both = random(seed, rows, 16 * eights, dtype=dtype) * size
    gate, up = both.chunk(2, -1)
    command_of("gelu_mul", gate, up, out=torch.empty(gate.shape, dtype=dtype))
    expected = dialect.gelu_mul(gate, up)
    torch.testing.assert_close(native.gelu_mul(gate, up), expected, rtol=TOLERANCE[dtype]["rtol"], atol=1e-6 * size**2)
    assert torch.equal(native.geglu(both), native.gelu_mul(gate, up))


def test_exp_of_everything():
    """Through a softmax over two keys: the weight of the smaller score is e^-distance over one plus that."""
    for distance in [0.0, 1e-3, 0.5, 1.0, 5.0, 20.0, 80.0, 87.0, 90.0, 1e4]:
        keys, values = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8)
        keys[0, 1, 0, 0], values[0, 1] = -distance, 1.0
        query = torch.zeros(1, 1, 8).index_fill_(2, torch.tensor([0]), 1.0)
        table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
        found = native.paged_attention(query, keys, values, table, lens, 1.0)[0, 0, 0].double()
        expected = torch.sigmoid(torch.tensor(-distance, dtype=torch.float64))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-38)


@st.composite
def cached_rows(draw):
    """Lengths past a chunk of 256 keys, several block sizes, windows, layouts; table entries in any order."""
    rows, queries = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    block = draw(st.sampled_from([4, 16, 64]))
    columns = draw(st.integers(1, 700 // block))
    lens = [draw(st.integers(queries, columns * block)) if columns * block >= queries else 0 for _ in range(rows)]
    return {
        "rows": rows,
        "queries": queries,
        "block": block,
        "columns": columns,
        "lens": lens,
        "kv_heads": draw(st.integers(1, 2)),
        "per_kv": draw(st.integers(1, 3)),
        "width": draw(st.sampled_from([8, 24, 56, 64, 72])),
        "window": draw(st.none() | st.integers(1, 300)),
        "layout": draw(st.sampled_from(["TND", "BNSD"])),
        "dtype": draw(floats),
        "seed": draw(seeds),
    }


def _attention_case(case):
    rows, queries, dtype = case["rows"], case["queries"], case["dtype"]
    blocks = rows * case["columns"] + 2
    shape = blocks, case["block"], case["kv_heads"], case["width"]
    caches = [random(case["seed"] + i, *shape, dtype=dtype) for i in (0, 1)]
    order = torch.randperm(blocks - 2, generator=torch.Generator().manual_seed(case["seed"])) + 2
    table = order.view(rows, case["columns"]).to(torch.int32)
    heads = case["kv_heads"] * case["per_kv"]
    query = random(case["seed"] + 2, rows, queries, heads, case["width"], dtype=dtype)
    query = query.flatten(0, 1) if case["layout"] == "TND" else query.transpose(1, 2)
    lens = torch.tensor(case["lens"], dtype=torch.int32)
    return query, *caches, table, lens, 0.3, case["window"], case["layout"], "verify/target.layers.0"


@given(cached_rows())
def test_attention(case):
    args = _attention_case(case)
    command_of("paged_attention", *args, out=torch.empty(args[0].shape, dtype=args[0].dtype))
    expected = dialect.paged_attention(*args)
    found = native.paged_attention(*args)
    agree(found, expected)
    # Nothing past a row's length is read, nor anything its window hides from every query.
    poisoned = [cache.clone() for cache in args[1:3]]
    seen = torch.zeros(poisoned[0].shape[:2], dtype=torch.bool)
    for row, length in enumerate(case["lens"]):
        first = 0 if case["window"] is None else max(0, length - case["queries"] - case["window"] + 1)
        for position in range(first, length):
            seen[args[3][row, position // case["block"]], position % case["block"]] = True
    for cache in poisoned:
        cache[~seen] = float("nan")
    assert torch.equal(native.paged_attention(args[0], *poisoned, *args[3:]), found)
    if case["layout"] == "BNSD":  # a row alone gives what it gives beside others
        for row in range(case["rows"]):
            alone = native.paged_attention(
                args[0][row : row + 1], *args[1:3], args[3][row : row + 1], args[4][row : row + 1], *args[5:]
            )
            assert torch.equal(alone[0], found[row])


@given(seeds, st.sampled_from([torch.int32, torch.int64]), floats, st.integers(1, 6))
def test_store(seed, index, dtype, tokens):
    caches = [random(seed + i, 4, 8, 2, 4, dtype=dtype) for i in (0, 1)]
    both = random(seed + 2, tokens, 2, 2, 4, dtype=dtype)
    slots = torch.randperm(32, generator=torch.Generator().manual_seed(seed))[:tokens].to(index)
    found, expected = ([each.clone() for each in caches] for _ in range(2))
    native.store_kv(both[:, 0], both[:, 1], *found, slots)
    dialect.store_kv(both[:, 0], both[:, 1], *expected, slots)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


OPERANDS = [((3, 1, 5), (3, 4, 5)), ((4,), (2, 3, 4)), ((2, 1), (2, 6)), ((1,), (3, 2)), ((), (3, 2))]
OPERANDS += [((1,), (3, 37)), ((19,), (4, 19)), ((2, 1, 21), (2, 3, 21)), ((2, 3, 1), (2, 3, 27))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor], ids=str)
def test_small_operators_are_atens_bit_for_bit(op, dtype):
    for small, large in OPERANDS:
        left, right = random(1, *large, dtype=dtype), random(2, *small, dtype=dtype)
        for operands in [(left, right), (left, left.mT.contiguous().mT), (left, 0.3), (left, 7)]:
            if not isinstance(operands[1], torch.Tensor) or operands[1].dim() or operands[1].shape == large:
                out = torch.full_like(left, float("nan"))
                commands = COMMANDS[op](*operands, out=out)
                assert len(commands) == 1
                Program(commands)()
                assert torch.equal(out, op(*operands))


@given(seeds, st.sampled_from([torch.int32, torch.int64]), st.sampled_from([torch.int32, torch.int64]))
def test_integers_are_atens(seed, left_dtype, right_dtype):
    left, right = (torch.randint(-9, 9, (2, 3), generator=torch.Generator().manual_seed(seed + i)) for i in (0, 1))
    left, right = left.to(left_dtype), right.to(right_dtype)
    cases = [(op, (left, each)) for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor) for each in (right, 7)]
    cases += [(op, (left, n)) for op in (aten.floor_divide.default, aten.remainder.Scalar) for n in (4, -4)]
    cases += [(aten.clamp.default, (left, -2)), (aten.clamp.default, (left, None, 3))]
    cases += [(aten.eq.Tensor, (left, right)), (aten.add.Tensor, (left[:1], right.t()[:, :1]))]
    for op, args in cases:
        expected = op(*args)
        out = torch.zeros_like(expected)
        commands = COMMANDS[op](*args, out=out)
        assert len(commands) == 1
        Program(commands)()
        assert torch.equal(out, expected), op
    for source, dtype in ((left, torch.float32), (left, torch.int64), (right, torch.int32), (left > 0, torch.int64)):
        out = torch.zeros(source.shape, dtype=dtype)
        Program(COMMANDS[aten.copy_.default](out, source))()
        assert torch.equal(out, source.to(dtype))
    zero = torch.zeros(2, 3, dtype=torch.int64)
    assert COMMANDS[aten.floor_divide.default](left.long(), 0, out=zero) == ()
    assert COMMANDS[aten.floor_divide.default](left.long(), right.long(), out=zero) == ()


@given(
    seeds,
    st.sampled_from([torch.int32, torch.int64, torch.bool]),
    st.integers(-2, 1),
    st.integers(1, 17),
    st.booleans(),
)
def test_folds_are_atens(seed, dtype, dim, places, keep):
    shape = [3, 3]
    shape[dim] = places
    x = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    for op, args in ((aten.cumprod.default, (x, dim)), (aten.sum.dim_IntList, (x, [dim], keep))):
        expected = op(*args)
        out = torch.full_like(expected, 77)
        commands = COMMANDS[op](*args, out=out)
        assert len(commands) == (places if places <= 16 else 0), "more would be slower than one call of ATen"
        if commands:
            Program(commands)()
            assert torch.equal(out, expected)
    y = torch.ones(2, 2)
    assert COMMANDS[aten.cumprod.default](y, 0, out=y) == COMMANDS[aten.sum.dim_IntList](y, [0], out=y[0]) == ()
    assert COMMANDS[aten.sum.dim_IntList](x, None, out=x.sum()) == ()


@given(seeds, st.sampled_from([torch.float32, torch.int32, torch.bfloat16]), st.integers(0, 2), st.booleans())
def test_gather_is_atens(seed, dtype, dim, turned):
    source = (random(seed, 4, 5, 6) * 3).to(dtype)
    source = source.mT if turned else source
    shape = [2, 3, 4]
    index = torch.randint(source.shape[dim], shape, generator=torch.Generator().manual_seed(seed))
    out = torch.zeros(shape, dtype=dtype)
    Program(COMMANDS[aten.gather.default](source, dim, index, out=out))()
    assert torch.equal(out, source.gather(dim, index))


@given(seeds, floats, st.integers(1, 3), st.sampled_from([1e-4, 0.5, 3.0, 100.0]))
def test_tanh(seed, dtype, rows, size):
    x = random(seed, rows, 24, dtype=dtype) * size
    command_of("tanh", x, out=torch.empty_like(x))
    agree(native.tanh(x), x.double().tanh().to(dtype))
    ends = torch.tensor([0.0, -0.0, 1e-30, 20.0, -20.0, float("inf"), -float("inf"), 0.624])
    torch.testing.assert_close(native.tanh(ends), ends.tanh(), rtol=1e-6, atol=0)
    assert native.tanh(torch.full((8,), float("nan"))).isnan().all()


def test_sines_of_long_contexts():
    x = torch.cat([random(1, 500) * 10, torch.rand(500) * 262144, torch.arange(500) * torch.pi / 4])
    for name in ("sin", "cos"):
        command_of(name, x, out=torch.empty_like(x))
        found, exact = getattr(native, name)(x), getattr(x.double(), name)()
        torch.testing.assert_close(found.double(), exact, rtol=2e-7, atol=1e-9)
        assert getattr(native, name)(torch.tensor([float("inf"), float("nan")])).isnan().all()
    agree(native.cos(x[:8].bfloat16()), x[:8].bfloat16().cos())


def test_copies_and_lookups_are_atens():
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        parts = [(random(i, 2, n, 3) * 3).to(dtype) for i, n in enumerate((1, 4, 2))]
        cases = [(aten.cat.default, (parts, 1)), (aten.cat.default, ([p[:, :1] for p in parts], -1))]
        cases += [(aten.stack.default, ([p[:, 0] for p in parts], dim)) for dim in (0, 1, -1)]
        table, index = (random(9, 6, 3) * 3).to(dtype), torch.tensor([[5, 0], [3, 3]])
        cases.append((aten.embedding.default, (table, index)))
        for op, args in cases:
            expected = op(*args)
            out = torch.zeros_like(expected)
            commands = COMMANDS[op](*args, out=out)
            assert commands
            Program(commands)()
            assert torch.equal(out, expected), op
        source, out = parts[1].transpose(0, 2), torch.zeros_like(parts[1]).transpose(0, 2)
        Program(COMMANDS[aten.copy_.default](out, source))()
        assert torch.equal(out, source)


@given(seeds, floats, st.integers(1, 5), st.integers(1, 40), st.booleans())
def test_a_copy_to_another_dtype_is_rounded_as_atens(seed, dtype, rows, width, turned):
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    source = random(seed, rows, width, dtype=dtype)
    source.view(-1)[0] = float("inf")
    source = source.t() if turned else source
    out = torch.zeros(source.shape, dtype=other)
    (command,) = COMMANDS[aten.copy_.default](out, source)
    Program([command])()
    assert torch.equal(out, source.to(other))


@given(seeds, floats, st.integers(1, 3), st.integers(1, 40), st.integers(0, 3))
def test_argmax_takes_the_first_and_a_nan_before_all(seed, dtype, rows, width, odd):
    x = (random(seed, rows, width) * 2).round().to(dtype)
    x.view(-1)[torch.arange(odd) * 5 % x.numel()] = float("nan")
    out = torch.empty(rows, dtype=torch.int64)
    Program(COMMANDS[aten.argmax.default](x, -1, out=out))()
    assert torch.equal(out, x.argmax(-1))


def test_nothing_depends_on_the_number_of_threads():
    case = {"rows": 3, "queries": 4, "block": 16, "columns": 40, "lens": [600, 31, 280], "kv_heads": 2, "per_kv": 2}
    args = _attention_case(case | {"width": 64, "window": None, "layout": "TND", "dtype": torch.float32, "seed": 1})
    x, weight = random(3, 7, 64), random(4, 101, 64)
    wide, large = random(5, 7, 520), random(6, 3001, 520)  # several units, and columns that no pair has
    command = command_of("linear", wide, large, out=wide.new_empty(7, 3001))
    assert command.words[2] > 8
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            products = native.linear(x, weight), native.linear(wide, large)
            results.append([*products, native.paged_attention(*args), native.rms_norm(x, None, 1e-6)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    torch.testing.assert_close(results[0][1], wide @ large.t(), rtol=1e-4, atol=1e-4)


def test_tables_of_no_columns_are_no_work():
    query, cache, table = random(1, 2, 4, 16), random(2, 3, 8, 2, 16), torch.zeros(2, 0, dtype=torch.int32)
    args = query, cache, cache, table, torch.zeros(2, dtype=torch.int32), 1.0
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = torch.full_like(query, torch.nan)
            Program([command_of("paged_attention", *args, out=out)])()
            assert torch.equal(out, torch.zeros_like(query))
    finally:
        torch.set_num_threads(before)


def test_threads_run_programs_beside_each_other():
    """Who finds the workers busy computes alone; everybody gets his own numbers, scratch memory included."""
    case = {"rows": 2, "queries": 2, "block": 16, "columns": 40, "lens": [600, 300], "kv_heads": 1, "per_kv": 4}
    case |= {"width": 64, "window": None, "layout": "TND", "dtype": torch.float32}
    cases = [_attention_case(case | {"seed": seed}) for seed in range(4)]
    expected = [native.paged_attention(*args) for args in cases]
    wrong = []

    def repeat(index: int) -> None:
        for _ in range(60):
            if not torch.equal(native.paged_attention(*cases[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_does_not_fit_is_an_error_that_names_the_node():
    cache, index = torch.zeros(2, 4, 1, 8), torch.tensor
    query, lens = torch.zeros(1, 1, 8), index([3], dtype=torch.int32)
    key = torch.ones(2, 1, 8)
    table = index([[1]], dtype=torch.int32)
    for kind, message, args in (
        (IndexError, "a block the cache does not have", (query, cache, cache, table + 1, lens, 1.0)),
        (ValueError, "longer than its block table reaches", (query, cache, cache, table, lens + 2, 1.0)),
    ):
        with pytest.raises(kind, match=message):
            native.paged_attention(*args)
        out = torch.empty_like(query)
        found = command_of("paged_attention", *args, out=out)
        with pytest.raises(kind, match=f"attention_3: .*{message}"):
            Program([found], ["attention_3"])()
    stored = [cache.clone(), cache.clone()]
    with pytest.raises(IndexError, match="a slot lies outside of the cache"):
        native.store_kv(key, key, *stored, index([8, 0]))
    rows, chosen, out = torch.zeros(4, 3), index([4]), torch.empty(1, 3)
    lookup = Program(COMMANDS[aten.embedding.default](rows, chosen, out=out))
    with pytest.raises(IndexError, match="an index is out of range"):
        lookup()


def test_what_a_kernel_does_not_take_goes_to_the_dialect():
    """Widths that are no multiple of eight, float16, many rows: no command, and the same numbers."""
    x, weight = random(1, 3, 12), random(2, 5, 12)
    assert program.linear(x, weight, torch.empty(3, 5)) is None
    agree(native.linear(x, weight), x @ weight.t())
    many = random(3, program.MOST_ROWS + 1, 16)
    assert program.linear(many, random(4, 8, 16), many.new_empty(len(many), 8)) is None
    half = random(5, 2, 16).half()
    assert program.rms_norm(half, None, 1e-6, torch.empty_like(half)) is None
    torch.testing.assert_close(native.rms_norm(half, None, 1e-6), dialect.rms_norm(half, None, 1e-6))
    with pytest.raises(ValueError, match=r"linear: x \(rows, k\) and weight \(n, k\) of one dtype are needed"):
        native.linear(x, weight.bfloat16())
