"""Runs each operator on the CPU and on the software ACL and prints, as JSON, how many agree and which do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_npu  # noqa: F401

Case = Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]


def _data() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(4, 6, generator=generator)
    return {
        "f": floats,
        "g": torch.randn(4, 6, generator=generator),
        "p": floats.abs() + 0.5,
        "b": floats > 0,
        "c": floats < 0.3,
        "i": torch.randint(-5, 9, (4, 6), generator=generator),
        "j": torch.randint(1, 7, (4, 6), generator=generator),
        "n": torch.randint(0, 40, (4, 6), generator=generator, dtype=torch.int32),
        "m": torch.randn(6, 5, generator=generator),
        "x": torch.randn(3, 4, 6, generator=generator),
        "y": torch.randn(3, 6, 5, generator=generator),
        "w": torch.randn(40, 6, generator=generator),
        "q": torch.randn(2, 4, 8, 16, generator=generator),
        "k": torch.randn(2, 4, 8, 16, generator=generator),
        "s": torch.rand(2, 1, 8, 8, generator=generator) > 0.4,
    }


DATA = _data()
UNARY = ["abs", "ceil", "cos", "exp", "floor", "neg", "relu", "round", "sigmoid", "sin", "tanh", "trunc", "erf", "sign"]
UNARY += ["logical_not", "isfinite"]
POSITIVE = ["log", "sqrt", "rsqrt", "reciprocal", "log2"]
BINARY = ["add", "sub", "mul", "div", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge"]
INTEGER = ["bitwise_and", "bitwise_or", "bitwise_xor", "floor_divide", "remainder", "eq", "lt"]
REDUCTIONS = ["sum", "mean", "amax", "amin", "argmax", "argmin"]


def _put(d: Any, name: str, *operands: Any) -> Any:
    """An in-place method on a fresh copy."""
    target = d("f").clone()
    getattr(target, name)(*operands)
    return target


def _cases() -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for name in UNARY:
        cases[name] = lambda d, op=name: getattr(torch, op)(d("f"))
    for name in POSITIVE:
        cases[name] = lambda d, op=name: getattr(torch, op)(d("p"))
    for name in BINARY:
        cases[name] = lambda d, op=name: getattr(torch, op)(d("f"), d("g"))
        cases[f"{name}_broadcast"] = lambda d, op=name: getattr(torch, op)(d("f"), d("g")[:, :1])
    for name in INTEGER:
        cases[f"{name}_int"] = lambda d, op=name: getattr(torch, op)(d("i"), d("j"))
        cases[f"{name}_scalar"] = lambda d, op=name: getattr(torch, op)(d("i"), 3)
    for name in REDUCTIONS:
        cases[f"{name}_dim"] = lambda d, op=name: getattr(torch, op)(d("f"), dim=1)
        cases[f"{name}_keep"] = lambda d, op=name: getattr(torch, op)(d("f"), dim=-1, keepdim=True)
    cases.update(
        {
            "add_alpha": lambda d: torch.add(d("f"), d("g"), alpha=3),
            "add_scalar": lambda d: d("f") + 2.5,
            "rsub": lambda d: 1 - d("f"),
            "rdiv": lambda d: 1 / d("p"),
            "add_int_float": lambda d: d("i") + d("f"),
            "add_": lambda d: _put(d, "add_", d("g")),
            "mul_": lambda d: _put(d, "mul_", 2),
            "fill_": lambda d: _put(d, "fill_", 7.0),
            "zero_": lambda d: _put(d, "zero_"),
            "copy_": lambda d: _put(d, "copy_", d("i")),
            "masked_fill_": lambda d: _put(d, "masked_fill_", d("b"), -1.0),
            "pow": lambda d: d("f") ** 2,
            "pow_tensor": lambda d: torch.pow(d("p"), d("g")),
            "pow_scalar_base": lambda d: torch.pow(2.0, d("g")),
            "clamp": lambda d: d("f").clamp(-0.5, 0.5),
            "clamp_min": lambda d: d("i").clamp(min=0),
            "clamp_max": lambda d: d("i").clamp(max=3),
            "where": lambda d: torch.where(d("b"), d("f"), d("g")),
            "where_scalar": lambda d: torch.where(d("b"), d("f"), 0.0),
            "logical_and": lambda d: torch.logical_and(d("b"), d("c")),
            "logical_or": lambda d: d("b") | d("c"),
            "bool_not": lambda d: ~d("b"),
            "all": lambda d: d("b").all(),
            "any": lambda d: d("b").any(),
            "all_dim": lambda d: d("b").all(dim=1),
            "any_dim": lambda d: d("b").any(dim=-1, keepdim=True),
            "sum_all": lambda d: d("f").sum(),
            "sum_int": lambda d: d("i").sum(dim=0),
            "sum_bool": lambda d: d("b").sum(),
            "max_all": lambda d: d("f").max(),
            "min_all": lambda d: d("f").min(),
            "max_dim": lambda d: tuple(d("f").max(dim=1)),
            "argmax_all": lambda d: d("f").argmax(),
            "cumsum": lambda d: d("i").cumsum(dim=1),
            "cumprod": lambda d: d("b").long().cumprod(dim=1),
            "repeat_interleave_tensor": lambda d: d("f").repeat_interleave(d("j")[:, 0], dim=0),
            "sdpa": lambda d: F.scaled_dot_product_attention(d("q"), d("k"), d("k"), scale=1.0),
            "sdpa_causal": lambda d: F.scaled_dot_product_attention(d("q"), d("k"), d("k"), is_causal=True),
            "sdpa_mask": lambda d: F.scaled_dot_product_attention(d("q"), d("k"), d("k"), d("s")),
            "prod": lambda d: d("p").prod(dim=1),
            "topk": lambda d: tuple(d("f").topk(3, dim=-1)),
            "sort": lambda d: tuple(d("f").sort(dim=-1)),
            "sort_descending": lambda d: tuple(d("f").sort(dim=0, descending=True)),
            "mm": lambda d: d("f") @ d("m"),
            "mm_half": lambda d: d("f").half() @ d("m").half(),
            "mm_bf16": lambda d: d("f").bfloat16() @ d("m").bfloat16(),
            "mm_transposed": lambda d: d("m").t() @ d("f").t(),
            "bmm": lambda d: torch.bmm(d("x"), d("y")),
            "matmul_3d": lambda d: d("x") @ d("m"),
            "linear": lambda d: F.linear(d("x"), d("w")),
            "linear_bias": lambda d: F.linear(d("f"), d("w"), d("w")[:, 0]),
            "addmm": lambda d: torch.addmm(d("f")[:, :5], d("g"), d("m")),
            "embedding": lambda d: F.embedding(d("n"), d("w")),
            "index_select": lambda d: d("w").index_select(0, d("n")[0]),
            "gather": lambda d: d("f").gather(1, d("j").clamp(max=5)),
            "index": lambda d: d("w")[d("n")],
            "index_two": lambda d: d("f")[d("j").clamp(max=3), d("j") % 6],
            "index_bool": lambda d: d("f")[d("b")],
            "index_after_slice": lambda d: d("x")[:, d("j")[0].clamp(max=3)],
            "nonzero": lambda d: d("b").nonzero(),
            "masked_select": lambda d: d("f").masked_select(d("b")),
            "index_put": lambda d: torch.index_put(d("w"), (torch.arange(4, device=d("f").device) * 3,), d("f")),
            "index_copy": lambda d: d("w").index_copy(0, torch.arange(4, device=d("f").device), d("f")),
            "index_copy_": lambda d: _put(d, "index_copy_", 0, torch.arange(2, device=d("f").device), d("g")[:2]),
            "scatter_value": lambda d: d("f").scatter(1, d("j").clamp(max=5), 3.0),
            "scatter_add": lambda d: d("f").scatter_add(1, d("j").clamp(max=5), d("g")),
            "cat": lambda d: torch.cat([d("f"), d("g")], dim=-1),
            "stack": lambda d: torch.stack([d("f"), d("g")], dim=1),
            "repeat": lambda d: d("f").repeat(2, 3),
            "repeat_interleave": lambda d: d("f").repeat_interleave(2, dim=1),
            "flip": lambda d: d("f").flip(0),
            "roll": lambda d: d("f").roll(2, 1),
            "triu": lambda d: d("f").triu(1),
            "tril": lambda d: d("f").tril(),
            "pad": lambda d: F.pad(d("f"), (1, 2), value=3.0),
            "permute": lambda d: d("x").permute(2, 0, 1).contiguous(),
            "expand": lambda d: d("f")[:, None].expand(4, 3, 6).contiguous(),
            "slice_copy": lambda d: _slice_copy(d("f")),
            "arange": lambda d: torch.arange(3, 20, 2, device=d("f").device),
            "arange_float": lambda d: torch.arange(0, 1, 0.25, device=d("f").device),
            "full": lambda d: torch.full((2, 3), 7, device=d("f").device),
            "ones_like": lambda d: torch.ones_like(d("f")),
            "new_zeros": lambda d: d("f").new_zeros(3, 2),
            "eye": lambda d: torch.eye(3, device=d("f").device),
            "softmax": lambda d: d("f").softmax(-1),
            "softmax_upcast": lambda d: F.softmax(d("f").half(), dim=-1, dtype=torch.float32),
            "log_softmax": lambda d: d("f").log_softmax(-1),
            "gelu_tanh": lambda d: F.gelu(d("f"), approximate="tanh"),
            "silu": lambda d: F.silu(d("f")),
            "to_half": lambda d: d("f").half(),
            "to_bf16": lambda d: d("f").bfloat16(),
            "to_int": lambda d: d("f").int(),
            "to_bool": lambda d: d("i").bool(),
            "to_long": lambda d: d("n").long(),
            "equal": lambda d: torch.tensor(torch.equal(d("f"), d("f"))),
            "allclose": lambda d: torch.tensor(torch.allclose(d("f"), d("f"))),
            "item": lambda d: torch.tensor(d("f")[1, 2].item()),
            "tolist": lambda d: torch.tensor(d("i").tolist()),
            "rms": lambda d: d("f") * torch.rsqrt(d("f").pow(2).mean(-1, keepdim=True) + 1e-6),
            "half_add": lambda d: d("f").half() + d("g").half(),
            "unsqueeze_sum": lambda d: (d("f")[:, :, None] * d("m")[None]).sum(1),
            "div_floor": lambda d: torch.div(d("i"), d("j"), rounding_mode="floor"),
            "div_trunc": lambda d: torch.div(d("f"), 0.3, rounding_mode="trunc"),
            "foreach_copy": lambda d: _foreach_copy(d("f"), d("g")),
        }
    )
    return cases


def _slice_copy(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(6, 6, dtype=x.dtype, device=x.device)
    out[1:5, ::2] = x[:, :3]
    return out


def _foreach_copy(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    targets = [torch.empty_like(x), torch.empty_like(y)]
    torch._foreach_copy_(targets, [x, y])
    return tuple(targets)


def _flat(value: Any) -> list[torch.Tensor]:
    return [each.cpu() for each in value] if isinstance(value, tuple) else [value.cpu()]


def main() -> None:
    """Compare every case."""
    wrong: dict[str, str] = {}
    cases = _cases()
    for name, case in cases.items():
        expected = _flat(case(lambda key: DATA[key]))
        try:
            found = _flat(case(lambda key: DATA[key].to("npu")))
            for one, other in zip(expected, found, strict=True):
                torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {str(error)[:200]}"
    print(json.dumps({"cases": len(cases), "wrong": wrong}))


if __name__ == "__main__":
    main()
