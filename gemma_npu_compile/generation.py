"""``generate()``: batched greedy speculative decoding with transformers' calling convention."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from gemma_npu_compile.engine_pool import ENGINES
from gemma_npu_compile.models import check_target
from gemma_npu_compile.options import Options, nearest
from gemma_npu_compile.session import Session
from gemma_npu_compile.stats import Acceptance, Stats

# Settings of GenerationConfig that change the result and are not implemented, with the values that mean "off".
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "do_sample": (None, False),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "max_time": (None,),
    "stop_strings": (None,),
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "remove_invalid_values": (None, False),
    "exponential_decay_length_penalty": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None,),
    "token_healing": (None, False),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
    "prompt_lookup_num_tokens": (None,),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "return_dict_in_generate": (None, False),
}
_OWN_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")


# What transformers hands to a custom_generate function beside settings; none of it changes a greedy result.
_INTERNALS = {
    "assistant_tokenizer",
    "cache",
    "cache_position",
    "logits_processor",
    "logits_to_keep",
    "mm_token_type_ids",
    "past_key_values",
    "position_ids",
    "stopping_criteria",
    "synced_gpus",
    "token_type_ids",
    "tokenizer",
    "use_cache",
    "use_model_defaults",
}
_INPUTS = ("inputs_embeds", "pixel_values", "pixel_values_videos", "input_features", "prefix_allowed_tokens_fn")


def resolve_config(
    model: PreTrainedModel, generation_config: GenerationConfig | None, kwargs: Mapping[str, Any]
) -> GenerationConfig:
    """The settings of a call: keyword arguments over ``generation_config`` over the model's own, as in transformers.

    Raises:
        ValueError: a setting is not supported or not known; names it.
    """
    config = copy.deepcopy(generation_config) if generation_config is not None else GenerationConfig()
    config.update(**model.generation_config.to_dict(), defaults_only=True)
    known = set(GenerationConfig().to_dict())
    for name, value in kwargs.items():
        if name in _INPUTS:
            if value is not None:
                raise ValueError(f"{name} is not supported: generation starts from input_ids")
        elif name in known:
            setattr(config, name, value)
        elif name not in _INTERNALS:
            raise ValueError(f"unknown argument {name!r}{nearest(name, sorted(known))}")
    for name, off in _UNSUPPORTED.items():
        value = getattr(config, name, None)
        if value not in off:
            raise ValueError(f"generation setting {name}={value!r} is not supported: decoding is greedy and exact")
    for processor in kwargs.get("logits_processor") or ():
        raise ValueError(f"logits processor {type(processor).__name__} is not supported: decoding is greedy and exact")
    for criterion in kwargs.get("stopping_criteria") or ():
        if type(criterion).__name__ not in _OWN_CRITERIA:
            raise ValueError(
                f"stopping criterion {type(criterion).__name__} is not supported: use EOS and length limits"
            )
    return config


def eos_ids(config: GenerationConfig) -> list[int]:
    """End tokens, in the order given."""
    eos = config.eos_token_id
    if eos is None:
        return []
    return list(eos) if isinstance(eos, (list, tuple)) else [int(eos)]


def pad_id(config: GenerationConfig) -> int:
    """What follows a finished row: the pad token, else the first end token as in transformers, else 0."""
    return config.pad_token_id if config.pad_token_id is not None else next(iter(eos_ids(config)), 0)


def _prompts(input_ids: Tensor, attention_mask: Tensor | None, pad: int | None, eos: list[int]) -> list[Tensor]:
    """The real tokens of each row, without padding on either side."""
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"input_ids must be an integer tensor (rows, length), got {input_ids.dtype} {tuple(input_ids.shape)}"
        )
    if attention_mask is None:
        if pad is None or pad in eos:  # transformers' rule: a pad that is also an end token says nothing
            return [row.long() for row in input_ids]
        real = (input_ids != pad).int()
        # Pads in front of the first and behind the last other token; one in between is a token.
        attention_mask = (real.cumsum(1) > 0) & (real.flip(1).cumsum(1).flip(1) > 0)
        if not bool(attention_mask.any(1).all()):
            attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask is {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}")
    prompts = []
    for index, (row, mask) in enumerate(zip(input_ids, attention_mask.bool(), strict=True)):
        places = mask.nonzero().flatten().tolist()
        if not places:
            raise ValueError(f"row {index} of input_ids has no token: its attention mask is all zero")
        if len(places) != places[-1] - places[0] + 1:
            raise ValueError(
                f"row {index} of attention_mask has a hole: only padding on the left or right is supported"
            )
        prompts.append(row[places[0] : places[-1] + 1].long())
    return prompts


def _limit(config: GenerationConfig, max_new_tokens: int | None, width: int) -> int:
    if max_new_tokens is None:
        max_new_tokens = config.max_new_tokens
    if max_new_tokens is None:
        # transformers counts max_length over the padded prompt; its default is 20.
        max_new_tokens = 20 if config.max_length is None else config.max_length - width
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens!r}, it must be a positive integer")
    return max_new_tokens


@torch.inference_mode(False)
@torch.no_grad()
def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    assistant_model: PreTrainedModel | None = None,
    num_draft_tokens: int = 3,
    max_new_tokens: int | None = None,
    generation_config: GenerationConfig | None = None,
    streamer: Any = None,
    compiled: bool = True,
    options: Options | Mapping[str, Any] | None = None,
    return_stats: bool = False,
    **kwargs: Any,
) -> Any:
    """Greedy decoding of a batch; with an assistant, draft-plus-verify steps, each row accepting on its own.

    Usable as transformers' ``custom_generate``; transformers drops ``assistant_model`` and ``streamer`` on that way, so
    bind them: ``model.generate(ids, custom_generate=functools.partial(generate, assistant_model=assistant))``.

    Args:
        model: a Gemma 4 causal model; left as it was.
        input_ids: ``(rows, length)`` int64, padded on the left or on the right.
        attention_mask: ``(rows, length)``, 1 for real tokens; None: all real, but for leading or trailing pads.
        assistant_model: its MTP assistant; None decodes plainly, one token a step.
        num_draft_tokens: drafts per step, 1 to 16; ignored without an assistant.
        max_new_tokens: per row; default from ``generation_config``, else 20 as in transformers.
        generation_config: for limits, EOS and pad ids; default the model's own.
        streamer: for one row; gets ``put(tokens)`` with the prompt, then with each step's tokens, and ``end()``.
        compiled: False runs the step as plain PyTorch.
        options: of the backend (:class:`Options`).
        return_stats: also return :class:`Stats`.
        **kwargs: what transformers passes to a ``custom_generate`` function; settings that would change the result and
            are not implemented are refused by name.

    Returns:
        int64 ``(rows, length + new)``: prompts as given, new tokens (EOS included), ``pad_token_id`` after it.

    Raises:
        ValueError: an input or a setting cannot be honoured; names it.
    """
    check_target(model)
    config = resolve_config(model, generation_config, kwargs)
    parsed = Options.parse(options)
    eos, pad = eos_ids(config), pad_id(config)
    if input_ids.dim() == 2 and input_ids.shape[0] == 0:
        stats = Stats(Acceptance([0] * (num_draft_tokens if assistant_model is not None else 0)))
        return (input_ids.clone(), stats) if return_stats else input_ids.clone()
    prompts = _prompts(input_ids, attention_mask, config.pad_token_id, eos)
    limit = _limit(config, max_new_tokens, input_ids.shape[1])
    if streamer is not None and len(prompts) != 1:
        raise ValueError(f"a streamer shows one row, got {len(prompts)} rows")
    k = num_draft_tokens if assistant_model is not None else 0
    ahead = 0 if model.device.type == "cpu" else k + 1  # tokens of a step queued ahead
    needed = max(len(p) for p in prompts) + limit + ahead
    with ENGINES.engine(
        model, assistant_model, k, rows=len(prompts), model_len=needed, compiled=compiled, options=parsed
    ) as engine:
        session = Session.on(engine)
        requests = [session.add(p, max_new_tokens=limit, eos_token_id=eos) for p in prompts]
        if streamer is not None:
            streamer.put(input_ids.cpu())
        for _, tokens in session:
            if streamer is not None:
                streamer.put(torch.tensor(tokens))
        stats = session.stats
    if streamer is not None:
        streamer.end()
    stats.per_row = [request.acceptance for request in requests]
    outputs = [request.tokens for request in requests]
    width = max(len(tokens) for tokens in outputs)
    new = torch.tensor([t + [pad] * (width - len(t)) for t in outputs], dtype=torch.int64, device=input_ids.device)
    result = torch.cat([input_ids.long(), new], dim=1)
    return (result, stats) if return_stats else result


# transformers hands a custom_generate function every parameter it names and `_sample` does not, and takes it away from
# its own preparation. It must go on preparing these two, so the signature it inspects does not show them.
_signature = inspect.signature(generate)
generate.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[p for n, p in _signature.parameters.items() if n not in ("attention_mask", "max_new_tokens")]
)
