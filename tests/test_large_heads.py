"""A pair with the heads of the real models: 12 layers, 256 and 512, a window of 1024; what an NPU would get of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gemma_npu_compile as gnc
from gemma_npu_compile.graphs.runner import GraphRunner

PATTERN = ("sliding_attention",) * 5 + ("full_attention",)


def engines(pair: Any) -> tuple[gnc.Engine, gnc.Engine]:
    """Compiled for ascend910b, and plain PyTorch."""
    size: dict[str, Any] = {"max_rows": 2, "max_model_len": 2048}
    strict = gnc.Options(on_fallback="error")
    return gnc.Engine(*pair, 3, options=strict, **size), gnc.Engine(*pair, 3, compiled=False, **size)


@pytest.mark.slow
def test_twelve_layers(make_pair: Callable[..., Any], fresh_dynamo: None) -> None:
    pair = make_pair(
        layer_types=PATTERN * 2,
        draft_layer_types=PATTERN[2:],
        head_dim=256,
        global_head_dim=512,
        sliding_window=1024,
        max_position_embeddings=4096,
    )
    ours, plain = engines(pair)
    ours.warm_up()
    (report,) = ours.report.graphs
    print(ours.report)
    attention = report.plan.attention
    assert len(attention) == 3 * 4 + 12
    assert {(a.head_dim, a.layout, a.window, a.lengths) for a in attention} == {
        (256, "BNSD", 1025, "fixed 1152"),
        (256, "BNSD", 1024, "fixed 1280"),
        (512, "BNSD", None, "bucket"),
    }
    full = {f"target.layers.{i}" for i in (5, 11)} | {"assistant.layers.3"}
    for node in attention:
        assert node.group == ("g1" if node.layer in full else "g0"), node
    bound = {i.name: (i.phase, i.layer, i.buffer) for i in report.plan.inputs if i.layer is not None}
    assert len(bound) == len(attention)
    for node in attention:
        assert bound[node.block_table] == (node.phase, node.layer, f"block_table.{node.group}")
    (runner,) = ours._run("greedy").backend._runners
    assert isinstance(runner, GraphRunner)
    fused = torch.ops.npu.npu_fused_infer_attention_score.default
    assert {n.kwargs["input_layout"] for n in runner.gm.graph.find_nodes(op="call_function", target=fused)} == {"BNSD"}
    assert not runner.gm.graph.find_nodes(op="call_function", target=torch.ops.gemma_npu.paged_attention.default)

    prompts = [torch.arange(1, 1 + n) % 127 + 1 for n in (1100, 40)]
    left, right = ours.prefill(prompts), plain.prefill(prompts)
    accepted = 0
    for _ in range(12):
        left, tokens, drafts, _ = ours.decode(left)
        right, expected, expected_drafts, _ = plain.decode(right)
        assert (tokens, drafts) == (expected, expected_drafts)
        accepted += sum(drafts)
    assert 0 < accepted < 2 * 3 * 12, "both outcomes occur"
    assert report.fallbacks == {}
