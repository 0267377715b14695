"""Every setting of GenerationConfig is honoured as transformers does it, or refused by name."""

import functools
import re
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    WatermarkingConfig,
)

import gemma_npu_compile as gnc
from gemma_npu_compile.settings import IGNORED, PROCESSED, REFUSED, SUPPORTED
from gemma_npu_compile.tiny_pair import TARGET_DIR
from gemma_npu_compile.verify import plain_greedy

README = Path(__file__).resolve().parents[1] / "README.md"
IDS = torch.tensor([[17, 5, 6, 7, 8, 5, 6]])
MASK = torch.ones_like(IDS)


def test_every_setting_has_one_place():
    """In the code and in the README's table, so that a new one of transformers is seen."""
    ours = [*SUPPORTED, *PROCESSED, *REFUSED, *IGNORED]
    assert sorted(ours) == sorted({*vars(GenerationConfig()), *GenerationConfig().to_dict()})
    text = README.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (supported|processors|refused|ignored) \| (.*) \|$", text, flags=re.MULTILINE))
    table = {kind: re.findall(r"`(\w+)`", names) for kind, names in rows.items()}
    assert table == {
        "supported": list(SUPPORTED),
        "processors": list(PROCESSED),
        "refused": list(REFUSED),
        "ignored": [name for name in IGNORED if name not in ("transformers_version", "_from_model_config")],
    }


@pytest.mark.parametrize("name", REFUSED)
def test_the_refused_are_refused_by_name(pair, name):
    config = GenerationConfig()
    on = {"watermarking_config": WatermarkingConfig(), "assistant_ensemble_weight": 0.5}.get(name, 3)
    setattr(config, name, on)
    with pytest.raises(ValueError, match=f"generation setting {name}=.* is not supported"):
        gnc.generate(pair[0], IDS, generation_config=config, compiled=False)
    for off in (None, *REFUSED[name]):
        setattr(config, name, off)
        assert gnc.generate(pair[0], IDS, generation_config=config, max_new_tokens=1, compiled=False).shape == (1, 8)


@pytest.fixture(scope="module")
def run(pair):
    """Two drafts, uncompiled, 24 tokens."""
    return functools.partial(gnc.generate, assistant_model=pair[1], num_draft_tokens=2, compiled=False)


FREE = 24


def eos_of(pair) -> int:
    """A token that plain decoding says early."""
    return plain_greedy(pair[0], IDS[0].tolist(), FREE, [], 0)[3]


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
        {"min_new_tokens": 11, "eos_token_id": list(range(1, 100))},
        {"min_length": 15},
        {"bad_words_ids": [[5], [6, 7]], "sequence_bias": [[[8], 2.0]]},
        {"suppress_tokens": [5, 6, 7], "begin_suppress_tokens": [8]},
        {"forced_eos_token_id": 9, "max_new_tokens": 6},
        {"exponential_decay_length_penalty": (4, 1.3)},
        {"forced_bos_token_id": 9, "remove_invalid_values": True},
    ],
    ids=lambda settings: "+".join(settings),
)
def test_processors_act_at_every_verified_position(pair, run, settings):
    """Tokens equal transformers' own, called directly and as its custom_generate, and drafts are still accepted."""
    target, _ = pair
    common = {"max_new_tokens": FREE, "eos_token_id": eos_of(pair), "pad_token_id": 0, "do_sample": False, **settings}
    expected = target.generate(IDS, attention_mask=MASK, **common)
    output, stats = run(target, IDS, MASK, **common, return_stats=True)
    assert output.tolist() == expected.tolist()
    assert target.generate(IDS, attention_mask=MASK, custom_generate=run, **common).tolist() == expected.tolist()
    assert stats.acceptance.drafts > 0


def test_a_padded_row_counts_as_in_transformers(pair, run):
    """min_length counts padding, as there; the other row is its own."""
    target, _ = pair
    ids = torch.cat([torch.zeros(1, 5, dtype=torch.long), IDS], dim=1)
    ids = torch.cat([ids, torch.arange(20, 32)[None]])
    mask = (ids != 0).long()
    common = {"max_new_tokens": FREE, "eos_token_id": eos_of(pair), "min_length": 20, "repetition_penalty": 1.3}
    expected = target.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **common)
    assert run(target, ids, mask, pad_token_id=0, **common).tolist() == expected.tolist()


class Forbid(LogitsProcessor):
    """Somebody's own: no token twice in a row."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], -float("inf"))


def test_processors_of_the_user(pair, run):
    target, _ = pair
    for given in ([Forbid()], [RepetitionPenaltyLogitsProcessor(1.5), Forbid()]):
        processors = LogitsProcessorList(given)
        common = {"max_new_tokens": FREE, "do_sample": False, "pad_token_id": 0, "logits_processor": processors}
        expected = target.generate(IDS, attention_mask=MASK, **common)
        assert run(target, IDS, **common).tolist() == expected.tolist()
        assert target.generate(IDS, attention_mask=MASK, custom_generate=run, **common).tolist() == expected.tolist()
    allowed = {"prefix_allowed_tokens_fn": lambda row, ids: [int(ids[-1]) % 40 + 1, int(ids[-2]) % 9 + 30]}
    expected = target.generate(IDS, attention_mask=MASK, do_sample=False, max_new_tokens=9, **allowed)
    assert run(target, IDS, max_new_tokens=9, **allowed).tolist() == expected.tolist()


def test_processors_that_cannot_be_put_to_drafts_are_refused(pair, run):
    target, _ = pair
    mark = SynthIDTextWatermarkLogitsProcessor(5, [1, 2, 3], 16, 4, 0, "cpu", skip_first_ngram_calls=True)
    with pytest.raises(ValueError, match="logits processor SynthIDTextWatermarkLogitsProcessor is not supported"):
        run(target, IDS, logits_processor=[mark])
    both = {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.5)], "repetition_penalty": 1.2}
    with pytest.raises(ValueError, match="RepetitionPenaltyLogitsProcessor is given beside the setting"):
        target.generate(IDS, attention_mask=MASK, do_sample=False, custom_generate=run, max_new_tokens=3, **both)


# ---- sampling


def test_sampling_settings(pair, run):
    """Seeds come from torch's generator; a filter down to one token is greedy, whoever filters."""
    target, _ = pair
    draw = functools.partial(run, target, IDS, do_sample=True, max_new_tokens=12)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(draw(num_return_sequences=3))
    assert results[0].shape == (3, 7 + 12)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert len({tuple(row) for row in results[0].tolist()}) == 3
    greedy = run(target, IDS, max_new_tokens=12)
    for one in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"min_p": 1.0, "temperature": 3.0}):
        assert torch.equal(draw(**one), greedy), one
    torch.manual_seed(1)
    through = target.generate(
        IDS, attention_mask=MASK, do_sample=True, max_new_tokens=12, num_return_sequences=3, custom_generate=run
    )
    assert torch.equal(through, results[0])


# ---- stopping


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET_DIR)


def test_stop_strings(pair, run, tokenizer):
    """The token that completes the string stays whole, whatever a step added behind it is dropped.

    transformers' generate() drops the tokenizer before it calls a custom_generate function: bind it, or give the
    criterion.
    """
    target, _ = pair
    free = plain_greedy(target, IDS[0].tolist(), FREE, [], 0)
    texts = [tokenizer.decode(free[place : place + 2]) for place in range(FREE - 2)]
    for text in [t for t in texts if t.isascii()][:2]:
        common = {"max_new_tokens": FREE, "do_sample": False, "stop_strings": [text, "never said"], "pad_token_id": 0}
        expected = target.generate(IDS, attention_mask=MASK, tokenizer=tokenizer, **common)
        assert expected.shape[1] < 7 + FREE, text
        assert run(target, IDS, tokenizer=tokenizer, **common).tolist() == expected.tolist()
        common.pop("stop_strings")
        ways = (
            {"custom_generate": functools.partial(run, stop_strings=[text], tokenizer=tokenizer)},
            {"custom_generate": run, "stopping_criteria": [StopStringCriteria(tokenizer, [text])]},
        )
        for way in ways:
            assert target.generate(IDS, attention_mask=MASK, **common, **way).tolist() == expected.tolist()


class AtLength(StoppingCriteria):
    """Stops a row of a certain length."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.seen: list[int] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] >= self.length])


def test_criteria_are_asked_token_by_token(pair, run):
    target, _ = pair
    criterion = AtLength(13)
    output = run(target, IDS, max_new_tokens=FREE, stopping_criteria=[criterion])
    assert output.shape == (1, 13)
    assert criterion.seen == list(range(8, 14))
    assert run(target, IDS, max_new_tokens=FREE, max_time=1e-9).shape == (1, 8)
    for bad in (0, -1.0, "1"):
        with pytest.raises(ValueError, match="max_time is"):
            run(target, IDS, max_time=bad)
