"""What this machine is and what it can do: bandwidth and arithmetic, measured in the run that uses them."""

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

import gemma_npu_compile.ops.native  # noqa: F401  (registers the operators)
from gemma_npu_compile import __version__
from gemma_npu_compile.native.program import MOST_ROWS

BUFFER = 512 * 2**20
"""Bytes of the buffers that are copied: more than any processor's cache."""


def _seconds(run: Any, repeats: int = 5) -> float:
    run()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return median(found)


def copy_gbps(nbytes: int = BUFFER) -> float:
    """Copy bandwidth in GB/s, bytes read plus bytes written, with torch's threads."""
    source = torch.ones(nbytes // 4)
    target = torch.zeros_like(source)
    return 2 * nbytes / _seconds(lambda: target.copy_(source)) / 1e9


def read_gbps(nbytes: int = BUFFER) -> float:
    """Read bandwidth in GB/s of a sum over float32, with torch's threads."""
    source = torch.ones(nbytes // 4)
    return nbytes / _seconds(source.sum) / 1e9


def product_gbps(rows: int, dtype: torch.dtype, platform: str, nbytes: int = BUFFER // 2) -> float:
    """GB/s at which products of ``rows`` rows read a weight from memory, arithmetic included, as a step computes them:
    on the CPU platform with its own kernel, where that takes so many rows."""
    weight = torch.ones(nbytes // dtype.itemsize // 1024, 1024, dtype=dtype)
    x = torch.ones(rows, 1024, dtype=dtype)
    linear: Any = torch.nn.functional.linear
    if platform == "cpu" and rows <= MOST_ROWS:
        linear = torch.ops.gemma_npu_cpu.linear
    return weight.nbytes / _seconds(lambda: linear(x, weight)) / 1e9


def attention_gbps(
    queries: int, geometry: tuple[int, int, int, int], dtype: torch.dtype, platform: str, nbytes: int = BUFFER // 4
) -> float:
    """GB/s at which attention of ``queries`` queries a row reads keys and values from memory, arithmetic included; on
    the CPU platform with its own kernel.

    Args:
        geometry: query heads, kv heads, head size, keys of a row.
        nbytes: of the keys and values read: as many rows as that takes.
    """
    heads, kv_heads, width, keys = geometry
    block, taken = 128, -(-keys // 128)
    rows = max(1, nbytes // (2 * taken * block * kv_heads * width * dtype.itemsize))
    key, value = (torch.full((rows * taken, block, kv_heads, width), x, dtype=dtype) for x in (0.01, 1.0))
    table = torch.arange(rows * taken, dtype=torch.int32).view(rows, taken)
    lengths = torch.full((rows,), keys, dtype=torch.int32)
    query = torch.ones(rows * queries, heads, width, dtype=dtype)
    operators: Any = torch.ops.gemma_npu_cpu if platform == "cpu" else torch.ops.gemma_npu
    seconds = _seconds(lambda: operators.paged_attention(query, key, value, table, lengths, width**-0.5))
    return 2 * rows * keys * kv_heads * width * dtype.itemsize / seconds / 1e9


@dataclass(frozen=True)
class Rates:
    """What a machine does, measured in the run that uses it.

    Attributes:
        copy: bytes read and written by a copy; ``read``: bytes read by a sum; both GB/s.
        verify, draft: weights read by products of as many rows as a verification and a draft have, GB/s.
        attend_verify, attend_draft: keys and values read by attention of as many queries a row, GB/s.
        gflops: of a large float32 product.
    """

    copy: float
    read: float
    verify: float
    draft: float
    attend_verify: float
    attend_draft: float
    gflops: float


def middle(measured: Sequence[Rates]) -> Rates:
    """The median of each rate: a machine changes from minute to minute."""
    return Rates(*(median(getattr(each, one.name) for each in measured) for one in fields(Rates)))


def rates(rows: int, drafts: int, geometry: tuple[int, int, int, int], dtype: torch.dtype, platform: str) -> Rates:
    """Of this machine, for steps of ``rows`` rows with ``drafts`` drafts; ``geometry`` as in :func:`attention_gbps`."""
    verify, draft = (product_gbps(each, dtype, platform) for each in (rows * (1 + drafts), rows))
    attend_verify, attend_draft = (attention_gbps(each, geometry, dtype, platform) for each in (1 + drafts, 1))
    return Rates(copy_gbps(), read_gbps(), verify, draft, attend_verify, attend_draft, gflops())


def gflops(size: int = 1024) -> float:
    """Rate of a float32 matrix product in GFLOP/s, with torch's threads."""
    left, right = torch.ones(size, size), torch.ones(size, size)
    return 2 * size**3 / _seconds(lambda: left @ right) / 1e9


def describe() -> dict[str, Any]:
    """Processor, threads, versions."""
    return {
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gemma_npu_compile": __version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def resident_mb(peak: bool = False) -> float | None:
    """Resident memory of this process in MiB now, or its peak since :func:`forget_peak`; None where unknown."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    name = "VmHWM:" if peak else "VmRSS:"
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(name)), None)


def forget_peak() -> bool:
    """Let the kernel begin a new peak of resident memory; False where it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True
