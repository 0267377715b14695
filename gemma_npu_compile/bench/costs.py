"""What one step has to read and to compute, as formulas of rows, context and drafts.

The least any implementation can do: every weight once per forward pass, every visible key and value once per layer.
Embedding tables are not counted, only their looked-up rows would be read; a tied table is counted as the head. What is
written (new keys and values, activations) is not counted either: it is small next to the rest.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from transformers import PreTrainedModel

from gemma_npu_compile.models import text_model

ROWS, CONTEXT, DRAFTS, ACCEPTED = sympy.symbols("rows context drafts accepted", nonnegative=True)
"""Rows of the batch, tokens of each in the cache, drafts per step, drafts accepted per step."""

Geometry = tuple[str, int, int, int, int | None]
"""Layer type, query heads, kv heads, head size, window."""


@dataclass(frozen=True)
class Formula:
    """A formula in symbols, and the numbers of one pair for those that are not variables of a scenario."""

    name: str
    unit: str
    expr: sympy.Expr
    numbers: Mapping[sympy.Symbol, int | float]

    @property
    def filled(self) -> sympy.Expr:
        """With the numbers put in; rows, context, drafts and accepted drafts stay."""
        return self.expr.subs(dict(self.numbers))

    def __call__(self, rows: int, context: int, drafts: int) -> float:
        """The value for ``rows`` rows of ``context`` tokens."""
        return float(self.filled.subs({ROWS: rows, CONTEXT: context, DRAFTS: drafts}))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        numbers = {str(symbol): value for symbol, value in self.numbers.items()}
        return {
            "name": self.name,
            "unit": self.unit,
            "formula": str(self.expr),
            "numbers": numbers,
            "filled": str(self.filled),
        }


@dataclass(frozen=True)
class Costs:
    """Of one step of a pair.

    Attributes:
        weights: bytes; ``kv``: bytes; ``flops``: multiplications and additions; ``attention``: those of attention.
        stored: bytes of all weights of both models, embedding tables included; kept: bytes of keys and values.
    """

    weights: Formula
    kv: Formula
    flops: Formula
    attention: Formula
    stored: int
    kept: Formula

    def read(self, rows: int, context: int, drafts: int) -> float:
        """Bytes a step has to read."""
        return self.weights(rows, context, drafts) + self.kv(rows, context, drafts)


def _elements(model: PreTrainedModel) -> tuple[int, int, int]:
    """Elements read in a forward pass outside the experts (head included), in the experts, and in all of a model."""
    text = text_model(model)
    named = {id(p): (name, p) for name, p in [*text.named_parameters(), *_around(model)]}
    gathered = {id(p) for name, p in named.values() if "embed_tokens" in name}
    head: Any = model.lm_head.weight
    config = model.config
    size = head.numel()
    if getattr(config, "use_ordered_embeddings", False):  # the head's rows of the best centroids
        size = config.centroid_intermediate_top_k * (head.shape[0] // config.num_centroids) * head.shape[1]
    experts = sum(p.numel() for name, p in named.values() if ".experts." in name)
    dense = sum(p.numel() for key, (name, p) in named.items() if ".experts." not in name and key not in gathered)
    everything = sum(p.numel() for p in {id(p): p for _, p in [*named.values(), ("head", head)]}.values())
    return dense + size, experts, everything


def _around(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Parameters of an assistant outside its layers: projections and centroids."""
    parts = ("pre_projection", "post_projection", "masked_embedding")
    return [item for part in parts if getattr(model, part, None) for item in getattr(model, part).named_parameters()]


def _layers(config: Any) -> list[Geometry]:
    """Geometry of every layer of a text config."""
    found = []
    for layer, kind in enumerate(config.layer_types):
        own = config.per_layer_config[layer]
        window = config.sliding_window if kind == "sliding_attention" else None
        found.append((kind, config.num_attention_heads, own.num_key_value_heads, own.head_dim, window))
    return found


def most_read(target: PreTrainedModel, context: int) -> tuple[int, int, int, int]:
    """Of the layers that read most keys and values together: query heads, kv heads, head size, keys a row sees."""
    counted = Counter(_layers(target.config.get_text_config()))
    seen = {geometry: min(context, geometry[-1] or context) for geometry in counted}
    most = max(counted, key=lambda each: counted[each] * each[2] * each[3] * seen[each])
    return *most[1:4], seen[most]


def _attention(layers: Counter[Geometry], label: str, seen: sympy.Expr, queries: sympy.Expr | int, more: Any) -> Any:
    """Keys read and multiplications of one pass: ``(key and value elements, flops, numbers)``."""
    elements, flops = sympy.Integer(0), sympy.Integer(0)
    numbers: dict[sympy.Symbol, int | float] = {}
    for index, ((kind, heads, kv_heads, head_dim, window), count) in enumerate(layers.items()):
        short = kind.removesuffix("_attention") + (f"_{index}" if len({g[0] for g in layers}) < len(layers) else "")
        n, q, h, d = sympy.symbols(" ".join(f"{letter}_{label}_{short}" for letter in "nqhd"), positive=True)
        numbers.update({n: count, q: heads, h: kv_heads, d: head_dim})
        keys = seen
        if window is not None:
            w = sympy.Symbol(f"window_{label}_{short}", positive=True)
            numbers[w] = window
            keys = sympy.Min(seen, w + more)
        elements += 2 * n * h * d * ROWS * keys
        flops += 4 * n * q * d * ROWS * queries * keys
    return elements, flops, numbers


def costs_of(target: PreTrainedModel, assistant: PreTrainedModel) -> Costs:
    """Formulas of a step of a pair; the models may be on the meta device.

    Draft iterations see the ``context`` verified keys (sliding layers ``window + 1`` of them); the verification reads
    ``context + drafts + 1`` keys once for its ``drafts + 1`` queries (sliding layers ``window + drafts``).
    """
    size = target.dtype.itemsize
    text, draft = target.config.get_text_config(), assistant.config.get_text_config()
    dense, experts, all_target = _elements(target)
    per_draft, _, all_assistant = _elements(assistant)
    element, base, each = sympy.symbols("bytes_per_element W_target W_assistant", positive=True)
    numbers: dict[sympy.Symbol, int | float] = {element: size, base: dense, each: per_draft}
    weights = base + DRAFTS * each
    tokens = ROWS * (DRAFTS + 1)
    multiplied = tokens * base + ROWS * DRAFTS * each
    if experts:  # a token visits top_k of them; routed independently and evenly, that many distinct ones are read
        held, number, top = sympy.symbols("W_experts experts top_k", positive=True)
        numbers.update({held: experts, number: text.num_experts, top: text.top_k_experts})
        weights += held * (1 - (1 - top / number) ** tokens)
        multiplied += tokens * held * top / number
    owned = _layers(text)
    last = dict(zip(text.layer_types, owned, strict=True))  # the assistant reads the keys of the last layer of a type
    modes = zip(owned, text.kv_sharing_modes, strict=True)
    drafting = Counter((kind, heads, *last[kind][2:]) for kind, heads, *_ in _layers(draft))
    verify, verify_flops, seen = _attention(Counter(owned), "target", CONTEXT + DRAFTS + 1, DRAFTS + 1, DRAFTS)
    drafted, draft_flops, more = _attention(drafting, "draft", CONTEXT, 1, 1)
    kept, _, own = _attention(Counter(g for g, mode in modes if mode != "reuse"), "kept", CONTEXT, 1, 0)
    heads = {**numbers, **seen, **more}
    attention = verify_flops + DRAFTS * draft_flops
    return Costs(
        weights=Formula("weights", "bytes", element * weights, numbers),
        kv=Formula("keys and values", "bytes", element * (verify + DRAFTS * drafted), {element: size, **seen, **more}),
        flops=Formula("arithmetic", "flop", 2 * multiplied + attention, heads),
        attention=Formula("arithmetic of attention", "flop", attention, {**seen, **more}),
        stored=size * (all_target + all_assistant),
        kept=Formula("keys and values kept", "bytes", element * kept, {element: size, **own}),
    )
