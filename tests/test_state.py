"""Lengths on the host."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gemma_npu_compile.state import LengthsOnHost


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), min_size=1, max_size=6))
def test_lengths_are_those_of_the_last_call_with_as_many_rows(calls):
    lengths, addresses = LengthsOnHost(), {}
    for call in calls:
        found = lengths(call)
        assert (found.dtype, found.device.type, found.tolist()) == (torch.int32, "cpu", call)
        assert addresses.setdefault(len(call), found.data_ptr()) == found.data_ptr()
    assert len(set(addresses.values())) == len(addresses)
