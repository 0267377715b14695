"""Paged fused attention of the real torch_npu: its numbers, its documented limits, and what a capture freezes."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.software_acl
SCRIPTS = Path(__file__).parent / "scripts"
TOLERANCE = 0.015

CALL = """
import torch, torch_npu

def call(layout="BNSD", rows=2, queries=1, heads=4, kv_heads=2, head_dim=512, block=128, width=2, dtype=torch.float16,
         lengths=(130, 7), flat=True, change=None, **options):
    shapes = {"BNSD": (rows, heads, queries, head_dim), "BSND": (rows, queries, heads, head_dim),
              "BSH": (rows, queries, heads * head_dim), "TND": (rows * queries, heads, head_dim)}
    query = torch.randn(shapes[layout]).to(dtype).npu()
    cache = (rows * width, block, kv_heads * head_dim) if flat else (rows * width, kv_heads, block, head_dim)
    keys, values = (torch.randn(cache).to(dtype).npu() for _ in range(2))
    table = torch.arange(rows * width, dtype=torch.int32).view(rows, width).npu()
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()
    arguments = {"actual_seq_lengths_kv": list(lengths), "block_table": table, "num_heads": heads,
                 "num_key_value_heads": kv_heads, "input_layout": layout, "block_size": block}
    if layout == "TND":
        arguments["actual_seq_lengths"] = [queries * (row + 1) for row in range(rows)]
    if queries > 1:
        arguments.update(sparse_mode=3, atten_mask=mask)
    arguments.update(options)
    if change is not None:
        query, keys, values = change(query, keys, values)
    out, _ = torch_npu.npu_fused_infer_attention_score(query, keys, values, **arguments)
    torch.npu.synchronize()
    return out
"""
A2, A3, A5 = "Ascend910B3", "Ascend910_9391", "Ascend950PR_9599"


def test_numbers(software_acl: Any) -> None:
    """float16 and bfloat16, one and four queries, heads of 256 and 512, full and sliding; eager and captured."""
    result = software_acl.run(SCRIPTS / "attention.py")
    eager, captured = result.last["eager"], result.last["captured"]
    assert len(eager) == 12
    assert max(eager.values()) < TOLERANCE
    assert captured["captured"] < TOLERANCE
    assert captured["updated"] < TOLERANCE
    assert captured["stale"] > 0.1  # lengths are host parameters: without an update they stay what they were
    (capture,) = result.trace.captures
    assert capture["ops"]["aclnnFusedInferAttentionScoreV3"] == 1
    assert len(result.trace.replays) == len(result.trace.of("replayed")) == 3
    assert [update["op"] for update in result.trace.updates] == ["aclnnFusedInferAttentionScoreV3"]


LEGAL = {
    "bnsd_one_query": {},
    "bnsd_verification": {"queries": 4},
    "bnsd_blocked_cache": {"flat": False},
    "bnsd_small_blocks_one_query": {"block": 16, "width": 9},
    "tnd_128": {"layout": "TND", "queries": 4, "head_dim": 128},
    "tnd_192": {"layout": "TND", "queries": 4, "head_dim": 192},
    "bsnd": {"layout": "BSND", "queries": 4},
    "bsh": {"layout": "BSH", "queries": 4},
}
ILLEGAL = {
    "tnd_512": ({"layout": "TND", "queries": 4}, 561002, "q_rope and k_rope should not be null"),
    "tnd_256": ({"layout": "TND", "queries": 4, "head_dim": 256}, 561002, "must be 192/128/64"),
    "small_blocks_verification": ({"queries": 4, "block": 64, "width": 3}, 561002, "multiple of 128"),
    "odd_blocks": ({"block": 24, "width": 9}, 561002, "multiple of 16"),
    "large_blocks": ({"block": 1024}, 561002, "at most 512"),
    "head_size": ({"head_dim": 40}, 561002, "D is 40"),
    "head_size_above": ({"head_dim": 528}, 561002, "D is 528"),
    "group": ({"heads": 66, "kv_heads": 1, "head_dim": 16}, 561002, "above 64"),
    "heads": ({"heads": 258, "kv_heads": 6, "head_dim": 16}, 561002, "num_heads is 258"),
    "no_lengths": ({"actual_seq_lengths_kv": None}, 561002, "mandatory"),
    "few_lengths": ({"rows": 3, "lengths": (5, 7)}, 561002, "2 values for batch 3"),
    "negative_length": ({"lengths": (5, -1)}, 561002, "[1] is -1"),
    "narrow_table": ({"lengths": (5, 257)}, 561002, "too narrow: row 1 has 257"),
    "block_size": ({"block_size": 256}, 561002, "blocks of 128"),
    "tnd_total": (
        {"layout": "TND", "queries": 4, "head_dim": 128, "actual_seq_lengths": [4, 7]},
        561002,
        "T is 8",
    ),
    "mask_size": (
        {"queries": 4, "atten_mask": "torch.ones(4, 256, dtype=torch.bool).npu()"},
        561002,
        "2048 x 2048",
    ),
    "mask_type": (
        {"queries": 4, "atten_mask": "torch.ones(2048, 2048).npu()"},
        561002,
        "bool, int8 or uint8",
    ),
    "float32": ({"dtype": "torch.float32"}, 161002, "only float16 and bfloat16"),
    "strided_query": (
        {"queries": 4, "change": "lambda q, k, v: (q.transpose(1, 2).contiguous().transpose(1, 2), k, v)"},
        161002,
        "query is not contiguous",
    ),
    "strided_cache": (
        {"change": "lambda q, k, v: (q, torch.cat([k, v], -1)[..., :1024], v)"},
        161002,
        "key is not contiguous",
    ),
    "types": ({"change": "lambda q, k, v: (q, k.bfloat16(), v)"}, 161002, "differ in type"),
}


def _arguments(options: dict[str, Any]) -> str:
    """Keyword arguments as source text; some values are expressions."""
    expressions = ("torch.", "lambda ")
    shown = (
        f"{name}={value if isinstance(value, str) and value.startswith(expressions) else repr(value)}"
        for name, value in options.items()
    )
    return ", ".join(shown)


@pytest.mark.parametrize("soc", [A2, A3])
def test_legal_calls(software_acl: Any, soc: str) -> None:
    lines = [f"call({_arguments(options)})" for options in LEGAL.values()]
    result = software_acl.run(CALL + "\n".join(lines), env={"SOFTWARE_ACL_SOC": soc})
    assert result.trace.launches["aclnnFusedInferAttentionScoreV3"] == len(LEGAL)


def test_illegal_calls_have_their_code_and_reason(software_acl: Any) -> None:
    """All in one process: a refused call leaves nothing behind, since it never reaches a stream."""
    lines = [
        f"""
try:
    call({_arguments(options)})
    print(json.dumps([{name!r}, 0, "no error"]))
except RuntimeError as error:
    print(json.dumps([{name!r}, {code} if "error code is {code}" in str(error) else -1, str(error)]))
"""
        for name, (options, code, _) in ILLEGAL.items()
    ]
    result = software_acl.run("import json\n" + CALL + "".join(lines))
    import json

    found = {line[0]: line[1:] for line in map(json.loads, result.stdout.strip().splitlines()[-len(ILLEGAL) :])}
    wrong = {
        name: found[name]
        for name, (_, code, reason) in ILLEGAL.items()
        if found[name][0] != code or reason not in found[name][1]
    }
    assert wrong == {}


def test_the_field_failure_inside_a_capture(software_acl: Any) -> None:
    """TND with D = 512 while capturing: 561002, the capture is not usable, nothing stays open."""
    script = (
        CALL.replace("    torch.npu.synchronize()\n", "")
        + """
call(queries=4); torch.npu.synchronize()
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    call(layout="TND", queries=4)
"""
    )
    result = software_acl.run(script.replace(".npu()", ".to('npu')"), check=False)
    assert result.returncode != 0
    assert not result.trace.replays


@pytest.mark.parametrize(
    ("options", "soc"),
    [
        ({"layout": "TND", "queries": 4}, A5),
        ({"queries": 4, "block": 1024}, A5),
        ({"heads": 66, "kv_heads": 1, "head_dim": 16}, A5),
    ],
)
def test_limits_of_another_soc(software_acl: Any, options: dict[str, Any], soc: str) -> None:
    result = software_acl.run(f"{CALL}\ncall({_arguments(options)})", env={"SOFTWARE_ACL_SOC": soc})
    assert sum(result.trace.launches[f"aclnnFusedInferAttentionScoreV{n}"] for n in (3, 5)) == 1


def test_switches(software_acl: Any) -> None:
    """float32 and TND with D = 256 are refused unless a test asks for them by name."""
    script = CALL + "call(dtype=torch.float32)\ncall(layout='TND', queries=4, head_dim=256)\n"
    software_acl.run(script, env={"SOFTWARE_ACL_FP32": "1", "SOFTWARE_ACL_TND_256": "1"})
