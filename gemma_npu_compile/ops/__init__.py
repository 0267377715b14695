"""The ``gemma_npu::`` dialect: what the tracer sees of a decode step, before any platform is chosen.

Every operand a replay needs is an argument of its node (block table, lengths, caches), so nothing has to be looked up
beside the graph. Importing this package registers the schemas, the fake kernels and the CPU kernels.
"""

from gemma_npu_compile.ops.activation import geglu, gelu_mul
from gemma_npu_compile.ops.attention import paged_attention
from gemma_npu_compile.ops.mirror import host_mirror
from gemma_npu_compile.ops.norm import add_rms_norm, rms_norm
from gemma_npu_compile.ops.padding import row_padding
from gemma_npu_compile.ops.rotary import rotary, rotary_qk
from gemma_npu_compile.ops.store import slot_mapping, store_kv

__all__ = [
    "add_rms_norm",
    "geglu",
    "gelu_mul",
    "host_mirror",
    "paged_attention",
    "rms_norm",
    "rotary",
    "rotary_qk",
    "row_padding",
    "slot_mapping",
    "store_kv",
]
