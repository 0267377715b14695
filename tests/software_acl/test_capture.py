"""Captured graphs of the real torch_npu: "captured" is asserted on the trace, never on values alone."""

from itertools import pairwise
from typing import Any

import pytest

pytestmark = pytest.mark.software_acl


def test_capture_and_replay(software_acl: Any) -> None:
    script = """
        import json, torch, torch_npu, software_acl
        x = torch.arange(6, dtype=torch.float32, device="npu")
        y = torch.zeros(6, device="npu")
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            y.copy_(x * 2 + 1)
        values = [y.tolist()]
        software_acl.mark("replays")
        for start in (0.0, 10.0):
            x.copy_(torch.arange(6.0) + start)
            graph.replay()
            torch.npu.synchronize()
            values.append(y.tolist())
        software_acl.mark("end")
        print(json.dumps(values))
    """
    result = software_acl.run(script)
    expected = [[2 * (i + start) + 1 for i in range(6)] for start in (0.0, 10.0)]
    assert result.last == [[0.0] * 6, *expected]
    (capture,) = result.trace.captures
    assert capture["ops"] == {"aclnnMuls": 1, "aclnnAdds": 1, "aclnnInplaceCopy": 1}
    replays = result.trace.between("replays", "end")
    assert [event["graph"] for event in replays.replays] == [capture["graph"]] * 2
    assert len(replays.of("replayed")) == 2
    assert not replays.launches


def test_sizes_in_one_pool_leave_no_memory_behind(software_acl: Any) -> None:
    script = """
        import json, torch, torch_npu, software_acl
        weight = torch.randn(64, 64).npu()
        buffers = {n: (torch.zeros(n, 64).npu(), torch.zeros(n, 64).npu()) for n in (12, 8, 4, 2, 1)}
        torch.npu.synchronize(); torch.npu.empty_cache()
        before = software_acl.device_bytes()
        pool, graphs = torch.npu.graph_pool_handle(), {}
        for n, (source, target) in buffers.items():
            graphs[n] = torch.npu.NPUGraph()
            with torch.npu.graph(graphs[n], pool=pool):
                target.copy_((source @ weight).relu() @ weight)
        wrong = []
        for seed, n in enumerate((1, 12, 4, 2, 8, 1, 12)):
            source, target = buffers[n]
            value = torch.randn(n, 64, generator=torch.Generator().manual_seed(seed))
            source.copy_(value)
            graphs[n].replay()
            expected = (value @ weight.cpu()).relu() @ weight.cpu()
            wrong += [] if torch.allclose(target.cpu(), expected, atol=1e-4) else [n]
        alive = software_acl.live_graphs()
        for graph in graphs.values():
            graph.reset()
        del graphs, graph
        torch.npu.synchronize(); torch.npu.empty_cache()
        print(json.dumps([wrong, alive, software_acl.live_graphs(), software_acl.device_bytes() - before]))
    """
    result = software_acl.run(script)
    assert result.last == [[], 5, 0, 0]
    assert len(result.trace.captures) == 5
    assert len(result.trace.replays) == len(result.trace.of("replayed")) == 7


FAULTS = {
    "item": ("(x + 1).sum().item()", 107027),
    "device_synchronize": ("torch.npu.synchronize()", 107027),
    "stream_synchronize": ("torch.npu.current_stream().synchronize()", 107027),
    "stream_query": ("torch.npu.current_stream().query()", 107027),
    "synchronous_copy": ("torch.ones(4).to('npu')", 107030),
    "pageable_copy": ("x.copy_(torch.ones(4), non_blocking=True); torch.npu.current_stream().synchronize()", 107041),
    "group_in_group": ("begin(torch.npu.current_stream()); begin(torch.npu.current_stream())", 107033),
    "open_group": ("begin(torch.npu.current_stream()); x + 1; torch.npu.current_stream()", 107033),
    "fork_without_join": ("side.wait_stream(torch.npu.current_stream()); on(side, lambda: x + 1)", 107025),
    "uncaptured_dependency": (
        "on(side, lambda: event.record(side)); event.wait(torch.npu.current_stream())",
        107022,
    ),
    "nested_replay": ("other.replay()", 107030),
}


def test_what_a_capture_forbids_has_its_documented_code(software_acl: Any) -> None:
    """All in one process: without torch_npu's task queue an error is raised where it happens and spoils nothing."""
    attempts = [
        f"""
software_acl.mark({fault!r})
try:
    with torch.npu.graph(torch.npu.NPUGraph()):
        y = x * 2
        {statement}
except RuntimeError as error:
    print({fault!r})
"""
        for fault, (statement, _) in FAULTS.items()
    ]
    script = f"""
import torch, torch_npu, software_acl
x = torch.ones(4, device="npu")
side, event, begin = torch.npu.Stream(), torch.npu.Event(), torch.npu.graph_task_group_begin
def on(stream, function):
    with torch.npu.stream(stream):
        function()
other = torch.npu.NPUGraph()
with torch.npu.graph(other):
    x + 1
{"".join(attempts)}
software_acl.mark("end")
with torch.npu.graph(torch.npu.NPUGraph()):  # after all that a capture still works
    x + 1
print(software_acl.live_graphs())
"""
    result = software_acl.run(script, env={"TASK_QUEUE_ENABLE": "0"})
    assert set(FAULTS) <= set(result.stdout.split())
    marks = [*FAULTS, "end"]
    for fault, following in pairwise(marks):
        part = result.trace.between(fault, following)
        assert FAULTS[fault][1] in part.error_codes, fault
        assert len(part.of("capture_begin")) == len(part.of("capture_end")) == 1, fault
    assert result.last == 1


def test_task_updates(software_acl: Any) -> None:
    """Parameters of a captured task change only by an update; an update with too few or other operators is refused."""
    script = """
        import json, torch, torch_npu
        x, y = torch.ones(4, device="npu"), torch.zeros(4, device="npu")
        graph, update = torch.npu.NPUGraph(), torch.npu.Stream()
        factor, seen = 2.0, []
        with torch.npu.graph(graph):
            stream = torch.npu.current_stream()
            torch.npu.graph_task_group_begin(stream)
            torch.mul(x, factor, out=y)
            torch.add(y, 1.0, out=y)
            handle = torch.npu.graph_task_group_end(stream)
        def replay():
            graph.replay(); torch.npu.synchronize(); seen.append(y.tolist()[0])
        replay()
        factor = 5.0
        replay()
        with torch.npu.stream(update):
            torch.npu.graph_task_update_begin(update, handle)
            torch.mul(x, factor, out=y)
            torch.add(y, 3.0, out=y)
            torch.npu.graph_task_update_end(update)
        update.synchronize()
        replay()
        for operators in ([], [lambda: torch.sub(x, 1.0, out=y), lambda: torch.sub(x, 1.0, out=y)]):
            try:
                with torch.npu.stream(update):
                    torch.npu.graph_task_update_begin(update, handle)
                    for operator in operators:
                        operator()
                    torch.npu.graph_task_update_end(update)
            except RuntimeError as error:
                seen.append([code for code in ("507000", "107040") if code in str(error)])
        replay()
        print(json.dumps(seen))
    """
    result = software_acl.run(script)
    assert result.last == [3.0, 3.0, 8.0, ["507000"], ["107040"], 8.0]
    (update,) = result.trace.updates
    assert update["tasks"] == 2
    assert len(result.trace.replays) == 4


def test_an_external_event_holds_a_replay(software_acl: Any) -> None:
    """The replay waits until the event is recorded, each time; nothing else can let it go on."""
    script = """
        import json, time, torch, torch_npu
        x, y = torch.ones(4, device="npu"), torch.zeros(4, device="npu")
        graph, event, side = torch.npu.NPUGraph(), torch.npu.ExternalEvent(), torch.npu.Stream()
        with torch.npu.graph(graph):
            event.wait(torch.npu.current_stream())
            event.reset(torch.npu.current_stream())
            y.add_(x)
        stream, waits = torch.npu.current_stream(), []
        for _ in range(3):
            graph.replay()
            time.sleep(0.2)
            waits.append(not stream.query())
            event.record(side)
            stream.synchronize()
        print(json.dumps([waits, y.tolist()]))
    """
    result = software_acl.run(script)
    assert result.last == [[True] * 3, [3.0] * 4]


def test_an_update_that_never_comes_can_be_bounded(software_acl: Any) -> None:
    script = """
        import os, time, torch, torch_npu
        x = torch.ones(4, device="npu")
        graph, event = torch.npu.NPUGraph(), torch.npu.ExternalEvent()
        with torch.npu.graph(graph):
            event.wait(torch.npu.current_stream())
            event.reset(torch.npu.current_stream())
            x.add_(1)
        graph.replay()
        deadline = time.monotonic() + 1.0
        while not torch.npu.current_stream().query() and time.monotonic() < deadline:
            time.sleep(0.01)
        print("blocked" if not torch.npu.current_stream().query() else "done", flush=True)
        os._exit(0)
    """
    result = software_acl.run(script, timeout=60)
    assert result.stdout.strip().splitlines()[-1] == "blocked"


def test_forked_and_joined_streams(software_acl: Any) -> None:
    script = """
        import json, torch, torch_npu
        x, y = torch.arange(4.0).npu(), torch.zeros(4, device="npu")
        graph, side = torch.npu.NPUGraph(), torch.npu.Stream()
        with torch.npu.graph(graph):
            main = torch.npu.current_stream()
            a = x + 1
            side.wait_stream(main)
            with torch.npu.stream(side):
                b = a * 10
            c = a * 100
            main.wait_stream(side)
            y.copy_(b + c)
        graph.replay()
        print(json.dumps(y.tolist()))
    """
    result = software_acl.run(script)
    assert result.last == [110.0 * (i + 1) for i in range(4)]
    assert result.trace.captures[0]["tasks"] == 5


def test_a_capture_that_fails_leaves_none_open(software_acl: Any) -> None:
    """The third of five captures meets the end of the stream resources; those before it still replay."""
    script = """
        import json, torch, torch_npu, software_acl
        x, graphs, codes = torch.ones(4, device="npu"), [], []
        for size in range(5):
            graph = torch.npu.NPUGraph()
            try:
                with torch.npu.graph(graph):
                    x.add_(1)
                graphs.append(graph)
            except RuntimeError as error:
                codes.append("207008" in str(error))
        for graph in graphs:
            graph.replay()
        torch.npu.synchronize()
        print(json.dumps([len(graphs), codes, x.tolist()[0], software_acl.live_graphs()]))
    """
    result = software_acl.run(script, env={"SOFTWARE_ACL_GRAPHS": "2"})
    assert result.last == [2, [True] * 3, 3.0, 2]


def test_a_kernel_that_fails_is_reported_by_the_next_wait(software_acl: Any) -> None:
    script = """
        import torch, torch_npu
        weight, ids = torch.ones(4, 2, device="npu"), torch.tensor([1, 9]).npu()
        torch.nn.functional.embedding(ids, weight)
        torch.npu.synchronize()
    """
    result = software_acl.run(script, check=False)
    assert result.returncode != 0
    assert "507015" in result.stderr
    assert result.trace.of("kernel_failed")[0]["op"] == "aclnnEmbedding"
