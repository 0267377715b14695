"""The compile cache: graphs kept across processes, because tracing and passes are most of what comes behind Dynamo.

Kept are, as JSON, the inference graph in front of the passes (trace.py), under a key made of Dynamo's graph and all
that tracing consults (key.py), and the graph behind the passes with its plan (final.py), under that key and all that
passes consult. Where the latter is found only the capture is left to do; where only the former is, passes run. Of AOT's
graphs that is right only where AOT would do nothing around the one it made, and added no guard, so only such are kept
(ticket.py). The rest runs as usual.
"""

from gemma_npu_compile.compile_cache.files import Entry, Folder, enabled
from gemma_npu_compile.compile_cache.key import versions
from gemma_npu_compile.compile_cache.ticket import Ticket, calling, look_up

__all__ = ["Entry", "Folder", "Ticket", "calling", "enabled", "look_up", "versions"]
