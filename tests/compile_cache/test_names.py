"""Operators, arguments and sizes as plain data: what goes in comes out, and nothing else comes in."""

import json
import math

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph
from torch.utils._sympy.functions import FloorDiv, Max, Mod

from gemma_npu_compile.compile_cache.names import (
    DamagedError,
    NotCacheableError,
    decode,
    decode_size,
    encode,
    encode_size,
    find_target,
    target_name,
)

OURS = [sympy.Symbol(f"s{i}", integer=True, positive=True) for i in (77, 21)]
THEIRS = [sympy.Symbol(f"s{i}", integer=True, positive=True) for i in (5, 3)]

numbers = st.integers(1, 9).map(sympy.Integer)
sizes = st.recursive(
    st.sampled_from(OURS) | numbers,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: a * b, inner, inner),
        st.builds(lambda a, b: a - b, inner, inner),
        st.builds(FloorDiv, inner, numbers),
        st.builds(Mod, inner.map(abs), numbers),
        st.builds(Max, inner, numbers),
    ),
    max_leaves=8,
)


@given(sizes)
def test_a_size_comes_back_in_the_symbols_of_another_process(size) -> None:
    try:
        plain = json.loads(json.dumps(encode_size(size, {symbol: i for i, symbol in enumerate(OURS)})))
    except NotCacheableError:
        assert size.has(sympy.Abs)  # no size of a tensor
        return
    assert decode_size(plain, THEIRS) == size.xreplace(dict(zip(OURS, THEIRS, strict=True)))


def test_a_symbol_of_no_input_has_no_plain_form() -> None:
    with pytest.raises(NotCacheableError, match="size s21 "):
        encode_size(OURS[1] + 1, {OURS[0]: 0})


def deep(levels: int) -> list:
    return ["Add", 1, deep(levels - 1)] if levels else ["Add", 1, 2]


@pytest.mark.parametrize(
    "plain",
    [
        "__import__('os').system('touch pwned')",
        "s0",
        ["__import__", "os"],
        ["Lambda", {"s": 0}, 1],
        ["Pow", 9, 9999999],
        ["Pow", 9, {"s": 0}],
        {"s": 2},
        {"s": -1},
        {"s": True},
        {"s": "0"},
        {"s": 0, "t": 1},
        2**70,
        True,
        None,
        deep(40),
    ],
)
def test_anything_else_is_no_size(plain) -> None:
    with pytest.raises(DamagedError):
        decode_size(plain, THEIRS)


def test_targets_are_found_by_name() -> None:
    ops = torch.ops
    for target in (ops.aten.add.Tensor, ops.gemma_npu.store_kv.default, ops.prims.convert_element_type.default):
        assert find_target(target_name(target)) is target
    assert target_name(torch.ops.aten.add.Tensor) == "aten::add.Tensor"


@pytest.mark.parametrize(
    "name",
    [
        "os::system.default",
        "higher_order::cond.default",
        "aten::no_such_operator.default",
        "aten::add.no_such_overload",
        "aten::add",
        "aten::__class__.__init__",
        "aten::add.Tensor.__call__",
        "operator.attrgetter",
        "builtins.eval",
        "",
    ],
)
def test_nothing_else_is_a_target(name: str) -> None:
    with pytest.raises(DamagedError):
        find_target(name)


def test_operators_of_others_are_not_kept() -> None:
    with torch.library._scoped_library("elsewhere", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        with pytest.raises(NotCacheableError, match=r"operator elsewhere::twice\.default is of neither"):
            target_name(torch.ops.elsewhere.twice.default)
        with pytest.raises(DamagedError, match=r"'elsewhere::twice\.default' names no operator"):
            find_target("elsewhere::twice.default")
    with pytest.raises(NotCacheableError, match="the trace calls print"):
        target_name(print)


def test_arguments_come_back_as_they_were() -> None:
    graph = Graph()
    nodes = [graph.placeholder("x"), graph.placeholder("y")]
    arguments = (
        [nodes[1], (nodes[0], 1), True, 1, 1.0, None, "text", -0.0],
        {torch.bfloat16: 0}.popitem()[0],
        torch.device("cpu"),
        torch.strided,
        torch.channels_last,
        torch.ops.gemma_npu.store_kv.default,
        -math.inf,
        0.1,
    )
    plain = json.loads(json.dumps(encode(arguments, nodes.index), allow_nan=False))
    found = decode(plain, nodes)
    assert found == arguments
    assert list(map(type, found[0])) == list(map(type, arguments[0]))
    assert math.copysign(1, found[0][-1]) == -1
    assert math.isnan(decode(encode(math.nan, nodes.index), nodes))


@pytest.mark.parametrize("argument", [1j, torch.Size, object(), {"a": 1}, b"bytes"])
def test_arguments_without_a_plain_form_are_named(argument) -> None:
    with pytest.raises(NotCacheableError, match=f"an argument is a {type(argument).__name__}"):
        encode(argument, lambda node: 0)


@pytest.mark.parametrize("plain", [{"n": 1}, {"n": -1}, {"dtype": "load"}, {"dtype": "__dict__"}, {"eval": "1"}])
def test_arguments_that_were_not_written_are_refused(plain) -> None:
    with pytest.raises(DamagedError):
        decode(plain, [Graph().placeholder("x")])
