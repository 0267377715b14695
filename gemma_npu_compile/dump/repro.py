"""A failing compilation as one script: Dynamo's graph as code, random inputs of the same shapes, the options."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from gemma_npu_compile.options import Options

_RUN = """
if __name__ == "__main__":
    from torch._dynamo.debug_utils import InputReader

    import gemma_npu_compile.ops  # registers the dialect

    reader = InputReader(save_dir=None)
    load_args(reader)
    with torch.no_grad():
        torch.compile(mod, backend="gemma_npu", fullgraph=True, options={options!r})(*reader.args)
"""


def write_repro(directory: Path, gm: GraphModule, inputs: Sequence[Any], options: Options, error: Exception) -> Path:
    """Write ``repro.py``, which compiles the graph on its own: ``python repro.py``.

    Args:
        gm: Dynamo's graph, as the backend got it; its weights are inputs, of which only shapes are written.
    """
    from torch._dynamo.repro.after_dynamo import generate_dynamo_fx_repro_string

    text = generate_dynamo_fx_repro_string(gm, list(inputs), "gemma_npu")
    head = text[: text.index("if __name__ ==")]
    default = Options()
    given = {f.name: getattr(options, f.name) for f in fields(options)}
    changed = {name: value for name, value in given.items() if value != getattr(default, name)}
    changed.pop("record", None)
    message = " ".join(str(error).split())
    path = directory / "repro.py"
    body = f"# {type(error).__name__}: {message}\n{head.strip()}\n{_RUN.format(options=changed)}"
    path.write_text(body, encoding="utf-8")
    return path
