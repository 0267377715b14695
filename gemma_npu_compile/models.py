"""What the step needs to know of transformers' Gemma 4 classes, and how it runs them without changing them.

A model is run through a *shadow*: new module objects that share the original's parameters and buffers, with copied
configs that select the paged attention function. The user's model keeps its attention implementation, its forward
methods and its hooks, also when a call fails and also while another thread uses it.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.models.gemma4.modeling_gemma4 import Gemma4ForCausalLM, Gemma4ForConditionalGeneration
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantForCausalLM
from transformers.models.gemma4_unified.modeling_gemma4_unified import (
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedForConditionalGeneration,
)
from transformers.models.gemma4_unified_assistant.modeling_gemma4_unified_assistant import (
    Gemma4UnifiedAssistantForCausalLM,
)

from gemma_npu_compile.ops import paged_attention

ATTENTION = "gemma_npu"
TARGETS = (
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedForConditionalGeneration,
)
ASSISTANTS = (Gemma4AssistantForCausalLM, Gemma4UnifiedAssistantForCausalLM)


@dataclass(frozen=True)
class PagedContext:
    """What one call of a model needs beside its inputs; handed to the attention function as keyword ``paged``.

    Attributes:
        site: ``"<phase>/<model>"``, the first part of every attention node's layer name.
        layer_groups: KV group of every layer of the model that is called.
        tables: one ``(rows, width)`` int32 block table per group.
        kv_lens: ``(rows,)`` int32, keys the last query of each row sees.
        slots: one ``(tokens,)`` slot mapping per group; None for a model that writes nothing.
        extra_window: keys a sliding query sees beyond the window (the assistant's: 1).
        query_lens: ``(rows,)`` counts of a ragged call; None when every row has the same count.
    """

    site: str
    layer_groups: tuple[int, ...]
    tables: tuple[Tensor, ...]
    kv_lens: Tensor
    slots: tuple[Tensor, ...] | None = None
    extra_window: int = 0
    query_lens: Tensor | None = None


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    paged: PagedContext | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers' ``AttentionInterface``; ``key`` and ``value`` are a layer's pools.

    Args:
        query: ``(batch, heads, q_len, head_dim)``.

    Returns:
        ``(batch, q_len, heads, head_dim)`` and no weights.
    """
    if paged is None:
        raise ValueError(f"attention implementation {ATTENTION!r} is driven by gemma_npu_compile, not set on a model")
    batch, heads, q_len, head_dim = query.shape
    index: int = module.layer_idx  # type: ignore[assignment]
    window = None if sliding_window is None else sliding_window + paged.extra_window
    context = paged_attention(
        query.transpose(1, 2).reshape(batch * q_len, heads, head_dim),
        key,
        value,
        paged.tables[paged.layer_groups[index]],
        paged.kv_lens,
        scaling,
        window,
        "TND",
        f"{paged.site}.layers.{index}",
        paged.query_lens,
    )
    return context.view(batch, q_len, heads, head_dim), None


AttentionInterface.register(ATTENTION, paged_attention_forward)


def shadow(module: nn.Module) -> Any:
    """Copy the module objects of a model, sharing parameters and buffers, with configs set to paged attention.

    Instance-level ``forward`` overrides and compiled calls stay behind: they are bound to the original. The set of
    layer types becomes a list: a set's order, and so a trace's, is another one in each process, and no compile cache
    would hit.
    """
    configs: dict[int, PreTrainedConfig] = {}

    def config_of(config: PreTrainedConfig) -> PreTrainedConfig:
        if id(config) not in configs:
            copied = copy.deepcopy(config)
            nested = [copied, *(getattr(copied, name) for name in copied.sub_configs)]
            for part in nested:
                if part is not None:
                    part._attn_implementation_internal = ATTENTION
            configs[id(config)] = copied
        return configs[id(config)]

    def copy_module(original: nn.Module) -> nn.Module:
        copied = original.__new__(type(original))
        copied.__dict__ = {k: v for k, v in original.__dict__.items() if k not in ("forward", "_compiled_call_impl")}
        copied.__dict__["_modules"] = {
            name: None if child is None else copy_module(child) for name, child in original._modules.items()
        }
        if isinstance(getattr(original, "config", None), PreTrainedConfig):
            copied.__dict__["config"] = config_of(original.config)  # type: ignore[arg-type]
        if isinstance(getattr(original, "unique_layer_types", None), set):
            copied.__dict__["unique_layer_types"] = sorted(original.unique_layer_types)  # type: ignore[arg-type]
        return copied

    return copy_module(module).eval()


def text_model(target: PreTrainedModel) -> Any:
    """The decoder stack of a target: ``Gemma4TextModel`` or ``Gemma4UnifiedTextModel``."""
    return getattr(target.model, "language_model", target.model)


def check_target(target: nn.Module) -> None:
    """Raise ValueError unless ``target`` is one of the Gemma 4 causal models."""
    if not isinstance(target, TARGETS):
        names = ", ".join(cls.__name__ for cls in TARGETS)
        raise ValueError(f"target is a {type(target).__name__}; supported are {names}")


def check_pair(target: PreTrainedModel, assistant: PreTrainedModel, owners: dict[str, int]) -> None:
    """Raise ValueError, with every value that differs, unless ``assistant`` can draft for ``target``.

    Args:
        owners: ``{layer type: target layer whose keys the assistant's layers of this type read}``.
    """
    check_target(target)
    if not isinstance(assistant, ASSISTANTS):
        names = ", ".join(cls.__name__ for cls in ASSISTANTS)
        raise ValueError(f"assistant is a {type(assistant).__name__}; supported are {names}")
    ours, theirs = target.config.get_text_config(), assistant.config.get_text_config()
    differences = []

    def compare(what: str, target_value: Any, assistant_value: Any) -> None:
        if target_value != assistant_value:
            differences.append(f"{what}: target {target_value}, assistant {assistant_value}")

    compare("hidden_size / backbone_hidden_size", ours.hidden_size, assistant.config.backbone_hidden_size)
    compare("vocab_size", ours.vocab_size, theirs.vocab_size)
    compare("sliding_window", ours.sliding_window, theirs.sliding_window)
    compare("dtype", target.dtype, assistant.dtype)
    compare("device", target.device, assistant.device)
    for layer, layer_type in enumerate(theirs.layer_types):
        if layer_type not in owners:
            differences.append(f"assistant layer {layer} is {layer_type}, the target has {sorted(owners)}")
            continue
        owner, reader = ours.per_layer_config[owners[layer_type]], theirs.per_layer_config[layer]
        compare(f"head_dim of assistant layer {layer}", owner.head_dim, reader.head_dim)
        if theirs.num_attention_heads % owner.num_key_value_heads:
            differences.append(
                f"assistant layer {layer} has {theirs.num_attention_heads} query heads, not a multiple of the target's "
                f"{owner.num_key_value_heads} kv heads"
            )
        compare(
            f"rope_parameters of {layer_type}", ours.rope_parameters[layer_type], theirs.rope_parameters[layer_type]
        )
    if differences:
        unique: Sequence[str] = list(dict.fromkeys(differences))
        raise ValueError("this assistant does not fit the target: " + "; ".join(unique))
