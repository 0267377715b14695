"""What one device can do: which attention calls are legal on which SoC, and where that is written.

Documents, tiling sources and reports disagree between CANN releases, so the table is data: every row names its source,
and a file can put rows in front of it (``options={"capabilities": FILE}``).
"""

import json
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.options import PLATFORMS, choice, nearest

DOCUMENT = "op-plugin document of npu_fused_infer_attention_score"
TILING = "ops-transformer host tiling of FusedInferAttentionScore"
REPORT = "vllm-ascend #9632, #14670"


@dataclass(frozen=True)
class AttentionCall:
    """One attention call to be judged.

    Attributes:
        layout: ``TND``, ``BNSD``, ``BSND`` or ``BSH``.
        q_len: queries per row.
        block_size: of the paged cache; None for dense keys.
        mask: ``"none"``, ``"causal"`` (sparse modes 2, 3), ``"band"`` (sparse mode 4) or ``"full"`` (an explicit mask).
    """

    layout: str
    head_dim: int
    q_len: int
    heads: int
    kv_heads: int
    block_size: int | None
    mask: str = "none"


@dataclass(frozen=True)
class AttentionRule:
    """One row of the table. A field that is None matches everything.

    Attributes:
        q_len: ``"1"`` or ``">1"``.
        paged: whether keys come through a block table.
        block_multiple, block_max: for legal paged calls; a block size outside makes the call illegal.
        masks: for legal calls; another form of mask makes the call illegal.
        error: what the operator says, for an illegal call.
        source: document, source or report behind the row.
    """

    legal: bool
    source: str
    layout: str | None = None
    head_dims: tuple[int, ...] | None = None
    max_head_dim: int | None = None
    q_len: str | None = None
    paged: bool | None = None
    block_multiple: int | None = None
    block_max: int | None = None
    masks: tuple[str, ...] | None = None
    error: str = ""

    def matches(self, call: AttentionCall) -> bool:
        """Whether this row speaks of ``call``."""
        return (
            self.layout in (None, call.layout)
            and (self.head_dims is None or call.head_dim in self.head_dims)
            and (self.max_head_dim is None or call.head_dim <= self.max_head_dim)
            and self.q_len in (None, "1" if call.q_len == 1 else ">1")
            and self.paged in (None, call.block_size is not None)
        )


@dataclass(frozen=True)
class Verdict:
    """Whether a call is legal, and the rule and source that decide."""

    legal: bool
    rule: str
    source: str


@dataclass(frozen=True)
class FusedOperator:
    """An ``npu::`` operator of a platform and what limits its last axis.

    Attributes:
        max_dim, dims, multiple: of the last axis.
        source: document behind the limits.
        legal: False where the device does not have the operator.
        error: what the device says, for an operator it does not have.
    """

    name: str
    source: str
    max_dim: int | None = None
    dims: tuple[int, ...] | None = None
    multiple: int = 1
    legal: bool = True
    error: str = ""

    def judge(self, last_dim: int) -> Verdict:
        """Whether the operator takes a last axis of ``last_dim``."""
        if not self.legal:
            return Verdict(False, self.error or f"{self.name} is missing", self.source)
        limits = (
            (self.max_dim is None or last_dim <= self.max_dim, f"at most {self.max_dim}"),
            (self.dims is None or last_dim in self.dims, f"one of {self.dims}"),
            (last_dim % self.multiple == 0, f"a multiple of {self.multiple}"),
        )
        for holds, limit in limits:
            if not holds:
                return Verdict(False, f"{self.name}: the last axis is {last_dim}, it must be {limit}", self.source)
        return Verdict(True, f"{self.name} takes a last axis of {last_dim}", self.source)


@dataclass(frozen=True)
class Platform:
    """One SoC (or the CPU): attention rules, first match decides, general limits, and fused operators.

    Attributes:
        max_group: largest ``heads / kv_heads``; None for no limit.
        operators: what the dialect can be lowered to; none on the CPU, which runs the dialect's own kernels.
    """

    name: str
    attention: tuple[AttentionRule, ...]
    max_heads: int | None = None
    max_group: int | None = None
    head_multiple: int = 1
    operators: tuple[FusedOperator, ...] = ()

    def operator(self, name: str, last_dim: int = 1) -> Verdict:
        """Whether the platform has operator ``npu::<name>`` for a last axis of ``last_dim``."""
        for each in self.operators:
            if each.name == name:
                return each.judge(last_dim)
        return Verdict(False, f"{self.name} has no {name}", "the platform's table")

    def judge(self, call: AttentionCall) -> Verdict:
        """Whether ``call`` is legal here, and why."""
        limits = (
            (call.head_dim % self.head_multiple == 0, f"head size must be a multiple of {self.head_multiple}"),
            (self.max_heads is None or call.heads <= self.max_heads, f"at most {self.max_heads} heads"),
            (
                self.max_group is None or call.heads // call.kv_heads <= self.max_group,
                f"at most {self.max_group} query heads per kv head",
            ),
        )
        for holds, rule in limits:
            if not holds:
                return Verdict(False, rule, DOCUMENT)
        for row in self.attention:
            if row.matches(call):
                return self._verdict(row, call)
        return Verdict(False, f"no rule allows {call.layout} with head size {call.head_dim}", DOCUMENT)

    @staticmethod
    def _verdict(row: AttentionRule, call: AttentionCall) -> Verdict:
        if not row.legal:
            return Verdict(
                False, row.error or f"{call.layout} with head size {call.head_dim} is not allowed", row.source
            )
        size = call.block_size
        if size is not None and row.block_multiple is not None and size % row.block_multiple:
            rule = f"block size {size} must be a multiple of {row.block_multiple} for {call.q_len} queries"
            return Verdict(False, rule, row.source)
        if size is not None and row.block_max is not None and size > row.block_max:
            return Verdict(False, f"block size {size} exceeds {row.block_max}", row.source)
        if row.masks is not None and call.mask not in row.masks:
            queries = "one query" if call.q_len == 1 else f"{call.q_len} queries"
            rule = f"{call.layout} with {queries} takes no {call.mask} mask (only {', '.join(row.masks)})"
            return Verdict(False, rule, row.source)
        return Verdict(True, f"{call.layout} with head size {call.head_dim} is legal", row.source)


_ONE = ("none", "causal", "full")  # one query ignores the sparse modes: a causal mask hides nothing, a band would
_TND = ("none", "causal", "band")  # an explicit mask has an axis of queries per row, which packed queries lack
_TND_ONE = ("none", "causal")
_BNSD = (
    AttentionRule(True, DOCUMENT, "BNSD", None, 512, "1", True, block_multiple=16, block_max=512, masks=_ONE),
    AttentionRule(True, f"{DOCUMENT}; {TILING}", "BNSD", None, 512, ">1", True, block_multiple=128, block_max=512),
    AttentionRule(True, DOCUMENT, "BNSD", None, 512, "1", False, masks=_ONE),
    AttentionRule(True, DOCUMENT, "BNSD", None, 512, ">1", False),
)


def _as(layout: str, *rules: AttentionRule) -> tuple[AttentionRule, ...]:
    return tuple(replace(rule, layout=layout) for rule in rules)


_A2 = (
    *_BNSD,
    AttentionRule(
        False,
        f"{TILING}; {REPORT}",
        "TND",
        (512,),
        error="561002: D is 512, TND, q_rope and k_rope should not be null",
    ),
    AttentionRule(
        False,
        REPORT,
        "TND",
        (256,),
        error="561002: queryD(256) must be 192/128/64 (rejected on some CANN builds)",
    ),
    AttentionRule(
        True, DOCUMENT, "TND", (64, 128, 192), None, "1", True, block_multiple=16, block_max=512, masks=_TND_ONE
    ),
    AttentionRule(
        True, DOCUMENT, "TND", (64, 128, 192), None, ">1", True, block_multiple=128, block_max=512, masks=_TND
    ),
    AttentionRule(True, DOCUMENT, "TND", (64, 128, 192), None, "1", False, masks=_TND_ONE),
    AttentionRule(True, DOCUMENT, "TND", (64, 128, 192), None, ">1", False, masks=_TND),
    *_as("BSND", *_BNSD),
    *_as("BSH", *_BNSD),
)
_BNSD_A5 = (_BNSD[0], replace(_BNSD[1], source=DOCUMENT, block_max=1024), *_BNSD[2:])
_A5 = (
    *_BNSD_A5,
    AttentionRule(True, "not excluded by " + DOCUMENT, "TND", None, 512, "1", None, 16, 512, _TND_ONE),
    AttentionRule(True, "not excluded by " + DOCUMENT, "TND", None, 512, ">1", None, 128, 1024, _TND),
    *_as("BSND", *_BNSD_A5),
    *_as("BSH", *_BNSD_A5),
)

_FUSED = (
    FusedOperator("npu_fused_infer_attention_score", DOCUMENT, max_dim=512, multiple=16),
    FusedOperator("npu_scatter_pa_kv_cache", "op-plugin document of npu_scatter_pa_kv_cache"),
    FusedOperator("npu_rms_norm", "op-plugin document of npu_rms_norm"),
    FusedOperator("npu_add_rms_norm", "op-plugin document of npu_add_rms_norm"),
    FusedOperator("npu_rotary_mul", "op-plugin document of npu_rotary_mul", max_dim=895, multiple=2),
    FusedOperator("npu_geglu", "op-plugin schema of npu_geglu", multiple=2),
    FusedOperator("npu_gelu_mul", "op-plugin document of npu_gelu_mul", max_dim=1024, multiple=2),
)
_JOINT_ROTARY = FusedOperator(
    "npu_apply_rotary_pos_emb", "op-plugin document of npu_apply_rotary_pos_emb", dims=(64, 128)
)

_TABLE = {
    "ascend910b": Platform("ascend910b", _A2, 256, 64, 16, (*_FUSED, _JOINT_ROTARY)),
    "ascend910_93": Platform("ascend910_93", _A2, 256, 64, 16, (*_FUSED, _JOINT_ROTARY)),
    "ascend950": Platform("ascend950", _A5, 256, None, 16, (*_FUSED, replace(_JOINT_ROTARY, dims=None))),
    "cpu": Platform("cpu", (AttentionRule(True, "gemma_npu::paged_attention, CPU kernel"),)),
}
assert tuple(_TABLE) == PLATFORMS


def _row(row: Any, kind: type, where: str) -> Any:
    """One row of an override file as an object of ``kind``."""
    known = [f.name for f in fields(kind)]
    required = [f.name for f in fields(kind) if f.default is MISSING]
    if not isinstance(row, dict):
        raise CompileError(f"{where} is {row!r}, it must be an object with fields {', '.join(known)}")
    for name in row:
        if name not in known:
            raise CompileError(f"{where}: unknown field {name!r}{nearest(name, known)}; known are {', '.join(known)}")
    for name in required:
        if name not in row:
            raise CompileError(f"{where}: a rule needs {name!r}")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})


def platform(name: str, overrides: str | Path | None = None) -> Platform:
    """The table of one platform, with the rules of an override file in front.

    Args:
        name: one of ``PLATFORMS``.
        overrides: a JSON file as ``gemma-npu probe`` writes it: ``{"attention": [{"legal": true, "source": "...",
            "layout": "TND", ...}, ...], "operators": [{"name": "npu_geglu", "source": "...", "legal": false}, ...]}``;
            fields as in :class:`AttentionRule` and :class:`FusedOperator`, ``"probe"`` is left alone.

    Raises:
        CompileError: the name is unknown, or the file cannot be used; names the rule and the field.
    """
    choice("platform", name, PLATFORMS)
    found = _TABLE[name]
    if overrides is None:
        return found
    try:
        data = json.loads(Path(overrides).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CompileError(f"capabilities file {overrides}: {error}") from None
    kinds = {"attention": AttentionRule, "operators": FusedOperator}
    lists = isinstance(data, dict) and all(isinstance(data.get(each, []), list) for each in kinds)
    if not lists or set(data) - {*kinds, "probe"}:
        raise CompileError(f'capabilities file {overrides} must hold {{"attention": [rules], "operators": [rules]}}')
    rules = {
        each: tuple(
            _row(row, kind, f"capabilities file {overrides}, {'' if each == 'attention' else 'operator '}rule {index}")
            for index, row in enumerate(data.get(each, []))
        )
        for each, kind in kinds.items()
    }
    return replace(
        found, attention=rules["attention"] + found.attention, operators=rules["operators"] + found.operators
    )
