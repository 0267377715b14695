"""Train the tiny pair from scratch: ``OMP_WAIT_POLICY=passive python -m gemma_npu_compile.tiny_pair.train --out DIR``.

Three stages, each repeatable (fixed seeds and step counts, nothing depends on the clock) with one version of Python and
of torch on one kind of machine. Each starts from the files of the one before, so ``--from`` can continue a run.

language   a byte-level BPE tokenizer, and the target, on the standard library's sources;
variety    the target unlearns to go in circles;
assistant  the assistant, on the target's predictions for real text and for text the target wrote.

Letters of shapes: B or N sequences, T = 320 tokens, V = 1024 words, H = 192 (the target's hidden size), Q positions
that draft, K = 3 drafts. ``evaluate.py`` measures the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import pathlib
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

from gemma_npu_compile.tiny_pair import heldout_sources
from gemma_npu_compile.tiny_pair.corpus import SEQUENCE, function_prompts, pack, train_tokenizer, training_sources
from gemma_npu_compile.tiny_pair.models import DRAFTS, PAD, WINDOW, build_assistant, build_target
from gemma_npu_compile.tiny_pair.muon import Muon

logger = logging.getLogger(__name__)

STAGES = ("language", "variety", "assistant")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How long and how fast to train; the defaults made the files of this folder."""

    language_steps: int = 600
    variety_steps: int = 96
    assistant_steps: int = 400
    batch: int = 8
    rate: float = 0.02
    variety_rate: float = 0.01
    written: int = 1024  # sequences the target writes for the assistant to learn from
    seed: int = 0


FAST = Recipe(language_steps=4, variety_steps=4, assistant_steps=4, written=64)


def minimise(loss_of: Callable[[], Tensor], model: nn.Module, steps: int, rate: float) -> None:
    """Train ``model``: Muon with ``rate`` for the layers' matrices, Adam with a fifth of it for embeddings and norms.

    Rates warm up over 20 steps and then decay to zero along a cosine.
    """
    parameters = dict(model.named_parameters())  # tied weights appear once
    matrices = [p for name, p in parameters.items() if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in parameters.items() if p.ndim != 2 or "embed_tokens" in name]
    optimizers = [Muon(matrices, rate), torch.optim.Adam(others, rate / 5, betas=(0.9, 0.98))]

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]
    model.train()
    start, average = time.perf_counter(), 0.0
    for step in range(steps):
        loss = loss_of()
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        average += (loss.item() - average) / min(step + 1, 20)
        if step % 25 == 0 or step == steps - 1:
            logger.info("step %d of %d: loss %.3f, %.0f s", step, steps, average, time.perf_counter() - start)
    model.eval()


def batches(rows: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Yield [size, T] rows for ever, in a new order in each pass."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from rows[torch.randperm(len(rows), generator=generator)].split(size)


def next_token_loss(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy of every token but the first."""
    logits = model(input_ids=tokens_BT, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten())


def repeats(tokens_BT: Tensor, length: int = 6) -> Tensor:
    """Return [B, T] booleans: whether a token completes a run of ``length`` tokens that occurred before in its row."""
    same_BTT = tokens_BT[:, :, None] == tokens_BT[:, None, :]
    end = tokens_BT.shape[1] - length + 1
    runs = torch.stack([same_BTT[:, i : i + end, i : i + end] for i in range(length)]).all(0)
    return F.pad(runs.tril(-1).any(-1), (length - 1, 0))


def circles(tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
    """Return [B, T] tokens of real text bent into circles: from a random token on, the last 1 to 36 ones come again."""
    size = (len(tokens_BT), 1)
    start_B1 = torch.randint(40, 160, size, generator=generator)
    period_B1 = torch.randint(1, 7, size, generator=generator) ** 2  # short circles are the most frequent ones
    source_BT = torch.arange(SEQUENCE).expand_as(tokens_BT)
    source_BT = torch.where(source_BT < start_B1, source_BT, start_B1 - period_B1 + (source_BT - start_B1) % period_B1)
    return tokens_BT.gather(1, source_BT)


def repetition_loss(model: nn.Module, tokens_BT: Tensor, first: int = 48) -> Tensor:
    """Return the mean of log(1 + e^margin), where the margin is that of a token repeating a run over its best rival.

    Greedy text of a small model soon goes in circles, because the most likely token wins however unlikely it is: what
    must change is the margin, more than the probability. Only the ``first`` such tokens of a row count, since past them
    a circle is settled.
    """
    logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits[:, :-1]
    following_BT1 = tokens_BT[:, 1:, None]
    best_rival_BT = logits_BTV.scatter(-1, following_BT1, float("-inf")).amax(-1)
    margins_BT = logits_BTV.gather(-1, following_BT1).squeeze(-1) - best_rival_BT
    repeated_BT = repeats(tokens_BT)[:, 1:]
    counted_BT = repeated_BT & (repeated_BT.cumsum(-1) <= first)
    return F.softplus(margins_BT)[counted_BT].sum() / counted_BT.sum().clamp(min=1)


@torch.no_grad()
def write_greedily(target: Gemma4ForCausalLM, prompts: list[list[int]]) -> Tensor:
    """Return [B, T] tokens: each prompt continued by the target's most likely tokens.

    Prompts of different lengths need no padding on the left: every row starts at position 0, and where a prompt still
    has a token it overrules the prediction. Text goes on after an <eos>, as it does in the rows of real text.
    """
    tokens_BT = torch.full((len(prompts), SEQUENCE), PAD)
    for row, prompt in zip(tokens_BT, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt[:SEQUENCE])
    cache = None
    for position in range(SEQUENCE - 1):
        output = target(input_ids=tokens_BT[:, position : position + 1], cache=cache, use_cache=True)
        cache = output.cache
        following = tokens_BT[:, position + 1]
        tokens_BT[:, position + 1] = torch.where(following == PAD, output.logits[:, -1].argmax(-1), following)
    return tokens_BT


def draft_masks() -> dict[str, Tensor]:
    """Return the [1, 1, Q, T] boolean masks of the keys that drafting from position t = 1..Q sees.

    Token t itself is not in the cache yet, so keys stop at t - 1; sliding layers see the last window + 1 of them, which
    is how transformers' mask of the assistant counts.
    """
    position_Q1 = torch.arange(1, SEQUENCE - DRAFTS + 1)[:, None]
    key_T = torch.arange(SEQUENCE)
    full = key_T < position_Q1
    sliding = full & (key_T >= position_Q1 - 1 - WINDOW)
    return {"full_attention": full[None, None], "sliding_attention": sliding[None, None]}


def draft_loss(assistant: Gemma4AssistantForCausalLM, target: Gemma4ForCausalLM, tokens_BT: Tensor) -> Tensor:
    """Return the mean loss of K drafts from every position of [B, T] tokens at once.

    As in generation, draft i from position t takes token t + i and a hidden state: the target's of position t - 1 at
    first, then the assistant's own; keys, values and the rotary position stay those of t. Feeding the text's tokens
    instead of the drafts is exact where it matters: a draft only counts when all drafts before it were right.

    Labels are the target's distribution (a richer signal) mixed with its best token (what greedy decoding compares).
    """
    with torch.no_grad():
        output = target(input_ids=tokens_BT, use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
        best = F.one_hot(output.logits.argmax(-1), output.logits.shape[-1])
        labels_BTV = 0.4 * output.logits.softmax(-1) + 0.6 * best
        embeddings_BTH = target.get_input_embeddings()(tokens_BT)
    count = SEQUENCE - DRAFTS
    masks, position_ids = draft_masks(), torch.arange(1, count + 1)[None]
    hidden_BQH = output.hidden_states[-1][:, :count]
    loss = torch.zeros(())
    for i in range(DRAFTS):
        inputs = torch.cat([embeddings_BTH[:, 1 + i : 1 + i + count], hidden_BQH], dim=-1)
        # assistant.forward() would build masks for a single position, so its parts are called here.
        states = assistant.model(
            inputs_embeds=assistant.pre_projection(inputs),
            attention_mask=masks,
            position_ids=position_ids,
            shared_kv_states=output.shared_kv_states,
            use_cache=False,
            logits_to_keep=torch.tensor(0),  # an int would slice per_layer_inputs, which is None
        ).last_hidden_state
        hidden_BQH = assistant.post_projection(states)
        labels_BQV = labels_BTV[:, 1 + i : 1 + i + count]
        loss = loss + F.cross_entropy(assistant.lm_head(states).flatten(0, 1), labels_BQV.flatten(0, 1)) / DRAFTS
    return loss


def train_language(tokens: Tensor, recipe: Recipe) -> Gemma4ForCausalLM:
    """Return a new target, trained to predict [N, T] tokens of real text."""
    target = build_target()
    rows = batches(tokens, recipe.batch, recipe.seed)
    minimise(lambda: next_token_loss(target, next(rows)), target, recipe.language_steps, recipe.rate)
    return target


def train_variety(target: Gemma4ForCausalLM, tokens: Tensor, recipe: Recipe) -> None:
    """Teach ``target`` to leave circles: half of each batch is real text, half is real text bent into circles.

    Bent text works far better than circles the target wrote itself, which it unlearns one by one and replaces by
    others: bent text is varied enough to teach the general rule.
    """
    half = recipe.batch // 2
    real_rows, bent_rows = batches(tokens, half, recipe.seed + 1), batches(tokens, half, recipe.seed + 2)
    generator = torch.Generator().manual_seed(recipe.seed)

    def loss() -> Tensor:
        circular = circles(next(bent_rows), generator)
        return next_token_loss(target, next(real_rows)) + repetition_loss(target, circular)

    minimise(loss, target, recipe.variety_steps, recipe.variety_rate)


def train_assistant(
    target: Gemma4ForCausalLM, tokens: Tensor, prompts: list[list[int]], recipe: Recipe
) -> Gemma4AssistantForCausalLM:
    """Return a new assistant of ``target``, trained on batches half of real text, half of text the target wrote.

    Written text is what drafts are compared with; real text keeps the assistant from learning its few rows by heart.
    """
    assistant = build_assistant()
    target.requires_grad_(False)
    written = torch.cat([write_greedily(target, prompts[i : i + 128]) for i in range(0, len(prompts), 128)])
    logger.info("the target wrote %d sequences", len(written))
    half = recipe.batch // 2
    real_rows, written_rows = batches(tokens, half, recipe.seed), batches(written, half, recipe.seed)

    def loss() -> Tensor:
        return draft_loss(assistant, target, torch.cat([next(real_rows), next(written_rows)]))

    minimise(loss, assistant, recipe.assistant_steps, recipe.rate)
    return assistant


def train_pair(directory: pathlib.Path, recipe: Recipe, first_stage: str = STAGES[0]) -> None:
    """Write ``directory``/target and ``directory``/assistant, in bfloat16.

    Every stage loads the target from its file: the assistant in particular has to imitate the rounded weights.
    """
    target_dir = directory / "target"
    sources = training_sources()
    tokenizer = train_tokenizer(sources)
    tokens = pack(tokenizer, sources)
    prompts = function_prompts(tokenizer, sources, recipe.written)
    logger.info("%d sources, %d rows of tokens, %d prompts", len(sources), len(tokens), len(prompts))
    for stage in STAGES[STAGES.index(first_stage) :]:
        logger.info("stage %s", stage)
        torch.manual_seed(recipe.seed)
        if stage == "language":
            tokenizer.save_pretrained(target_dir)
            target = train_language(tokens, recipe)
        else:
            target = Gemma4ForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
        if stage == "variety":
            train_variety(target, tokens, recipe)
        if stage == "assistant":
            train_assistant(target, tokens, prompts, recipe).bfloat16().save_pretrained(directory / "assistant")
        else:
            with torch.no_grad():
                held_out = pack(tokenizer, heldout_sources())[::8]
                logger.info("held-out loss of the target: %.3f", next_token_loss(target, held_out).item())
            target.bfloat16().save_pretrained(target_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for target/ and assistant/")
    parser.add_argument("--fast", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--from", dest="first_stage", choices=STAGES, default=STAGES[0], help="the first stage to run")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train_pair(arguments.out, FAST if arguments.fast else Recipe(), arguments.first_stage)


if __name__ == "__main__":
    main()
