"""Three ways to run one step on the device: ours, torch_npu's npugraph_ex, and one launch after the other.

npugraph_ex gets ``DraftVerifyStep`` itself, traced by Dynamo and AOT and compiled with its own defaults (its fusions
included): none of this package's passes. One thing stands in its way: the dialect's attention reads lengths on the
host (``on_host`` in ops/attention_npu.py), which a capture refuses with 107027 and 107030. So, for its calls alone,
that one kernel is :func:`capturable_attention`, which asks the same operator in the same layout for the same result
and hides keys behind a mask. The masks are shared by all layers of a group, as they would be in code written for it.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pairs  # noqa: F401  (imports torch_npu, and keeps the compile cache out of it)
import software_acl
import torch
from torch import Tensor

import gemma_npu_compile as gnc
from gemma_npu_compile.graphs.acl import AclRuntime
from gemma_npu_compile.state import Results, State


def held() -> int:
    """Bytes of device memory that somebody needs: without what the allocator only keeps for later."""
    gc.collect()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    return software_acl.device_bytes()


def capturable_attention(
    masks: dict[Any, Tensor],
    last: str,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None = None,
    layout: str = "TND",
    layer: str = "",
    query_lens: Tensor | None = None,
) -> Tensor:
    """``gemma_npu::paged_attention`` without a question to the device: every row may reach what its table reaches.

    Args:
        masks: those of this step so far.
        last: the step's last layer, behind which no mask may outlive a capture.
    """
    rows, keys = block_table.shape[0], block_table.shape[1] * key_cache.shape[1]
    heads_first = query.view(rows, -1, *query.shape[1:]).transpose(1, 2).contiguous()
    q_len = heads_first.shape[2]
    kind = layer.split("/")[0].split(".")[0], window  # every draft sees what the first one sees
    if kind not in masks:
        steps = functools.partial(torch.arange, dtype=torch.int32, device=kv_lens.device)
        queries = kv_lens.view(-1, 1, 1, 1) - q_len + steps(q_len).view(-1, 1)
        hidden = steps(keys) > queries
        masks[kind] = hidden if window is None else hidden | (steps(keys) < queries - (window - 1))
    out = torch.ops.npu.npu_fused_infer_attention_score(
        heads_first,
        key_cache.flatten(2),
        value_cache.flatten(2),
        atten_mask=masks[kind],
        actual_seq_lengths_kv=[keys] * rows,
        block_table=block_table,
        block_size=key_cache.shape[1],
        num_heads=query.shape[1],
        num_key_value_heads=key_cache.shape[2],
        scale=scale,
        input_layout="BNSD",
    )[0]
    if layer == last:
        masks.clear()
    return out.transpose(1, 2).reshape(query.shape)


class Subject:
    """A way to run the step, with an engine of its own for the cache and the prefill.

    Attributes:
        memory: bytes held before anything was captured, behind the largest size, and behind all sizes.
    """

    name: str

    def __init__(self, pair: tuple[Any, Any], drafts: int, sizes: tuple[int, ...], model_len: int) -> None:
        self.engine = self.build(pair, drafts, max_rows=max(sizes), max_model_len=model_len, sizes=sizes)
        self.sizes, self.width = sorted(sizes, reverse=True), 1 + drafts
        self.memory = self.prepare()

    def build(self, pair: tuple[Any, Any], drafts: int, sizes: tuple[int, ...], **capacity: int) -> gnc.Engine:
        """The engine; uncompiled unless a subject compiles it."""
        return gnc.Engine(*pair, drafts, compiled=False, **capacity)

    def prepare(self) -> list[int]:
        """Compile and capture every size; returns :attr:`memory`."""
        raise NotImplementedError

    def step(self, state: State) -> tuple[State, list[list[int]]]:
        """The next state and each row's new tokens."""
        following, new, _, _ = self.engine.decode(state)
        return following, new

    def padding(self, rows: int) -> tuple[Any, ...]:
        """Inputs of the step that touch nobody's blocks."""
        step, cache = self.engine.step, self.engine.cache
        inputs = step.token_padding, step.hidden_padding, cache.padding_lens
        tables = tuple(table[:rows].clone() for table in cache.padding_tables)
        return *(each[:rows].clone() for each in inputs), tables


class Ours(Subject):
    """This package, default options."""

    name = "ours"

    def build(self, pair: tuple[Any, Any], drafts: int, sizes: tuple[int, ...], **capacity: int) -> gnc.Engine:
        return gnc.Engine(*pair, drafts, options=gnc.Options(capture_sizes=sizes, on_fallback="error"), **capacity)

    def prepare(self) -> list[int]:
        found, record = [held()], AclRuntime.capture

        def capture(*args: Any, **kwargs: Any) -> Any:
            graph = record(*args, **kwargs)
            found.append(held())
            return graph

        AclRuntime.capture = capture
        try:
            self.engine.warm_up()
        finally:
            AclRuntime.capture = record
        return [*found[:2], held()]


class NpugraphEx(Subject):
    """``torch.compile(backend="npugraph_ex")`` on the step; one trace for many rows, and one for a single row."""

    name = "npugraph_ex"

    def prepare(self) -> list[int]:
        def results(*inputs: Any) -> tuple[Tensor, ...]:
            out = self.engine.step(*inputs)  # its empty results are left out: npugraph_ex cannot reuse a pool with them
            return out.tokens, out.accepted, out.token, out.hidden, out.seq_len

        self.call: Callable[..., tuple[Tensor, ...]] = torch.compile(results, backend="npugraph_ex", fullgraph=True)
        self.last = f"verify/target.layers.{len(self.engine.cache) - 1}"
        found = [held()]
        for rows in self.sizes:
            inputs = self.padding(rows)
            if rows == self.sizes[0]:
                gnc.mark_rows(*inputs)
            self.run(inputs)
            found.append(held())
        return [found[0], found[1], found[-1]]

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        """The capturable kernel in the place of the one that reads lengths."""
        library = torch.library.Library("gemma_npu", "IMPL")
        kernel = functools.partial(capturable_attention, {}, self.last)
        library.impl("paged_attention", kernel, "PrivateUse1", allow_override=True)
        try:
            yield
        finally:
            library._destroy()

    @torch.no_grad()
    def run(self, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        with self.attention():
            return self.call(*inputs)

    def step(self, state: State) -> tuple[State, list[list[int]]]:
        cache = self.engine.cache
        for row, length in zip(state.rows, state.lengths, strict=True):
            cache.extend(row, length + self.width)
        inputs = state.token, state.hidden, state.seq_len, cache.block_tables(state.rows)
        tokens, accepted, token, hidden, seq_len = self.run(inputs)
        new, _ = Results(tokens, accepted).read()
        lengths = [length + len(more) for length, more in zip(state.lengths, new, strict=True)]
        for row, length in zip(state.rows, lengths, strict=True):
            cache.set_length(row, length)
        return State(state.rows, token, hidden, seq_len, lengths), new


class Eager(Subject):
    """The step as plain PyTorch: every operator a launch. Its memory is the peak of one step."""

    name = "eager"

    @torch.no_grad()
    def prepare(self) -> list[int]:
        inputs, before = self.padding(self.sizes[0]), held()
        torch.npu.reset_peak_memory_stats()
        allocated = torch.npu.memory_allocated()
        self.engine.step(*inputs)
        torch.npu.synchronize()
        peak = before + torch.npu.max_memory_allocated() - allocated
        return [before, peak, peak]


SUBJECTS: tuple[type[Subject], ...] = (Ours, NpugraphEx, Eager)
