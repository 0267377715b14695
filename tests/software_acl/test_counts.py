"""The targets that are counted: a step of this package against npugraph_ex and eager launches, from the trace."""

from typing import Any

import pytest

pytestmark = pytest.mark.software_acl


@pytest.fixture(scope="module")
def counted(software_acl: Any, counts: Any) -> Any:
    """Two layers, one draft, four rows; :func:`counts.measure` fails where the three decode different tokens."""
    report = counts.measure(software_acl, layers=2, drafts=1, sizes=[4])
    assert report["errors"] == []
    return report["counts"]


def test_the_command_says_so(counted: Any, counts: Any) -> None:
    assert set(counts.targets(counted).values()) == {True}
    broken = {**counted, "ours": counted["eager"]}  # no update either way
    assert sorted(counts.targets(broken).values()) == [False, False, True, True]


def test_tasks(counted: Any) -> None:
    """npugraph_ex captures what eager launches, but for copies in and out; ours is at most half of it."""
    ours, peer, eager = (counted[name] for name in ("ours", "npugraph_ex", "eager"))
    assert (ours["replays"], peer["replays"], eager["replays"]) == (1, 1, 0)
    assert abs(peer["tasks"] / eager["tasks"] - 1) < 0.1
    assert peer["ops"]["aclnnMatmul"] == ours["ops"]["aclnnMatmul"], "the same products"
    assert ours["tasks"] <= 0.5 * peer["tasks"]
    assert ours["host_calls"] < 20 < 0.1 * eager["host_calls"]


def test_no_update_in_steady_state(counted: Any) -> None:
    assert counted["ours"]["updates"] == 0


def test_no_cache_is_copied(counted: Any) -> None:
    """Neither in a captured task nor around the replay: all copies together are smaller than one layer's keys."""
    ours, eager = counted["ours"], counted["eager"]
    assert 0 < ours["copied_around"] + ours["copied_inside"] < ours["smallest_pool"]
    assert ours["copied_around"] < 4096
    assert eager["copied_around"] > ours["smallest_pool"], "what a gathered verification looks like"


def test_verification_reads_each_visible_block_once(counted: Any) -> None:
    """And hardly another: a window's blocks lie in a fixed number, of which one may hold no visible key."""
    ours, peer = counted["ours"], counted["npugraph_ex"]
    assert set(ours["kv_times"]) == {1}
    assert ours["kv_times"][1] == 26
    assert ours["kv_visible"] <= ours["kv_read"] < 1.1 * ours["kv_visible"]
    assert ours["kv_read"] < peer["kv_read"]
