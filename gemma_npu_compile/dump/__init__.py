"""Write what the compiler did to a folder people can read: a page, the graph after each pass, the plan."""

from gemma_npu_compile.dump.facts import plan_to_dict
from gemma_npu_compile.dump.folder import Dump, current, dump_to
from gemma_npu_compile.dump.observe import observers

__all__ = ["Dump", "current", "dump_to", "observers", "plan_to_dict"]
