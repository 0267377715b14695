"""``Options``: what can be asked of the backend, checked once, at the door."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gemma_npu_compile.errors import CompileError

PLATFORMS = ("ascend910b", "ascend910_93", "ascend950", "cpu")
ON_FALLBACK = ("warn", "error")
KV_LENS = ("device", "host")
VERIFY_ATTENTION = ("paged", "dense")
ENGINES = ("aclgraph", "torchair")


def nearest(name: str, known: Sequence[str]) -> str:
    """`` (did you mean 'x'?)`` for the known name closest to ``name``, or an empty string."""
    match = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def choice(what: str, value: Any, known: Sequence[str]) -> None:
    """Raise CompileError unless ``value`` is one of ``known``."""
    if value not in known:
        raise CompileError(f"{what} is {value!r}{nearest(str(value), known)}, it must be one of {', '.join(known)}")


@dataclass(frozen=True)
class Options:
    """Options of the backend, as keyword arguments or as ``torch.compile(..., options={...})``.

    Attributes:
        platform: the SoC to compile for. None for the device's own; on a CPU that is ``ascend910b``, whose graph is
            executed with CPU kernels of its operators.
        capture: False runs the same lowered graph without capturing it ("eager" in this project).
        capture_sizes: rows of the captured graphs; None for powers of two up to the rows the inputs were made for
            (``max_rows`` of the cache). That ceiling is always added. Size 1 becomes 2: torch traces one row apart.
        capabilities: a JSON file with rules to put in front of the platform's table (capabilities.py).
        kv_lens: ``"device"`` hides keys behind lengths with a mask computed on the device; the host knows lengths in
            buckets only. ``"host"`` hands exact lengths of full-attention layers to the operator at every replay. The
            CPU platform reads lengths as they are, in either mode.
        verify_attention: ``"paged"`` reads the cache in place; ``"dense"`` first gathers the keys of a verification
            (more than one query per row, BNSD): memory and traffic grow with all a block table can reach. For devices
            whose operator does not take the paged form.
        skip_softcap: take the argmax of logits before their soft cap; other tokens only where the cap makes a tie.
        merge_weights: compute gate and up projections as one product of a merged copy of both weights. A weight changed
            through ``.data`` afterwards is not seen.
        on_fallback: ``"warn"`` runs an uncaptured call and warns once per reason; ``"error"`` raises instead.
        max_query_len: a call of a model with a KV cache that brings more tokens a row is a prefill and runs uncaptured;
            so does the call that makes the cache.
        max_captures: captured graphs per compiled graph, for graphs whose inputs have no declared row padding; and
            calls in a row that bring other caches, after which no more captures are made for those.
        record: a file that keeps the small inputs of the last 8 calls (tokens, lengths, block tables; never weights)
            for ``gemma-npu check --state``. Graphs with one file name overwrite each other's.
        disable_passes: names of passes to leave out (``gemma_npu_compile.passes.PASSES``).
        cache: False neither reads nor writes the compile cache of this user (GEMMA_NPU_CACHE_DIR).
        engine: what captures on an NPU. ``"aclgraph"`` is this package's own runtime; ``"torchair"`` hands the final
            graph to torch_npu's ``npugraph_ex``: same tokens, every host list updated in every replay.

    Raises:
        CompileError: (a ValueError) an unknown name or an impossible value.
    """

    platform: str | None = None
    capture: bool = True
    capture_sizes: tuple[int, ...] | None = None
    kv_lens: str = "device"
    verify_attention: str = "paged"
    skip_softcap: bool = False
    merge_weights: bool = False
    on_fallback: str = "warn"
    max_query_len: int = 32
    max_captures: int = 16
    disable_passes: tuple[str, ...] = field(default=())
    capabilities: str | None = None
    record: str | None = None
    engine: str = "aclgraph"
    cache: bool = True

    def __post_init__(self) -> None:
        if self.platform is not None:
            choice("platform", self.platform, PLATFORMS)
        choice("engine", self.engine, ENGINES)
        choice("kv_lens", self.kv_lens, KV_LENS)
        choice("verify_attention", self.verify_attention, VERIFY_ATTENTION)
        choice("on_fallback", self.on_fallback, ON_FALLBACK)
        for name in ("capture", "skip_softcap", "merge_weights", "cache"):
            if not isinstance(getattr(self, name), bool):
                raise CompileError(f"{name} is {getattr(self, name)!r}, it must be True or False")
        for name in ("max_captures", "max_query_len"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CompileError(f"{name} is {value!r}, it must be a positive integer")
        if self.record is not None and not Path(self.record).parent.is_dir():
            raise CompileError(f"record is {self.record!r}: there is no directory {str(Path(self.record).parent)!r}")
        object.__setattr__(self, "capture_sizes", self._sizes())
        object.__setattr__(self, "disable_passes", self._pass_names())

    def _sizes(self) -> tuple[int, ...] | None:
        sizes = self.capture_sizes
        if sizes is None:
            return None
        if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence) or not sizes:
            raise CompileError(f"capture_sizes is {sizes!r}, it must be a non-empty list of row counts")
        for size in sizes:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise CompileError(f"capture_sizes has {size!r}, a size is a positive number of rows")
        return tuple(sorted(set(sizes)))

    def _pass_names(self) -> tuple[str, ...]:
        from gemma_npu_compile.passes import PASSES

        names = (self.disable_passes,) if isinstance(self.disable_passes, str) else self.disable_passes
        if not isinstance(names, Sequence):
            raise CompileError(f"disable_passes is {names!r}, it must be a list of pass names")
        for name in names:
            choice("disable_passes", name, tuple(PASSES))
        return tuple(names)

    @classmethod
    def parse(cls, options: "Options | Mapping[str, Any] | None") -> "Options":
        """Options from a mapping (``options={...}`` of torch.compile), an Options object, or None for the defaults."""
        if options is None:
            return cls()
        if isinstance(options, Options):
            return options
        if not isinstance(options, Mapping):
            raise CompileError(f"options must be a dict or Options, got {type(options).__name__}")
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise CompileError(f"unknown option {name!r}{nearest(str(name), known)}; known are {', '.join(known)}")
        return cls(**options)
