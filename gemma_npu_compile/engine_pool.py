"""Engines between calls: a generate() call takes one that fits, and compiles only when none does."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from gemma_npu_compile.engine import Engine
from gemma_npu_compile.options import Options


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
