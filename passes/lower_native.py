"""Lower a graph of the CPU platform to the C++ kernels: the dialect's operators, and products with a weight."""

import torch
from torch.fx import GraphModule, Node

import gemma_npu_compile.ops.native  # noqa: F401  (the operators)
from gemma_npu_compile.capabilities import Platform
from gemma_npu_compile.native.build import NoKernelsError, library
from gemma_npu_compile.passes.fx import argument, call, copy_trace, device_of, is_packed, value
from gemma_npu_compile.passes.result import PassResult
from gemma_npu_compile.passes.sites import record

aten = torch.ops.aten
NAMES = ("paged_attention", "store_kv", "rms_norm", "add_rms_norm", "rotary", "gelu_mul", "geglu")
DTYPES = (torch.float32, torch.bfloat16)


def _products(gm: GraphModule, result: PassResult) -> None:
    """``x @ w.t()`` becomes ``linear(x, w)``: a weight is read in rows, where it lies."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
        x, turned = node.args
        if not isinstance(turned, Node) or turned.target is not aten.t.default or not isinstance(x, Node):
            result.left["a product, but not with a transposed weight"] += 1
        elif value(x).dtype not in DTYPES or not is_packed(value(turned.args[0])):
            result.left[f"a product of {value(x).dtype}, or with a strided weight"] += 1
        else:
            with gm.graph.inserting_before(node):
                new = call(gm.graph, torch.ops.gemma_npu_cpu.linear.default, x, turned.args[0])
            copy_trace(new, node)
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
            result.changed += 1


def _functions(gm: GraphModule, result: PassResult) -> None:
    """Of rotary tables and soft caps; ATen's would start threads of its own between two programs."""
    for name in ("tanh", "sin", "cos"):
        for node in gm.graph.find_nodes(op="call_function", target=getattr(aten, name).default):
            if value(node).dtype in DTYPES:
                node.target = getattr(torch.ops.gemma_npu_cpu, name).default
                result.changed += 1


def lower_native(gm: GraphModule, *, platform: Platform) -> PassResult:
    """Replace operators by ``gemma_npu_cpu::`` ones where the platform is the CPU and a C++ compiler exists.

    Results depend on neither the number of rows nor the number of threads. Sums have another order than ATen's.
    Without a compiler the nodes are left, with that reason, and the graph runs on ATen.
    """
    result = PassResult()
    found = [
        node
        for name in NAMES
        for node in gm.graph.find_nodes(op="call_function", target=getattr(torch.ops.gemma_npu, name).default)
    ]
    if platform.name != "cpu" or device_of(gm).type != "cpu":
        return result
    try:
        library()
    except NoKernelsError as reason:
        result.left[str(reason)] += len(found)
        return result
    for node in found:
        schema = node.target._schema  # type: ignore[union-attr]
        name, dtype = schema.name.split("::")[1], value(argument(node, schema.arguments[0].name)).dtype
        if dtype not in DTYPES:
            result.left[f"{name} of {dtype}"] += 1
            continue
        if name == "paged_attention":
            if argument(node, "query_lens") is not None:
                result.left["ragged queries"] += 1
                continue
            node.meta["attention"] = record(node)
        node.target = getattr(torch.ops.gemma_npu_cpu, name).default
        result.changed += 1
    _products(gm, result)
    _functions(gm, result)
    gm.graph.eliminate_dead_code()
    return result
