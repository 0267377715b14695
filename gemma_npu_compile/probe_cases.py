"""One answer at a time about one device: the process that ``gemma-npu probe`` starts, restarts and, if need be, kills.

It reads a list of questions from stdin and writes two JSON lines for each to the file descriptor it is given: that it
begins, and the answer. Each question runs one operator on the device, eagerly or as a captured graph that is replayed
with other contents, and compares with the formula in float32 on the CPU: an operator that ignores what it was asked for
is no better than one that refuses.
"""

import itertools
import json
import operator
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

import gemma_npu_compile.ops.npu  # noqa: F401  (torch_npu, where torch was told not to load it)
from gemma_npu_compile.capabilities import AttentionCall

DTYPE = torch.float16
TOLERANCE = 0.015
LENGTHS = (130, 70)  # keys of the two rows of every attention call
WINDOW = 24


class WrongResultError(ValueError):
    """The operator ran and computed something else."""


@dataclass
class Trial:
    """One operator call: ``make(seed)`` gives its tensors (on the CPU) and the expected results.

    Attributes:
        target: the operator.
        make: tensors by argument name, positional ones first, and the expected results in float32.
        options: further keyword arguments, not tensors.
        named: tensors passed by name; the others go by position.
        results: which tensors to compare: indices of a tuple of results, or names of arguments written in place.
    """

    target: Any
    make: Callable[[int], tuple[dict[str, Tensor], list[Tensor]]]
    options: dict[str, Any] = field(default_factory=dict)
    named: frozenset[str] = frozenset()
    results: tuple[int | str | None, ...] = (0,)

    def graph(self, names: Sequence[str]) -> GraphModule:
        """The call as a graph: what a capture records."""
        graph = Graph()
        inputs = {name: graph.placeholder(name) for name in names}
        args = tuple(node for name, node in inputs.items() if name not in self.named)
        kwargs = {name: node for name, node in inputs.items() if name in self.named}
        out = graph.call_function(self.target, args, {**self.options, **kwargs})
        results: list[Node] = []
        for each in self.results:
            if isinstance(each, str):
                results.append(inputs[each])
            else:
                results.append(out if each is None else graph.call_function(operator.getitem, (out, each)))
        graph.output(results)
        return GraphModule({}, graph)


# ---- attention


def _visible(mask: str, q_len: int) -> Tensor:
    """``(rows, q_len, keys)``: what each query sees."""
    ends = torch.tensor([[length - q_len + i + 1 for i in range(q_len)] for length in LENGTHS]).unsqueeze(-1)
    keys = torch.arange(max(LENGTHS))
    if mask == "none":
        return (keys < torch.tensor(LENGTHS).view(-1, 1, 1)).expand(-1, q_len, -1)
    seen = keys < ends
    return seen & (keys >= ends - WINDOW) if mask == "band" else seen


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Attention written out, in float32; all ``(rows, tokens, heads, size)``."""
    groups = query.shape[2] // keys.shape[2]
    wide, contents = (each.float().repeat_interleave(groups, 2).transpose(1, 2) for each in (keys, values))
    scores = query.float().transpose(1, 2) @ wide.transpose(2, 3) / query.shape[3] ** 0.5
    return (scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1) @ contents).transpose(1, 2)


def _layout(tensor: Tensor, layout: str, counts: Sequence[int]) -> Tensor:
    """``(rows, tokens, heads, size)`` as ``layout`` has it; ``counts`` are the tokens of each row that count."""
    if layout == "BNSD":
        return tensor.transpose(1, 2).contiguous()
    if layout == "TND":
        return torch.cat([row[:count] for row, count in zip(tensor, counts, strict=True)])
    return tensor.flatten(2) if layout == "BSH" else tensor


def _attention(call: AttentionCall) -> Trial:
    """A call of fused attention, v1."""
    rows, q_len, layout, size = len(LENGTHS), call.q_len, call.layout, call.block_size
    seen, counts = _visible(call.mask, q_len), [q_len] * rows
    width = 0 if size is None else -(-max(LENGTHS) // size)
    options: dict[str, Any] = {
        "actual_seq_lengths_kv": list(LENGTHS),
        "num_heads": call.heads,
        "num_key_value_heads": call.kv_heads,
        "scale": call.head_dim**-0.5,
        "input_layout": layout,
    }
    if size is not None:
        options["block_size"] = size
    if layout == "TND":
        options["actual_seq_lengths"] = [q_len * (row + 1) for row in range(rows)]
        if size is None:
            options["actual_seq_lengths_kv"] = list(itertools.accumulate(LENGTHS))
    if call.mask in ("causal", "band"):
        options["sparse_mode"] = 3 if call.mask == "causal" else 4
    if call.mask == "band":
        options.update(pre_tokens=WINDOW - 1, next_tokens=0)

    def make(seed: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        shape = (rows, max(LENGTHS), call.kv_heads, call.head_dim)
        query = torch.randn(rows, q_len, call.heads, call.head_dim, generator=generator).to(DTYPE)
        keys, values = (torch.randn(shape, generator=generator).to(DTYPE) for _ in range(2))
        tensors = {"query": _layout(query, layout, counts)}
        if size is None:
            tensors |= {"key": _layout(keys, layout, LENGTHS), "value": _layout(values, layout, LENGTHS)}
        else:
            blocks = torch.randperm(rows * width, generator=generator)
            for name, dense in (("key", keys), ("value", values)):
                padded = torch.zeros(rows, width * size, *shape[2:], dtype=DTYPE)
                padded[:, : shape[1]] = dense
                pool = torch.empty(rows * width, size, call.kv_heads * call.head_dim, dtype=DTYPE)
                pool[blocks] = padded.view(rows * width, size, -1)
                tensors[name] = pool
            tensors["block_table"] = blocks.view(rows, width).int()
        if call.mask in ("causal", "band"):
            tensors["atten_mask"] = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
        elif call.mask == "full":
            hidden = torch.ones(rows, 1, q_len, max(LENGTHS) if size is None else width * size, dtype=torch.bool)
            hidden[:, 0, :, : shape[1]] = ~seen
            tensors["atten_mask"] = hidden
        return tensors, [_layout(_attend(query, keys, values, seen), layout, counts)]

    target = torch.ops.npu.npu_fused_infer_attention_score.default
    return Trial(target, make, options, frozenset({"block_table", "atten_mask"}))


# ---- other operators


def _random(*shapes: tuple[int, ...], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DTYPE) for shape in shapes]


def _norm(x: Tensor, gamma: Tensor) -> Tensor:
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * gamma.float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.float().chunk(2, -1)
    return x.float() * cos.float() + torch.cat((-right, left), -1) * sin.float()


def _rms_norm(width: int) -> Trial:
    def make(seed: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        x, gamma = _random((3, 5, width), (width,), seed=seed)
        return {"x": x, "gamma": gamma}, [_norm(x, gamma)]

    return Trial(torch.ops.npu.npu_rms_norm.default, make)


def _add_rms_norm(width: int) -> Trial:
    def make(seed: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        x, y, gamma = _random((3, 5, width), (3, 5, width), (width,), seed=seed)
        return {"x": x, "y": y, "gamma": gamma}, [_norm(x + y, gamma), (x + y).float()]

    return Trial(torch.ops.npu.npu_add_rms_norm.default, make, results=(0, 2))


def _rotary_mul(width: int) -> Trial:
    def make(seed: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        x, cos, sin = _random((2, 4, 3, width), (2, 1, 3, width), (2, 1, 3, width), seed=seed)
        return {"x": x, "cos": cos, "sin": sin}, [_rotate(x, cos, sin)]

    return Trial(torch.ops.npu.npu_rotary_mul.default, make, results=(None,))


def _joint_rotary(width: int) -> Trial:
    def make(seed: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        query, key, cos, sin = _random(
            (2, 3, 4, width), (2, 3, 2, width), (2, 3, 1, width), (2, 3, 1, width), seed=seed
        )
        expected = [_rotate(query, cos, sin), _rotate(key, cos, sin)]
        return {"query": query, "key": key, "cos": cos, "sin": sin}, expected

    target = torch.ops.npu.npu_apply_rotary_pos_emb.default
    return Trial(target, make, {"layout": "BSND"}, results=(0, 1))


def _gated_gelu(width: int) -> Trial:
    def make(seed: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        (x,) = _random((5, width), seed=seed)
        left, right = x.float().chunk(2, -1)
        return {"x": x}, [left * torch.nn.functional.gelu(right, approximate="tanh")]

    return Trial(torch.ops.npu.npu_geglu.default, make)


def _gelu_mul(width: int) -> Trial:
    def make(seed: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        (x,) = _random((5, width), seed=seed)
        left, right = x.float().chunk(2, -1)
        return {"x": x}, [torch.nn.functional.gelu(left, approximate="tanh") * right]

    return Trial(torch.ops.npu.npu_gelu_mul.default, make, {"approximate": "tanh"}, results=(None,))


def _scatter(width: int) -> Trial:
    def make(seed: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        key, value, keys, values = _random(
            (5, 2, width), (5, 2, width), (3, 16, 2, width), (3, 16, 2, width), seed=seed
        )
        slots = torch.randperm(48, generator=torch.Generator().manual_seed(seed))[:5].int()
        expected = [cache.float().view(48, 2, width).clone() for cache in (keys, values)]
        for cache, new in zip(expected, (key, value), strict=True):
            cache[slots.long()] = new.float()
        tensors = {"key": key, "value": value, "key_cache": keys, "value_cache": values, "slots": slots}
        return tensors, [cache.view(keys.shape) for cache in expected]

    target = torch.ops.npu.npu_scatter_pa_kv_cache.default
    return Trial(target, make, {"cache_mode": "Norm"}, results=("key_cache", "value_cache"))


def _fused_attention(width: int) -> Trial:
    return _attention(AttentionCall("BNSD", width, 1, 4, 2, 128))


OPERATORS: dict[str, Callable[[int], Trial]] = {
    "npu_fused_infer_attention_score": _fused_attention,
    "npu_scatter_pa_kv_cache": _scatter,
    "npu_rms_norm": _rms_norm,
    "npu_add_rms_norm": _add_rms_norm,
    "npu_rotary_mul": _rotary_mul,
    "npu_geglu": _gated_gelu,
    "npu_gelu_mul": _gelu_mul,
    "npu_apply_rotary_pos_emb": _joint_rotary,
}
"""A trial of every operator of the table, for a last axis of a given size."""


# ---- on the device


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for each, wanted in zip(found, expected, strict=True):
        result = each.cpu().float()
        if not torch.allclose(result, wanted, rtol=TOLERANCE, atol=TOLERANCE):
            raise WrongResultError(f"wrong result: off by up to {float((result - wanted).abs().max()):.2g}")


def attempt(trial: Trial, device: torch.device, captured: bool) -> None:
    """Run a trial.

    Raises:
        WrongResultError: it ran, and the result is another.
        RuntimeError: whatever the device says.
    """
    contents, expected = trial.make(0)
    tensors = {name: tensor.to(device) for name, tensor in contents.items()}
    gm = trial.graph(list(tensors))
    if not captured:
        _compare(gm(*tensors.values()), expected)
        return
    from gemma_npu_compile.graphs.acl import AclRuntime

    graph = AclRuntime(device).capture(gm, list(tensors.values()), {})
    for seed in (1, 2):
        contents, expected = trial.make(seed)
        for name, tensor in tensors.items():
            tensor.copy_(contents[name])
        graph.replay()
        torch.get_device_module(device).synchronize(device)
        _compare(graph.outputs, expected)


def ask(question: dict[str, Any], device: torch.device) -> str:
    """The error text of one question; empty when the device does what the operator is for."""
    try:
        if "attention" in question:
            trial = _attention(AttentionCall(**question["attention"]))
        else:
            trial = OPERATORS[question["operator"]](question["last_dim"])
        attempt(trial, device, question["captured"])
    except (RuntimeError, ValueError, AttributeError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _healthy(device: torch.device) -> bool:
    try:
        return float(torch.ones(1, device=device).add(1).cpu()) == 2.0
    except RuntimeError:
        return False


def main(descriptor: int) -> int:
    """Answer the questions on stdin, and stop where an answer has left the device's context unusable."""
    asked = json.load(sys.stdin)
    device = torch.empty(0, device=asked["device"]).device
    with os.fdopen(descriptor, "w") as out:

        def say(**line: Any) -> None:
            print(json.dumps(line), file=out, flush=True)

        say(ready=_healthy(device))
        for index, question in asked["questions"]:
            say(begin=index)
            error = ask(question, device)
            say(answer=index, error=error)
            if error and not _healthy(device):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
