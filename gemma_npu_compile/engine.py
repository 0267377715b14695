"""A step with its cache, compiled once: prefill rows, run steps, keep the cache's books."""

import copy
import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.collector import paused
from gemma_npu_compile.direct import DirectCall, TappedRunner
from gemma_npu_compile.kv_cache import PagedKVCache
from gemma_npu_compile.models import PagedContext
from gemma_npu_compile.modes import without_grad
from gemma_npu_compile.ops import slot_mapping
from gemma_npu_compile.options import Options
from gemma_npu_compile.report import CompileReport
from gemma_npu_compile.sampling import Draws, sample
from gemma_npu_compile.state import LengthsOnHost, Results, State
from gemma_npu_compile.step import DraftVerifyStep, StepOutput, accept, mark_rows

log = logging.getLogger(__name__)


Kind = Literal["greedy", "sampled", "open"]
Adjust = Callable[[Tensor, Tensor], Tensor]
"""Logits ``(rows, n, vocab)`` and drafts ``(rows, n - 1)`` to the logits to choose from (logits processors)."""


@dataclasses.dataclass
class _Run:
    """One way to run the step, with the backend that compiles it."""

    step: DraftVerifyStep
    call: Any
    backend: Backend
    runners: weakref.WeakSet[TappedRunner]  # Dynamo's to keep: a reset drops the code, and captures go with it
    warm: int = -1  # the backend's number of resets at the last warm-up
    direct: DirectCall | None = None


_compiling = threading.Lock()  # engines of several threads are compiled one after the other


def _addresses(*models: PreTrainedModel | None) -> tuple[int, ...]:
    tensors = (t for m in models if m is not None for t in (*m.parameters(), *m.buffers()))
    return tuple(t.data_ptr() for t in tensors)


class Engine:
    """A :class:`DraftVerifyStep`, its :class:`PagedKVCache`, and the compiled function; for one thread at a time.

    Args:
        target, assistant, num_draft_tokens: as in :class:`DraftVerifyStep`.
        max_rows, max_model_len: capacity of the cache.
        compiled: False runs the step as plain PyTorch, without tracing it.
        options: of the backend.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        target: PreTrainedModel,
        assistant: PreTrainedModel | None,
        num_draft_tokens: int,
        *,
        max_rows: int,
        max_model_len: int,
        compiled: bool = True,
        options: Options | None = None,
        **cache_options: Any,
    ) -> None:
        self.cache = PagedKVCache(
            target.config,
            max_rows=max_rows,
            max_model_len=max_model_len,
            dtype=target.dtype,
            device=target.device,
            **cache_options,
        )
        self.step = DraftVerifyStep(target, assistant, self.cache, num_draft_tokens, regions=compiled)
        self.report = CompileReport()
        self.compiled = compiled
        self._options = options or Options()
        self._runs: dict[Kind, _Run] = {}
        self._weights = _addresses(target, assistant)
        self._host_lengths = LengthsOnHost()

    def stale(self, target: PreTrainedModel, assistant: PreTrainedModel | None) -> bool:
        """Whether weights of the models were moved or replaced since this engine was built for them."""
        return self._weights != _addresses(target, assistant)

    def _run(self, kind: Kind) -> "_Run":
        """The step as a function of its own for each kind, made when it is first asked for."""
        if kind not in self._runs:
            step = self.step
            if kind == "open":
                step = copy.copy(step)  # the same modules and buffers
                step.return_states = True
            runners: weakref.WeakSet[TappedRunner] = weakref.WeakSet()

            def runner(*args: Any) -> TappedRunner:
                made = TappedRunner(*args)
                runners.add(made)
                return made

            run = _Run(step, step, Backend(self.report.graphs.append, runner, smallest=1), runners)
            if self.compiled:
                given = {f.name: getattr(self._options, f.name) for f in dataclasses.fields(self._options)}
                # Engines share the code of forward: isolation keeps one from counting as a recompilation of another.
                run.call = torch.compile(  # type: ignore[call-overload]
                    step, backend=run.backend, fullgraph=True, options=given, isolate_recompiles=True
                )
            self._runs[kind] = run
        return self._runs[kind]

    def warm_up(self, kind: Kind = "greedy") -> None:
        """Compile and capture, on padded rows only: no request's block is touched. Done once (and after a reset).

        Args:
            kind: ``"greedy"``; ``"sampled"``, which takes :class:`Draws`; or ``"open"``, whose acceptance is computed
                outside the graph.
        """
        run = self._run(kind)
        known = run.warm == run.backend.resets and run.runners  # Dynamo tells a backend of one reset, not of a second
        if self.compiled and not known:
            self._compile(run, kind)

    @without_grad
    def _compile(self, run: "_Run", kind: Kind) -> None:
        step, cache = self.step, self.cache
        inputs = step.token_padding, step.hidden_padding, cache.padding_lens, cache.host_padding_lens
        token, hidden, seq_len, host_len = (each[:2].clone() for each in inputs)
        tables = tuple(table[:2].clone() for table in cache.padding_tables)
        mark_rows(token, hidden, seq_len, tables, host_len)
        arguments = [token, hidden, seq_len, tables]
        if kind == "sampled":
            draws = Draws(step.filters_padding[:2].clone(), step.keys_padding[:2].clone())
            mark_rows(*draws)
            arguments.append(draws)
        run.runners.clear()
        run.direct = None
        with _compiling, paused():
            run.call(*arguments, host_len=host_len)
        run.warm = run.backend.resets

    # ---- prefill

    def _pieces(self, prompts: Sequence[Tensor]) -> Iterator[list[tuple[int, int, int]]]:
        """Packed chunks of at most ``prefill_chunk`` tokens: ``(prompt index, start, end)`` pieces."""
        chunk: list[tuple[int, int, int]] = []
        room = self.cache.prefill_chunk
        for index, prompt in enumerate(prompts):
            start = 0
            while start < len(prompt):
                end = min(len(prompt), start + room)
                chunk.append((index, start, end))
                room -= end - start
                start = end
                if not room:
                    yield chunk
                    chunk, room = [], self.cache.prefill_chunk
        if chunk:
            yield chunk

    @without_grad
    def prefill(self, prompts: Sequence[Tensor], draws: Draws | None = None, adjust: Adjust | None = None) -> State:
        """Write prompts to the cache, in packed chunks, and choose each row's first token.

        Args:
            prompts: 1-d int64 tensors, none empty, on any device.
            draws, adjust: as in :meth:`launch`.

        Raises:
            ValueError: a prompt has no tokens; names it.
            OutOfBlocksError: the cache has no room; rows taken by this call are released.
        """
        cache, device = self.cache, self.cache.device
        for index, prompt in enumerate(prompts):
            if prompt.dim() != 1 or not len(prompt):
                raise ValueError(f"prompt {index} is {tuple(prompt.shape)}, it must be a 1-d tensor with tokens")
        if not prompts:
            nothing = torch.zeros(0, dtype=torch.int32, device=device)
            return State([], nothing.long(), self.step.hidden_padding[:0], nothing, [])
        rows: list[int] = []
        try:
            for _ in prompts:
                rows.append(cache.allocate())
            hidden: list[Tensor] = [torch.empty(0)] * len(prompts)
            for pieces in self._pieces(prompts):
                states = self._prefill_chunk([(rows[i], prompts[i][s:e], s) for i, s, e in pieces])
                offset = 0
                for index, start, end in pieces:
                    offset += end - start
                    if end == len(prompts[index]):
                        hidden[index] = states[offset - 1]
            last = torch.stack(hidden)
            lengths = [len(p) for p in prompts]
            seq_len = torch.tensor(lengths, dtype=torch.int32, device=device)
            logits = self.step.logits(last).unsqueeze(1)
            token = _choose(logits, seq_len.new_empty(len(rows), 0).long(), seq_len, draws, adjust).squeeze(1)
        except BaseException:
            for row in rows:
                cache.release(row)
            raise
        return State(rows, token, last, seq_len, lengths)

    def _prefill_chunk(self, pieces: list[tuple[int, Tensor, int]]) -> Tensor:
        """Run the target over ``(row, tokens, start)`` pieces as one packed sequence; ``(tokens, hidden)``."""
        cache, device = self.cache, self.cache.device
        rows = [row for row, _, _ in pieces]
        ends = [start + len(tokens) for _, tokens, start in pieces]
        for row, end in zip(rows, ends, strict=True):
            cache.extend(row, end)
        tables = cache.block_tables(rows)
        spans = [torch.arange(start, start + len(tokens), device=device) for _, tokens, start in pieces]
        slots = tuple(
            torch.cat([slot_mapping(t[i : i + 1], span[None], g.block_size) for i, span in enumerate(spans)])
            for t, g in zip(tables, cache.groups, strict=True)
        )
        paged = PagedContext(
            site="prefill/target",
            layer_groups=cache.layer_groups,
            tables=tables,
            kv_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            slots=slots,
            query_lens=torch.tensor([len(s) for s in spans], dtype=torch.int32, device=device),
        )
        tokens = torch.cat([t.to(device) for _, t, _ in pieces])[None]
        states = self.step.run_target(tokens, torch.cat(spans)[None], paged)[0]
        for row, end in zip(rows, ends, strict=True):
            cache.set_length(row, end)
        return states

    # ---- decode

    @without_grad
    def launch(self, state: State, draws: Draws | None = None, adjust: Adjust | None = None) -> tuple[State, Results]:
        """Queue one step and read nothing: the next one can be launched from the state returned.

        Rows need blocks for the longest they can be: a caller that launches ahead of its reading must have kept them.

        Args:
            draws: how the rows sample; None is greedy.
            adjust: changes the verification's logits, outside the captured graph, before tokens are chosen.

        Raises:
            OutOfBlocksError: a row cannot grow; nothing was run.
        """
        kind: Kind = "open" if adjust is not None else "sampled" if draws is not None else "greedy"
        self.warm_up(kind)
        cache, rows, width = self.cache, state.rows, 1 + self.step.num_draft_tokens
        for row, length in zip(rows, state.lengths, strict=True):
            cache.extend(row, length + width)
        inputs = [state.token, state.hidden, state.seq_len, *cache.block_tables(rows)]
        if kind == "sampled" and draws is not None:
            inputs += draws
        if self._options.kv_lens == "host":  # exact, so the step before has to be waited for
            host_len = state.seq_len.to("cpu", copy=True)  # on a CPU too: an input of its own
        else:
            host_len = self._host_lengths(state.lengths)
        output = self._call(kind, [*inputs, host_len])
        found = output.tokens, output.accepted, output.token, output.hidden, output.seq_len
        if len(output.tokens) > len(rows):  # one row ran beside a padded one
            found = tuple(each[: len(rows)] for each in found)  # type: ignore[assignment]
        tokens, accepted, token, hidden, seq_len = found
        if kind == "open":
            logits, drafts, states = (e[: len(rows)] for e in (output.target_logits, output.drafts, output.states))
            tokens = _choose(logits, drafts, state.seq_len + 1, draws, adjust)
            accepted, token, hidden, seq_len = accept(tokens, drafts, states, state.seq_len)
        following = State(rows, token, hidden, seq_len, [length + width for length in state.lengths])
        return following, Results(tokens, accepted)

    def _call(self, kind: Kind, leaves: list[Tensor]) -> StepOutput:
        """The step on its tensors in order: token, hidden, seq_len, tables, draws, host_len."""
        run = self._run(kind)
        direct = run.direct if run.direct is not None and run.direct.holds() else None
        one = len(leaves[0]) == 1 and not (direct is not None and direct.takes(1))
        if self.compiled and one:  # torch traces one row apart from many: run it beside a padded one
            paddings = [*self._paddings()[: len(leaves) - 1], self.cache.host_padding_lens]
            leaves = [torch.cat([each, padding[1:2]]) for each, padding in zip(leaves, paddings, strict=True)]
        if direct is not None:
            return direct(leaves)
        last = 3 + len(self.cache.groups)
        arguments: list[Any] = [*leaves[:3], tuple(leaves[3:last])]
        if kind == "sampled":
            arguments.append(Draws(*leaves[last:-1]))
        if run.direct is not None and run.direct.gone:
            run.direct = None
        learn = run.direct is None and len(run.runners) == 1 and not self._options.record
        watched = next(iter(run.runners), None) if learn else None
        if watched is None:
            return run.call(*arguments, host_len=leaves[-1])
        watched.tap = []
        try:
            output: StepOutput = run.call(*arguments, host_len=leaves[-1])
            if len(watched.tap) == 1:
                run.direct = DirectCall(run.step, watched, *watched.tap[0], leaves, output)
        finally:
            watched.tap = None
        return output

    def _paddings(self) -> list[Tensor]:
        """What padded rows of the step's inputs hold, in the order of the inputs."""
        step, cache = self.step, self.cache
        draws = step.filters_padding, step.keys_padding
        return [step.token_padding, step.hidden_padding, cache.padding_lens, *cache.padding_tables, *draws]

    def decode(self, state: State) -> tuple[State, list[list[int]], list[int], float]:
        """Run one greedy step and read its results.

        Returns:
            the next state, each row's new tokens, its number of accepted drafts, and the wall time in seconds.

        Raises:
            OutOfBlocksError: a row cannot grow; nothing was run.
        """
        self.warm_up()
        start = time.perf_counter()
        following, results = self.launch(state)
        new, accepted = results.read()
        seconds = time.perf_counter() - start
        following.lengths = [length + len(n) for length, n in zip(state.lengths, new, strict=True)]
        for row, length in zip(following.rows, following.lengths, strict=True):
            self.cache.set_length(row, length)
        return following, new, accepted, seconds


def _choose(logits: Tensor, drafts: Tensor, first: Tensor, draws: Draws | None, adjust: Adjust | None) -> Tensor:
    """Tokens ``(rows, n)`` for logits ``(rows, n, vocab)`` of positions from ``first`` ``(rows,)`` on."""
    if adjust is not None:
        logits = adjust(logits, drafts)
    if draws is None:
        return logits.argmax(-1)
    positions = first.long().unsqueeze(1) + torch.arange(logits.shape[1], device=logits.device)
    return sample(logits, positions, draws)
