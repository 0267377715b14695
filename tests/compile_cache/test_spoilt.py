"""Entries that were not written by this package, or not for this graph: ignored, said once, replaced."""

import base64
import hashlib
import json
import logging
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from gemma_npu_compile.compile_cache import Folder
from gemma_npu_compile.compile_cache.ticket import TRACE_HIT

X = torch.arange(12.0).view(3, 4)


def plus(x):
    return x * 2 + torch.tensor([1.0, 2.0, 3.0, float("inf")]), x.shape[0] * 3


def _call(body: dict) -> dict:
    return next(node for node in body["nodes"] if node["op"] == "call_function")


def _drop_input(header: dict, body: dict) -> None:
    """Read a constant in place of the last input."""
    last = max(i for i, node in enumerate(body["nodes"]) if node["op"] == "placeholder")
    (name,) = body["constants"]
    body["nodes"][last] = {"op": "get_attr", "name": body["nodes"][last]["name"], "target": name, "value": None}


BOMB = base64.b64encode(zlib.compress(bytes(2**20))).decode()

TAMPERED = {
    "namespace": lambda h, b: _call(b).update(target="os::system.default"),
    "function": lambda h, b: _call(b).update(target="builtins.eval"),
    "size": lambda h, b: b["fakes"][0][2].__setitem__(0, "__import__('pathlib').Path('pwned').touch()"),
    "name": lambda h, b: _call(b).update(name="x, __import__('pathlib').Path('pwned').touch()"),
    "keyword": lambda h, b: _call(b)["kwargs"].update({"__import__('pathlib').Path('pwned').touch() or a": 1}),
    "argument": lambda h, b: _call(b).update(args=[{"eval": "1"}]),
    "node after": lambda h, b: _call(b).update(args=[{"n": len(b["nodes"])}, 2]),
    "origin": lambda h, b: _call(b).update(origin={"stack_trace": 10**6}),
    "kind of node": lambda h, b: _call(b).update(op="call_module"),
    "twice the same name": lambda h, b: _call(b).update(name=b["nodes"][0]["name"]),
    "fewer inputs": _drop_input,
    "more inputs": lambda h, b: b["nodes"].insert(-1, {"op": "placeholder", "name": "another", "input": 0}),
    "constant": lambda h, b: next(iter(b["constants"].values())).update(data="!"),
    "constant that unpacks to more": lambda h, b: next(iter(b["constants"].values())).update(data=BOMB),
    "constant of another size": lambda h, b: next(iter(b["constants"].values())).update(shape=[3]),
    "size of a constant": lambda h, b: next(iter(b["constants"].values())).update(shape=[2**30]),
    "no constant": lambda h, b: b["constants"].clear(),
    "results": lambda h, b: b["dynamic"].append(None),
    "static": lambda h, b: b["static"].append(7),
    "symbols": lambda h, b: b.update(symbols=0),
    "no nodes": lambda h, b: b.pop("nodes"),
    "versions": lambda h, b: h["versions"].update(torch="1.0"),
    "header": lambda h, b: h.clear(),
}


OF_THE_PLAN = {
    "no plan": lambda h, b: b.update(plan=None),
    "another record": lambda h, b: b["plan"].update(record="Input"),
    "unknown record": lambda h, b: b["plan"].update(record="Path"),
    "missing field": lambda h, b: b["plan"]["fields"].pop(),
    "type of a field": lambda h, b: b["plan"]["fields"].__setitem__(0, 7),
    "name of an input": lambda h, b: b["plan"]["fields"][0][0]["fields"].__setitem__(0, "another"),
    "source of an input": lambda h, b: b["plan"]["fields"][0][0]["fields"].__setitem__(2, 10**6),
    "dtype of an input": lambda h, b: b["plan"]["fields"][0][-1]["fields"].__setitem__(6, {"dtype": "int8"}),
    "padding of an input": lambda h, b: b["plan"]["fields"][0][0]["fields"].__setitem__(7, 99),
    "shape of a result": lambda h, b: b["plan"]["fields"][1][0]["fields"].__setitem__(0, [1, 1]),
    "results of the plan": lambda h, b: b["plan"]["fields"][1].pop(),
    "passes": lambda h, b: b.update(passes=[b["plan"]]),
}


def tamper(path: Path, change) -> None:
    """Change an entry and give it the right checksum."""
    _, header, body = path.read_text().split("\n")
    header, body = json.loads(header), json.loads(body)
    change(header, body)
    text = f"{json.dumps(header)}\n{json.dumps(body)}"
    path.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _foreign(path: Path) -> None:
    text = "[[\n{"
    path.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


SPOILT = {name: lambda path, change=change: tamper(path, change) for name, change in (TAMPERED | OF_THE_PLAN).items()}
SPOILT |= {"truncated": _truncate, "foreign": _foreign}
CASES = [
    (stage, name) for name in SPOILT for stage in ("trace", "final") if stage == "final" or name not in OF_THE_PLAN
]


@pytest.mark.parametrize(("stage", "name"), CASES)
def test_a_spoilt_entry_is_ignored_with_one_warning_and_replaced(
    folder: Folder, compiled, caplog, monkeypatch, tmp_path, entry, stage: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    compiled(plus, X, dynamic=True)
    path = entry(folder, stage)
    good = path.read_bytes()
    if stage == "trace":
        entry(folder, "final").unlink()
    SPOILT[name](path)
    assert path.read_bytes() != good
    caplog.clear()
    result, report = compiled(plus, X, dynamic=True)
    assert torch.equal(result[0], plus(X)[0])
    assert report.cache == ("stored" if stage == "trace" else TRACE_HIT)
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.message.startswith(f"compile cache: ignoring {path}")
    assert not list(tmp_path.glob("pwned"))
    assert _timeless(path.read_bytes()) == _timeless(good)


def _timeless(entry: bytes) -> Any:
    """An entry without its checksum and the time each pass took."""
    header, body = map(json.loads, entry.split(b"\n")[1:])
    for each in body.get("passes", ()):
        each["fields"][3] = 0.0
    return header, body
