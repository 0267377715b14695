"""generate(): exact tokens at every batch size, capture size and length, with transformers' calling convention."""

import functools
import threading

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

import gemma_npu_compile as gnc
from gemma_npu_compile.engine_pool import ENGINES
from gemma_npu_compile.verify import is_tie, plain_greedy, verify


def prompts(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Left-padded ids and mask of ``rows`` prompts of different lengths, and the prompts themselves."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (rows,), generator=generator).tolist()
    lists = [torch.randint(1, 128, (n,), generator=generator).tolist() for n in lengths]
    width = max(lengths)
    ids = torch.tensor([[0] * (width - n) + p for n, p in zip(lengths, lists, strict=True)])
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    return ids, mask, lists


def assert_plain(target, lists, output, width, new) -> None:
    rows = [row[width:].tolist() for row in output]
    result = verify(target, lists, rows, new, [], 0)
    assert result.differences == ()
    assert all(len(row) == new for row in rows)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_tokens_equal_plain_greedy_at_every_batch_size(pair, rows):
    """Past the window of 24, rows of different lengths, one engine for 5 rows down to 1."""
    target, assistant = pair
    ids, mask, lists = prompts(rows, seed=rows)
    output, stats = gnc.generate(
        target, ids, mask, assistant_model=assistant, num_draft_tokens=1, max_new_tokens=60, return_stats=True
    )
    assert torch.equal(output[:, : ids.shape[1]], ids)
    assert_plain(target, lists, output, ids.shape[1], 60)
    totals = stats.report.totals()
    assert totals["fallbacks"] == {}
    assert totals["recompiles"] == 0
    assert max(totals["sizes"]) >= rows, "rows are padded to captured sizes, in every engine of this process"
    assert 0 < stats.acceptance.accepted_per_pos[0] < stats.acceptance.drafts
    assert sum(row.drafts for row in stats.per_row) == stats.acceptance.drafts
    assert stats.new_tokens == 60 * rows


def test_captured_eager_and_plain_pytorch_agree(pair):
    """The same tokens and the same acceptance, whichever way the step runs."""
    target, assistant = pair
    ids, mask, _ = prompts(3)
    results = [
        gnc.generate(
            target,
            ids,
            mask,
            assistant_model=assistant,
            num_draft_tokens=1,
            max_new_tokens=50,
            return_stats=True,
            **how,
        )
        for how in ({}, {"options": {"capture": False}}, {"compiled": False})
    ]
    for output, stats in results[1:]:
        assert torch.equal(output, results[0][0])
        assert stats.acceptance == results[0][1].acceptance
    assert [bool(stats.report.totals()["replays"]) for _, stats in results] == [True, False, False]
    assert results[1][1].report.graphs[0].eager_calls > 0


def test_no_recompilation_after_warm_up(pair):
    """Other batch sizes, lengths and limits replay what is there."""
    target, assistant = pair
    call = functools.partial(gnc.generate, target, assistant_model=assistant, num_draft_tokens=1, return_stats=True)
    call(*prompts(4)[:2], max_new_tokens=8)
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (1, 2, 3, 4):
            output, stats = call(*prompts(rows, seed=20 + rows)[:2], max_new_tokens=30)
            assert output.shape[0] == rows
    totals = stats.report.totals()
    assert (totals["recompiles"], totals["fallbacks"]) == (0, {})


def test_without_an_assistant_decoding_is_plain_and_captured(pair):
    target, _ = pair
    ids, mask, lists = prompts(3)
    output, stats = gnc.generate(target, ids, mask, max_new_tokens=40, return_stats=True)
    assert_plain(target, lists, output, ids.shape[1], 40)
    assert stats.report.totals()["replays"] >= 39
    assert stats.acceptance.accepted_per_pos == []


def test_end_tokens_and_limits_per_row(pair):
    """A row stops at its first EOS (included), is padded on the right, and leaves the batch; the others go on."""
    target, assistant = pair
    ids, mask, lists = prompts(4, seed=3)
    free = [plain_greedy(target, p, 40, [], 0) for p in lists]
    eos = [free[0][7], free[1][0]]
    config = GenerationConfig(eos_token_id=eos, pad_token_id=0, max_new_tokens=40)
    output, stats = gnc.generate(
        target,
        ids,
        mask,
        assistant_model=assistant,
        num_draft_tokens=1,
        generation_config=config,
        return_stats=True,
    )
    expected = [tokens[: next((i + 1 for i, t in enumerate(tokens) if t in eos), 40)] for tokens in free]
    assert len(expected[1]) == 1, "the prompt's first token may end a row"
    width = max(map(len, expected))
    assert output[:, ids.shape[1] :].tolist() == [e + [0] * (width - len(e)) for e in expected]
    assert stats.per_row[1].drafts == 0
    assert stats.new_tokens == sum(map(len, expected))


def test_custom_generate_of_transformers(pair):
    """The model's own generate() drives it, and nothing of the model changes."""
    target, assistant = pair
    ids, mask, lists = prompts(3, seed=5)
    run = functools.partial(gnc.generate, assistant_model=assistant, num_draft_tokens=1)
    output = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=25, custom_generate=run)
    assert_plain(target, lists, output, ids.shape[1], 25)
    ones = ids[:1, -5:]
    expected = target.generate(ones, attention_mask=torch.ones_like(ones), do_sample=False, max_length=15)
    output = target.generate(
        ones, attention_mask=torch.ones_like(ones), do_sample=False, max_length=15, custom_generate=run
    )
    assert torch.equal(output, expected)


def test_right_padding_and_missing_masks(pair):
    target, assistant = pair
    run = functools.partial(
        gnc.generate, target, assistant_model=assistant, num_draft_tokens=1, max_new_tokens=10, compiled=False
    )
    ids = torch.tensor([[5, 6, 7, 0, 0], [1, 2, 3, 4, 5]])
    left = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]])
    masked = run(ids, torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]))
    assert torch.equal(masked[:, 5:], run(left)[:, 5:])  # pads are recognised without a mask
    assert torch.equal(masked[:, 5:], run(ids)[:, 5:])


class Recorder(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_streamer(pair):
    target, assistant = pair
    ids = torch.tensor([[5, 6, 7]])
    streamer = Recorder()
    output = gnc.generate(
        target, ids, assistant_model=assistant, num_draft_tokens=1, max_new_tokens=30, streamer=streamer
    )
    assert streamer.ended
    assert streamer.parts[0] == [5, 6, 7]
    assert [t for part in streamer.parts for t in part] == output[0].tolist()
    assert {len(part) for part in streamer.parts[1:]} == {1, 2}
    with pytest.raises(ValueError, match="a streamer shows one row, got 2 rows"):
        gnc.generate(target, ids.repeat(2, 1), streamer=streamer)


def test_streamer_through_transformers(pair):
    """transformers does not see a bound streamer, so the prompt comes from here, once."""
    target, assistant = pair
    ids = torch.tensor([[5, 6, 7]])
    streamer = Recorder()
    run = functools.partial(
        gnc.generate, assistant_model=assistant, num_draft_tokens=1, streamer=streamer, compiled=False
    )
    output = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, custom_generate=run
    )
    assert streamer.parts[0] == [5, 6, 7]
    assert [t for part in streamer.parts for t in part] == output[0].tolist()


def test_settings_come_from_arguments_then_config_then_model(pair, monkeypatch):
    target, _ = pair
    ids = torch.tensor([[5, 6, 7]])
    free = plain_greedy(target, [5, 6, 7], 12, [], 0)
    run = functools.partial(gnc.generate, target, ids, compiled=False)
    monkeypatch.setattr(target.generation_config, "eos_token_id", [free[5]])
    stop = free.index(free[5]) + 1
    assert run(generation_config=GenerationConfig(max_new_tokens=12))[0, 3:].tolist() == free[:stop]
    assert run(max_new_tokens=12, eos_token_id=free[2])[0, 3:].tolist() == free[: free.index(free[2]) + 1]
    assert run(max_length=4).shape == (1, 4)
    assert target.generation_config.eos_token_id == [free[5]]


def test_a_pad_inside_a_prompt_is_a_token(pair):
    target, _ = pair
    run = functools.partial(gnc.generate, target, max_new_tokens=5, compiled=False)
    assert torch.equal(run(torch.tensor([[0, 5, 0, 7, 0]]))[:, 5:], run(torch.tensor([[5, 0, 7]]))[:, 3:])


def test_inference_mode(pair):
    """An engine built in one mode serves the other."""
    target, assistant = pair
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    run = functools.partial(gnc.generate, target, ids, assistant_model=assistant, num_draft_tokens=1, max_new_tokens=8)
    with torch.inference_mode():
        first = run()
    assert torch.equal(run(), first)
    with torch.inference_mode():
        assert torch.equal(run(), first)


def test_capture_sizes_above_the_rows(pair):
    target, _ = pair
    options = {"capture_sizes": [2, 4]}
    _, stats = gnc.generate(target, torch.tensor([[5, 6]]), max_new_tokens=4, options=options, return_stats=True)
    assert stats.report.totals()["sizes"] == [2, 4]


@pytest.mark.slow
def test_a_reset_is_survived_and_recompiles_are_counted(pair):
    """After torch._dynamo.reset() an engine compiles again, padded as before; what Dynamo recompiles is counted."""
    engine = gnc.Engine(*pair, 1, max_rows=2, max_model_len=64)
    state = engine.prefill([torch.tensor([1, 2, 3]), torch.tensor([4, 5])])
    state, *_ = engine.decode(state)
    torch._dynamo.reset()
    state, *_ = engine.decode(state)
    assert [g.sizes for g in engine.report.graphs] == [[2, 1], [2, 1]]
    assert engine.report.totals()["recompiles"] == 0
    engine.step.return_logits = True  # a guard of the compiled code
    engine.decode(state)
    assert engine.report.totals()["recompiles"] == 1


def test_bad_prompts_take_no_row(pair):
    engine = gnc.Engine(*pair, 1, max_rows=2, max_model_len=64, compiled=False)
    with pytest.raises(ValueError, match=r"prompt 1 is \(0,\)"):
        engine.prefill([torch.tensor([1]), torch.tensor([], dtype=torch.long)])
    assert engine.cache.rows == ()
    assert engine.prefill([]).rows == []


def test_empty_batch(pair):
    target, assistant = pair
    ids = torch.zeros(0, 4, dtype=torch.long)
    output, stats = gnc.generate(target, ids, assistant_model=assistant, return_stats=True)
    assert output.shape == (0, 4)
    assert output.dtype == torch.int64
    assert stats.acceptance.to_dict()["drafts"] == 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"generation_config": GenerationConfig(num_beams=2)}, "num_beams=2"),
        ({"generation_config": GenerationConfig(stop_strings=["x"])}, r"stop_strings=\['x'\] needs the tokenizer"),
        ({"num_return_sequences": 2}, "num_return_sequences=2 needs do_sample=True"),
        ({"logits_processor": [object()]}, "logits processor object"),
        ({"stopping_criteria": [object()]}, "stopping criterion object"),
        ({"inputs_embeds": torch.zeros(1, 1, 64)}, "inputs_embeds"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0"),
        ({"max_new_token": 3}, "unknown argument 'max_new_token' .did you mean 'max_new_tokens'"),
        ({"temperature": -0.5, "do_sample": True}, r"temperature is -0\.5"),
        ({"options": {"captur": True}}, "unknown option 'captur' .did you mean 'capture'"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "row 0 of attention_mask has a hole"),
        ({"attention_mask": torch.tensor([[0, 0, 0]])}, "row 0 of input_ids has no token"),
        ({"attention_mask": torch.ones(2, 3)}, "attention_mask is"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(pair, kwargs, message):
    target, assistant = pair
    with pytest.raises(ValueError, match=message):
        gnc.generate(target, torch.tensor([[1, 2, 3]]), assistant_model=assistant, **kwargs)


@pytest.mark.slow
def test_two_threads_with_one_model(pair):
    """Each call takes an engine of its own."""
    target, assistant = pair
    jobs = [prompts(2, seed=30), prompts(3, seed=31)]
    results: dict[int, torch.Tensor] = {}

    errors: list[BaseException] = []

    def work(index: int) -> None:
        ids, mask, _ = jobs[index]
        try:
            results[index] = gnc.generate(
                target, ids, mask, assistant_model=assistant, num_draft_tokens=1, max_new_tokens=30
            )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for index, (ids, _, lists) in enumerate(jobs):
        assert_plain(target, lists, results[index], ids.shape[1], 30)


def test_moved_weights_get_a_new_engine(make_pair):
    """A captured graph reads the old address; generate() notices and builds anew."""
    target, assistant = make_pair(seed=9)
    ids, _, lists = prompts(2, seed=9)
    run = functools.partial(
        gnc.generate, target, ids, assistant_model=assistant, num_draft_tokens=1, max_new_tokens=6, compiled=False
    )
    run()
    target.load_state_dict({k: v.clone() for k, v in make_pair(seed=10)[0].state_dict().items()}, assign=True)
    new = [row[ids.shape[1] :].tolist() for row in run()]
    assert new == [plain_greedy(target, p, 6, [], 0) for p in lists]
    target.lm_head = make_pair(seed=13)[0].lm_head  # another module, as adapters do it
    new = [row[ids.shape[1] :].tolist() for row in run()]
    assert new == [plain_greedy(target, p, 6, [], 0) for p in lists]


def test_engines_die_with_their_model(make_pair):
    import gc
    import weakref

    target, assistant = make_pair(seed=11)
    gnc.generate(target, torch.tensor([[1, 2]]), assistant_model=assistant, max_new_tokens=2, compiled=False)
    assert target in ENGINES._idle
    pool = weakref.ref(ENGINES._idle[target][0][1].cache)
    del target
    gc.collect()
    assert pool() is None


def test_a_useless_assistant_is_reported(pair, caplog, monkeypatch):
    target, assistant = pair
    monkeypatch.setattr(gnc.stats.Acceptance, "add", lambda self, accepted: setattr(self, "drafts", self.drafts + 1))
    gnc.generate(
        target, torch.tensor([[1, 2]]), assistant_model=assistant, num_draft_tokens=1, max_new_tokens=40, compiled=False
    )
    assert "first draft was accepted in 0.0 %" in caplog.text


def test_a_tie_is_excused_and_counted(make_pair):
    """Two tokens with the same head weights have the same logit; choosing the other one is no difference."""
    target, _ = make_pair(seed=12)
    token = plain_greedy(target, [1, 2, 3], 10, [], 0)[4]
    twin = (token + 1) % 128
    with torch.no_grad():
        target.lm_head.weight[twin] = target.lm_head.weight[token]
    right = plain_greedy(target, [1, 2, 3], 10, [], 0)
    place = next(i for i, t in enumerate(right) if t in (token, twin))
    other = [*right[:place], token + twin - right[place], *right[place + 1 :]]
    result = verify(target, [[1, 2, 3]], [other], 10, [], 0)
    assert (result.equal, result.ties, result.differences) == (True, 1, ())


def test_verify_sees_a_wrong_token(pair):
    target, _ = pair
    right = plain_greedy(target, [1, 2, 3], 10, [], 0)
    assert verify(target, [[1, 2, 3]], [right], 10, [], 0).equal
    wrong = [*right[:6], (right[6] + 1) % 128, *right[7:]]
    result = verify(target, [[1, 2, 3]], [wrong], 10, [], 0)
    assert (result.equal, result.ties, result.differences) == (False, 0, ((0, 6),))
    assert verify(target, [[1, 2, 3]], [right[:9]], 10, [], 0).differences == ((0, 9),)
    assert not is_tie(target, [1, 2, 3], (right[0], (right[0] + 1) % 128))
