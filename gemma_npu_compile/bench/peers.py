"""Who is measured: the captured step, the same step uncaptured and under Inductor, and transformers' own generation."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from gemma_npu_compile.bench.measure import Round, Unavailable
from gemma_npu_compile.bench.steady import steady_facts
from gemma_npu_compile.bench.work import ForcedWork, Step, TextWork, Work, hidden_states
from gemma_npu_compile.engine import Engine
from gemma_npu_compile.options import Options, choice
from gemma_npu_compile.state import Results, State

PEERS = ("eager", "inductor", "hf_assisted", "hf_plain")


class StepSubject:
    """Runs the draft-plus-verify step itself. Subclasses say how.

    Args:
        options: of the engine; None for a step that is not compiled by this package.
    """

    def __init__(self, work: Work, options: Options | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.work, self.clock = work, clock
        self.engine = Engine(
            work.target,
            work.assistant,
            work.drafts,
            max_rows=work.batch,
            max_model_len=work.model_len,
            compiled=options is not None,
            options=options,
        )

    def launch(self, state: State) -> tuple[State, Results]:
        """Queue one step."""
        raise NotImplementedError

    def step(self, state: State) -> Step:
        """Run one step and read its tokens."""
        start = self.clock()
        following, results = self.launch(state)
        new, _ = results.read()
        seconds = self.clock() - start
        following.lengths = [length + len(n) for length, n in zip(state.lengths, new, strict=True)]
        return Step(following, new, seconds)

    def first(self) -> float | None:
        """Seconds from the first call to its result: trace, compilation, capture, and the run itself."""
        return self.step(self.work.begin(self.engine)).seconds

    def round(self) -> Round:
        """One round from the start."""
        start = state = self.work.begin(self.engine)
        steps: list[Step] = []
        lengths = []
        while self.work.more(steps):
            lengths.append(list(state.lengths))
            steps.append(self.step(state))
            state = self.work.follow(self.engine, steps[-1], len(steps) - 1)
        tokens = self.work.tokens(start, steps)
        counted = sum(map(len, tokens)) - self.work.batch  # the first of a row is its prefill's
        hidden = None
        if isinstance(self.work, ForcedWork):
            counted, hidden = self.work.batch * self.work.grown[-1], hidden_states(steps)
        return Round([step.seconds for step in steps], tokens, counted, lengths, hidden)

    def facts(self) -> dict[str, Any]:
        """Nothing more."""
        return {}


class Ours(StepSubject):
    """The captured step as an engine launches it."""

    def __init__(
        self, work: Work, platform: str, clock: Callable[[], float] = time.perf_counter, cache: bool = False
    ) -> None:
        # without a compile cache: as fresh as Inductor's
        super().__init__(work, Options(platform=platform, on_fallback="error", cache=cache), clock)

    def launch(self, state: State) -> tuple[State, Results]:
        return self.engine.launch(state)

    def facts(self) -> dict[str, Any]:
        """Capture time, host overhead, and what the steady state allocates and copies."""
        return steady_facts(self.engine, lambda: self.step(self.work.begin(self.engine)))


class Plain(StepSubject):
    """The same module under inference mode, at its own number of rows, nothing padded."""

    def __init__(self, work: Work, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(work, None, clock)
        self.call: Any = self.engine.step

    @torch.inference_mode()
    def launch(self, state: State) -> tuple[State, Results]:
        cache, width = self.engine.cache, 1 + self.work.drafts
        for row, length in zip(state.rows, state.lengths, strict=True):
            cache.extend(row, length + width)
        inputs = state.token, state.hidden, state.seq_len, *cache.block_tables(state.rows)
        # A round's first inputs were made outside: one kind of tensor, one compilation.
        token, hidden, seq_len, *tables = (each if each.is_inference() else each.clone() for each in inputs)
        output = self.call(token, hidden, seq_len, tuple(tables))
        following = State(state.rows, output.token, output.hidden, output.seq_len, list(state.lengths))
        return following, Results(output.tokens, output.accepted)


class Eager(Plain):
    """Plain PyTorch."""

    def first(self) -> float | None:
        super().first()
        return None  # nothing is compiled


class Inductor(Plain):
    """``torch.compile(step, fullgraph=True)`` with static shapes and nothing in its caches."""

    def __init__(self, work: Work, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(work, clock)
        self.call = torch.compile(self.engine.step, fullgraph=True, dynamic=False, isolate_recompiles=True)  # type: ignore[call-overload]

    def first(self) -> float | None:
        from torch._inductor.utils import fresh_cache

        with fresh_cache():
            return super().first()


class _Arrivals(BaseStreamer):
    """When tokens came: transformers hands over the prompt, then the tokens of each step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.times = clock, []  # type: ignore[var-annotated]

    def put(self, value: Tensor) -> None:
        self.times.append(self.clock())

    def end(self) -> None:
        """Nothing to flush."""


class HuggingFace:
    """transformers' ``generate``: the time behind its first token, which its prefill yields, is the decode phase.

    Args:
        assisted: with the assistant (one row only), or plain greedy decoding.
    """

    def __init__(self, work: Work, assisted: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        if not isinstance(work, TextWork):
            raise Unavailable(
                "random weights with a synthetic cache: transformers has to prefill and to accept by itself"
            )
        if assisted and work.batch > 1:
            raise Unavailable("transformers' assisted generation takes one row")
        self.work, self.clock = work, clock
        self.extra = {"assistant_model": work.assistant} if assisted else {}
        width = max(map(len, work.prompts))
        self.ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in work.prompts])
        self.mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in work.prompts])

    def first(self) -> float | None:
        """Nothing is compiled."""
        return None

    @torch.inference_mode()
    def round(self) -> Round:
        """Generate once."""
        arrivals, model = _Arrivals(self.clock), self.work.target
        output = model.generate(  # type: ignore[operator]
            self.ids,
            attention_mask=self.mask,
            max_new_tokens=self.work.new_tokens,
            do_sample=False,
            streamer=arrivals,
            **self.extra,
        )
        tokens = output[:, self.ids.shape[1] :].tolist()
        times = arrivals.times[1:]  # without the prompt's
        seconds = [after - before for before, after in pairwise(times)]
        return Round(seconds, tokens, sum(map(len, tokens)) - self.work.batch)

    def facts(self) -> dict[str, Any]:
        """Nothing more."""
        return {}


def parse_peers(text: str) -> tuple[str, ...]:
    """Peers of a comma-separated list, in the order of :data:`PEERS`.

    Raises:
        ValueError: a peer is unknown; suggests the nearest.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        choice("--peers", name, PEERS)
    return tuple(name for name in PEERS if name in names)


def makers(work: Work, peers: tuple[str, ...], platform: str) -> dict[str, Callable[[], Any]]:
    """How each subject of a scenario is made, ours first."""
    every: dict[str, Callable[[], Any]] = {
        "eager": lambda: Eager(work),
        "inductor": lambda: Inductor(work),
        "hf_assisted": lambda: HuggingFace(work, assisted=True),
        "hf_plain": lambda: HuggingFace(work, assisted=False),
    }
    return {"ours": lambda: Ours(work, platform), **{name: every[name] for name in peers}}
