"""The published pairs as shapes: their parameters are as many as published, and a folded one is planned."""

import json

import pytest
import torch

from gemma_npu_compile.cli import main
from gemma_npu_compile.shapes import SHAPES, build

# in millions: of the model cards; text models without what serves images and sound, so upper bounds where those count
PUBLISHED = {
    "gemma-4-31b": (30700, 470),
    "26b-a4b": (25200, None),
    "12b": (11950, 423),
    "e4b": (None, 78.8),
    "e2b": (None, None),
}


def millions(model: torch.nn.Module) -> float:
    return sum(p.numel() for p in model.parameters()) / 1e6


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_shape_has_the_published_number_of_parameters(name):
    target, assistant = build(name, torch.bfloat16)
    assert {p.device.type for p in target.parameters()} == {"meta"}
    expected = PUBLISHED[name]
    if expected[0] is not None:
        assert millions(target) == pytest.approx(expected[0], rel=0.01)
    if expected[1] is not None:
        assert millions(assistant) == pytest.approx(expected[1], rel=0.005)
    assert target.config.hidden_size == assistant.config.backbone_hidden_size


def kinds(config) -> list[tuple[str, bool]]:
    modes = config.kv_sharing_modes
    return [(kind, mode == "reuse") for kind, mode in zip(config.layer_types, modes, strict=True)]


@pytest.mark.parametrize("name", list(SHAPES))
def test_folded_it_has_one_layer_of_each_kind(name):
    whole, folded = build(name, torch.bfloat16)[0].config, build(name, torch.bfloat16, fold=True)[0].config
    assert sorted(kinds(folded)) == sorted(set(kinds(whole)))


def test_an_unknown_shape_is_refused_with_the_nearest(capsys, tmp_path):
    assert main(["dump", "--shapes", "gemma-4-32b", "--out", str(tmp_path / "d")]) == 2
    assert "did you mean 'gemma-4-31b'?" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma-4-31b", "26b-a4b", "e2b"])
def test_a_folded_shape_is_traced_and_planned(name, capsys, tmp_path):
    out = tmp_path / "d"
    assert main(["dump", "--shapes", name, "--fold", "--out", str(out), "--num-draft-tokens", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"out": str(out), "graphs": 1}
    (graph,) = json.loads((out / "plan.json").read_text())["graphs"]
    heads = {(a["head_dim"], a["layout"]) for a in graph["attention"]}
    assert heads == {(256, "BNSD"), (512, "BNSD")}
    target, _ = build(name, torch.bfloat16, fold=True)
    layers = target.config.num_hidden_layers
    assert len(graph["attention"]) == 2 + layers
    assert graph["memory"]["intermediates"] > 0
    assert graph["sizes"] == [2, 4]
    assert (graph["replays"], graph["eager_calls"]) == (0, 0)
