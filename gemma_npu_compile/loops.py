"""``compile_loop``: a generation loop as it stands, with the models it calls compiled."""

import dis
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from gemma_npu_compile.backend import Backend
from gemma_npu_compile.errors import CaptureError
from gemma_npu_compile.options import Options
from gemma_npu_compile.report import CompileReport
from gemma_npu_compile.shadows import Shadows, holds_module, kept_in, original_of, replace

GROWING = (
    "a loop's cache grows with every token (DynamicCache): every call has shapes of its own; a StaticCache is captured"
)

_COUNTERS = r".*\.cumulative_length_int$"
"""Sources of the integers in which a StaticCache counts tokens: another one in every call, so no constants."""


def _caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The transformers caches among a call's arguments."""
    return [each for each in (*args, *kwargs.values()) if hasattr(each, "get_seq_length") and hasattr(each, "layers")]


def _is_prefill(args: tuple[Any, ...], kwargs: dict[str, Any], longest: int) -> bool:
    """More than ``longest`` tokens a row, or a cache that this call has to make."""
    tokens, embeddings = kwargs.get("input_ids", args[0] if args else None), kwargs.get("inputs_embeds")
    for given in (tokens, embeddings):
        rows = isinstance(given, Tensor) and given.dim() == (3 if given.is_floating_point() else 2)
        if rows and given.shape[1] > longest:  # type: ignore[union-attr]
            return True
    layers = [cache.layers for cache in _caches(args, kwargs)]
    return any(not each or any(not getattr(layer, "is_initialized", True) for layer in each) for each in layers)


def _compiled_forward(model: nn.Module, options: Options, report: CompileReport) -> Callable[..., Any]:
    """``forward(shadow, ...)`` for all stand-ins of one model. Does not refer to the model."""
    plain: Any = type(model).forward
    backend = Backend(report.graphs.append)
    given = {f.name: getattr(options, f.name) for f in fields(options)}
    compiled = torch.compile(plain, backend=backend, options=given, isolate_recompiles=True)  # type: ignore[call-overload]
    lock = threading.Lock()

    @functools.wraps(plain)
    def forward(shadow: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_prefill(args, kwargs, options.max_query_len):
            with lock:
                report.prefills += 1
            return plain(shadow, *args, **kwargs)
        if any(getattr(cache, "is_compileable", True) is False for cache in _caches(args, kwargs)):
            if options.on_fallback == "error":
                raise CaptureError(f"{GROWING} (on_fallback='error')")
            with lock:
                report.fallbacks[GROWING] += 1
            return plain(shadow, *args, **kwargs)
        with torch.compiler.config.patch(dynamic_sources=_COUNTERS):  # type: ignore[attr-defined]
            return compiled(shadow, *args, **kwargs)

    def free(backend: weakref.ref[Backend]) -> None:
        if (found := backend()) is not None:
            found.reset()

    weakref.finalize(model, free, weakref.ref(backend)).atexit = False
    forward.compile_loop = True  # type: ignore[attr-defined]
    return forward


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def _reads(fn: types.FunctionType) -> Iterator[tuple[str, str, Any]]:
    """``(where, name, value)`` of what a function reads from outside itself."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield "closure", name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    instructions = [each for code in _codes(fn.__code__) for each in dis.get_instructions(code)]
    for name in sorted({each.argval for each in instructions if each.opname == "LOAD_GLOBAL"} & set(fn.__globals__)):
        yield "global", name, fn.__globals__[name]


def _refuse_hidden(fn: types.FunctionType) -> None:
    """Refuse models a loop reaches in a way that gives no stand-in a chance."""
    queue, seen = [fn], {fn}
    while queue:
        each = queue.pop()
        for where, name, value in _reads(each):
            _refuse_kept(name, value)
            if holds_module(value) and (each is not fn or where == "global"):
                raise ValueError(
                    f"compile_loop: {each.__qualname__} reads the model {name!r} from "
                    f"{'its module' if where == 'global' else 'its closure'}; pass it to the loop as an argument"
                )
            own = isinstance(value, types.FunctionType) and value.__module__ == fn.__module__
            if own and not hasattr(value, "compile_loop") and value not in seen:
                seen.add(value)
                queue.append(value)


def _refuse_kept(name: str, value: Any) -> None:
    """Refuse a model in an attribute of another object: a stand-in for it would need one for the object."""
    attribute = kept_in(value)
    if attribute is not None:
        raise ValueError(
            f"compile_loop: the loop would reach the model {name}{attribute} through a {type(value).__name__}, and run "
            "it uncompiled; pass it to the loop as an argument"
        )


class _Loop:
    """What a decorated function keeps: a compiled forward for every model it was given."""

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        self.fn, self.options = fn, options
        self.report = CompileReport()
        self._forwards: weakref.WeakKeyDictionary[nn.Module, Callable[..., Any]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def _stand_in(self, shadows: Shadows, module: nn.Module) -> nn.Module:
        if hasattr(module.__dict__.get("forward"), "compile_loop"):
            return module  # of an outer loop: compiled already
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            shadow = shadows.of(module)
            for child in module.children():
                self._stand_in(shadows, child)
            return shadow
        model = original_of(module)
        own = model.__dict__.get("forward")
        if own is not None and not hasattr(own, "_torchdynamo_orig_callable"):
            raise ValueError(
                f"compile_loop: this {type(model).__name__} has a forward of its own, set on the object; a loop "
                "compiles the one of the class"
            )
        with self._lock:
            if model not in self._forwards:
                self._forwards[model] = _compiled_forward(model, self.options, self.report)
            forward = self._forwards[model]
        shadow = shadows.of(model)
        shadow.__dict__["forward"] = types.MethodType(forward, shadow)
        return shadow

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shadows, found = Shadows(), False
        fn: Any = self.fn
        while isinstance(fn, functools.partial):
            fn, args, kwargs = fn.func, fn.args + args, {**fn.keywords, **kwargs}
        if isinstance(fn, types.MethodType):
            fn, args = fn.__func__, (fn.__self__, *args)

        def swap(module: nn.Module) -> nn.Module:
            nonlocal found
            found = True
            return self._stand_in(shadows, module)

        given = inspect.signature(fn).bind(*args, **kwargs)
        given.apply_defaults()
        for name, each in given.arguments.items():
            _refuse_kept(name, each)
        args, kwargs = replace(given.args, swap), replace(given.kwargs, swap)
        if isinstance(fn, types.FunctionType):
            _refuse_hidden(fn)
            cells = tuple(_cell(cell, swap) for cell in fn.__closure__ or ())
            made = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
            made.__kwdefaults__ = fn.__kwdefaults__
            fn = made
        if not found:
            raise ValueError(
                f"compile_loop: {getattr(fn, '__qualname__', fn)} was given no model: there is no nn.Module among its "
                "arguments (lists and dicts included) or in its closure"
            )
        return replace(fn(*args, **kwargs), shadows.back)


def _cell(cell: types.CellType, swap: Callable[[nn.Module], nn.Module]) -> types.CellType:
    """A cell with stand-ins for the models in it; the cell itself when it holds none."""
    try:
        before = cell.cell_contents
    except ValueError:  # not assigned yet
        return cell
    after = replace(before, swap)
    return cell if after is before else types.CellType(after)


def compile_loop(
    fn: Callable[..., Any] | None = None, /, *, num_draft_tokens: int | None = None, **options: Any
) -> Any:
    """Run a loop with the models it calls compiled: ``@compile_loop``, or ``@compile_loop(platform="cpu")``.

    The loop is any function that calls models, for example with the signature of transformers' ``custom_generate``. It
    is handed a stand-in for every ``nn.Module`` among its arguments (also in lists, tuples and dicts, which are then
    copied) and in its closure: the same weights in module objects of this call. The models themselves are never
    changed. A call of a stand-in runs compiled; a prefill does not, which is a call with more tokens a row than
    ``max_query_len`` (32, or ``1 + num_draft_tokens``), or the one that makes the cache. What is compiled is kept for
    the next call of the loop, as long as the model lives. A loop inside a loop uses what the outer one compiled.

    Args:
        num_draft_tokens: drafts the loop verifies at once; calls with more tokens a row are prefills.
        options: fields of :class:`Options`.

    Returns:
        The decorated function; its ``report`` is a :class:`CompileReport` of all its calls.

    Raises:
        CompileError: (a ValueError) an option is unknown or impossible.
        ValueError: when called: no model is found, or the loop reaches one through its module's globals, through a
            helper function or through an object that is no module; pass it as an argument.
    """
    if num_draft_tokens is not None:
        if isinstance(num_draft_tokens, bool) or not isinstance(num_draft_tokens, int) or num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens is {num_draft_tokens!r}, it must be a number of tokens from 0 on")
        if "max_query_len" in options:
            raise ValueError("num_draft_tokens and max_query_len say the same: give one of them")
        options["max_query_len"] = 1 + num_draft_tokens
    parsed = Options.parse(options)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        loop = _Loop(function, parsed)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return loop(args, kwargs)

        run.report = loop.report  # type: ignore[attr-defined]
        run.compile_loop = True  # type: ignore[attr-defined]
        return run

    return decorate if fn is None else decorate(fn)
