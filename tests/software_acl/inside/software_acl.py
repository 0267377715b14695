"""What a test script can ask the software ACL it runs on; importable only inside such a script."""

from __future__ import annotations

import ctypes

_acl = ctypes.CDLL("libascendcl.so")
_acl.software_acl_device_bytes.restype = ctypes.c_int64


def mark(name: str) -> None:
    """Write a mark into the trace, so that the events between two marks can be counted."""
    _acl.software_acl_mark(name.encode())


def device_bytes(device: int = 0) -> int:
    """Bytes of device memory in use, torch_npu's cached blocks included (``torch.npu.empty_cache()`` returns those)."""
    return int(_acl.software_acl_device_bytes(device))


def live_graphs() -> int:
    """Captured graphs that were not destroyed."""
    return int(_acl.software_acl_live_graphs())
