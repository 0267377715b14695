"""Final graphs: which one a call gets, and records as plain data and back."""

import json
from collections import Counter

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemma_npu_compile.compile_cache import Folder
from gemma_npu_compile.compile_cache.final import RECORDS, read_record, write_record
from gemma_npu_compile.compile_cache.names import DamagedError, NotCacheableError
from gemma_npu_compile.compile_cache.ticket import TRACE_HIT
from gemma_npu_compile.graphs.cache_calls import CacheCalls
from gemma_npu_compile.graphs.inputs import Input
from gemma_npu_compile.graphs.plan import Output, Plan
from gemma_npu_compile.passes import PassRecord
from gemma_npu_compile.passes.merge_gate_up import MergedWeight
from gemma_npu_compile.passes.numbers_on_device import HostNumber
from gemma_npu_compile.passes.sites import Attention

X = torch.arange(12.0).view(3, 4)


def plus(x):
    return x * 2 + 1


OTHERS = {
    "platform": {"platform": "ascend910b"},
    "disabled pass": {"disable_passes": ["fold_views"]},
    "skip_softcap": {"skip_softcap": True},
    "merge_weights": {"merge_weights": True},
    "kv_lens": {"kv_lens": "host"},
    "verify_attention": {"verify_attention": "dense"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_passes_consult_is_in_the_key(folder: Folder, compiled, no_passes, name: str) -> None:
    assert compiled(plus, X)[1].cache == "stored"
    assert compiled(plus, X, **OTHERS[name])[1].cache == TRACE_HIT
    assert len(list(folder.entries())) == 3
    no_passes()
    assert [compiled(plus, X, **options)[1].cache for options in ({}, OTHERS[name])] == ["hit", "hit"]


def test_a_table_of_capabilities_is_in_the_key(folder: Folder, compiled, tmp_path) -> None:
    options = {"platform": "ascend910b", "capabilities": str(tmp_path / "table.json")}
    states = []
    for blocks in (128, 128, 256):
        rules = [{"legal": True, "source": "a test", "layout": "TND", "block_multiple": blocks}]
        (tmp_path / "table.json").write_text(json.dumps({"attention": rules, "operators": []}))
        states.append(compiled(plus, X, **options)[1].cache)
    assert states == ["stored", "hit", TRACE_HIT]


def test_whether_there_are_kernels_is_in_the_key(folder: Folder, compiled, monkeypatch) -> None:
    """Why there are none is not: compilers name files that are others each time."""
    compiled(plus, X)
    states = []
    for why in ("/tmp/a.o: no", "/tmp/b.o: no"):
        monkeypatch.setattr("gemma_npu_compile.backend.why_no_kernels", lambda why=why: why)
        states.append(compiled(plus, X)[1].cache)
    assert states == [TRACE_HIT, "hit"]


def test_a_pass_of_somebody_else_runs_each_time(folder: Folder, compiled, monkeypatch) -> None:
    """The key knows this package's sources, and no others."""
    from gemma_npu_compile.passes.pipeline import PASSES, PassResult

    def times(factor):
        def mine(gm):
            for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
                node.update_arg(1, factor)
            return PassResult(1)

        return mine

    assert compiled(plus, X)[1].cache == "stored"
    for factor in (10, 20):
        monkeypatch.setitem(PASSES, "mine", times(factor))
        result, report = compiled(plus, X)
        assert torch.equal(result, X * factor + 1)
        assert report.cache == TRACE_HIT
    monkeypatch.delitem(PASSES, "mine")
    assert compiled(plus, X)[1].cache == "hit"


def test_the_cache_looks_for_no_kernels_where_it_is_off(folder: Folder, compiled, monkeypatch) -> None:
    def refuse():
        raise AssertionError("the kernels were built")

    monkeypatch.setattr("gemma_npu_compile.backend.why_no_kernels", refuse)
    assert compiled(plus, X, cache=False, disable_passes=["lower_native"])[1].cache == "off"


def test_names_of_inputs_are_those_of_the_call(folder: Folder, compiled) -> None:
    """Dynamo's graph is the same, what the user calls its inputs is not."""
    found = [compiled(fn, X)[1] for fn in (lambda x: x * 2, lambda other: other * 2, lambda other: other * 2)]
    assert [each.cache for each in found] == ["stored", TRACE_HIT, "hit"]
    assert [[item.label for item in each.plan.inputs] for each in found] == [["x"], ["other"], ["other"]]


def test_options_that_no_pass_consults_are_not_in_the_key(folder: Folder, compiled) -> None:
    compiled(plus, X)
    assert compiled(plus, X, capture=False, on_fallback="error", max_captures=3)[1].cache == "hit"


def test_a_host_number_is_read_anew_in_each_call(folder: Folder, fresh_dynamo, no_passes) -> None:
    """The expression comes back in the symbols of the process at hand."""
    from gemma_npu_compile.backend import Backend
    from gemma_npu_compile.report import collect

    def at(x, n):
        return x + (n + 3)

    for state in ("stored", "hit"):
        torch._dynamo.reset()
        made = torch.compile(at, backend=Backend(), options={"platform": "cpu"}, dynamic=True)
        with collect() as report, torch.no_grad():
            results = [made(X, n) for n in (5, 9, 6)]
        (graph,) = report.graphs
        assert (graph.cache, graph.captures, graph.fallbacks) == (state, 1, {})
        assert [type(each) for each in graph.plan.extras] == [HostNumber]
        assert [each[0, 0].item() for each in results] == [8, 12, 9]
        no_passes()


def test_a_pass_that_adds_a_guard_keeps_its_graph_from_the_cache(folder: Folder, compiled, monkeypatch) -> None:
    """Where passes do not run nothing would add it."""
    from gemma_npu_compile.passes.pipeline import PASSES

    run = PASSES["fold_views"]
    monkeypatch.setattr("gemma_npu_compile.backend.only_own", lambda: True)

    def deciding(gm):
        (x,) = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], torch.Tensor)]
        assert bool(x.shape[0] < 1000)
        return run(gm)

    monkeypatch.setitem(PASSES, "fold_views", deciding)
    for state in ("stored in front of the passes", TRACE_HIT):
        assert compiled(plus, X, dynamic=True)[1].cache == f"{state}: a pass added guards"
    assert [entry.header["stage"] for entry in folder.entries()] == ["trace"]


# ---- records

OURS = [sympy.Symbol(f"s{i}", integer=True, positive=True) for i in (77, 21)]
THEIRS = [sympy.Symbol(f"s{i}", integer=True, positive=True) for i in (5, 3)]
TO_THEIRS = dict(zip(OURS, THEIRS, strict=True))

words = st.text(max_size=5)
counts = st.integers(0, 9)
maybe = lambda values: st.none() | values  # noqa: E731
expressions = st.sampled_from([OURS[0], OURS[0] * 3 + OURS[1], OURS[1] - 2, sympy.Integer(7)])
shapes = st.lists(counts | expressions, max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])
devices = st.just(torch.device("cpu"))
sources = st.lists(counts, max_size=3).map(tuple)
inputs = st.builds(
    Input, words, words, counts, words, st.booleans(), shapes, maybe(dtypes), maybe(counts),
    maybe(st.tuples(counts, counts)), st.booleans(), maybe(words), maybe(words), maybe(words),
)  # fmt: skip
attention = st.builds(
    Attention, words, words, words, counts, counts, maybe(counts), st.floats(-9, 9), maybe(words), words, words,
    maybe(words), words,
)  # fmt: skip
several = lambda values: st.lists(values, max_size=2).map(tuple)  # noqa: E731
plans = st.builds(
    Plan, several(inputs), several(st.builds(Output, shapes, maybe(dtypes), maybe(devices))), several(attention),
    several(st.builds(MergedWeight, words, sources) | st.builds(HostNumber, sources, expressions, devices)),
    st.just(tuple(OURS)), maybe(st.just(OURS[0])), maybe(counts), maybe(words), devices,
    maybe(st.builds(CacheCalls, maybe(counts | expressions), st.booleans(), maybe(words))),
)  # fmt: skip
records = st.builds(
    PassRecord, words, counts, st.dictionaries(words, counts).map(Counter), st.floats(0, 9), counts, counts, counts
)


def theirs(value):
    """The same in the symbols of the other process."""
    if isinstance(value, sympy.Expr):
        return value.xreplace(TO_THEIRS)
    if isinstance(value, tuple):
        return tuple(map(theirs, value))
    if type(value) in RECORDS.values():
        return type(value)(**{name: theirs(each) for name, each in vars(value).items()})
    return value


@given(plans | records)
def test_a_record_comes_back_in_the_symbols_of_another_process(record) -> None:
    plain = json.loads(json.dumps(write_record(record, {symbol: i for i, symbol in enumerate(OURS)}), allow_nan=False))
    found = read_record(plain, THEIRS)
    assert found == theirs(record)
    assert list(vars(found)) == list(vars(record))


@given(inputs, st.data())
def test_a_field_of_another_type_is_no_record(item, data) -> None:
    plain = write_record(item, {symbol: i for i, symbol in enumerate(OURS)})
    wrong = {0: 1, 2: "0", 4: 1, 5: [None], 6: "float32", 8: [1], 9: None}  # name, source, static, shape, dtype, ...
    place = data.draw(st.sampled_from(sorted(wrong)))
    plain["fields"][place] = wrong[place]
    with pytest.raises(DamagedError, match=r"^Input\."):
        read_record(plain, THEIRS)


def test_what_no_record_holds_is_named() -> None:
    with pytest.raises(NotCacheableError, match="a record holds a Tensor"):
        write_record((1, torch.ones(1)), {})
    with pytest.raises(NotCacheableError, match="a record holds a float"):
        write_record(float("inf"), {})


def _sliced(name="y", keyword="alpha", op="call_function") -> dict:
    first = ["placeholder", "x", None, [{"tuple": []}, []]]
    call = [op, name, "aten::add.Tensor", [{"tuple": [{"n": 0}, 1]}, [{"tuple": [keyword, 1]}]]]
    return {"slice": [first, call, ["output", "output", None, [{"tuple": [{"n": 1}]}, []]]]}


def test_a_slice_computes_what_it_did() -> None:
    assert read_record(_sliced(), [])(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize(
    "plain",
    [
        {"record": "Path", "fields": []},
        {"eval": "1"},
        _sliced(op="call_module"),
        _sliced(name="x"),
        _sliced(name="x, __import__('pathlib').Path('pwned').touch()"),
        _sliced(keyword="other=__import__('pathlib').Path('pwned').touch() or 1, alpha"),
    ],
)
def test_nothing_else_is_read(plain) -> None:
    with pytest.raises(DamagedError):
        read_record(plain, [])
