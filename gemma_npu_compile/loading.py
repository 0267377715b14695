"""Load a pair and its tokenizer from local directories, for the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from gemma_npu_compile.models import ASSISTANTS, TARGETS
from gemma_npu_compile.options import nearest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Loaded:
    """A pair ready to run."""

    target: PreTrainedModel
    assistant: PreTrainedModel
    tokenizer: Any


def _model(directory: Path, kinds: tuple[type, ...], dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} is not a model directory: it has no config.json")
    config = AutoConfig.from_pretrained(directory)
    name = (config.architectures or [""])[0]
    known = {kind.__name__: kind for kind in kinds}
    if name not in known:
        raise ValueError(f"{directory} holds a {name or config.model_type}; supported are {', '.join(known)}")
    model = getattr(transformers, name).from_pretrained(directory, dtype=dtype)
    return model.to(device).eval()


def load_pair(model: Path, assistant: Path, dtype: str, device: str) -> Loaded:
    """Load target, assistant and the target's tokenizer.

    Raises:
        ValueError: a directory, architecture or dtype cannot be used; names it.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}{nearest(dtype, list(DTYPES))}, it must be one of {', '.join(DTYPES)}")
    place = torch.device(device)
    transformers.utils.logging.disable_progress_bar()
    return Loaded(
        _model(model, TARGETS, DTYPES[dtype], place),
        _model(assistant, ASSISTANTS, DTYPES[dtype], place),
        AutoTokenizer.from_pretrained(model),
    )
