"""``diff``: what it calls a difference, and its exit codes."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from gemma_npu_compile.cli import main

GRAPH: dict[str, Any] = {
    "platform": "ascend910b",
    "passes": [{"name": "fuse_rotary", "changed": 4, "nodes": 90, "launches": 40, "left": {}, "seconds": 0.1}],
    "kinds": {"aten.mm": 7, "npu.npu_rotary_mul": 4},
    "attention": [
        {
            "phase": "verify",
            "layer": "target.layers.1",
            "layout": "BNSD",
            "heads": 8,
            "head_dim": 512,
            "window": None,
            "scale": 1.0,
            "group": "g1",
            "block_table": "verify_1",
            "kv_len_source": "args[2]",
            "lengths": "bucket",
        }
    ],
    "inputs": [
        {
            "label": "args[3][1]",
            "phase": "verify",
            "layer": "target.layers.1",
            "role": "block_table",
            "group": "g1",
            "shape": ["s0", 9],
            "dtype": "int32",
            "address": "buffer",
            "buffer": "block_table.g1",
            "bytes": 288,
        }
    ],
    "sizes": [2, 4],
    "memory": {"intermediates": 4096},
    "host_parameters": [{"name": "kv_lens", "inputs": ["args[2]"], "tasks": ["a"], "bucket": 128, "capacity": 512}],
    "fallbacks": {},
    "seconds": {"aot": 1.0},
    "replays": 3,
}


def write(directory: Path, *graphs: dict[str, Any]) -> str:
    directory.mkdir()
    (directory / "plan.json").write_text(json.dumps({"graphs": graphs}))
    return str(directory)


def diff(capsys, before: str, after: str) -> tuple[int, list[str]]:
    code = main(["diff", before, after, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["equal"] == (code == 0)
    return code, [line for each in answer["differences"] for line in each["lines"]]


def test_equal_dumps_and_times(capsys, tmp_path):
    other = copy.deepcopy(GRAPH)
    other["seconds"]["aot"] = 9.0
    other["passes"][0]["seconds"] = 9.0
    other["replays"] = 9
    a, b = write(tmp_path / "a", GRAPH), write(tmp_path / "b", other)
    assert diff(capsys, a, b) == (0, [])
    assert main(["diff", a, b]) == 0
    assert capsys.readouterr().out == "no differences\n"


CHANGES = [
    (lambda g: g.update(platform="cpu"), "compiled for platform: ascend910b -> cpu"),
    (lambda g: g["passes"][0].update(changed=3), "pass fuse_rotary: changed 4 -> 3"),
    (lambda g: g["passes"].clear(), "pass fuse_rotary: gone"),
    (lambda g: g["kinds"].update({"aten.mm": 8}), "nodes of kind aten.mm: 7 -> 8"),
    (lambda g: g["kinds"].update({"aten.add": 1}), "nodes of kind aten.add: new, 1"),
    (lambda g: g["attention"][0].update(layout="TND"), "attention verify/target.layers.1: layout BNSD -> TND"),
    (lambda g: g["attention"][0].update(window=64), "attention verify/target.layers.1: window none -> 64"),
    (lambda g: g["attention"][0].update(group="g0"), "attention verify/target.layers.1: group g1 -> g0"),
    (
        lambda g: g["inputs"][0].update(buffer="block_table.g0"),
        "input args[3][1] verify/target.layers.1: buffer block_table.g1 -> block_table.g0",
    ),
    (lambda g: g.update(sizes=[2, 8]), "captured rows: 2, 4 -> 2, 8"),
    (lambda g: g["memory"].update(intermediates=8192), "memory intermediates: 4.0 KiB -> 8.0 KiB"),
    (lambda g: g["host_parameters"][0].update(bucket=None), "host list kv_lens: bucket 128 -> none"),
    (lambda g: g["fallbacks"].update({"too many rows": 2}), "fallback too many rows: new, 2"),
]


@pytest.mark.parametrize(("change", "line"), CHANGES)
def test_a_change_is_named_with_both_values(capsys, tmp_path, change, line):
    other = copy.deepcopy(GRAPH)
    change(other)
    assert diff(capsys, write(tmp_path / "a", GRAPH), write(tmp_path / "b", other)) == (1, [line])


def test_another_number_of_graphs(capsys, tmp_path):
    a, b = write(tmp_path / "a", GRAPH), write(tmp_path / "b", GRAPH, GRAPH)
    assert diff(capsys, a, b) == (1, ["only in the second dump"])
    assert main(["diff", b, a]) == 1
    assert capsys.readouterr().out == "graph 1, graphs\n  only in the first dump\n"


def test_a_directory_without_a_dump_is_a_mistake(capsys, tmp_path):
    a = write(tmp_path / "a", GRAPH)
    assert main(["diff", a, str(tmp_path)]) == 2
    assert "is not a dump" in capsys.readouterr().err
    (tmp_path / "plan.json").write_text("{")
    assert main(["diff", a, str(tmp_path)]) == 2
    assert "is not a dump's plan" in capsys.readouterr().err
