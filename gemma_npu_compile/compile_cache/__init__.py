"""The compile cache: traces kept across processes, because tracing is most of what comes behind Dynamo.

Kept is the inference graph in front of the passes, as JSON (trace.py), under a key made of Dynamo's graph and all that
tracing consults (key.py). Where it is found nothing is traced. Of AOT's graphs that is right only where AOT would do
nothing around the one it made, and added no guard, so only such are kept (ticket.py). The rest runs as usual.
"""

from gemma_npu_compile.compile_cache.files import Entry, Folder, enabled
from gemma_npu_compile.compile_cache.key import versions
from gemma_npu_compile.compile_cache.ticket import Ticket, calling, look_up

__all__ = ["Entry", "Folder", "Ticket", "calling", "enabled", "look_up", "versions"]
