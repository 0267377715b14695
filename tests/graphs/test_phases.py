"""Ranges a profiler shows of a replay, and that nothing is spent on them without one."""

import torch
from torch.fx import Graph

from gemma_npu_compile.graphs import host
from gemma_npu_compile.graphs.phases import phase_of


def chain(*modules: str | None) -> list[torch.fx.Node]:
    graph = Graph()
    value = graph.placeholder("x")
    for module in modules:
        value = graph.call_function(torch.ops.aten.neg.default, (value,))
        if module is not None:
            value.meta["nn_module_stack"] = {"0": ("L['self']", None), "1": (f"L['self'].{module}", None)}
    graph.output((value,))
    return list(graph.nodes)


def test_phases_end_with_the_last_node_of_their_model():
    nodes = chain(None, "assistant.norm", None, "embed_tokens", "assistant.head", None, "target.norm", None, None)
    names = [phase_of(nodes)[node.name] for node in nodes if node.op == "call_function"]
    assert names == ["draft"] * 5 + ["verify"] * 2 + ["accept"] * 2


def test_without_an_assistant_there_is_no_draft_and_without_models_one_phase():
    assert set(phase_of(chain("target.norm", None)).values()) == {"verify", "accept"}
    assert set(phase_of(chain("other", None)).values()) == {"graph"}


@torch.no_grad()
def test_a_profiled_replay_has_ranges_and_another_has_none(fresh_dynamo, monkeypatch):
    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.assistant, self.target = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.target(self.assistant(x)).argmax(-1)

    run = torch.compile(Step().eval(), backend="gemma_npu", options={"platform": "cpu"})
    x = torch.randn(3, 4)
    expected = run(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert torch.equal(run(x), expected)
    counts = {e.key: e.count for e in profile.key_averages()}
    assert {name: counts.get(name) for name in ("update", "replay", "draft", "verify", "accept")} == dict.fromkeys(
        ("update", "replay", "draft", "verify", "accept"), 1
    )
    monkeypatch.setattr(host.HostGraph, "_replay_in_ranges", lambda self: 1 / 0)
    assert torch.equal(run(x), expected)
