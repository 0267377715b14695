"""The architecture of the tiny pair, untrained."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

VOCABULARY = 1024
WINDOW = 64
DRAFTS = 3
PAD, EOS, BOS = 0, 1, 2


def text_config(hidden: int, mlp: int, sliding_layers: int, **overrides: Any) -> Gemma4TextConfig:
    """Return what the two models share; an assistant reads the target's keys, so their heads must agree."""
    layer_types = ["sliding_attention"] * sliding_layers + ["full_attention"]
    # Not among the declared fields: the class turns them into a per_layer_config, and that is what it saves.
    full_attention: dict[str, Any] = {"num_global_key_value_heads": 1, "global_head_dim": 512}
    return Gemma4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        attention_k_eq_v=True,
        sliding_window=WINDOW,
        max_position_embeddings=4096,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
        **full_attention,
        **overrides,
    )


def build_target() -> Gemma4ForCausalLM:
    """Return an untrained target of 3.6 M parameters."""
    target = Gemma4ForCausalLM(text_config(192, 512, sliding_layers=5, final_logit_softcapping=30.0))
    scale_attention(target)
    return target


def build_assistant() -> Gemma4AssistantForCausalLM:
    """Return an untrained assistant of 0.95 M parameters, whose layers have no keys and values of their own."""
    config = text_config(96, 224, sliding_layers=3, num_kv_shared_layers=4)
    assistant = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=config, backbone_hidden_size=192))
    assistant.generation_config.num_assistant_tokens = DRAFTS
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    scale_attention(assistant)
    return assistant


def scale_attention(model: nn.Module) -> None:
    """Initialise the query and key norms to d^-1/4.

    Gemma 4 does not scale attention scores, it learns to through these norms. At their default of 1 the scores start
    with a deviation of sqrt(d), 23 for heads of 512: softmax saturates and the layer hardly learns.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.constant_(parameter, parameter.numel() ** -0.25)
