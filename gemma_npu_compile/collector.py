"""Python's collector of cycles, paused while a graph is built.

Graphs are made of hundreds of thousands of objects that stay. The collector walks all there are each time their number
has grown by a quarter, and finds nothing.
"""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_inside = 0
_resume = False


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collections within. May be nested, and entered by several threads; who switched them off before finds them
    off."""
    global _inside, _resume
    with _lock:
        if _inside == 0:
            _resume = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside = max(0, _inside - 1)  # none in a child that was forked within
            if _inside == 0 and _resume:
                gc.enable()


def _after_fork() -> None:
    """A child has none of the threads that were inside."""
    global _lock, _inside
    _lock = threading.Lock()
    if _inside and _resume:
        gc.enable()
    _inside = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
