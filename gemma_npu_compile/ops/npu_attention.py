"""``npu_fused_infer_attention_score`` (v1 and v2) on the CPU.

Attention itself is :func:`gemma_npu_compile.ops.attention.attend`, the core of the dialect's own kernel; here are the
operator's layouts, length lists, masks and results. Operands that are not emulated (quantisation, shared prefixes,
rope, pse, padding) are refused by name; limits are in npu_attention_call.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from gemma_npu_compile.ops.attention import Fetch, attend, by_kv_head, fetch_blocks
from gemma_npu_compile.ops.npu import TILING, AclnnError, define
from gemma_npu_compile.ops.npu_attention_call import ALL_TOKENS, KNOWN_LAYOUTS, TRIANGLE, Call, check

_V1 = (
    "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, "
    "Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, "
    "Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, "
    "Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, "
    "Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, "
    "Tensor? value_antiquant_offset=None, Tensor? block_table=None, Tensor? query_padding_size=None, "
    "Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, "
    "SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None, "
    "Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0, int pre_tokens=2147483647, "
    'int next_tokens=2147483647, str input_layout="BSH", int num_key_value_heads=0, int sparse_mode=0, '
    "int inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0, "
    "int value_antiquant_mode=0, bool softmax_lse_flag=False) -> (Tensor, Tensor)"
)
_V2 = (
    "npu_fused_infer_attention_score_v2(Tensor query, Tensor key, Tensor value, *, Tensor? query_rope=None, "
    "Tensor? key_rope=None, Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_qlen=None, "
    "SymInt[]? actual_seq_kvlen=None, Tensor? block_table=None, Tensor? dequant_scale_query=None, "
    "Tensor? dequant_scale_key=None, Tensor? dequant_offset_key=None, Tensor? dequant_scale_value=None, "
    "Tensor? dequant_offset_value=None, Tensor? dequant_scale_key_rope=None, Tensor? quant_scale_out=None, "
    "Tensor? quant_offset_out=None, Tensor? quant_scale_p=None, Tensor? learnable_sink=None, int num_query_heads=1, "
    "int num_key_value_heads=0, float softmax_scale=1.0, int pre_tokens=2147483647, int next_tokens=2147483647, "
    'str input_layout="BSH", int sparse_mode=0, int block_size=0, int query_quant_mode=0, int key_quant_mode=0, '
    "int value_quant_mode=0, int inner_precise=0, bool return_softmax_lse=False, int? query_dtype=None, "
    "int? key_dtype=None, int? value_dtype=None, int? query_rope_dtype=None, int? key_rope_dtype=None, "
    "int? key_shared_prefix_dtype=None, int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None, "
    "int? dequant_scale_key_dtype=None, int? dequant_scale_value_dtype=None, "
    "int? dequant_scale_key_rope_dtype=None, int? out_dtype=None) -> (Tensor, Tensor)"
)
_SHARED = ("block_table", "block_size", "sparse_mode", "pre_tokens", "next_tokens", "inner_precise")
_NAMES = {"input_layout": "layout", "atten_mask": "mask", "num_key_value_heads": "kv_heads"}
_NAMES |= {name: name for name in _SHARED}
_V1_NAMES = _NAMES | {
    "actual_seq_lengths": "query_lens",
    "actual_seq_lengths_kv": "kv_lens",
    "num_heads": "heads",
    "scale": "scale",
    "softmax_lse_flag": "lse",
}
_V2_NAMES = _NAMES | {
    "actual_seq_qlen": "query_lens",
    "actual_seq_kvlen": "kv_lens",
    "num_query_heads": "heads",
    "softmax_scale": "scale",
    "return_softmax_lse": "lse",
}


def _results(call: Call) -> tuple[Tensor, Tensor]:
    """Memory for attention and log-sum-exp, of any layout there is: traces must know more than is emulated."""
    query, value, kv_heads = call.query, call.value, call.kv_heads or call.heads
    axes, _, out_axes = call.layout.partition("_")
    if call.layout not in KNOWN_LAYOUTS or query.dim() != len(axes) or call.heads < 1:
        raise call.error(f"input_layout {call.layout!r} with {call.heads} heads and a query of {tuple(query.shape)}")
    sizes: dict[str, Any] = {"B": 1, "N": call.heads, **dict(zip(axes, query.shape, strict=True))}
    width = value.shape[-1] * (value.shape[2] if value.dim() == 5 else 1)
    flat = axes == "BSH" if call.block_table is None else value.dim() == 3
    sizes["D"] = width // kv_heads if flat else width
    sizes["H"] = call.heads * sizes["D"]
    shape = [sizes[axis] for axis in out_axes or axes]
    sums = [sizes[axis] for axis in ("TN" if "T" in axes else "BNS")] + [1] if call.lse else [0]
    return query.new_empty(shape), query.new_empty(sums, dtype=torch.float32)


def _tokens_last(x: Tensor, axes: str, heads: int) -> Tensor:
    """A rectangular tensor as ``(rows, q_len, heads, ...)``, a view."""
    return x.unflatten(2, (heads, -1)) if axes == "BSH" else x.transpose(1, 2) if axes == "BNSD" else x


def _groups(call: Call, out: Tensor, lse: Tensor | None) -> Iterator[tuple[int, int, int, list[Tensor]]]:
    """Neighbouring rows with one number of queries: ``(start, stop, count, tensors)``.

    The tensors are query, result and log-sum-exp of those queries, as :func:`by_kv_head` has them; padding is written.
    """
    axes, token, row = call.axes, 0, 0
    kv_heads = call.shape[2]
    whole: list[Tensor] = [call.query, out] if lse is None else [call.query, out, lse]
    if axes != "TND":
        layouts = axes, "BSND" if call.layout == "BNSD_BSND" else axes, "BNSD"
        whole = [_tokens_last(each, form, call.heads) for each, form in zip(whole, layouts, strict=False)]
    for count, members in groupby(call.query_counts):
        start, row = row, row + len(list(members))
        if axes == "TND":
            begin, token = token, token + count * (row - start)
            parts = [each[begin:token].unflatten(0, (row - start, count)) for each in whole] if count else []
        else:
            parts = [each[start:row, :count] for each in whole]
            if count < call.shape[1]:
                for each, filler in zip(whole[1:], (0.0, -torch.inf), strict=False):
                    each[start:row, count:].fill_(filler)
        if count:
            yield start, row, count, [by_kv_head(each, kv_heads) for each in parts]


def _fetch(call: Call, x: Tensor, start: int, stop: int) -> Fetch:
    """Keys or values of rows ``start .. stop - 1``."""
    kv_heads, head_dim = call.shape[2:]
    axes, table = call.axes, call.block_table
    if table is not None:
        cache = x if x.dim() == 4 else x.unflatten(2, (kv_heads, head_dim))
        return fetch_blocks(cache, table[start:stop], heads_first=x.dim() == 4)
    if axes == "TND":
        ends = [0, *(call.kv_lens or ())]

        def fetch(first: int, last: int, length: int) -> Tensor:
            begin = ends[start + first]
            packed = x[begin : begin + (last - first) * length]
            return packed.unflatten(0, (last - first, length)).permute(2, 0, 1, 3).float()

        return fetch
    dense = _tokens_last(x, axes, kv_heads)[start:stop].permute(2, 0, 1, 3)
    return lambda first, last, length: dense[:, first:last, :length].float()


def _hidden(call: Call, start: int, stop: int, count: int, lengths: Sequence[int]) -> Tensor | None:
    """``(rows, queries, keys)`` bool, True where hidden; None when all keys are seen."""
    mode, hidden = call.mode, None
    rows, width = stop - start, max(lengths, default=0)
    if call.explicit:
        assert call.mask is not None
        full = call.mask.view(-1, call.shape[1], call.mask.shape[-1])
        full = full if full.dtype == torch.bool else full != 0
        hidden = full.expand(rows, -1, -1) if full.shape[0] == 1 else full[start:stop]
        hidden = hidden[:, :count, :width]
        if mode == 1 or (call.pre_tokens >= ALL_TOKENS and call.next_tokens >= ALL_TOKENS) or call.shape[1] == 1:
            return hidden
    elif mode == 0:
        return None
    else:
        assert call.mask is not None
        corner = call.mask.view(TRIANGLE, TRIANGLE)[:2, :2].tolist()
        if corner != [[0, 1], [0, 0]]:
            raise call.error(f"atten_mask of sparse_mode {mode} must be 1 above the diagonal, it starts with {corner}")
    limit = 1 << 40
    before = limit if mode in (2, 3) else max(-limit, min(call.pre_tokens, limit))
    after = 0 if mode in (2, 3) else max(-limit, min(call.next_tokens, limit))
    # Modes 0 and 2 count from the first query and key, 3 and 4 from the last.
    offsets = torch.tensor([length - count if mode in (3, 4) else 0 for length in lengths])
    distance = torch.arange(width) - (offsets[:, None, None] + torch.arange(count)[:, None])
    outside = (distance > after) | (distance < -before)
    return outside if hidden is None else hidden | outside


def _run(call: Call, out: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    result, lse = out = _results(call) if out is None else out
    if result.numel() == 0:
        return out
    counts = call.kv_counts
    for start, stop, count, parts in _groups(call, result, lse if call.lse else None):
        lengths = counts[start:stop]
        hidden = _hidden(call, start, stop, count, lengths)
        keys, values = (_fetch(call, each, start, stop) for each in (call.key, call.value))
        sums = parts[2][..., 0] if call.lse else None
        attend(parts[0], keys, values, lengths, call.scale, hidden, parts[1], sums)
    return out


def _define(schema: str, names: Mapping[str, str]) -> None:
    name = schema.split("(", 1)[0]

    def parse(query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> Call:
        return Call(name, query, key, value, **{names[k]: v for k, v in options.items() if k in names})

    def check_all(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
        for option, given in options.items():  # what is not emulated must be absent, or zero
            if option not in names and (isinstance(given, Tensor) or given):
                raise AclnnError(f"{name}: {option} is not emulated", TILING)
        check(parse(query, key, value, options))

    def run(
        query: Tensor, key: Tensor, value: Tensor, *, out: tuple[Tensor, Tensor] | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        return _run(parse(query, key, value, options), out)

    def fake(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return _results(parse(query, key, value, options))

    define(schema, check=check_all, run=run, fake=fake)


_define(_V1, _V1_NAMES)
_define(_V2, _V2_NAMES)
