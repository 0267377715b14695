"""Give every attention node its own block-table input.

Which table a layer reads is the field's most expensive mistake: looked up beside the graph by order or by name, it goes
stale or belongs to another KV group, and acceptance collapses. After this pass it is an input of the graph, named after
the layer and the phase; inputs of one group are views of one stable buffer.
"""

from torch.fx import GraphModule, Node

from gemma_npu_compile.errors import CompileError
from gemma_npu_compile.passes.fx import add_input, argument, placeholders
from gemma_npu_compile.passes.result import PassResult
from gemma_npu_compile.passes.sites import TableBinding, attention_nodes, site


def _check_caches(nodes: list[Node]) -> None:
    """One cache, one table: a layer that reads a cache through another group's table reads other requests' blocks."""
    seen: dict[object, tuple[Node, Node]] = {}
    for node in nodes:
        cache, table = argument(node, "key_cache"), argument(node, "block_table")
        first, known = seen.setdefault(cache, (node, table))  # type: ignore[arg-type]
        if known is not table:
            mine, theirs = "/".join(site(node)), "/".join(site(first))
            raise CompileError(
                f"layer {mine} reads its cache through block table {table}, but {theirs} reads the same cache through "
                f"{known}: each cache belongs to one KV group"
            )


def bind_block_tables(gm: GraphModule) -> PassResult:
    """Replace each attention node's table by an input of its own, with ``meta["table"]`` and ``meta["source"]``.

    Raises:
        CompileError: two attention nodes read one cache through different tables.
    """
    result = PassResult()
    inputs = placeholders(gm)
    unbound = [node for node in attention_nodes(gm) if "table" not in node.meta]
    _check_caches(unbound)
    tables = {argument(n, "block_table") for n in unbound}
    groups = {node: f"g{i}" for i, node in enumerate(n for n in inputs if n in tables)}
    for node in unbound:
        table = argument(node, "block_table")
        if table not in groups:
            result.left["the table is computed in the graph"] += 1
            continue
        assert isinstance(table, Node)
        phase, layer = site(node)
        bound = add_input(gm, f"block_table_{phase}_{layer}")
        bound.meta.update(table.meta)
        bound.meta["table"] = TableBinding(layer, phase, groups[table])
        node.meta["table"] = bound.name, bound.meta["table"]
        if len(node.args) > 3:
            node.update_arg(3, bound)
        else:
            node.update_kwarg("block_table", bound)
        result.changed += 1
    return result
