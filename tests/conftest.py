"""Shared fixtures: random two-layer pairs that trace in seconds, and the bundled trained pair."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch.fx import GraphModule, Node
from transformers import PreTrainedModel
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4ForCausalLM
from transformers.models.gemma4_assistant.configuration_gemma4_assistant import Gemma4AssistantConfig
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantForCausalLM

import gemma_npu_compile as gnc

os.environ["GEMMA_NPU_CACHE"] = "0"  # no test depends on what an earlier run left, nor touches a user's cache
settings.register_profile("seeded", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("seeded")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")))

Pair = tuple[PreTrainedModel, PreTrainedModel]
LAYERS = ("sliding_attention", "full_attention")


def build_pair(
    seed: int = 0,
    layer_types: tuple[str, ...] = LAYERS,
    draft_layer_types: tuple[str, ...] = LAYERS,
    ordered: bool = False,
    **overrides: Any,
) -> Pair:
    """A random target and an assistant that agrees with it now and then.

    The assistant sees the target's embedding unchanged (identity projections) and has a noisy copy of its head; small
    output projections keep both close to their input. So drafts are accepted often, never always, and both outcomes
    depend on the cache.
    """
    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 24,
        "max_position_embeddings": 1024,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "pad_token_id": 0,
        "eos_token_id": None,
        "bos_token_id": None,
        **overrides,
    }
    config = Gemma4TextConfig(
        **common,
        num_hidden_layers=len(layer_types),
        layer_types=list(layer_types),
        final_logit_softcapping=30.0,
        tie_word_embeddings=False,
    )
    target = Gemma4ForCausalLM(config).eval()
    draft_config = Gemma4TextConfig(
        **common,
        num_hidden_layers=len(draft_layer_types),
        layer_types=list(draft_layer_types),
        num_kv_shared_layers=len(draft_layer_types),
    )
    assistant = Gemma4AssistantForCausalLM(
        Gemma4AssistantConfig(
            text_config=draft_config,
            backbone_hidden_size=common["hidden_size"],
            use_ordered_embeddings=ordered,
            num_centroids=16,
            centroid_intermediate_top_k=8,
            tie_word_embeddings=False,
        )
    ).eval()
    with torch.no_grad():
        width = common["hidden_size"]
        target.lm_head.weight.normal_(std=0.5)
        noise = torch.randn_like(target.lm_head.weight) * 0.1
        assistant.lm_head.weight.copy_(target.lm_head.weight + noise)
        assistant.pre_projection.weight.copy_(torch.cat([torch.eye(width), 0.01 * torch.eye(width)], dim=1))
        assistant.post_projection.weight.copy_(torch.eye(width))
        for model in (target, assistant):
            for name, parameter in model.named_parameters():
                if "q_norm" in name or "k_norm" in name:
                    parameter.fill_(1.0)
                elif "post_attention_layernorm" in name:
                    parameter.fill_(0.05)
                elif "post_feedforward_layernorm" in name:
                    parameter.fill_(0.03)
        if ordered:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(common["vocab_size"]))
            assistant.masked_embedding.centroids.weight.normal_(std=0.5)
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    return target, assistant


@pytest.fixture(scope="session")
def make_pair() -> Callable[..., Pair]:
    """:func:`build_pair`."""
    return build_pair


@pytest.fixture(scope="session")
def pair() -> Pair:
    """The default random pair; tests must not change it."""
    return build_pair()


@pytest.fixture(scope="session")
def engine(pair: Pair) -> Any:
    """One draft, three rows, blocks for hardly two long requests; for sessions, each of which must leave it empty."""
    return gnc.Engine(
        *pair,
        1,
        max_rows=3,
        max_model_len=128,
        num_blocks={"sliding_attention": 24, "full_attention": 18},
        block_size=16,
        prefill_chunk=32,
        options=gnc.Options(platform="cpu"),
    )


@pytest.fixture
def replays(engine: Any) -> Callable[[], dict[str, int]]:
    """Counts replays of :func:`engine` by kind; a kind has several graphs where a test reset Dynamo in between."""
    engine.warm_up()

    def count() -> dict[str, int]:
        shapes = [(len(g.plan.inputs), len(g.plan.outputs), g.replays) for g in engine.report.graphs]
        inputs, outputs = (min(each) for each in list(zip(*shapes, strict=True))[:2])
        counts = dict.fromkeys(("greedy", "sampled", "open"), 0)
        for i, o, replayed in shapes:
            counts["sampled" if i > inputs else "open" if o > outputs else "greedy"] += replayed
        return counts

    return count


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Dynamo without compiled code, before and after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graph_structure(gm: GraphModule) -> list[Any]:
    """The graph without its names."""
    order = {node: index for index, node in enumerate(gm.graph.nodes)}

    def operands(node: Node) -> list[str]:
        """In the order of the operator's arguments, given by name or not."""
        names = [each.name for each in getattr(node.target, "_schema", torch.ops.aten.abs.default._schema).arguments]
        given = sorted(node.kwargs.items(), key=lambda each: names.index(each[0]) if each[0] in names else -1)
        plain = torch.fx.node.map_arg((*node.args, *(each for _, each in given)), lambda each: f"%{order[each]}")
        return [str(each) for each in plain]

    return [
        (node.op, str(node.target) if node.op == "call_function" else "", operands(node)) for node in gm.graph.nodes
    ]


def source_places(gm: GraphModule) -> list[tuple[str, str]]:
    """Source line and module of every operator."""
    stacks = [(n.meta.get("stack_trace") or "", n.meta.get("nn_module_stack") or {}) for n in gm.graph.nodes]
    return [
        (trace.strip().splitlines()[-1] if trace else "", str(list(stack.values())[-1:])) for trace, stack in stacks
    ]


@pytest.fixture(scope="session")
def structure() -> Callable[[GraphModule], list[Any]]:
    """:func:`graph_structure`."""
    return graph_structure


@pytest.fixture(scope="session")
def places() -> Callable[[GraphModule], list[tuple[str, str]]]:
    """:func:`source_places`."""
    return source_places


@pytest.fixture(scope="session")
def reference_round() -> Callable[..., Any]:
    """:func:`tests/reference.py` (loaded by path: tests are no package)."""
    spec = importlib.util.spec_from_file_location("reference", Path(__file__).with_name("reference.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference"] = module
    spec.loader.exec_module(module)
    return module.reference_round
