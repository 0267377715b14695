"""Questions about Python's objects: the same answers in C++ and in Python."""

import functools
import gc
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemma_npu_compile.native import build, objects
from gemma_npu_compile.native.objects import Addresses, Values


@pytest.fixture(params=["C++", "Python"], autouse=True)
def way(request, monkeypatch):
    if request.param == "Python":
        monkeypatch.setattr(objects, "_functions", lambda: None)
    else:
        build.library()
        assert objects._functions() is not None
    return request.param


def arguments() -> list[object]:
    return [torch.zeros(2), 7, torch.nn.Parameter(torch.zeros(3)), None, torch.zeros(0), torch.zeros(4)[1:]]


PLACES = (5, 0, 2, 4)


def test_addresses_are_those_of_the_places_asked_for():
    args = arguments()
    known = Addresses(args, PLACES)
    assert list(known.values) == [args[place].data_ptr() for place in PLACES]
    assert known.still(args)
    assert known.still([args[0][:1], None, args[2].detach(), 1, args[4], args[5].view(3, 1)]), "the same memory"
    assert Addresses(args, []).still([])


@pytest.mark.parametrize("place", PLACES)
def test_whatever_lies_elsewhere_is_seen(place):
    args = arguments()
    args[4] = torch.ones(1)
    known = Addresses(args, PLACES)
    kept = args[place].data
    for change in (lambda: setattr(args[place], "data", kept.clone()), lambda: args[place].set_(kept.clone())):
        with torch.no_grad():
            change()
        assert not known.still(args)
        args[place].data = kept
        assert known.still(args)
    args[place] = torch.zeros(9)
    assert not known.still(args)
    args[1] = torch.zeros(9)
    args[place] = kept
    assert known.still(args), "a place nobody asked for"


def test_what_is_no_tensor_raises_and_harms_nothing(way):
    args = arguments()
    known = Addresses(args, PLACES)
    for wrong in (None, 3, "tensor", object()):
        with pytest.raises(TypeError):
            known.still([*args[:2], wrong, *args[3:]])
    with pytest.raises(IndexError):
        known.still(args[:5])
    assert known.still(args)
    assert known.still(tuple(args))


def test_nothing_is_compiled_for_this_alone(monkeypatch):
    """An engine on an NPU needs no kernels; a call that has to be fast is no place to start a compiler."""
    asked = functools.cache(lambda: pytest.fail("compiles"))
    monkeypatch.undo()
    monkeypatch.setattr(build, "_load", asked)
    args, kept = arguments(), [{"a": 1}]
    assert Addresses(args, PLACES).still(args)
    assert Values(kept).still()
    assert not Addresses(args, PLACES).still([*args[:5], args[0]])


def test_nothing_is_kept_or_let_go():
    args, kept = arguments(), [{"a": object(), "b": None}, {"c": 1.5}]
    known, values = Addresses(args, PLACES), Values(kept)
    counted = [*(arg for arg in args if isinstance(arg, torch.Tensor)), *(v for d in kept for v in d.values())]
    before = [sys.getrefcount(each) for each in counted[:-2]]
    for _ in range(1000):
        assert known.still(args)
        assert values.still()
    gc.collect()
    assert [sys.getrefcount(each) for each in counted[:-2]] == before


@given(st.lists(st.dictionaries(st.text(max_size=2), st.integers(), max_size=4), max_size=4), st.data())
def test_values_are_the_same_objects_in_the_same_order(dicts, data):
    dicts = [{key: [value] for key, value in each.items()} for each in dicts]
    known = Values(dicts)
    assert known.still()
    for each in dicts:
        for key in list(each):
            kept = each[key]
            each[key] = list(kept)  # equal, and another
            assert not known.still()
            each[key] = kept
            assert known.still()
    if dicts:
        chosen = data.draw(st.sampled_from(dicts))
        chosen["added"] = None
        assert not known.still()
        del chosen["added"]
        assert known.still()
        if chosen:
            chosen.popitem()
            assert not known.still()
