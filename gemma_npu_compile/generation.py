"""``generate()``: batched speculative decoding with transformers' calling convention."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from gemma_npu_compile.engine_pool import ENGINES
from gemma_npu_compile.models import check_target
from gemma_npu_compile.modes import without_grad
from gemma_npu_compile.options import Options
from gemma_npu_compile.session import Session
from gemma_npu_compile.settings import Settings, eos_ids, new_token_limit, pad_id, resolve_config
from gemma_npu_compile.stats import Acceptance, Stats


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


@without_grad
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
    """Decode a batch; with an assistant, in draft-plus-verify steps, each row accepting on its own.

    Greedy tokens are exact. With ``do_sample=True`` tokens are drawn from the target's own distribution, with a seed
    per row from torch's generator (``torch.manual_seed``); the draws are not those of transformers.

    Usable as transformers' ``custom_generate``; transformers drops ``assistant_model`` and ``streamer`` on that way, so
    bind them: ``model.generate(ids, custom_generate=functools.partial(generate, assistant_model=assistant))``.

    Args:
        model: a Gemma 4 causal model; left as it was.
        input_ids: ``(rows, length)`` int64, padded on the left or on the right.
        attention_mask: ``(rows, length)``, 1 for real tokens; None: all real, but for leading or trailing pads.
        assistant_model: its MTP assistant; None decodes plainly, one token a step.
        num_draft_tokens: drafts per step, 1 to 16; ignored without an assistant.
        max_new_tokens: per row; default from ``generation_config``, else 20 as in transformers.
        generation_config: default the model's own; settings.py says what becomes of each setting.
        streamer: for one row; gets ``put(tokens)`` with the prompt, then with each step's tokens, and ``end()``.
        compiled: False runs the step as plain PyTorch.
        options: of the backend (:class:`Options`).
        return_stats: also return :class:`Stats`.
        **kwargs: settings of ``GenerationConfig``, ``logits_processor``, ``stopping_criteria``,
            ``prefix_allowed_tokens_fn``, ``tokenizer`` (for stop strings), and what transformers passes to a
            ``custom_generate`` function. What would change the result and is not implemented is refused by name.

    Returns:
        int64 ``(rows, length + new)``: prompts as given, new tokens (EOS included), ``pad_token_id`` after it;
        ``num_return_sequences`` rows for each prompt.

    Raises:
        ValueError: an input or a setting cannot be honoured; names it.
    """
    check_target(model)
    config = resolve_config(model, generation_config, kwargs)
    parsed, pad = Options.parse(options), pad_id(config)
    if input_ids.dim() == 2 and input_ids.shape[0] == 0:
        stats = Stats(Acceptance([0] * (num_draft_tokens if assistant_model is not None else 0)))
        return (input_ids.clone(), stats) if return_stats else input_ids.clone()
    prompts = _prompts(input_ids, attention_mask, config.pad_token_id, eos_ids(config))
    limit = new_token_limit(config, max_new_tokens, input_ids.shape[1])
    settings = Settings(
        model,
        config,
        input_ids.shape[1],
        limit,
        kwargs.get("logits_processor") or (),
        kwargs.get("stopping_criteria") or (),
        kwargs.get("prefix_allowed_tokens_fn"),
        kwargs.get("tokenizer"),
        # What generate() of transformers leaves on the config it made; it also repeated the prompts already.
        prepared=hasattr(generation_config, "_eos_token_tensor"),
    )
    copies = 1 if settings.prepared else config.num_return_sequences or 1
    input_ids = input_ids.repeat_interleave(copies, 0)
    prompts = [prompt for prompt in prompts for _ in range(copies)]
    if streamer is not None and len(prompts) != 1:
        raise ValueError(f"a streamer shows one row, got {len(prompts)} rows")
    k = num_draft_tokens if assistant_model is not None else 0
    seeds = torch.randint(2**63 - 1, (len(prompts),)).tolist() if config.do_sample else [0] * len(prompts)
    ahead = 0 if model.device.type == "cpu" else k + 1  # tokens of a step queued ahead
    needed = max(len(p) for p in prompts) + limit + ahead
    with ENGINES.engine(
        model, assistant_model, k, rows=len(prompts), model_len=needed, compiled=compiled, options=parsed
    ) as engine:
        session = Session.on(engine)
        requests = [
            session.add(
                prompt,
                max_new_tokens=limit,
                eos_token_id=settings.eos,
                stopping_criteria=settings.criteria,
                sampling=settings.sampling(seed),
                logits_processor=settings.row_processors(row, prompt),
            )
            for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
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
