"""Lower the dialect's attention to ``npu_fused_infer_attention_score``.

The operator takes KV lengths as host integers, which a captured graph freezes. By default they stay on the device all
the same: what a row sees is a mask, computed once per group and phase from ``kv_lens``, and the host length only says
how far to read: for ever the same for a table clipped to a window, the row's bucket otherwise.
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

import gemma_npu_compile.ops.npu  # noqa: F401  (the operators, where torch_npu is absent)
from gemma_npu_compile.capabilities import Platform
from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.passes.attention_masks import causal_mask, mask_form, visibility_mask
from gemma_npu_compile.passes.fx import add_input, argument, call, copy_trace, packed, placeholders, root, written_roots
from gemma_npu_compile.passes.host_lengths import HostLengths, integer_slice
from gemma_npu_compile.passes.large_heads_to_bnsd import attention_call
from gemma_npu_compile.passes.result import PassResult
from gemma_npu_compile.passes.sites import attention_nodes, query_len, record, row_count, site

aten = torch.ops.aten


class _Lowering:
    """One graph's masks, key views and host lists, each made once."""

    def __init__(self, gm: GraphModule, kv_lens: str, verify_attention: str) -> None:
        self.gm, self.graph, self.kv_lens, self.verify_attention = gm, gm.graph, kv_lens, verify_attention
        self._made: dict[Any, Any] = {}
        self._written = written_roots(gm.graph)

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _flat(self, cache: Node) -> Node:
        """A pool as (blocks, block_size, kv_heads * head_dim), the form every layout takes."""
        size, heads, width = map(int, cache.meta["val"].shape[1:])
        # An input's at the front: a view made before a write shows what is written.
        front = placeholders(self.gm)[-1] if cache.op == "placeholder" else cache
        with self.graph.inserting_after(front):
            return call(self.graph, aten.view.default, cache, [-1, size, heads * width])

    def _dense(self, cache: Node, table: Node) -> Node:
        """The blocks of a table as (rows, kv_heads, keys, head_dim), gathered: every key the table can reach."""
        size, heads, width = map(int, cache.meta["val"].shape[1:])
        columns = int(table.meta["val"].shape[1])
        blocks = call(self.graph, aten.index_select.default, cache, 0, call(self.graph, aten.view.default, table, [-1]))
        rows = call(self.graph, aten.view.default, blocks, [-1, columns * size, heads, width])
        swapped = call(self.graph, aten.transpose.int, rows, 1, 2)
        return call(self.graph, aten.clone.default, swapped, memory_format=torch.contiguous_format)

    def _host_list(self, node: Node, capacity: int, block_size: int | None) -> Node | None:
        """The placeholder of a list of lengths; None when the host cannot compute them from the inputs."""
        lens = argument(node, "kv_lens")
        found = integer_slice(lens)
        if found is None or any("source" not in each.meta for each in found[1]):
            return None
        made = add_input(self.gm, f"kv_lens_{site(node)[0].split('.')[0]}")
        sources = tuple(each.meta.get("mirror", each).meta["source"] for each in found[1])
        made.meta["host"] = HostLengths(made.name, sources, found[0], (), block_size, capacity)
        return made

    def lengths(self, node: Node) -> tuple[Any, str]:
        """The host lengths of a node, and what :class:`Attention` calls them."""
        lens, table = argument(node, "kv_lens"), argument(node, "block_table")
        block_size = int(argument(node, "key_cache").meta["val"].shape[1])
        capacity = int(table.meta["val"].shape[1]) * block_size
        exact = self.kv_lens == "host" and argument(node, "window") is None
        made = None
        if table.op == "placeholder":
            size = None if exact else block_size
            made = self._once(("list", lens, capacity, size), lambda: self._host_list(node, capacity, size))
        if made is None:
            if exact:
                raise CompileError(
                    f"attention of layer {argument(node, 'layer')}: its lengths ({lens}) are not computed from the "
                    "inputs by integer arithmetic alone, so kv_lens='host' cannot refresh them; use kv_lens='device'"
                )
            with self.graph.inserting_before(node):
                rows = self._once(("rows", table), lambda: call(self.graph, aten.sym_size.int, table, 0))
                fixed = self._once(("fixed", rows, capacity), lambda: self._repeated(capacity, rows))
            return fixed, f"fixed {capacity}"
        host: HostLengths = made.meta["host"]
        made.meta["host"] = replace(host, sites=(*host.sites, "/".join(site(node))))
        return made, "exact" if exact else "bucket"

    def _repeated(self, length: int, rows: Node) -> Node:
        made = self.graph.call_function(operator.mul, ([length], rows))
        made.meta["val"] = None  # a host list
        return made

    def mask(self, node: Node, form: str, q_len: int) -> Node | None:
        """The mask operand of a form (attention_masks.mask_form)."""
        if form == "none":
            return None
        if form == "causal":
            return self._once(form, lambda: causal_mask(self.gm, argument(node, "query").meta["val"]))
        lens, table, window = (argument(node, name) for name in ("kv_lens", "block_table", "window"))
        keys = int(table.meta["val"].shape[1]) * int(argument(node, "key_cache").meta["val"].shape[1])
        with self.graph.inserting_before(node):
            key = form, lens, q_len, window, keys, node if root(lens) in self._written else None
            return self._once(key, lambda: visibility_mask(self.graph, lens, q_len, window, keys))

    def lower(self, node: Node) -> None:
        """Put the fused operator in the place of a node."""
        query, caches = argument(node, "query"), [argument(node, f"{name}_cache") for name in ("key", "value")]
        layout, q_len = argument(node, "layout"), query_len(node)
        _, block_size, kv_heads, _ = caches[0].meta["val"].shape
        form = mask_form(q_len, argument(node, "window"), self.kv_lens)
        facts, (lengths, kind) = record(node), self.lengths(node)
        options: dict[str, Any] = {
            "actual_seq_lengths_kv": lengths,
            "num_heads": facts.heads,
            "scale": facts.scale,
            "input_layout": layout,
            "num_key_value_heads": int(kv_heads),
        }
        mask = self.mask(node, form, q_len)
        if mask is not None:
            options["atten_mask"] = mask
        if form == "causal":
            options["sparse_mode"] = 3
        with self.graph.inserting_before(node):
            query, table = (packed(self.graph, x) for x in (query, argument(node, "block_table")))
            if self.verify_attention == "dense" and q_len > 1 and layout == "BNSD":
                keys, values = (self._dense(each, table) for each in caches)
            else:
                keys, values = (self._once(("flat", each), partial(self._flat, each)) for each in caches)
                options.update(block_table=table, block_size=int(block_size))
            if layout == "TND":
                options["actual_seq_lengths"] = self._cumulative(node, q_len)
            fused = self.graph.call_function(
                torch.ops.npu.npu_fused_infer_attention_score.default, (query, keys, values), options
            )
            fake = query.meta["val"]
            fused.meta["val"] = torch.empty_like(fake), fake.new_empty(0, dtype=torch.float32)
            result = call(self.graph, operator.getitem, fused, 0)
        copy_trace(fused, node)
        fused.meta["attention"] = replace(facts, lengths=kind)
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def _cumulative(self, node: Node, q_len: int) -> Node:
        """TND counts queries cumulatively: ``[q, 2q, ...]``."""
        rows = call(self.graph, aten.sym_size.int, argument(node, "block_table"), 0)
        stop = self.graph.call_function(operator.add, (self.graph.call_function(operator.mul, (rows, q_len)), 1))
        steps = self.graph.call_function(range, (q_len, stop, q_len))
        return self.graph.call_function(list, (steps,))


def lower_attention(
    gm: GraphModule, *, platform: Platform, kv_lens: str, verify_attention: str = "paged"
) -> PassResult:
    """Replace the dialect's attention nodes by the platform's fused operator; numbers are those of the dialect.

    Args:
        kv_lens: ``"device"`` masks by device lengths and needs host lengths only in buckets; ``"host"`` hands the exact
            lengths of full-attention layers to the operator.
        verify_attention: ``"paged"`` reads the cache in place; ``"dense"`` gathers a verification's keys first, for a
            device whose operator takes no paged BNSD queries of more than one token. It copies all a table can reach.

    Raises:
        CompileError: ``kv_lens="host"`` and the host cannot compute a layer's lengths; names the layer.
    """
    result = PassResult()
    lowering, verdict = (
        _Lowering(gm, kv_lens, verify_attention),
        platform.operator("npu_fused_infer_attention_score", 16),
    )
    for node in attention_nodes(gm):
        if not verdict.legal:
            result.left[verdict.rule] += 1
        elif argument(node, "query_lens") is not None or (isinstance(row_count(node), int) and row_count(node) == 0):
            result.left["ragged queries, or no rows"] += 1
        elif not (allowed := platform.judge(attention_call(node, kv_lens, verify_attention))).legal:
            result.left[f"{allowed.rule}: the dialect's kernel stays"] += 1
        else:
            lowering.lower(node)
            result.changed += 1
    return result
