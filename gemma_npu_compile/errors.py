"""Errors that cross Dynamo unwrapped, so that a user's mistake arrives as the ValueError it is."""

from typing import Any

from torch._dynamo.exc import ShortenTraceback


class CompileError(ValueError, ShortenTraceback):
    """The graph or the options cannot be compiled as asked. A ValueError; the message names what and why.

    Dynamo wraps any other exception of a backend in ``BackendCompilerFailed``.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)  # type: ignore[call-arg]
        self.first_useful_frame = None


class CaptureError(RuntimeError):
    """A graph cannot be captured; the message names the node. Nothing half-captured is left behind."""


class ReplayError(ValueError):
    """A replay was refused before anything ran: an input does not fit what was captured."""
