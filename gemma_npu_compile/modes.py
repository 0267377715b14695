"""Calls without autograd, cheaply: a step enters several functions that must be so, mostly from one that is."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_grad(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: the function runs without gradients and outside inference mode, and leaves the modes as they were.

    As ``torch.inference_mode(False)`` and ``torch.no_grad()`` do with new contexts in every call.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return function(*args, **kwargs)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        torch._C._set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    return run
