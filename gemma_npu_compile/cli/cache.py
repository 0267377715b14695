"""``gemma-npu cache``: what the compile cache holds."""

import argparse
import time
from typing import Any

from gemma_npu_compile.cli.common import Command


def _usable(entry: Any, versions: dict[str, Any]) -> str | None:
    """Why an entry serves nothing here; None when it does."""
    if entry.header is None:
        return entry.damage
    theirs = entry.header.get("versions")
    if not isinstance(theirs, dict):
        return "no versions"
    differ = [name for name, ours in versions.items() if theirs.get(name) != ours]
    shown = ["other sources" if name == "sources" else f"{name} {theirs.get(name)}" for name in differ]
    return f"written by {', '.join(shown)}" if differ else None


def cache(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """List or remove the entries."""
    from gemma_npu_compile.compile_cache import Folder, enabled, versions

    folder = Folder.of_environment()
    answer: dict[str, Any] = {"path": str(folder.path), "limit": folder.limit, "enabled": enabled()}
    answer["refused"] = folder.refusal()
    if args.action == "clear":
        answer["removed"], answer["bytes"] = folder.clear()
        return answer, 0
    entries = []
    for entry in folder.entries():
        why, header = _usable(entry, versions()), entry.header or {}
        graph = {name: header.get(name) for name in ("module", "stage", "nodes", "operators", "inputs", "symbols")}
        age = max(0.0, time.time() - entry.used)
        shown = {"key": entry.key, "bytes": entry.size, "age_seconds": age, "usable": why is None, "why_not": why}
        entries.append({**shown, "graph": graph, "versions": header.get("versions")})
    return {**answer, "bytes": sum(each["bytes"] for each in entries), "entries": entries}, 0


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _show(answer: dict[str, Any]) -> None:
    state = "" if answer["enabled"] else " (off: GEMMA_NPU_CACHE=0)"
    if answer["refused"] is not None:
        state += f" (not used: {answer['refused']})"
    if "removed" in answer:
        print(f"removed {answer['removed']} entries, {answer['bytes'] / 2**20:.1f} MiB, from {answer['path']}")
        return
    print(f"{answer['path']}{state}: {len(answer['entries'])} entries, {answer['bytes'] / 2**20:.1f} MiB")
    for each in answer["entries"]:
        graph, used = each["graph"], f"used {_age(each['age_seconds'])} ago"
        facts = f"{graph['module'] or 'a function'}, {graph['stage']}, {graph['nodes']} nodes, {graph['inputs']} inputs"
        why = "" if each["usable"] else f"; not usable: {each['why_not']}"
        print(f"  {each['key'][:12]}  {each['bytes'] / 1024:7.0f} KiB  {used}  {facts}{why}")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("ls", "clear"), help="list the entries, or remove them")


COMMAND = Command("cache", "graphs kept across processes: ls, clear", cache, _show, _arguments, pair=False)
