"""``Session``: requests that join and leave one captured step."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
)

from gemma_npu_compile.engine import Engine
from gemma_npu_compile.modes import without_grad
from gemma_npu_compile.options import Options
from gemma_npu_compile.request import Processors, Request, adjustment, check_count, eos_list, prompt_tensor
from gemma_npu_compile.reservations import Reservations
from gemma_npu_compile.sampling import Draws, Sampling, draws
from gemma_npu_compile.state import Results, State
from gemma_npu_compile.stats import Acceptance, Stats
from gemma_npu_compile.stopping import Stopping, stop_string_criterion

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Launch:
    """What was queued and not yet read."""

    requests: tuple[Request, ...]
    results: Results
    is_step: bool


class Session:
    """Requests of any length that run together, joining and leaving between steps; greedy tokens are exact.

    Each call of :meth:`step` admits waiting requests, prefills them together, and runs one draft-plus-verify step over
    all rows. Requests are admitted first in, first out: the oldest one waits until a row and the blocks for its whole
    limit are free in every KV group, and nobody overtakes it: nothing runs out of memory in flight, and none starves.

    On a device, the next step is queued before the previous one's tokens are read, so results come one step late; the
    tokens are the same. A CPU has nothing to overlap, and reads at once.

    A session is for one thread. The models are left as they were.

    Args:
        model: a Gemma 4 causal model.
        assistant_model: its MTP assistant; None decodes one token a step.
        num_draft_tokens: drafts per step, 1 to 16; ignored without an assistant.
        max_rows: requests that run at once.
        max_model_len: tokens of a request, prompt included.
        options: of the backend.
        compiled: False runs the step as plain PyTorch.
        asynchronous: whether reading lags one step behind; None: on devices other than the CPU.
        **cache_options: of :class:`PagedKVCache`, for example ``num_blocks``.

    Attributes:
        stats: totals since the session began (:class:`Stats`).

    Raises:
        ValueError: a model or a number does not fit; names it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        assistant_model: PreTrainedModel | None = None,
        *,
        num_draft_tokens: int = 3,
        max_rows: int = 8,
        max_model_len: int = 2048,
        options: Options | Mapping[str, Any] | None = None,
        compiled: bool = True,
        asynchronous: bool | None = None,
        **cache_options: Any,
    ) -> None:
        k = num_draft_tokens if assistant_model is not None else 0
        ahead = model.device.type != "cpu" if asynchronous is None else asynchronous
        engine = Engine(
            model,
            assistant_model,
            k,
            max_rows=max_rows,
            max_model_len=max_model_len + (k + 1 if ahead else 0),
            compiled=compiled,
            options=Options.parse(options),
            **cache_options,
        )
        self._start(engine, ahead)

    @classmethod
    def on(cls, engine: Engine, asynchronous: bool | None = None) -> "Session":
        """A session on an engine nobody else uses meanwhile; its cache must be empty."""
        if engine.cache.rows:
            raise ValueError(f"the engine's cache holds rows {list(engine.cache.rows)}, a session needs it empty")
        session = cls.__new__(cls)
        ahead = engine.cache.device.type != "cpu" if asynchronous is None else asynchronous
        session._start(engine, ahead)
        return session

    def _start(self, engine: Engine, ahead: bool) -> None:
        self.engine = engine
        self._width = engine.step.num_draft_tokens + 1
        self._depth = int(ahead)  # steps that may be unread
        self.max_model_len = engine.cache.max_model_len - self._depth * self._width
        self.stats = Stats(self._zero(), report=engine.report)
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []  # the entries of the state, finished ones until the next step
        self._state: State | None = None
        self._draws: Draws | None = None  # of the active requests
        self._unread: deque[_Launch] = deque()
        self._events: list[tuple[Request, list[int]]] = []  # to be handed out
        self._reserved = Reservations(engine.cache, (1 + self._depth) * self._width)
        self._closed = self._warned = False
        engine.warm_up()

    def _zero(self) -> Acceptance:
        return Acceptance([0] * (self._width - 1))

    # ---- requests

    def add(
        self,
        prompt_ids: Sequence[int] | Tensor,
        *,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stopping_criteria: Sequence[StoppingCriteria] = (),
        sampling: Sampling | None = None,
        logits_processor: Sequence[LogitsProcessor] = (),
    ) -> Request:
        """Queue a prompt; it is admitted by a later :meth:`step`.

        Args:
            prompt_ids: 1-d token ids.
            max_new_tokens: new tokens at most, end token included.
            min_new_tokens: no end token before so many new ones.
            eos_token_id: one or more tokens that end the request.
            stop_strings: texts that end it, as transformers does it: the token that completes one is the last. Needs
                ``tokenizer``.
            stopping_criteria: of transformers, asked after each token with ids ``(1, prompt + new)`` and no scores.
            sampling: how to draw tokens; None is greedy.
            logits_processor: of transformers, applied at each verified position in the order given, before sampling.
                Steps with such a row are captured up to the logits; what follows runs outside, and reads at once.

        Raises:
            ValueError: the prompt is empty or no prompt of this model, the request could never be admitted, or a
                setting is impossible; names it. The session is as it was.
        """
        self._check_open()
        prompt = prompt_tensor(prompt_ids, self.engine.step.embed_tokens.num_embeddings)
        check_count("max_new_tokens", max_new_tokens, 1)
        check_count("min_new_tokens", min_new_tokens, 0)
        if sampling is not None and not isinstance(sampling, Sampling):
            raise ValueError(f"sampling is a {type(sampling).__name__}, it must be a Sampling or None")
        eos, processors = eos_list(eos_token_id), list(logits_processor)
        if eos and min_new_tokens:
            device = str(self.engine.cache.device)
            processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), min_new_tokens, eos, device))
        criteria = list(stopping_criteria)
        if stop_strings is not None:
            criteria.append(stop_string_criterion(stop_strings, tokenizer))
        request = Request(
            prompt,
            Stopping(max_new_tokens, eos, criteria),
            self._zero(),
            sampling,
            Processors(processors) if processors else None,
            needs=self._reserved.needs(len(prompt), max_new_tokens, self.max_model_len),
        )
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> bool:
        """End a request now; its row and blocks are free at once. False when it had finished before.

        Raises:
            ValueError: the request is not of this session.
        """
        if request.finished:
            return False
        if request in self._waiting:
            self._waiting.remove(request)
        elif request not in self._active:
            raise ValueError("this request belongs to another session")
        self._finish(request, "cancelled")
        return True

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        self.stats.requests += 1
        if request.row is not None:
            # Work in flight may still write its blocks; whatever is queued later runs behind that.
            self.engine.cache.release(request.row)
            self._reserved.give_back(request.needs)
            request.row = None
        if not self._warned and self.stats.useless is not None:
            self._warned = True
            log.warning("%s", self.stats.useless)

    @property
    def waiting(self) -> int:
        """Requests not admitted yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that hold a row."""
        return sum(not request.finished for request in self._active)

    # ---- running

    @without_grad
    def step(self) -> list[tuple[Request, list[int]]]:
        """Admit, run one step, and return ``(request, its new tokens)`` as they were read; [] when idle.

        A request that was just admitted may come twice: with the token of its prefill, and with those of the step.

        Raises:
            what the step, a prefill or a stopping criterion raised. A failed launch leaves the session as it was; the
            request whose criterion raised is finished with the reason ``"error"``, the others keep their tokens.
        """
        self._check_open()
        start = time.perf_counter()
        self._admit()
        self._read(self._depth)  # on a CPU: who ends with the prefill's token needs no step
        now = time.perf_counter()
        self.stats.prefill_seconds += now - start
        self._drop_finished()
        if any(request.adjusts for request in self._active):
            self._read(0)  # a processor sees the tokens so far
            self._drop_finished()
        if self._state is not None:
            adjust = adjustment(self._active)
            self._state, results = self.engine.launch(self._state, self._draws, adjust)
            self._unread.append(_Launch(tuple(self._active), results, True))
        self._read(self._depth if self._state is not None else 0)
        if self._state is not None:
            self.stats.step_seconds.append(time.perf_counter() - now)
            self.stats.decode_seconds += time.perf_counter() - now
        events, self._events = self._events, []
        return events

    def __iter__(self) -> Iterator[tuple[Request, list[int]]]:
        """Step until nothing waits or runs; yields each request's new tokens as they come. Requests may be added."""
        while not self._closed and (self._waiting or self._unread or self.running):
            yield from self.step()

    def drain(self) -> list[Request]:
        """Run everything to its end; the requests that finished meanwhile, in the order in which they did."""
        return list(dict.fromkeys(request for request, _ in self if request.finished))

    def _admit(self) -> None:
        """Prefill, together, the oldest waiting requests that fit."""
        cache = self.engine.cache
        admitted: list[Request] = []
        while self._waiting and len(cache.rows) + len(admitted) < cache.max_rows:
            if not self._reserved.fit([request.needs for request in (*admitted, self._waiting[0])]):
                break
            admitted.append(self._waiting.popleft())
        if not admitted:
            return
        try:
            how = draws([request.sampling for request in admitted], cache.device)
            state = self.engine.prefill([request.prompt for request in admitted], how, adjustment(admitted))
        except BaseException:
            self._waiting.extendleft(reversed(admitted))
            raise
        for request, row in zip(admitted, state.rows, strict=True):
            request.row = row
            self._reserved.take(request.needs)
        self._unread.append(_Launch(tuple(admitted), Results(state.token.unsqueeze(1), None), False))
        self._state = state if self._state is None else self._state.join(state)
        self._active.extend(admitted)
        self._draws = draws([request.sampling for request in self._active], cache.device)

    def _drop_finished(self) -> None:
        keep = [i for i, request in enumerate(self._active) if not request.finished]
        if len(keep) < len(self._active):
            self._active = [self._active[i] for i in keep]
            self._state = self._state.select(keep) if keep and self._state is not None else None
            self._draws = draws([request.sampling for request in self._active], self.engine.cache.device)

    def _read(self, unread: int) -> None:
        """Read launches, oldest first, until ``unread`` are left."""
        failure: Exception | None = None
        while len(self._unread) > unread:
            launch = self._unread[0]
            results = launch.results.read()
            self._unread.popleft()
            for request, new, accepted in zip(launch.requests, *results, strict=True):
                if request.finished:  # ended while this was in flight
                    continue
                try:
                    taken = self._take(request, new, accepted if launch.is_step else None)
                except Exception as error:
                    failure = failure or error
                    self._finish(request, "error")
                else:
                    self._events.append((request, taken))
        if failure is not None:
            raise failure

    def _take(self, request: Request, new: list[int], accepted: int | None) -> list[int]:
        """Hand a launch's tokens to their request."""
        if accepted is not None:
            request.acceptance.add(accepted)
            self.stats.acceptance.add(accepted)
            self._settle(request, len(new))
        taken, reason = request.stopping.take(request.prompt, request.tokens, new)
        request.tokens.extend(taken)
        self.stats.new_tokens += len(taken)
        if accepted is not None:
            self.stats.decoded_tokens += len(taken)
        if reason is not None:
            self._finish(request, reason)
        return taken

    def _settle(self, request: Request, gained: int) -> None:
        """A step's length is known: correct what the state assumed, give back blocks behind the window."""
        assert request.row is not None
        length = self.engine.cache.length(request.row) + gained
        self.engine.cache.set_length(request.row, length)
        if self._state is not None:
            self._state.lengths[self._active.index(request)] -= self._width - gained

    # ---- the end

    def close(self) -> None:
        """Cancel everything and forget the state; the session takes no more requests. May be called again."""
        if self._closed:
            return
        for request in [*self._waiting, *self._active]:
            self.cancel(request)
        self._active, self._state = [], None
        self._unread.clear()
        self._events.clear()
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this session is closed")

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
