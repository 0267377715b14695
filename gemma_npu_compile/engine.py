"""A step with its cache, compiled once: prefill rows, run steps, keep the cache's books."""

import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.kv_cache import PagedKVCache
from gemma_npu_compile.models import PagedContext
from gemma_npu_compile.ops import slot_mapping
from gemma_npu_compile.options import Options
from gemma_npu_compile.report import CompileReport
from gemma_npu_compile.state import Results, State
from gemma_npu_compile.step import DraftVerifyStep, StepOutput, mark_rows

log = logging.getLogger(__name__)


_compiling = threading.Lock()  # engines of several threads are compiled one after the other


def _addresses(*models: PreTrainedModel | None) -> tuple[int, ...]:
    tensors = (t for m in models if m is not None for t in (*m.parameters(), *m.buffers()))
    return tuple(t.data_ptr() for t in tensors)


class Engine:
    """A :class:`DraftVerifyStep`, its :class:`PagedKVCache`, and the compiled function.

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
        self.step = DraftVerifyStep(target, assistant, self.cache, num_draft_tokens)
        self.report = CompileReport()
        self._backend = Backend(self.report.graphs.append)
        self._warm = -1  # the backend's number of resets at the last warm-up
        self._run: Any = self.step
        if compiled:
            parsed = options or Options()
            given = {f.name: getattr(parsed, f.name) for f in dataclasses.fields(parsed)}
            # Engines share the code of forward: isolation keeps one from counting as a recompilation of another.
            self._run = torch.compile(  # type: ignore[call-overload]
                self.step, backend=self._backend, fullgraph=True, options=given, isolate_recompiles=True
            )
        self.compiled = compiled
        self._weights = _addresses(target, assistant)

    def stale(self, target: PreTrainedModel, assistant: PreTrainedModel | None) -> bool:
        """Whether weights of the models were moved or replaced since this engine was built for them."""
        return self._weights != _addresses(target, assistant)

    @torch.inference_mode(False)
    @torch.no_grad()  # leaving inference mode turns gradients on, which the compiled code guards on
    def warm_up(self) -> None:
        """Compile and capture, on padded rows only: no request's block is touched. Done once (and after a reset)."""
        if not self.compiled or self._warm == self._backend.resets:
            return
        step, cache = self.step, self.cache
        inputs = step.token_padding[:2], step.hidden_padding[:2], cache.padding_lens[:2]
        token, hidden, seq_len = (each.clone() for each in inputs)
        tables = tuple(table[:2].clone() for table in cache.padding_tables)
        mark_rows(token, hidden, seq_len, tables)
        with _compiling:
            self._run(token, hidden, seq_len, tables)
        self._warm = self._backend.resets

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

    @torch.inference_mode(False)
    @torch.no_grad()
    def prefill(self, prompts: Sequence[Tensor]) -> State:
        """Write prompts to the cache, in packed chunks, and choose each row's first token greedily.

        Args:
            prompts: 1-d int64 tensors, none empty, on any device.

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
        except Exception:
            for row in rows:
                cache.release(row)
            raise
        last = torch.stack(hidden)
        lengths = [len(p) for p in prompts]
        seq_len = torch.tensor(lengths, dtype=torch.int32, device=device)
        return State(rows, self.step.logits(last).argmax(-1), last, seq_len, lengths)

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

    @torch.inference_mode(False)
    @torch.no_grad()
    def launch(self, state: State) -> tuple[State, Results]:
        """Queue one step and read nothing: the next one can be launched from the state returned.

        Rows need blocks for the longest they can be: a caller that launches ahead of its reading must have kept them.

        Raises:
            OutOfBlocksError: a row cannot grow; nothing was run.
        """
        self.warm_up()
        cache, rows, width = self.cache, state.rows, 1 + self.step.num_draft_tokens
        for row, length in zip(rows, state.lengths, strict=True):
            cache.extend(row, length + width)
        token, hidden, seq_len, tables = state.token, state.hidden, state.seq_len, cache.block_tables(rows)
        if len(rows) == 1:  # torch traces one row apart from many: run it beside a padded one
            token = torch.cat([token, self.step.token_padding[1:2]])
            hidden = torch.cat([hidden, self.step.hidden_padding[1:2]])
            seq_len = torch.cat([seq_len, cache.padding_lens[1:2]])
            tables = tuple(torch.cat([t, p[1:2]]) for t, p in zip(tables, cache.padding_tables, strict=True))
        output: StepOutput = self._run(token, hidden, seq_len, tables)
        count = len(rows)
        longest = [length + width for length in state.lengths]
        following = State(rows, output.token[:count], output.hidden[:count], output.seq_len[:count], longest)
        return following, Results(output.tokens[:count], output.accepted[:count])

    def decode(self, state: State) -> tuple[State, list[list[int]], list[int], float]:
        """Run one step and read its results.

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


class EnginePool:
    """Engines that are not in use, per target model; taken out for one call at a time, so threads do not meet."""

    def __init__(self, keep: int = 2) -> None:
        self._idle: weakref.WeakKeyDictionary[PreTrainedModel, list[tuple[Any, Engine]]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._keep = keep

    @contextmanager
    def engine(
        self,
        target: PreTrainedModel,
        assistant: PreTrainedModel | None,
        num_draft_tokens: int,
        *,
        rows: int,
        model_len: int,
        compiled: bool,
        options: Options,
    ) -> Iterator[Engine]:
        """An engine with room for ``rows`` rows of ``model_len`` tokens; its cache is empty again afterwards.

        Capacities are rounded up (rows to a power of two, lengths to 512), so that similar calls share a compilation.
        """
        reference = None if assistant is None else weakref.ref(assistant)
        key = (reference, num_draft_tokens, compiled, options, target.dtype, target.device)
        engine = None
        with self._lock:
            idle = self._idle.setdefault(target, [])
            # Engines of another assistant are judged when that assistant comes again.
            idle[:] = [(k, e) for k, e in idle if k[0] != reference or not e.stale(target, assistant)]
            for entry in idle:
                cache = entry[1].cache
                if entry[0] == key and cache.max_rows >= rows and cache.max_model_len >= model_len:
                    idle.remove(entry)
                    engine = entry[1]
                    break
        if engine is None:
            max_rows = max(2, 1 << (rows - 1).bit_length(), *(options.capture_sizes or ()))
            max_model_len = -(-model_len // 512) * 512
            engine = Engine(
                target,
                assistant,
                num_draft_tokens,
                max_rows=max_rows,
                max_model_len=max_model_len,
                compiled=compiled,
                options=options,
            )
        try:
            yield engine
        finally:
            engine.cache.reset()
            with self._lock:
                idle = self._idle.setdefault(target, [])
                idle.append((key, engine))
                del idle[: -self._keep]

    def clear(self) -> None:
        """Forget all idle engines."""
        with self._lock:
            self._idle.clear()


ENGINES = EnginePool()
