"""Functions that run without autograd, whatever their caller is in."""

import pytest
import torch

from gemma_npu_compile.modes import without_grad


def _modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@without_grad
def _seen(weight: torch.Tensor, *, fail: bool = False) -> tuple[tuple[bool, bool], torch.Tensor]:
    """What a function is given."""
    if fail:
        raise ZeroDivisionError
    return _modes(), weight * 2


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_modes_are_off_inside_and_as_before_outside(around, fail):
    weight = torch.ones(2, requires_grad=True)
    with around():
        before = _modes()
        if fail:
            with pytest.raises(ZeroDivisionError):
                _seen(weight, fail=True)
        else:
            inside, result = _seen(weight)
            assert inside == (False, False)
            assert not result.requires_grad
            assert not result.is_inference()  # may be changed in place later
        assert _modes() == before


def test_a_function_keeps_its_name_and_its_words():
    assert (_seen.__name__, _seen.__doc__) == ("_seen", "What a function is given.")
