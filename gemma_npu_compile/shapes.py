"""The published Gemma 4 pairs as shapes: real configurations on the meta device, no weights.

Every number has a source. Targets: transformers' own conversion script (``models/gemma4/convert_gemma4_weights.py``,
the variants it converts), the 12B's from its published ``config.json``. The assistants' widths are those of the
published checkpoints (``google/gemma-4-*-it-assistant``); where only a size in parameters is public, the shape given
here is the one that has exactly that many, and ``source`` says so.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4ForCausalLM
from transformers.models.gemma4_assistant.configuration_gemma4_assistant import Gemma4AssistantConfig
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantForCausalLM
from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedTextConfig
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedForCausalLM
from transformers.models.gemma4_unified_assistant.configuration_gemma4_unified_assistant import (
    Gemma4UnifiedAssistantConfig,
)
from transformers.models.gemma4_unified_assistant.modeling_gemma4_unified_assistant import (
    Gemma4UnifiedAssistantForCausalLM,
)

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.graphs.plan import Plan
from gemma_npu_compile.kv_cache import PagedKVCache
from gemma_npu_compile.options import Options, choice
from gemma_npu_compile.report import CompileReport
from gemma_npu_compile.step import DraftVerifyStep, mark_rows

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Shape:
    """One published pair.

    Attributes:
        target: what its text config has other than the defaults; ``layers`` repeats ``pattern``.
        assistant: of the drafter's four layers (three sliding, one full): hidden size, MLP width, query heads.
        ordered: whether the assistant has ordered embeddings (2048 centroids, the best 32 are scored).
        unified: whether transformers' ``gemma4_unified`` classes run it.
        source: where the assistant's numbers come from.
    """

    target: dict[str, Any]
    assistant: tuple[int, int, int]
    source: str
    pattern: tuple[str, ...] = (SLIDING,) * 5 + (FULL,)
    ordered: bool = False
    unified: bool = False


_LARGE: dict[str, Any] = {
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "final_logit_softcapping": 30.0,
}
_SMALL: dict[str, Any] = {
    "num_attention_heads": 8,
    "hidden_size_per_layer_input": 256,
    "final_logit_softcapping": 30.0,
}

SHAPES: dict[str, Shape] = {
    "gemma-4-31b": Shape(
        {
            **_LARGE,
            "hidden_size": 5376,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 21504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
        },
        (1024, 8192, 32),
        "published widths; 470M parameters",
    ),
    "26b-a4b": Shape(
        {
            **_LARGE,
            "hidden_size": 2816,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 2112,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 128,
            "moe_intermediate_size": 704,
            "top_k_experts": 8,
        },
        (1024, 8192, 16),
        "not published: taken to have the width and depth of the 12B's assistant, which has as many heads",
    ),
    "12b": Shape(
        {
            **_LARGE,
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 1,
        },
        (1024, 8192, 16),
        "published width; the MLP follows from 423M parameters",
        unified=True,
    ),
    "e4b": Shape(
        {
            **_SMALL,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 42,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 18,
        },
        (256, 2048, 4),
        "the E2B's widths give its 78.8M parameters",
        ordered=True,
    ),
    "e2b": Shape(
        {
            **_SMALL,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
        },
        (256, 2048, 4),
        "published widths",
        pattern=(SLIDING,) * 4 + (FULL,),
        ordered=True,
    ),
}
"""Pairs by name. What the 12B and the assistants do not publish is said in ``source``."""


def _layers(shape: Shape, fold: bool) -> dict[str, Any]:
    """Layer types of the target; folded, one layer of each kind: of each type, owning its keys and reusing others'."""
    count, shared = shape.target["num_hidden_layers"], shape.target.get("num_kv_shared_layers", 0)
    types = [shape.pattern[i % len(shape.pattern)] for i in range(count)]
    if fold:
        shared = len({*types[count - shared :]}) if shared else 0
        types = [SLIDING, FULL] * (2 if shared else 1)
    return {"num_hidden_layers": len(types), "layer_types": types, "num_kv_shared_layers": shared}


def build(name: str, dtype: torch.dtype, fold: bool = False) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The pair ``name`` on the meta device.

    Args:
        name: one of ``SHAPES``.
        fold: one layer of each kind instead of all.

    Raises:
        ValueError: the name is unknown; suggests the nearest.
    """
    choice("--shapes", name, tuple(SHAPES))
    shape = SHAPES[name]
    text: Any = Gemma4UnifiedTextConfig if shape.unified else Gemma4TextConfig
    target = text(**{**shape.target, **_layers(shape, fold)})
    hidden, width, heads = shape.assistant
    types = [SLIDING, FULL] if fold else [SLIDING] * 3 + [FULL]
    own: dict[str, Any] = {} if shape.unified else {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    shared = ("num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v", "sliding_window")
    draft = text(
        hidden_size=hidden,
        intermediate_size=width,
        num_attention_heads=heads,
        num_hidden_layers=len(types),
        layer_types=types,
        num_kv_shared_layers=len(types),
        max_position_embeddings=target.max_position_embeddings,
        **{key: shape.target[key] for key in shared if key in shape.target},
        **own,
    )
    wrap: Any = Gemma4UnifiedAssistantConfig if shape.unified else Gemma4AssistantConfig
    assistant = wrap(text_config=draft, backbone_hidden_size=target.hidden_size, use_ordered_embeddings=shape.ordered)
    classes: tuple[Any, Any] = (Gemma4ForCausalLM, Gemma4AssistantForCausalLM)
    if shape.unified:
        classes = (Gemma4UnifiedForCausalLM, Gemma4UnifiedAssistantForCausalLM)
    with torch.device("meta"):
        made = [
            cls._from_config(config, dtype=dtype).eval()
            for cls, config in zip(classes, (target, assistant), strict=True)
        ]
    return made[0], made[1]


class Planned:
    """Stands in for a runner where there is nothing to run: results have the right shapes and no contents."""

    def __init__(self, gm: Any, plan: Plan, *rest: Any) -> None:
        self._plan = plan

    def __call__(self, args: list[Any]) -> list[Any]:
        values = self._plan.values(args)
        return [output.empty(values) for output in self._plan.outputs]

    def free(self) -> None:
        """Nothing to free."""


@contextmanager
def _no_collection() -> Iterator[None]:
    """Tracing makes millions of objects and no garbage cycles worth looking for: an eighth of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@torch.no_grad()
def plan_step(
    target: PreTrainedModel,
    assistant: PreTrainedModel,
    num_draft_tokens: int,
    *,
    max_rows: int,
    max_model_len: int,
    options: Options,
) -> CompileReport:
    """Trace, rewrite and plan a step of models on the meta device; nothing is run.

    Raises:
        ValueError: the pair, a size or an option cannot be used; names it.
    """
    cache = PagedKVCache(
        target.config, max_rows=max_rows, max_model_len=max_model_len, dtype=target.dtype, device=target.device
    )
    step = DraftVerifyStep(target, assistant, cache, num_draft_tokens, regions=True)
    inputs = step.token_padding[:2], step.hidden_padding[:2], cache.padding_lens[:2], cache.host_padding_lens[:2]
    token, hidden, seq_len, host_len = (each.clone() for each in inputs)
    tables = tuple(table[:2].clone() for table in cache.padding_tables)
    mark_rows(token, hidden, seq_len, tables, host_len)
    report = CompileReport()
    backend = Backend(report.graphs.append, Planned)
    given = {name: getattr(options, name) for name in options.__dataclass_fields__}
    compiled = torch.compile(step, backend=backend, fullgraph=True, options=given, isolate_recompiles=True)  # type: ignore[call-overload]
    with _no_collection():
        compiled(token, hidden, seq_len, tables, host_len=host_len)
    return report
