"""An independent draft-and-verify round: transformers' attention over full prefixes, no cache, no paging, no batch."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass
class Round:
    """One round of one row."""

    drafts: list[int]
    draft_logits: Tensor  # (k, vocab)
    target_logits: Tensor  # (k + 1, vocab)
    tokens: list[int]  # emitted: accepted drafts and the bonus token


@torch.no_grad()
def reference_round(target: PreTrainedModel, assistant: PreTrainedModel, prefix: list[int], k: int) -> Round:
    """Draft and verify after ``prefix``, whose last token is not in the cache yet.

    Every iteration drafts at position ``len(prefix) - 1`` and sees the keys before it; sliding layers the last
    ``window + 1`` of them.
    """
    seq_len = len(prefix) - 1
    window = target.config.get_text_config().sliding_window
    past = target.model(
        input_ids=torch.tensor([prefix[:-1]]), use_cache=False, return_shared_kv_states=True, logits_to_keep=None
    )
    shared = {kind: (keys, values) for kind, (keys, values) in past.shared_kv_states.items()}
    visible = torch.zeros(1, 1, 1, seq_len, dtype=torch.bool)
    visible[..., max(0, seq_len - 1 - window) :] = True
    masks = {"full_attention": None, "sliding_attention": visible}
    hidden = past.last_hidden_state[:, -1:]
    token, drafts, draft_logits = prefix[-1], [], []
    for _ in range(k):
        embeds = torch.cat([target.get_input_embeddings()(torch.tensor([[token]])), hidden], dim=-1)
        states = assistant.model(
            inputs_embeds=assistant.pre_projection(embeds),
            attention_mask=masks,
            position_ids=torch.tensor([[seq_len]]),
            shared_kv_states=shared,
            use_cache=False,
        ).last_hidden_state
        hidden = assistant.post_projection(states)
        if assistant.config.use_ordered_embeddings:
            logits = assistant.masked_embedding(states, assistant.lm_head.weight)
        else:
            logits = assistant.lm_head(states)
        draft_logits.append(logits[0, 0])
        token = int(logits[0, 0].argmax())
        drafts.append(token)
    verified = target(input_ids=torch.tensor([prefix + drafts]), use_cache=False).logits[0, -(k + 1) :]
    choice = verified.argmax(-1).tolist()
    accepted = next((i for i, (d, c) in enumerate(zip(drafts, choice, strict=False)) if d != c), k)
    stacked = torch.stack(draft_logits) if draft_logits else verified.new_empty(0, verified.shape[-1])
    return Round(drafts, stacked, verified, choice[: accepted + 1])
