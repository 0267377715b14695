"""FX graph to FX graph, one file per pass; ``pipeline.PASSES`` is the one ordered list."""

from gemma_npu_compile.passes.pipeline import PASSES, PassRecord, PassResult, run_passes

__all__ = ["PASSES", "PassRecord", "PassResult", "run_passes"]
