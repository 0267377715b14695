"""Measure the tiny pair: ``python -m gemma_npu_compile.tiny_pair.evaluate [DIR]``.

Uses nothing but transformers' own assisted generation (greedy, one sequence, float32), so that the figures are a
reference this project's generation can be compared with, rather than a product of it.
"""

from __future__ import annotations

import argparse
import json
import logging
import pathlib

import torch
from torch import Tensor
from transformers import AutoTokenizer, Gemma4AssistantForCausalLM, Gemma4ForCausalLM
from transformers.generation import BaseStreamer

from gemma_npu_compile.tiny_pair import CODING_PROMPTS, TARGET_DIR, heldout_prompts
from gemma_npu_compile.tiny_pair.models import DRAFTS

logger = logging.getLogger(__name__)


class RoundRecorder(BaseStreamer):
    """Records how many tokens each round of assisted generation emits: the accepted drafts and one more."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, value: Tensor) -> None:
        self.sizes.append(value.numel())

    def end(self) -> None:
        """Nothing is buffered."""

    def accepted(self, new_tokens: int) -> list[int]:
        """Return the accepted drafts of each round of a generation of at most ``new_tokens``.

        The first two chunks are the prompt and the prefill's token. Rounds too close to the limit to try all drafts are
        left out.
        """
        emitted, accepted = 1, []
        for size in self.sizes[2:]:
            if new_tokens - emitted > DRAFTS:
                accepted.append(size - 1)
            emitted += size
        return accepted


def acceptance(rounds: list[int]) -> list[float]:
    """Return the percentages of rounds that accepted at least their first 1, 2, ... drafts."""
    return [round(100 * sum(accepted > i for accepted in rounds) / len(rounds), 1) for i in range(DRAFTS)]


def distinct_4grams(tokens: Tensor) -> float:
    """Return the share of distinct ones among the runs of four tokens: 1 for a text that never repeats itself.

    A target that loops is easy to draft for: acceptance means little when this is low.
    """
    grams = [tuple(gram) for gram in tokens.unfold(0, 4, 1).tolist()]
    return len(set(grams)) / len(grams) if grams else 1.0


def evaluate(directory: pathlib.Path, new_tokens: int = 256) -> dict[str, dict[str, object]]:
    """Return acceptance, repetition, and how many outputs equal plain greedy generation, for each set of prompts."""
    tokenizer = AutoTokenizer.from_pretrained(directory / "target")
    target = Gemma4ForCausalLM.from_pretrained(directory / "target", dtype=torch.float32)
    assistant = Gemma4AssistantForCausalLM.from_pretrained(directory / "assistant", dtype=torch.float32)
    limits = {"max_new_tokens": new_tokens, "do_sample": False}
    results: dict[str, dict[str, object]] = {}
    pooled: list[int] = []
    for name, prompts in (("coding", CODING_PROMPTS), ("heldout", heldout_prompts())):
        rounds: list[int] = []
        shares: list[float] = []
        equal = tokens = 0
        for prompt in prompts:
            inputs = tokenizer(prompt, return_tensors="pt")
            recorder = RoundRecorder()
            plain = target.generate(**inputs, **limits)
            assisted = target.generate(**inputs, **limits, assistant_model=assistant, streamer=recorder)
            written = plain[0, inputs["input_ids"].shape[1] :]
            equal += torch.equal(plain, assisted)
            tokens += len(written)
            rounds += recorder.accepted(new_tokens)
            shares.append(distinct_4grams(written))
            logger.info("%s%s", prompt, tokenizer.decode(written))
        pooled += rounds
        results[name] = {
            "acceptance": acceptance(rounds),
            "rounds": len(rounds),
            "tokens": tokens,
            "equal to plain greedy": f"{equal} of {len(prompts)}",
            "distinct 4-grams": round(sum(shares) / len(shares), 3),
        }
    results["pooled"] = {"acceptance": acceptance(pooled), "rounds": len(pooled)}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path, nargs="?", default=TARGET_DIR.parent)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--verbose", action="store_true", help="print the texts, too")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, format="%(message)s")
    for name, result in evaluate(arguments.directory, arguments.new_tokens).items():
        print(f"{name:8}", json.dumps(result))


if __name__ == "__main__":
    main()
