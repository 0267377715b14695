"""What the tiny pair is trained on: the standard library of the running interpreter, as prompts and rows of tokens."""

from __future__ import annotations

import contextlib

import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from gemma_npu_compile.tiny_pair import HELDOUT_MODULES, function_heads, standard_library
from gemma_npu_compile.tiny_pair.models import BOS, EOS, VOCABULARY

SEQUENCE = 320

# Tests repeat themselves, pydoc_data is prose, encodings and entities.py are tables: no code worth learning to predict.
EXCLUDED_PARTS = {"test", "tests", "idle_test", "pydoc_data", "encodings", "entities.py", "site-packages"}


def training_sources() -> list[str]:
    """Return the text of the standard library's modules, in a fixed order, without tests and held-out modules."""
    root = standard_library()
    sources = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        machine_made = name.name.startswith("_sysconfigdata")
        if machine_made or EXCLUDED_PARTS.intersection(name.parts) or name.as_posix() in HELDOUT_MODULES:
            continue
        with contextlib.suppress(UnicodeDecodeError):  # a few modules keep their authors' legacy encodings
            sources.append(path.read_text(encoding="utf-8"))
    return sources


def train_tokenizer(sources: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer: any text round-trips, and every encoding begins with <bos>."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<eos>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sources, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        padding_side="left",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def pack(tokenizer: PreTrainedTokenizerFast, sources: list[str]) -> Tensor:
    """Return [N, T] tokens: the sources end to end, an <eos> after each, cut in rows that each begin with <bos>."""
    stream: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(sources, add_special_tokens=False):
        stream += [*encoding.ids, EOS]
    body = SEQUENCE - 1
    rows = torch.tensor(stream[: len(stream) // body * body]).view(-1, body)
    return F.pad(rows, (1, 0), value=BOS)


def function_prompts(tokenizer: PreTrainedTokenizerFast, sources: list[str], count: int) -> list[list[int]]:
    """Return the tokens of the heads of ``count`` functions of the sources, in a fixed random order."""
    heads = [head for source in sources for head in function_heads(source)]
    order = torch.randperm(len(heads), generator=torch.Generator().manual_seed(0))[:count]
    return tokenizer([heads[i] for i in order])["input_ids"]
