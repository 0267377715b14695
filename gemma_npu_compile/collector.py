"""Python's collector of cycles, paused while a graph is built.

Graphs are made of hundreds of thousands of objects that stay. The collector walks all there are each time their number
has grown by a quarter, and finds nothing.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_inside = 0
_resume = False


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collections within. May be nested, and entered by several threads; who switched them off finds them off."""
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
            _inside -= 1
            if _inside == 0 and _resume:
                gc.enable()
