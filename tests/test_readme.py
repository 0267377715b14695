"""The README's Python runs as it stands."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.slow
def test_the_examples_run(make_pair):
    target, assistant = make_pair(sliding_window=64)  # a static cache rolls back within the window
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 5
    ids = torch.randint(1, 128, (2, 9))
    names = {
        "target": target,
        "assistant": assistant,
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "prompt_a": ids[0],
        "prompt_b": ids[1, :4],
    }
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    greedy = target.generate(ids[:1], max_new_tokens=16, do_sample=False)
    assert torch.equal(names["speculated"], greedy)
    report = names["speculate"].report
    assert (report.totals()["fallbacks"], report.prefills) == ({}, 1)
    assert report.totals()["replays"] > 4 * 3
    assert names["stats"].report.totals()["fallbacks"] == {}
    assert names["ids"].shape == (2, 9 + 20)
    assert len(names["first_row"]) == int(names["out"].accepted[0]) + 1
    assert names["engine"].report.totals()["replays"] >= 16


def test_the_two_commands_are_what_ci_runs():
    text = README.read_text(encoding="utf-8")
    assert "pip install -e . && gemma-npu run\n" in text
    assert "pip install -e '.[test]' && pytest -n 2 --dist loadfile\n" in text
    assert (
        "\npip install -e '.[test]' && pytest -n 2 --dist loadfile || exit 1\n"
        in (README.parent / ".ci" / "run").read_text()
    )


def test_every_pass_is_described():
    from gemma_npu_compile.passes import PASSES

    table = re.findall(r"^\| `(\w+)` \|", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert table == list(PASSES)
