"""Options are checked once, at the door: a misspelt or impossible one must never be dropped silently."""

import dataclasses
from typing import Any

import pytest
import torch

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.options import Options, nearest


def test_defaults() -> None:
    assert Options.parse(None) == Options.parse({}) == Options()
    assert (Options().capture, Options().on_fallback, Options().capture_sizes) == (True, "warn", None)


def test_parse_accepts_mappings_and_options() -> None:
    given = Options(capture_sizes=(4, 2))
    assert Options.parse(given) is given
    assert Options.parse({"capture_sizes": [4, 2]}) == given
    assert given.capture_sizes == (2, 4)
    assert Options(disable_passes="bind_block_tables").disable_passes == ("bind_block_tables",)  # type: ignore[arg-type]


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().capture = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "suggestion"), [("platfrom", "platform"), ("captures", "capture"), ("disable_pass", "disable_passes")]
)
def test_unknown_name_suggests_the_nearest(name: str, suggestion: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown option '{name}' \(did you mean '{suggestion}'\?\); known are .*"):
        Options.parse({name: 1})


def test_unknown_name_like_no_other_lists_the_known() -> None:
    with pytest.raises(CompileError, match=r"unknown option 'zzz'; known are platform, capture, .*disable_passes"):
        Options.parse({"zzz": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"platform": "ascend910a"}, r"platform is 'ascend910a' \(did you mean 'ascend910b'\?\), it must be one of"),
        ({"on_fallback": "raise"}, "on_fallback is 'raise'.*one of warn, error"),
        ({"capture": 1}, "capture is 1, it must be True or False"),
        ({"max_captures": 0}, "max_captures is 0"),
        ({"max_captures": 1.5}, "max_captures is 1.5"),
        ({"max_captures": True}, "max_captures is True"),
        ({"capture_sizes": []}, "capture_sizes is"),
        ({"capture_sizes": "24"}, "capture_sizes is '24'"),
        ({"capture_sizes": 4}, "capture_sizes is 4"),
        ({"capture_sizes": [2, 0]}, "capture_sizes has 0"),
        ({"capture_sizes": [2, True]}, "capture_sizes has True"),
        ({"capture_sizes": [2, 4.0]}, "capture_sizes has 4.0"),
        ({"disable_passes": ["bind"]}, "disable_passes is 'bind'"),
        ({"disable_passes": [3]}, "disable_passes is 3"),
        ({"disable_passes": None}, "disable_passes"),
        ({"disable_passes": 3}, "disable_passes"),
    ],
)
def test_impossible_values_name_the_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        Options.parse(options)


@pytest.mark.parametrize("options", [3, "capture", ["capture"]])
def test_not_a_mapping(options: Any) -> None:
    with pytest.raises(CompileError, match="options must be a dict or Options"):
        Options.parse(options)


def test_nearest() -> None:
    assert nearest("captur", ["capture", "platform"]) == " (did you mean 'capture'?)"
    assert nearest("x", ["capture"]) == ""


def test_gradients_are_refused(fresh_dynamo: None) -> None:
    run = torch.compile(lambda x: x * 2, backend=Backend())
    with pytest.raises(CompileError, match=r"inference only.*torch\.no_grad"):
        run(torch.ones(2, requires_grad=True))
    with torch.no_grad():
        assert run(torch.ones(2, requires_grad=True)).tolist() == [2.0, 2.0]


def test_mode_is_refused(fresh_dynamo: None) -> None:
    with pytest.raises(CompileError, match=r"mode is 'reduce-overhead'.*options="):
        torch.compile(lambda x: x + 1, backend=Backend(), mode="reduce-overhead")(torch.ones(2))


def test_unknown_option_is_refused_with_the_nearest(fresh_dynamo: None) -> None:
    options: dict[str, Any] = {"capture_size": [2]}
    run = torch.compile(lambda x: x + 1, backend=Backend(), options=options)
    with pytest.raises(ValueError, match=r"unknown option 'capture_size' \(did you mean 'capture_sizes'\?\)"):
        run(torch.ones(2))
