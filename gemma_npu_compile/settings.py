"""What a ``GenerationConfig`` asks for, and what becomes of each of its settings."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from gemma_npu_compile.options import nearest
from gemma_npu_compile.request import check_count, check_processor, eos_list
from gemma_npu_compile.sampling import Sampling
from gemma_npu_compile.stopping import check_criterion, stop_string_criterion, time_criterion

SUPPORTED = (
    *("max_new_tokens", "max_length", "min_new_tokens", "min_length", "max_time", "stop_strings", "eos_token_id"),
    *("pad_token_id", "do_sample", "temperature", "top_k", "top_p", "num_return_sequences"),
)
"""Settings with an implementation of their own here."""

PROCESSED: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "sequence_bias": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "min_p": (),
    "top_h": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
}
"""Settings that are transformers' own logits processors, applied at each verified position, and what means "off"."""

_WARPERS = ("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "renormalize_logits")  # when sampling

REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "constraints": (),
    "force_words_ids": (),
    "penalty_alpha": (),
    "dola_layers": (),
    "low_memory": (False,),
    "guidance_scale": (1.0, 1),
    "watermarking_config": (),
    "token_healing": (False,),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "assistant_ensemble_weight": (),
    "speculation_type": (),
    "use_mtp": (False,),
    "is_assistant": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
    "return_dict_in_generate": (False,),
}
"""Settings that would change the result and are not implemented, with the values (beside None) that mean "off"."""

IGNORED = (
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "continuous_batching_config"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"),
    *("early_stopping", "length_penalty", "bos_token_id", "decoder_start_token_id"),
    *("transformers_version", "_from_model_config"),
)
"""Settings of machinery this package replaces, or of modes it refuses; they cannot change a token."""

# What transformers hands to a custom_generate function beside settings; none of it changes a result.
_INTERNALS = {
    "assistant_tokenizer",
    "cache",
    "cache_position",
    "logits_processor",
    "logits_to_keep",
    "mm_token_type_ids",
    "past_key_values",
    "position_ids",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "synced_gpus",
    "token_type_ids",
    "tokenizer",
    "use_cache",
    "use_model_defaults",
}
_INPUTS = ("inputs_embeds", "pixel_values", "pixel_values_videos", "input_features")


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
    for name, off in REFUSED.items():
        value = getattr(config, name, None)
        if value is not None and value not in off:
            raise ValueError(f"generation setting {name}={value!r} is not supported (README.md, settings)")
    if config.do_sample:
        defaults = GenerationConfig._get_default_generation_params()  # top_k is 50 unless someone says otherwise
        config.update(**{n: defaults[n] for n in ("temperature", "top_k", "top_p")}, defaults_only=True)
    elif (config.num_return_sequences or 1) != 1:
        raise ValueError(
            f"num_return_sequences={config.num_return_sequences!r} needs do_sample=True: greedy decoding has one result"
        )
    return config


def eos_ids(config: GenerationConfig) -> list[int]:
    """End tokens, in the order given."""
    return eos_list(config.eos_token_id)


def pad_id(config: GenerationConfig) -> int:
    """What follows a finished row: the pad token, else the first end token as in transformers, else 0."""
    return config.pad_token_id if config.pad_token_id is not None else next(iter(eos_ids(config)), 0)


def new_token_limit(config: GenerationConfig, max_new_tokens: int | None, width: int) -> int:
    """New tokens of each row at most; transformers counts ``max_length`` over the padded prompt of ``width`` tokens."""
    if max_new_tokens is None:
        max_new_tokens = config.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = 20 if config.max_length is None else config.max_length - width
    check_count("max_new_tokens", max_new_tokens, 1)
    return max_new_tokens


@dataclass
class Settings:
    """How the rows of one :func:`generate` call choose and stop.

    Attributes:
        config: from :func:`resolve_config`.
        width: of the padded prompts.
        limit: new tokens of a row at most.
        processors, criteria, prefix_fn, tokenizer: arguments of the call.
        prepared: transformers' ``generate()`` made the config, and put what follows from it into ``processors`` and
            ``criteria`` beside what the user gave.
    """

    model: PreTrainedModel
    config: GenerationConfig
    width: int
    limit: int
    processors: Sequence[LogitsProcessor]
    criteria: Sequence[StoppingCriteria]
    prefix_fn: Callable[[int, Tensor], list[int]] | None
    tokenizer: Any
    prepared: bool

    def __post_init__(self) -> None:
        config = self.config
        self.eos = eos_ids(config)
        self.minimum = max(config.min_new_tokens or 0, (config.min_length or 0) - self.width)
        on = [name for name, off in PROCESSED.items() if getattr(config, name, None) not in (None, *off)]
        if not config.do_sample:
            on = [name for name in on if name not in _WARPERS]
        self._ours = bool(on)
        self._warps = bool(config.do_sample) and any(name in _WARPERS for name in on)
        self.criteria = list(self.criteria)
        if self.prepared:
            self.processors = self._users(self.processors)
            self.criteria = [c for c in self.criteria if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria))]
        given = {type(c) for c in self.criteria}
        if config.max_time is not None and MaxTimeCriteria not in given:
            self.criteria.append(time_criterion(config.max_time))
        if config.stop_strings is not None and StopStringCriteria not in given:
            self.criteria.append(stop_string_criterion(config.stop_strings, self.tokenizer))
        for criterion in self.criteria:
            check_criterion(criterion)
        for processor in self.processors:
            check_processor(processor)
        self.sampling(0)

    def sampling(self, seed: int) -> Sampling | None:
        """How a row draws; None when the call is greedy."""
        config = self.config
        if not config.do_sample:
            return None
        if self._warps:  # transformers' warpers are among the processors, temperature included
            return Sampling(seed=seed)
        return Sampling(config.temperature, config.top_k or 0, 1.0 if config.top_p is None else config.top_p, seed)

    def row_processors(self, row: int, prompt: Tensor) -> list[LogitsProcessor]:
        """Logits processors of row ``row``, whose tokens are ``prompt``, for ids without padding."""
        prefix_fn = self.prefix_fn
        if not (self._ours or self.minimum or self.processors or prefix_fn):
            return []
        config = copy.copy(self.config)
        config.min_length, config.min_new_tokens = 0, self.minimum
        config.max_length = len(prompt) + self.limit
        config.do_sample = self._warps
        allowed = None if prefix_fn is None else lambda _, ids: prefix_fn(row, ids)
        return self._built(config, prompt, allowed, self.processors)

    def _built(
        self, config: GenerationConfig, prompt: Tensor, allowed: Any, given: Sequence[LogitsProcessor]
    ) -> list[LogitsProcessor]:
        """What transformers makes of a config, in its order, with ``given`` among it."""
        device = self.model.device
        ids = prompt[None].to(device)
        config._eos_token_tensor = torch.tensor(self.eos, device=device) if self.eos else None
        config.num_beams = config.num_return_sequences = 1
        return self.model._get_logits_processor(  # type: ignore[operator]
            generation_config=config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=ids,
            prefix_allowed_tokens_fn=allowed,
            logits_processor=LogitsProcessorList(given),
            device=device,
            model_kwargs={"attention_mask": torch.ones_like(ids)},
        )

    def _users(self, given: Sequence[LogitsProcessor]) -> list[LogitsProcessor]:
        """The processors of a prepared list that do not follow from the config."""
        own = {type(p): p for p in self._built(copy.copy(self.config), torch.zeros(self.width).long(), None, [])}
        users = []
        for each in given:
            if isinstance(each, PrefixConstrainedLogitsProcessor):
                self.prefix_fn = each._prefix_allowed_tokens_fn
            elif type(each) not in own:
                users.append(each)
            elif _numbers(each) != _numbers(own[type(each)]):
                raise ValueError(
                    f"logits processor {type(each).__name__} is given beside the setting it belongs to: give one only"
                )
        return users


def _numbers(processor: LogitsProcessor) -> dict[str, Any]:
    return {name: value for name, value in vars(processor).items() if isinstance(value, (bool, int, float, str))}
