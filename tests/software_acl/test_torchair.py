"""``engine="torchair"``: the same graph through torch_npu's own compiler. Captures and copies: from the trace."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.software_acl
SCRIPTS = Path(__file__).parent / "scripts"
FP32 = {"SOFTWARE_ACL_FP32": "1"}
COPY, SCATTER = "aclnnInplaceCopy", "aclnnScatterPaKvCache"


@pytest.fixture(scope="module")
def both(software_acl: Any) -> Any:
    return software_acl.run(SCRIPTS / "torchair.py", env=FP32, timeout=500)


def test_the_same_tokens(both: Any) -> None:
    """At two sizes, and across a block that the first row fills."""
    ours, theirs = both.last["ours"], both.last["theirs"]
    assert ours["tokens"] == theirs["tokens"]
    assert (theirs["captures"], theirs["checked"], theirs["replays"]) == (2, 2, 13)  # the first warms up
    assert ours["updates"] == 4, "both tasks, for the first rows and when one crosses into its next bucket"
    assert theirs["updates"] == 2 * 13, "both tasks, in every replay"
    assert both.last["graphs"] == 0, "a reset destroys them all"
    assert both.trace.error_codes == []


def test_no_cache_is_copied(both: Any) -> None:
    """Neither at a replay (a cache that is only read) nor inside a capture (one that is written)."""
    ours = both.trace.between("ours start", "theirs start").captures
    theirs = [each for each in both.trace.between("theirs start", "end").captures if each["tasks"]]
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        assert other["ops"][COPY] == one["ops"][COPY]
        assert other["ops"][SCATTER] == one["ops"][SCATTER] == 2
        waits = other["ops"]["value wait"] + other["ops"]["value write"]
        assert waits == 4, "one wait and one reset for each task with a host list"
        assert other["tasks"] <= one["tasks"] + waits
    found = both.last["theirs"]
    assert 0 < found["pool"] < found["cache"], "a clone would not fit"

    step, of_ours = (both.trace.between(f"{name} 2", f"{name} 3") for name in ("theirs", "ours"))
    assert len(step.replays) == len(of_ours.replays) == 1
    assert not step.captures
    assert step.launches == of_ours.launches, "small inputs and results, which are copied for every runtime"
    assert set(step.launches) <= {COPY, "aclnnForeachCopy", "aclnnCat"}
    assert [e["bytes"] for e in step.of("memcpy")] == [e["bytes"] for e in of_ours.of("memcpy")]
    assert sum(e["bytes"] for e in step.of("memcpy")) < 1024
    assert [len(step.updates), len(of_ours.updates)] == [2, 0]


def test_a_capture_runs_nothing_and_leaves_the_process_as_it_was(software_acl: Any) -> None:
    """A counter counts calls, not captures; results are the caller's own; signals are handled as before."""
    script = """
        import json, signal, torch, torch_npu
        import gemma_npu_compile.backend
        handler = signal.getsignal(signal.SIGINT)
        options = {"engine": "torchair", "on_fallback": "error"}
        def count(counter, x):
            counter.add_(1)
            return counter * x, torch.arange(3, device=x.device) + x.int()
        run = torch.compile(count, backend="gemma_npu", fullgraph=True, options=options)
        counter, x = torch.zeros(3).npu(), torch.tensor([1.0, 2.0, 3.0]).npu()
        torch._dynamo.mark_static_address(counter)
        with torch.no_grad():
            results = [run(counter, x + i) for i in range(3)]
        values = [[each.tolist() for each in result] for result in results]
        def mixed(x, y):
            return x + 1, y + 1
        try:
            torch.compile(mixed, backend="gemma_npu", options={**options, "platform": "ascend910b"})(x, torch.ones(3))
        except RuntimeError as error:
            refused = str(error)
        print(json.dumps([values, counter.tolist(), refused, signal.getsignal(signal.SIGINT) is handler]))
    """
    result = software_acl.run(script, timeout=300)
    values, counter, refused, kept = result.last
    rows = [[1.0 + i, 2.0 + i, 3.0 + i] for i in range(3)]
    expected = [[[(i + 1) * x for x in row], [int(x) + n for n, x in enumerate(row)]] for i, row in enumerate(rows)]
    assert values == expected
    assert counter == [3.0] * 3
    assert "input y is on cpu, the graph on npu:0" in refused
    assert kept
    assert len(result.trace.replays) == 3
