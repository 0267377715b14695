"""Check a draft-plus-verify step: on random rows or on recorded ones, in caches whose unreached blocks are poisoned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemma_npu_compile.check import TOLERANCES, Checker, Fault, Result, Traced, difference
from gemma_npu_compile.kv_cache import PagedKVCache
from gemma_npu_compile.options import Options
from gemma_npu_compile.step import DraftVerifyStep, StepOutput, mark_rows


@dataclass(frozen=True)
class StepState:
    """Small inputs of one step.

    Attributes:
        tokens: ``(rows,)`` int64.
        lengths: tokens of each row in the cache.
        tables: one ``(rows, width)`` int32 table per KV group.
    """

    tokens: Tensor
    lengths: list[int]
    tables: tuple[Tensor, ...]


def random_state(step: DraftVerifyStep, lengths: Sequence[int], seed: int) -> StepState:
    """Rows of the given lengths with random tokens, in blocks of the step's cache.

    Raises:
        OutOfBlocksError: they do not fit.
    """
    cache, generator = step.cache, torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        rows.append(cache.allocate(length))
        cache.set_length(rows[-1], length)
        cache.extend(rows[-1], length + 1 + step.num_draft_tokens)
    vocabulary = step.embed_tokens.num_embeddings
    tokens = torch.randint(1, vocabulary, (len(rows),), generator=generator)
    return StepState(tokens, list(lengths), cache.block_tables(rows))


def fill(cache: PagedKVCache, tables: Sequence[Tensor], seed: int) -> None:
    """Random keys and values in the blocks the tables reach, poison in all others but the null blocks."""
    generator = torch.Generator().manual_seed(seed)
    for group, table in zip(cache.groups, tables, strict=True):
        reached = torch.unique(table[table >= group.null_blocks]).long()
        for pools in (cache.key_pools, cache.value_pools):
            for layer in group.layers:
                pool = pools[layer]
                pool[group.null_blocks :] = float("nan")
                contents = torch.randn((len(reached), *pool.shape[1:]), generator=generator)
                pool[reached] = contents.to(pool)


def trace(
    step: DraftVerifyStep, state: StepState, options: Options, seed: int = 0, tolerance: float | None = None
) -> tuple[Checker, Result]:
    """Trace a step on a state, and compare the trace with the step as plain PyTorch.

    Args:
        state: its small inputs; hidden states and cache contents are random, by ``seed``.
        tolerance: relative and absolute; None for what the dtype's rounding leaves (``TOLERANCES``).
    """
    cache = step.cache
    limits = TOLERANCES[cache.dtype] if tolerance is None else (tolerance, tolerance)
    inputs = step_inputs(step, state, seed)
    fill(cache, state.tables, seed)
    mark_rows(*inputs)
    backend = Traced()
    eager, after = run_eager(step, inputs)
    with torch.no_grad():
        compiled = torch.compile(step, backend=backend, fullgraph=True, isolate_recompiles=True)  # type: ignore[call-overload]
        traced = call(compiled, inputs)
    assert backend.graph is not None
    checker = Checker(backend.graph, backend.static, backend.args, options, limits, _scratch(cache, backend.args))
    if any(each.is_floating_point() and bool(each.isnan().any()) for each in eager):
        poisoned = Fault("step", "its results are not numbers: it reads a poisoned block", float("nan"))
        return checker, Result({"step": poisoned.error}, poisoned)
    places = [pool.data_ptr() for pool in pools(cache)]
    caches = [after[places.index(backend.args[index].data_ptr())] for index in checker.written]
    names = [*eager._fields, *(checker.labels[i] for i in checker.written)]
    pairs = zip(names, [*eager, *caches], [*traced, *checker.reference[1]], strict=True)
    result = Result({"trace": 0.0})
    for name, a, b in pairs:
        same, error = difference(a, b, limits)
        result.stages["trace"] = max(result.stages["trace"], error if a.is_floating_point() else 0.0)
        if not same and result.fault is None:
            result.fault = Fault("trace", name, error)
    return checker, result


def step_inputs(step: DraftVerifyStep, state: StepState, seed: int) -> tuple[Any, ...]:
    """Arguments of a call of the step; hidden states are random."""
    device = step.cache.device
    generator = torch.Generator().manual_seed(seed + 1)
    lengths = torch.tensor(state.lengths, dtype=torch.int32)
    hidden = torch.randn((len(lengths), step.hidden_padding.shape[1]), generator=generator).to(step.hidden_padding)
    return state.tokens.to(device), hidden, lengths.to(device), tuple(t.to(device) for t in state.tables), lengths


def call(run: Any, inputs: tuple[Any, ...]) -> StepOutput:
    """Call a step, compiled or not, with what :func:`step_inputs` made."""
    output: StepOutput = run(*inputs[:-1], host_len=inputs[-1])
    return output


def pools(cache: PagedKVCache) -> list[Tensor]:
    """All pools of a cache."""
    return [*cache.key_pools.values(), *cache.value_pools.values()]


def run_eager(step: DraftVerifyStep, inputs: tuple[Any, ...]) -> tuple[StepOutput, list[Tensor]]:
    """Results of the step as plain PyTorch and the pools after it; the pools themselves stay as they are."""
    before = [pool.clone() for pool in pools(step.cache)]
    with torch.no_grad():
        results = call(step, inputs)
    after = [pool.clone() for pool in pools(step.cache)]
    for pool, contents in zip(pools(step.cache), before, strict=True):
        pool.copy_(contents)
    return results, after


def check_step(
    step: DraftVerifyStep,
    state: StepState,
    options: Options,
    *,
    seed: int = 0,
    tolerance: float | None = None,
    bisect: bool = False,
) -> Result:
    """Compare a step as plain PyTorch with its trace, with the graph after each pass, and with a captured call.

    Args:
        state, seed, tolerance: as in :func:`trace`.
        bisect: name the node as well.
    """
    checker, result = trace(step, state, options, seed, tolerance)
    if result.fault is not None:
        return result
    rest = checker.run(bisect)
    return Result({**result.stages, **rest.stages}, rest.fault)


def _scratch(cache: PagedKVCache, args: Sequence[object]) -> dict[int, int]:
    """Null blocks of each cache among the arguments."""
    found = {}
    for index, arg in enumerate(args):
        for group in cache.groups:
            places = {p[layer].data_ptr() for p in (cache.key_pools, cache.value_pools) for layer in group.layers}
            if isinstance(arg, Tensor) and arg.dim() == 4 and arg.data_ptr() in places:
                found[index] = group.null_blocks
    return found
