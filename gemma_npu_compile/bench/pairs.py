"""The medium pair: random weights whose choices are clear, and synthetic cache contents in place of a prefill.

bfloat16 kernels differ in the order of their sums, and the logits of a random network lie so close that its choices
would differ with them. So every layer adds little to the residual stream, which the token's embedding dominates; the
head is the embedding table, so the best logit is far ahead of the others. Tokens then say little of the layers in
between, which is why final hidden states are compared too.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4ForCausalLM
from transformers.models.gemma4_assistant.configuration_gemma4_assistant import Gemma4AssistantConfig
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantForCausalLM

from gemma_npu_compile.kv_cache import PagedKVCache

_RESIDUAL = 0.05
"""Root mean square of what an attention or an MLP adds; embeddings have about 0.55."""


def medium_config(**overrides: Any) -> dict[str, Any]:
    """The target: 148 M parameters, 10 of 12 layers sliding, heads of 256 and 512 as in the published models."""
    return {
        "vocab_size": 32768,
        "hidden_size": 768,
        "intermediate_size": 3328,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "max_position_embeddings": 32768,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "pad_token_id": 0,
        "eos_token_id": None,
        "bos_token_id": None,
        **overrides,
    }


def layer_types(layers: int) -> tuple[str, ...]:
    """Every sixth layer full, and the last."""
    return tuple("full_attention" if i % 6 == 5 or i == layers - 1 else "sliding_attention" for i in range(layers))


@torch.no_grad()
def medium_pair(
    dtype: torch.dtype = torch.bfloat16, seed: int = 0, layers: int = 12, **overrides: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Target and assistant with seeded random weights.

    Args:
        layers: of the target; the assistant has four. Which are full: :func:`layer_types`.
        overrides: of :func:`medium_config`.
    """
    config = medium_config(**overrides)
    kinds = list(layer_types(layers))
    text = Gemma4TextConfig(**config, num_hidden_layers=layers, layer_types=kinds, final_logit_softcapping=30.0)
    width = min(256, config["hidden_size"])
    small = {**config, "hidden_size": width, "intermediate_size": 4 * width}
    draft = Gemma4TextConfig(
        **small,
        num_hidden_layers=4,
        layer_types=list(layer_types(4)),
        num_kv_shared_layers=4,
    )
    generator = torch.Generator().manual_seed(seed)
    target = Gemma4ForCausalLM(text).eval()
    assistant = Gemma4AssistantForCausalLM(
        Gemma4AssistantConfig(text_config=draft, backbone_hidden_size=config["hidden_size"])
    ).eval()
    for model in (target, assistant):
        for name, parameter in model.named_parameters():
            _fill(name, parameter, generator)
    # The assistant sees the embedding through a random projection, and its own table is the target's through the same.
    projection = torch.randn(width, config["hidden_size"], generator=generator) / config["hidden_size"] ** 0.5
    table: Any = target.get_input_embeddings().weight  # type: ignore[union-attr]
    assistant.get_input_embeddings().weight.copy_(table @ projection.T)
    nothing = torch.zeros_like(projection)
    assistant.pre_projection.weight.copy_(torch.cat([projection, nothing], dim=1))
    return target.to(dtype), assistant.to(dtype)


def _fill(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Random matrices that keep the size of what they multiply; norms that keep scores and residuals small."""
    if "q_norm" in name or "k_norm" in name:
        parameter.fill_(parameter.shape[0] ** -0.25)  # attention's scale is 1: scores of about one
    elif "post_attention_layernorm" in name or "post_feedforward_layernorm" in name:
        parameter.fill_(_RESIDUAL)
    elif parameter.dim() == 1:
        parameter.fill_(1.0)
    elif "embed_tokens" in name:
        parameter.normal_(std=0.02, generator=generator)
    else:
        parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)


@torch.no_grad()
def fill_cache(cache: PagedKVCache, rows: int, context: int, ahead: int, seed: int) -> list[int]:
    """Give ``rows`` rows of ``context`` tokens seeded random keys and values, and blocks for ``ahead`` more tokens.

    The same seed gives every cache of one geometry the same contents, position by position.
    """
    taken = []
    for _ in range(rows):
        row = cache.allocate()
        taken.append(row)
        for end in [*range(cache.prefill_chunk, context, cache.prefill_chunk), context]:
            cache.extend(row, end)
            cache.set_length(row, end)
        cache.extend(row, context + ahead)
    for group in cache.groups:
        for layer in group.layers:
            generator = torch.Generator().manual_seed(seed * 1000 + layer)
            for pool, size in ((cache.key_pools[layer], group.head_dim**-0.25), (cache.value_pools[layer], 1.0)):
                for block in pool[group.null_blocks :]:
                    block.copy_(torch.randn(block.shape, generator=generator) * size)
    return taken
