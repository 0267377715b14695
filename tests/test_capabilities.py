"""The capability table says what the documents say, names its sources, and can be overridden by a file."""

import json

import pytest

from gemma_npu_compile.capabilities import AttentionCall, platform
from gemma_npu_compile.options import PLATFORMS, Options


def call(layout: str, head_dim: int, q_len: int, block_size: int | None = 128, heads: int = 32, kv_heads: int = 4):
    return AttentionCall(layout, head_dim, q_len, heads, kv_heads, block_size)


# (layout, head size, queries, block size) -> legal on 910B, on 950
CASES = [
    (("BNSD", 512, 1, 128), True, True),
    (("BNSD", 512, 4, 128), True, True),
    (("BNSD", 512, 4, 512), True, True),
    (("BNSD", 512, 4, 640), False, True),
    (("BNSD", 512, 4, 64), False, False),
    (("BNSD", 512, 1, 64), True, True),
    (("BNSD", 512, 1, 1024), False, False),
    (("BNSD", 256, 4, 128), True, True),
    (("BNSD", 576, 1, 128), False, False),
    (("BNSD", 512, 9, None), True, True),
    (("TND", 512, 4, 128), False, True),
    (("TND", 256, 4, 128), False, True),
    (("TND", 192, 4, 128), True, True),
    (("TND", 128, 1, 16), True, True),
    (("BSH", 512, 4, 128), True, True),
]


@pytest.mark.parametrize(("facts", "a2", "a5"), CASES)
def test_the_documents(facts, a2, a5):
    for name, legal in (("ascend910b", a2), ("ascend910_93", a2), ("ascend950", a5), ("cpu", True)):
        verdict = platform(name).judge(call(*facts))
        assert verdict.legal is legal, (name, verdict)
        assert verdict.rule
        assert verdict.source


def test_general_limits():
    assert "multiple of 16" in platform("ascend910b").judge(call("BNSD", 72, 1)).rule
    assert "at most 256 heads" in platform("ascend910b").judge(call("BNSD", 64, 1, heads=512, kv_heads=64)).rule
    wide = call("BNSD", 64, 1, heads=128, kv_heads=1)
    assert "at most 64 query heads per kv head" in platform("ascend910b").judge(wide).rule
    assert platform("ascend950").judge(wide).legal


def test_the_field_failure_is_named():
    verdict = platform("ascend910b").judge(call("TND", 512, 4))
    assert verdict.rule == "561002: D is 512, TND, q_rope and k_rope should not be null"
    assert "#9632" in verdict.source


def test_every_row_names_its_source():
    for name in PLATFORMS:
        assert all(row.source for row in platform(name).attention)


def test_a_file_overrides_rows(tmp_path):
    path = tmp_path / "probe.json"
    rule = {"legal": True, "source": "probe on 910B3", "layout": "TND", "head_dims": [256]}
    path.write_text(json.dumps({"attention": [rule]}))
    verdict = platform("ascend910b", path).judge(call("TND", 256, 4))
    assert (verdict.legal, verdict.source) == (True, "probe on 910B3")
    assert not platform("ascend910b", path).judge(call("TND", 512, 4)).legal
    assert not platform("ascend910b").judge(call("TND", 256, 4)).legal, "the table itself is unchanged"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "capabilities file"),
        ("[]", "must hold"),
        ('{"attention": [{"legal": true}]}', "rule 0: a rule needs 'source'"),
        ('{"attention": [{"legal": true, "source": "x", "layot": "TND"}]}', "'layot' .did you mean 'layout'"),
        ('{"ops": {}}', "must hold"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, content, message):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        platform("ascend910b", path)


def test_a_missing_file_and_an_unknown_platform_are_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        platform("ascend910b", tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"'ascend910' .did you mean 'ascend910"):
        Options(platform="ascend910")
