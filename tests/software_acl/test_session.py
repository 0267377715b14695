"""Session on the real torch_npu: asynchronous by default, sampled in the captured graph."""

import itertools
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.software_acl


def test_a_session_reads_late_and_once(software_acl):
    """Captured steps, sampled ones too, are queued ahead; the host waits for nothing but each launch's results."""
    script = Path(__file__).parent / "scripts" / "session.py"
    result = software_acl.run(script, env={"SOFTWARE_ACL_FP32": "1"}, timeout=400)
    found = result.last
    assert (found["greedy"], found["sampled"], found["held"]) == (True, True, True)
    assert (found["kinds"], found["captures"], found["fallbacks"]) == (3, [1, 1, 1], {})
    events = [e for e in result.trace.between("warm", "done").events if e["event"] in ("replay", "sync", "memcpy")]
    places = [i for i, event in enumerate(events) if event["event"] == "replay"]
    assert len(places) == found["steps"]
    windows = [events[a + 1 : b] for a, b in itertools.pairwise(places)]
    seen = Counter(tuple(each["kind"] for each in window) for window in windows)
    # Nobody joins or leaves, no block moves: the results start their way, and the ones before are waited for.
    assert seen[("device to host", "event")] >= len(windows) // 3, seen
    assert result.trace.error_codes == []
