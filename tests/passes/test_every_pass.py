"""Every pass on the graph of a whole step: numbers before and after, alone left out, twice, and by the hash seed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, GraphModule

import gemma_npu_compile as gnc
from gemma_npu_compile.backend import Backend
from gemma_npu_compile.capabilities import platform
from gemma_npu_compile.ops.npu import emulate
from gemma_npu_compile.passes import PASSES, run_passes
from gemma_npu_compile.passes.fx import placeholders

A2 = platform("ascend910b")
EVERYTHING = {"skip_softcap": True, "merge_weights": True}


class Recorder(Backend):
    """Keeps the graph AOT hands over, and the arguments of the first call."""

    graph: GraphModule
    args: list[Any]

    def _rewrite(self, gm: GraphModule, *rest: Any) -> None:
        super()._rewrite(copied(gm), *rest)  # labels are written to the nodes

    def _run(self, gm: GraphModule, *rest: Any) -> Any:
        self.graph = gm
        for index, node in enumerate(placeholders(gm)):
            node.meta.setdefault("source", index)

        def run(args: list[Any]) -> Any:
            self.args = list(args)
            return gm(*args)

        return run


def copied(gm: GraphModule) -> GraphModule:
    """A graph of its own over the same parameters and values."""
    graph, known = Graph(), {}
    output = graph.graph_copy(gm.graph, known)
    graph.output(output)
    return GraphModule(gm, graph)


def execute(gm: GraphModule, args: list[Any]) -> tuple[list[Any], list[Tensor]]:
    """Results, and the contents of everything afterwards that is written to; the arguments stay as they are."""
    fresh = [arg.clone() if isinstance(arg, Tensor) and arg.dim() == 4 else arg for arg in args]  # the pools
    given = []
    for node in placeholders(gm):
        extra = node.meta.get("host") or node.meta.get("merged")
        given.append(fresh[node.meta["source"]] if extra is None else extra([fresh[s] for s in extra.sources]))
    with emulate(A2), torch.no_grad():
        return list(gm(*given)), [arg for arg in fresh if isinstance(arg, Tensor) and arg.dim() == 4]


@dataclass(repr=False)
class Step:
    """A traced step with three rows in flight."""

    graph: GraphModule
    args: list[Any]
    vocabulary: int

    def state(self, seed: int) -> list[Any]:
        """Other tokens, hidden states and cache contents at the same lengths."""
        generator = torch.Generator().manual_seed(seed)
        found = list(self.args)
        for index, arg in enumerate(found):
            if not isinstance(arg, Tensor) or isinstance(arg, torch.nn.Parameter):
                continue
            if arg.dim() == 4 or (arg.dim() == 2 and arg.shape[0] == 3 and arg.is_floating_point()):
                found[index] = torch.randn(arg.shape, generator=generator).to(arg.dtype)
            elif arg.dtype == torch.long and arg.shape == (3,):
                found[index] = torch.randint(1, self.vocabulary, (3,), generator=generator)
        return found


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def step(request, make_pair: Callable[..., Any]) -> Step:
    torch._dynamo.reset()
    pair = [model.to(request.param) for model in make_pair(ordered=True)]
    engine = gnc.Engine(*pair, 1, max_rows=4, max_model_len=700, compiled=False)
    state = engine.prefill([torch.arange(1, 1 + n) % 127 + 1 for n in (5, 140, 300)])
    for row, length in zip(state.rows, state.lengths, strict=True):
        engine.cache.extend(row, length + 2)
    recorder = Recorder()
    inputs = state.token, state.hidden, state.seq_len, engine.cache.block_tables(state.rows)
    gnc.mark_rows(*inputs)
    torch.compile(engine.step, backend=recorder, fullgraph=True)(*inputs)
    return Step(recorder.graph, recorder.args, 128)


def close(step: Step, left: Any, right: Any, name: str) -> None:
    """float32: tokens equal and values as close as reordering leaves them; bfloat16: values within its roundings."""
    exact = not any(isinstance(arg, Tensor) and arg.dtype == torch.bfloat16 for arg in step.args)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if exact else {"rtol": 0.1, "atol": 0.15}
    for a, b in zip(left[0] + left[1], right[0] + right[1], strict=True):
        if isinstance(a, Tensor) and (exact or a.is_floating_point()):
            torch.testing.assert_close(a, b, **tolerance, msg=lambda text: f"{name}: {text}")


@settings(max_examples=2)
@given(seed=st.integers(0, 2**16))
def test_each_pass_leaves_the_numbers(step: Step, seed: int) -> None:
    args = step.state(seed)
    gm = copied(step.graph)
    reference = [execute(gm, args)]
    ran = []

    def after(name: str, graph: GraphModule) -> None:
        result = execute(graph, args)
        close(step, result, reference[0], name)
        ran.append(name)

    with emulate(A2):
        run_passes(gm, platform=A2, after=after, **EVERYTHING)
    assert ran == list(PASSES)


@pytest.mark.parametrize("name", PASSES)
def test_any_pass_can_be_left_out(step: Step, name: str) -> None:
    args = step.state(1)
    reference = execute(copied(step.graph), args)
    gm = copied(step.graph)
    with emulate(A2):
        run_passes(gm, platform=A2, disable=[name], **EVERYTHING)
    close(step, execute(gm, args), reference, f"without {name}")


def test_every_pass_is_idempotent(step: Step) -> None:
    """Run again right after itself, a pass finds nothing to do and changes no node."""
    gm = copied(step.graph)
    settings_ = {"platform": A2, "kv_lens": "device", **EVERYTHING}
    with emulate(A2):
        for name in PASSES:
            others = [each for each in PASSES if each != name]
            run_passes(gm, disable=others, **settings_)
            nodes = [str(node.format_node()) for node in gm.graph.nodes]
            (record,) = run_passes(gm, disable=others, **settings_)
            assert record.changed == 0, name
            assert [str(node.format_node()) for node in gm.graph.nodes] == nodes, name


def test_what_each_pass_finds_in_the_step(step: Step) -> None:
    with emulate(A2):
        records = {r.name: r for r in run_passes(copied(step.graph), platform=A2, **EVERYTHING)}
    changed = {name: record.changed for name, record in records.items() if record.changed}
    assert changed.keys() == set(PASSES) - {
        "declare_host_mirrors",
        "elide_key_rope",
        "fia_to_bnsd",
        "lower_native",
        "numbers_on_device",
        "prove_rows",
        "sdpa_to_fia",
    }
    assert changed["keep_writes_in_place"] == 2
    assert changed["remove_host_syncs"] == changed["candidate_argmax"] == changed["drop_softcap"] == 1
    assert changed["large_heads_to_bnsd"] == changed["bind_block_tables"] == changed["lower_attention"] == 4
    assert changed["clip_to_window"] == 2
    assert changed["fuse_gated_gelu"] == changed["merge_gate_up"] == 4
