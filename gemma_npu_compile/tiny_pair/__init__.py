"""A tiny but real Gemma 4 target and MTP assistant: 9 MB that stand in for 60 GB in tests and demonstrations.

Random weights cannot test speculative decoding: a random assistant never drafts a token its target accepts. This pair
was trained from scratch (``train.py``) on the sources of Python's standard library, so its drafts are accepted and
rejected at realistic rates, and it has the geometry that matters: full-attention layers with heads of 512 whose keys
double as values, and a sliding window short enough to be left behind within a test.

The prompts below are what acceptance is measured on. Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

import ast
import pathlib
import sysconfig
import textwrap

TARGET_DIR = pathlib.Path(__file__).parent / "target"
ASSISTANT_DIR = pathlib.Path(__file__).parent / "assistant"

CODING_PROMPTS = (
    'def binary_search(items, target):\n    """Return the index of target in the sorted list items, or -1."""\n',
    'def merge_sort(items):\n    """Return a new sorted list of items, by merging sorted halves."""\n',
    'def lru_cache_get(cache, key):\n    """Return the value of key and mark it as the most recently used."""\n',
    'def is_balanced(text):\n    """Return True if every bracket in text is closed in the right order."""\n',
    'def flatten(nested):\n    """Return a flat list of the items of an arbitrarily nested list."""\n',
)

# Never trained on, by whole files: neither the tokenizer, nor the target, nor the assistant has seen them.
HELDOUT_MODULES = (
    "bisect.py",
    "calendar.py",
    "difflib.py",
    "fractions.py",
    "gzip.py",
    "heapq.py",
    "json/decoder.py",
    "mimetypes.py",
    "netrc.py",
    "pprint.py",
    "queue.py",
    "random.py",
    "reprlib.py",
    "shlex.py",
    "statistics.py",
    "tabnanny.py",
    "tempfile.py",
    "textwrap.py",
    "timeit.py",
    "zipapp.py",
)


def standard_library() -> pathlib.Path:
    """Return the folder of the running interpreter's standard library."""
    return pathlib.Path(sysconfig.get_paths()["stdlib"])


def function_heads(source: str, max_chars: int = 400) -> list[str]:
    """Return the signature and docstring of every documented function in ``source``, in its order, without indentation.

    Functions whose head is longer than ``max_chars``, and those with nothing after the docstring, are left out.
    """
    lines = source.splitlines(keepends=True)
    heads = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2 or ast.get_docstring(node) is None:
            continue
        head = textwrap.dedent("".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
        if len(head) <= max_chars:
            heads.append((node.lineno, head))
    return [head for _, head in sorted(heads)]


def heldout_sources() -> list[str]:
    """Return the text of the held-out modules; one that this version of Python does not have is skipped."""
    paths = [standard_library() / module for module in HELDOUT_MODULES]
    return [path.read_text(encoding="utf-8") for path in paths if path.is_file()]


def heldout_prompts() -> list[str]:
    """Return one prompt of each held-out module that has one: the head of its first documented function.

    They are read from the running interpreter, so that no code of the standard library is copied here.
    """
    return [head for source in heldout_sources() for head in function_heads(source)[:1]]
