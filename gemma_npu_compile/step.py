"""One draft-plus-verify step of Gemma 4 MTP speculative decoding, as one traceable function."""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gemma_npu_compile.kv_cache import PagedKVCache
from gemma_npu_compile.kv_groups import MAX_QUERY_LEN
from gemma_npu_compile.models import PagedContext, check_pair, check_target, shadow, text_model
from gemma_npu_compile.ops import host_mirror, row_padding, slot_mapping
from gemma_npu_compile.regions import CALL
from gemma_npu_compile.sampling import Draws, sample


class StepOutput(NamedTuple):
    """Result of one step over ``rows`` rows with ``k`` drafts.

    Attributes:
        tokens: ``(rows, k + 1)`` int64, the target's choice after the last token and after each draft. The first
            ``accepted + 1`` of a row are its new tokens (the bonus token included), the rest is void.
        accepted: ``(rows,)`` int64, length of the prefix of the drafts that the target agrees with.
        drafts: ``(rows, k)`` int64.
        token, hidden, seq_len: the inputs of the next step: ``(rows,)`` int64, ``(rows, hidden)``, ``(rows,)`` int32.
        draft_logits: ``(rows, k, vocab)`` when asked for, else empty.
        target_logits: ``(rows, k + 1, vocab)`` when asked for, else empty.
        states: the target's final hidden states ``(rows, k + 1, hidden)`` when asked for, else empty.
    """

    tokens: Tensor
    accepted: Tensor
    drafts: Tensor
    token: Tensor
    hidden: Tensor
    seq_len: Tensor
    draft_logits: Tensor
    target_logits: Tensor
    states: Tensor


def accept(choice: Tensor, drafts: Tensor, states: Tensor, seq_len: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How many drafts each row accepts, and its next token, hidden state and length.

    Args:
        choice: ``(rows, k + 1)`` int64, the target's choices.
        drafts: ``(rows, k)`` int64.
        states: ``(rows, k + 1, hidden)``.
        seq_len: ``(rows,)`` int32.
    """
    # Length of the matching prefix: a mismatch zeroes everything behind it.
    accepted = (drafts == choice[:, :-1]).long().cumprod(dim=1).sum(dim=1)
    last = accepted.unsqueeze(1)
    token = choice.gather(1, last).squeeze(1)
    hidden = states.gather(1, last.unsqueeze(2).expand(-1, -1, states.shape[2])).squeeze(1)
    return accepted, token, hidden, seq_len + accepted.to(torch.int32) + 1


def mark_rows(*inputs: Tensor | tuple[Tensor, ...]) -> None:
    """Tell Dynamo that the first axis of the step's inputs is a number of rows, before the first compiled call.

    One trace then serves every number of rows from 2 on. Without it, the first call is traced for its own size.
    """
    for tensor in inputs:
        for each in tensor if isinstance(tensor, tuple) else (tensor,):
            torch._dynamo.mark_dynamic(each, 0)


_numbers = itertools.count()


# Any two calls of one step are alike; without a key, Dynamo finds side effects in transformers and traces each call.
@torch.compiler.nested_compile_region(reuse_hash_fn=lambda step, *_: step.number)
def _draft_region(
    step: "DraftVerifyStep",
    token: Tensor,
    hidden: Tensor,
    position: Tensor,
    seq_len: Tensor,
    tables: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    return step.draft_once(f"draft.{CALL}/assistant", token, hidden, position, seq_len, tables)


class DraftVerifyStep(nn.Module):
    """Draft ``num_draft_tokens`` tokens with the assistant, verify them with the target, accept them row by row.

    ``forward`` traces with ``torch.compile(..., fullgraph=True)`` and any number of rows. The models are the unmodified
    transformers classes, run through shadows (models.py); their parameters are shared, not copied.

    The drafting follows transformers' ``SinglePositionMultiTokenCandidateGenerator``: all iterations use position
    ``seq_len`` and see the ``seq_len`` verified keys, the assistant's sliding layers the last ``window + 1`` of them.

    Args:
        target: a Gemma 4 causal model, in eval mode or not; it is run in eval mode.
        assistant: its MTP assistant; None together with ``num_draft_tokens=0`` gives plain greedy decoding.
        cache: the target's :class:`PagedKVCache`.
        num_draft_tokens: drafts per step, 0 to 16.
        return_logits: also return the logits of drafts and verification.
        return_states: also return logits and hidden states of the verification, for an acceptance outside.
        regions: trace one drafting iteration for all of them (``torch.compiler.nested_compile_region``), which this
            backend writes out again. Off for other backends: they are given plain PyTorch.

    Raises:
        ValueError: the pair does not fit, with every differing value; or a number is out of range.
    """

    token_padding: Tensor
    hidden_padding: Tensor
    filters_padding: Tensor
    keys_padding: Tensor

    def __init__(
        self,
        target: PreTrainedModel,
        assistant: PreTrainedModel | None,
        cache: PagedKVCache,
        num_draft_tokens: int = 3,
        *,
        return_logits: bool = False,
        return_states: bool = False,
        regions: bool = False,
    ) -> None:
        super().__init__()
        self.number, self.regions = next(_numbers), regions
        check_target(target)
        smallest = 0 if assistant is None else 1
        if not isinstance(num_draft_tokens, int) or not smallest <= num_draft_tokens <= MAX_QUERY_LEN - 1:
            raise ValueError(f"num_draft_tokens is {num_draft_tokens!r}, it must be in {smallest}..{MAX_QUERY_LEN - 1}")
        if assistant is None and num_draft_tokens:
            raise ValueError(f"num_draft_tokens is {num_draft_tokens}, without an assistant it must be 0")
        layers = target.config.get_text_config().num_hidden_layers
        if len(cache) != layers:
            raise ValueError(f"the cache was built for {len(cache)} layers, the target has {layers}")
        if (cache.dtype, cache.device) != (target.dtype, target.device):
            raise ValueError(
                f"the cache is {cache.dtype} on {cache.device}, the target {target.dtype} on {target.device}"
            )
        self.cache = cache
        self.num_draft_tokens = num_draft_tokens
        self.return_logits, self.return_states = return_logits, return_states
        self.target = shadow(target)
        self.embed_tokens = text_model(self.target).embed_tokens
        self.softcap: float | None = target.config.get_text_config().final_logit_softcapping
        self.assistant = None
        if assistant is not None:
            check_pair(target, assistant, cache.owners)
            self.assistant = shadow(assistant)
            types = assistant.config.get_text_config().layer_types
            self.draft_groups = tuple(cache.layer_groups[cache.owners[t]] for t in types)
        self.register_buffer("token_padding", torch.zeros(cache.padded_rows, dtype=torch.long), persistent=False)
        hidden_size = target.config.get_text_config().hidden_size
        padding = torch.zeros(cache.padded_rows, hidden_size, dtype=target.dtype)
        self.register_buffer("hidden_padding", padding, persistent=False)
        # Zeros are a greedy row (sampling.py).
        self.register_buffer("filters_padding", torch.zeros(cache.padded_rows, 2), persistent=False)
        self.register_buffer("keys_padding", torch.zeros(cache.padded_rows, 3, dtype=torch.long), persistent=False)
        self.to(target.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's logits ``(..., vocab)`` of final hidden states ``(..., hidden)``, softcap applied."""
        logits = self.target.lm_head(hidden)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def run_target(self, input_ids: Tensor, positions: Tensor, paged: PagedContext) -> Tensor:
        """Final hidden states ``(batch, q_len, hidden)``; keys and values go to the cache.

        Args:
            input_ids, positions: ``(batch, q_len)`` int64. A packed prefill is one batch entry with ``query_lens``.
        """
        output = text_model(self.target)(
            input_ids=input_ids,
            attention_mask={"full_attention": None, "sliding_attention": None},
            position_ids=positions,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=None,  # an int would let KV-shared layers drop positions
            paged=paged,
        )
        return output.last_hidden_state

    def draft_once(
        self,
        site: str,
        token: Tensor,
        hidden: Tensor,
        position: Tensor,
        seq_len: Tensor,
        tables: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One iteration, at ``position`` ``(rows, 1)``.

        Returns:
            hidden states ``(rows, hidden)``, logits ``(rows, vocab)`` and the next token ``(rows,)``.
        """
        pools = self.cache.key_pools, self.cache.value_pools
        shared = {kind: (pools[0][owner], pools[1][owner]) for kind, owner in self.cache.owners.items()}
        embeds = torch.cat([self.embed_tokens(token), hidden], dim=-1).unsqueeze(1)
        paged = PagedContext(site, self.draft_groups, tables, seq_len, extra_window=1)
        assistant: Any = self.assistant
        output = assistant(
            inputs_embeds=embeds, position_ids=position, shared_kv_states=shared, use_cache=False, paged=paged
        )
        logits = output.logits[:, 0]
        return output.last_hidden_state[:, 0], logits, logits.argmax(-1)

    def draft(
        self, token: Tensor, hidden: Tensor, seq_len: Tensor, tables: tuple[Tensor, ...]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """``k`` draft tokens ``(rows,)`` and their logits ``(rows, vocab)``."""
        drafts: list[Tensor] = []
        logits: list[Tensor] = []
        position = seq_len.long().unsqueeze(1)
        for i in range(self.num_draft_tokens):
            if self.regions and self.num_draft_tokens > 1:  # Dynamo writes out what is called once, with its {call}
                hidden, scores, token = _draft_region(self, token, hidden, position, seq_len, tables)
            else:
                hidden, scores, token = self.draft_once(
                    f"draft.{i}/assistant", token, hidden, position, seq_len, tables
                )
            logits.append(scores)
            drafts.append(token)
        return drafts, logits

    def _check_inputs(
        self, token: Tensor, hidden: Tensor, seq_len: Tensor, block_tables: tuple[Tensor, ...], draws: Draws | None
    ) -> None:
        # Comparing sizes also tells the tracer that all inputs have one number of rows.
        if token.shape[0] != hidden.shape[0] or token.shape[0] != seq_len.shape[0]:
            raise ValueError(
                f"token, hidden and seq_len have {token.shape[0]}, {hidden.shape[0]} and {seq_len.shape[0]} rows"
            )
        for name, each in zip(Draws._fields, draws or (), strict=False):
            if each.shape[0] != token.shape[0]:
                raise ValueError(f"{name} of draws has {each.shape[0]} rows, token has {token.shape[0]}")
        if len(block_tables) != len(self.cache.groups):
            raise ValueError(
                f"{len(block_tables)} block tables were given, the cache has {len(self.cache.groups)} groups"
            )
        for table, padding, group in zip(block_tables, self.cache.padding_tables, self.cache.groups, strict=True):
            if table.shape[0] != token.shape[0]:
                raise ValueError(
                    f"the block table of KV group {group.name} has {table.shape[0]} rows, token has {token.shape[0]}"
                )
            if table.shape[1] != padding.shape[1]:
                raise ValueError(
                    f"the block table of KV group {group.name} (layers {group.layers}) is {table.shape[1]} blocks "
                    f"wide, the cache's tables are {padding.shape[1]} wide"
                )

    @torch.no_grad()
    def forward(
        self,
        token: Tensor,
        hidden: Tensor,
        seq_len: Tensor,
        block_tables: tuple[Tensor, ...],
        draws: Draws | None = None,
        host_len: Tensor | None = None,
    ) -> StepOutput:
        """Run one step.

        Args:
            token: ``(rows,)`` int64, each row's last token, not yet in the cache.
            hidden: ``(rows, hidden)``, the target's final hidden state that predicted ``token``.
            seq_len: ``(rows,)`` int32, tokens of each row in the cache.
            block_tables: one ``(rows, width)`` int32 table per group of the cache, with blocks for positions up to
                ``seq_len + k`` (:meth:`PagedKVCache.extend`, :meth:`PagedKVCache.block_tables`).
            draws: how each row samples; None chooses greedily, in a graph without a trace of sampling.
            host_len: ``seq_len`` on the CPU, so that a replay need not wait for the device to learn it; a row may have
                more with ``kv_lens="device"`` (:func:`gemma_npu_compile.ops.host_mirror`).
        """
        cache, k = self.cache, self.num_draft_tokens
        self._check_inputs(token, hidden, seq_len, block_tables, draws)
        if host_len is not None and host_len.shape[0] != token.shape[0]:
            raise ValueError(f"host_len has {host_len.shape[0]} rows, token {token.shape[0]}")
        token = row_padding(token, self.token_padding)
        hidden = row_padding(hidden, self.hidden_padding)
        seq_len = row_padding(seq_len, cache.padding_lens)
        if host_len is not None:
            seq_len = host_mirror(seq_len, row_padding(host_len, cache.host_padding_lens))
        tables = tuple(row_padding(t, p) for t, p in zip(block_tables, cache.padding_tables, strict=True))

        drafts, draft_logits = self.draft(token, hidden, seq_len, tables) if k else ([], [])

        inputs = torch.stack([token, *drafts], dim=1)
        positions = seq_len.long().unsqueeze(1) + torch.arange(k + 1, device=seq_len.device)
        slots = tuple(slot_mapping(t, positions, g.block_size) for t, g in zip(tables, cache.groups, strict=True))
        paged = PagedContext("verify/target", cache.layer_groups, tables, seq_len + (k + 1), slots)
        states = self.run_target(inputs, positions, paged)
        target_logits = self.logits(states)
        if draws is None:
            choice = target_logits.argmax(-1)
        else:
            paddings = self.filters_padding, self.keys_padding
            padded = Draws(*(row_padding(d, p) for d, p in zip(draws, paddings, strict=True)))
            choice = sample(target_logits, positions + 1, padded)
        proposed = inputs[:, 1:]
        accepted, next_token, next_hidden, next_len = accept(choice, proposed, states, seq_len)
        nothing = states.new_empty(0)
        return StepOutput(
            tokens=choice,
            accepted=accepted,
            drafts=proposed,
            token=next_token,
            hidden=next_hidden,
            seq_len=next_len,
            draft_logits=torch.stack(draft_logits, dim=1) if self.return_logits and k else nothing,
            target_logits=target_logits if self.return_logits or self.return_states else nothing,
            states=states if self.return_states else nothing,
        )
