"""What goes wrong on a device: named, counted, nothing left open, no memory lost, no hang."""

import textwrap
from typing import Any

import pytest

pytestmark = pytest.mark.software_acl
FP32 = {"SOFTWARE_ACL_FP32": "1"}


def run(software_acl: Any, script: str, env: dict[str, str]) -> Any:
    head = "import gc, json, threading\nimport pairs, torch, software_acl\n"
    head += "import gemma_npu_compile as gnc\nfrom gemma_npu_compile.errors import CaptureError\n"
    return software_acl.run(head + textwrap.dedent(script), env=env, timeout=300)


def test_the_device_runs_out_of_streams_at_the_third_of_five_sizes(software_acl: Any) -> None:
    script = """
        target, assistant = pairs.on_device()
        torch.npu.synchronize()
        options = dict(capture_sizes=(2, 3, 4, 5, 6))
        engine = gnc.Engine(target, assistant, 1, max_rows=6, max_model_len=256,
                            options=gnc.Options(on_fallback="error", **options))
        plain = gnc.Engine(target, assistant, 1, max_rows=6, max_model_len=256, compiled=False)
        given = pairs.prompts(5, 9, 14)
        expected = pairs.tokens(plain, given, 10)
        torch.npu.empty_cache()
        before = torch.npu.memory_reserved()
        try:
            engine.warm_up()
        except CaptureError as error:
            message = str(error)
        live = software_acl.live_graphs()
        torch._dynamo.reset()
        torch.npu.empty_cache()
        left = torch.npu.memory_reserved() - before
        engine = gnc.Engine(target, assistant, 1, max_rows=6, max_model_len=256, options=gnc.Options(**options))
        found = pairs.tokens(engine, given, 10)
        (report,) = engine.report.graphs
        with torch.npu.stream(torch.npu.Stream()):
            graph = torch.npu.NPUGraph()  # no capture is left open: another can be made
            graph.capture_begin()
            torch.ones(4, device="npu") + 1
            graph.capture_end()
        print(json.dumps([message, live, found == expected, report.captures, dict(report.fallbacks), left]))
    """
    result = run(software_acl, script, {**FP32, "SOFTWARE_ACL_GRAPHS": "2"})
    message, live, equal, captures, fallbacks, left = result.last
    assert message.startswith(
        "capture of 4 rows: the device is out of streams or events (207008) with 2 graphs captured"
    )
    assert "capture fewer sizes (capture_sizes)" in message
    assert (live, captures) == (0, 0), "the two graphs that were captured are given back"
    assert equal
    assert left <= 2 << 20, "the pool of the captures before it is given back"
    ((reason, count),) = fallbacks.items()
    assert reason.startswith("capture of 4 rows: the device is out of streams")
    assert count > 5
    begun, ended = result.trace.of("capture_begin"), result.trace.of("capture_end")
    assert len(begun) == len(ended)


def test_a_node_that_cannot_be_captured(software_acl: Any) -> None:
    """An operator the device lacks falls back to the host, which a capture forbids: named, and run uncaptured."""
    script = """
        def fn(x):
            return torch.special.bessel_j0(x + 1) * 2
        compiled = torch.compile(fn, backend="gemma_npu", options={"on_fallback": "error"}, dynamic=False)
        x = torch.ones(4, device="npu")
        try:
            with torch.no_grad():
                compiled(x)
        except CaptureError as error:
            message = str(error)
        torch._dynamo.reset()
        with torch.no_grad():
            report = gnc.explain(fn)(x)
            again = torch.compile(lambda x: x * 3, backend="gemma_npu", dynamic=False)(x)
        print(json.dumps([message, report.totals(), again.tolist(), software_acl.live_graphs()]))
    """
    result = run(software_acl, script, {"TASK_QUEUE_ENABLE": "0"})
    message, totals, again, live = result.last
    assert message.startswith("capture: the capture failed at or shortly before special_bessel_j0")
    assert totals["captures"] == 0
    assert list(totals["fallbacks"].values()) == [1]
    assert again == [3.0] * 4
    assert live == 1


def test_inputs_on_two_devices(software_acl: Any) -> None:
    script = """
        target, assistant = pairs.on_device()
        cache = gnc.PagedKVCache(target.config, max_rows=2, max_model_len=256, dtype=target.dtype, device="npu:1")
        try:
            gnc.DraftVerifyStep(target, assistant, cache, 1)
        except ValueError as error:
            message = str(error)
        def fn(x, scale):
            return x * scale
        compiled = torch.compile(fn, backend="gemma_npu", dynamic=False)
        with torch.no_grad(), gnc.report.collect() as report:
            first = compiled(torch.ones(4, device="npu"), torch.tensor(2.0)).tolist()
            second = compiled(torch.ones(4, device="npu"), torch.tensor(5.0)).tolist()
        print(json.dumps([message, first, second, report.totals()]))
    """
    result = run(software_acl, script, {**FP32, "SOFTWARE_ACL_DEVICES": "2"})
    message, first, second, totals = result.last
    assert "the cache is torch.float32 on npu:1, the target torch.float32 on npu:0" in message
    assert (first, second) == ([2.0] * 4, [5.0] * 4), "a number on the host is not frozen"
    ((reason, count),) = totals["fallbacks"].items()
    assert count == 2
    assert "input scale is on cpu, the graph on npu:0" in reason


def test_threads_reset_and_memory(software_acl: Any) -> None:
    """A replay from another thread; a reset while graphs exist; a wider table; and no byte more after three rounds."""
    script = """
        target, assistant = pairs.on_device()
        engine = gnc.Engine(target, assistant, 1, max_rows=4, max_model_len=256)
        given, found = pairs.prompts(5, 9), []
        expected = pairs.tokens(engine, given, 12)
        worker = threading.Thread(target=lambda: found.append(pairs.tokens(engine, given, 12)))
        worker.start(); worker.join()
        state = engine.prefill(given)
        wide = tuple(torch.cat([t, t], 1) for t in engine.cache.block_tables(state.rows))
        software_acl.mark("wide")
        try:
            engine._run("greedy").call(state.token, state.hidden, state.seq_len, wide)
        except (ValueError, RuntimeError) as error:
            message = str(error)
        software_acl.mark("wide end")
        for row in state.rows:
            engine.cache.release(row)
        live, sizes = [software_acl.live_graphs()], []
        for _ in range(3):
            torch._dynamo.reset()
            live.append(software_acl.live_graphs())
            found.append(pairs.tokens(engine, given, 12))
            gc.collect()  # Dynamo's code lies in cycles
            torch.npu.synchronize()
            sizes.append(torch.npu.memory_allocated())
        print(json.dumps([[each == expected for each in found], message, live, sizes]))
    """
    result = run(software_acl, script, FP32)
    equal, message, live, sizes = result.last
    assert equal == [True] * 4
    assert "blocks wide" in message
    assert not result.trace.between("wide", "wide end").replays
    assert live == [3] + [0] * 3
    assert sizes[-1] <= sizes[0]


def test_a_replay_without_an_update_ends(software_acl: Any) -> None:
    """No event waits inside a graph: whoever replays it without refreshing its lengths gets the old ones, no hang."""
    script = """
        target, assistant = pairs.on_device()
        engine = gnc.Engine(target, assistant, 1, max_rows=2, max_model_len=256)
        engine.warm_up()
        (runner,) = engine._run("greedy").backend._runners
        (binding,) = runner._bindings
        for graph in binding.graphs.values():
            assert graph.host, "it has lengths that can be updated"
            for _ in range(3):
                graph.replay()
        torch.npu.synchronize()
        print(json.dumps("done"))
    """
    result = run(software_acl, script, FP32)
    assert result.last == "done"
    assert all(name.startswith("aclnn") for event in result.trace.captures for name in event["ops"])
