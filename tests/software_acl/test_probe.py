"""``gemma-npu probe`` on the real torch_npu: it finds the documented rows, and what is unlike them."""

import json
from pathlib import Path
from typing import Any

import pytest

from gemma_npu_compile.capabilities import AttentionCall, platform
from gemma_npu_compile.probe_findings import questions

pytestmark = pytest.mark.software_acl
NOT_EMULATED = {"npu_gelu_mul": "aclnnGeluMul", "npu_apply_rotary_pos_emb": "aclnnApplyRotaryPosEmb"}
RUN = """
import json, sys, torch, torch_npu
from gemma_npu_compile.capabilities import platform
from gemma_npu_compile.probe import probe
from gemma_npu_compile.probe_findings import questions
"""


def test_the_documented_rows(software_acl: Any, tmp_path: Path) -> None:
    """Every attention row of the table as it stands, tried eagerly and captured; operators as far as they exist."""
    out = tmp_path / "capabilities.json"
    script = """
        import sys, torch, torch_npu
        from gemma_npu_compile.cli import main
        sys.exit(main(["probe", "--out", sys.argv[1], "--json"]))
    """
    result = software_acl.run(script, str(out), timeout=400)
    answer, table = result.last, platform("ascend910b")
    assert [answer[key] for key in ("soc", "cann", "torch_npu", "platform")] == [
        "Ascend910B3",
        "8.5.0",
        "2.13.0",
        "ascend910b",
    ]
    assert (answer["tried"], answer["untried"]) == (len(questions(table)), [])
    assert {each["call"].split(",")[0] for each in answer["differences"]} == set(NOT_EMULATED)

    data = json.loads(out.read_text())
    assert data["attention"] == []
    assert {row["name"]: row["legal"] for row in data["operators"]} == dict.fromkeys(NOT_EMULATED, False)
    assert all(NOT_EMULATED[row["name"]] in row["error"] for row in data["operators"])
    attention = [each for each in data["probe"]["answers"] if "attention" in each]
    legal = [each for each in attention if table.judge(AttentionCall(**each["attention"])).legal]
    assert all(each["eager"] == each["captured"] == "" for each in legal)
    assert all(each["eager"] and each["captured"] for each in attention if each not in legal)
    field = {"layout": "TND", "head_dim": 512, "q_len": 4, "block_size": 128, "mask": "causal"}
    (tnd,) = [each for each in attention if field.items() <= each["attention"].items()]
    assert "q_rope and k_rope should not be null" in tnd["eager"]
    band = {"layout": "BNSD", "head_dim": 256, "q_len": 1, "block_size": 128, "mask": "band"}
    (ignored,) = [each for each in attention if band.items() <= each["attention"].items()]
    assert "wrong result" in ignored["eager"], "one query ignores a band: no error, another result"
    captured = [each for each in result.trace.captures if each["tasks"]]
    worked = [each for each in data["probe"]["answers"] if each["captured"] == ""]
    assert len(captured) >= len(worked) > 180
    assert len(result.trace.replays) >= 2 * len(worked), "each capture is replayed with other contents, twice"


def test_one_difference(software_acl: Any, tmp_path: Path) -> None:
    """A CANN build that takes packed queries with heads of 256: exactly those rows change."""
    out = tmp_path / "capabilities.json"
    script = (
        RUN
        + """
from pathlib import Path
table = platform("ascend910b")
asked = [each for each in questions(table) if each.attention and each.attention.layout == "TND"]
findings = probe(table, "npu", asked=asked)
findings.write(Path(sys.argv[1]))
print(json.dumps([each.to_dict() for each in findings.differences]))
"""
    )
    found = software_acl.run(script, str(out), env={"SOFTWARE_ACL_TND_256": "1"}, timeout=300).last
    assert {each["attention"]["head_dim"] for each in found} == {256}
    assert len(found) == 7  # dense: 1 and 4 queries; paged: two and three masks
    before, after = platform("ascend910b"), platform("ascend910b", out)
    for head_dim in (64, 128, 192, 256, 512):
        for q_len, mask in ((1, "none"), (1, "band"), (4, "causal"), (4, "band"), (4, "full")):
            call = AttentionCall("TND", head_dim, q_len, 4, 2, 128, mask)
            moved = head_dim == 256 and (q_len, mask) not in ((1, "band"), (4, "full"))
            assert after.judge(call).legal == (before.judge(call).legal or moved), call
    assert "Ascend910B3" in after.judge(AttentionCall("TND", 256, 4, 4, 2, 128, "causal")).source


def test_a_planted_hang_and_a_planted_crash(software_acl: Any, tmp_path: Path) -> None:
    """Real processes with the real torch_npu: one that never returns, one that dies inside an operator."""
    planted = tmp_path / "planted.py"
    planted.write_text(
        """
import ctypes, sys, time
from gemma_npu_compile import probe_cases
honest = probe_cases.attempt
def attempt(trial, device, captured):
    if trial.options.get("input_layout") == "BSH" and captured:
        time.sleep(600)
    if trial.options.get("input_layout") == "BSND" and not captured:
        ctypes.string_at(0)
    honest(trial, device, captured)
probe_cases.attempt = attempt
sys.exit(probe_cases.main(int(sys.argv[1])))
"""
    )
    script = (
        RUN
        + """
asked = [q for q in questions(platform("ascend910b")) if q.attention and q.attention.head_dim == 512
         and q.attention.q_len == 4 and q.attention.block_size == 128 and q.attention.mask == "causal"]
findings = probe(platform("ascend910b"), "npu", asked=asked, timeout=20, command=[sys.executable, sys.argv[1]])
print(json.dumps({q.attention.layout: [a.eager, a.captured] for q, a in findings.answers.items()}))
"""
    )
    found = software_acl.run(script, str(planted), timeout=300).last
    assert list(found) == ["TND", "BNSD", "BSND", "BSH"]
    assert found["BNSD"] == ["", ""]
    assert all("561002" in each for each in found["TND"])
    assert "the process died (signal SIGSEGV)" in found["BSND"][0]
    assert found["BSND"][1] == ""
    assert found["BSH"] == ["", "no answer within 20 s"]
