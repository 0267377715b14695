"""What a replay asks a few hundred Python objects before it runs, in one call of C++.

Asked in Python, each object is touched several times and new ones are made. Caches have lost most of it from one step
to the next: it took a third of the time between two replays.
"""

import ctypes
import functools
import operator
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor
from torch._C._dynamo import guards

from gemma_npu_compile.native import build


def _functions() -> ctypes.PyDLL | None:
    """The kernels' library, called with the interpreter's lock held; None where this process has not loaded it (it is
    not compiled for this alone), where there is none, or no such torch."""
    return _bound() if build.loaded() else None


@functools.cache
def _bound() -> ctypes.PyDLL | None:
    address = getattr(guards, "_torchinductor_pyobject_tensor_data_ptr", None)  # Inductor's own wrappers call it
    if address is None:
        return None
    try:
        found = ctypes.PyDLL(build.library()._name)
    except build.NoKernelsError:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found.gemma_npu_python.argtypes = [pointer] * 3
    found.gemma_npu_lie_at.argtypes = [ctypes.py_object, pointer, pointer, number]
    found.gemma_npu_hold.argtypes = [pointer, number, pointer, number]
    found.gemma_npu_lie_at.restype = found.gemma_npu_hold.restype = number
    api = ctypes.pythonapi
    found.gemma_npu_python(*(ctypes.cast(each, pointer) for each in (api.PyList_GetItem, api.PyDict_Next)), address)
    return found


class Addresses:
    """Where some of the tensors in a list of arguments lie.

    Attributes:
        values: one address for each of ``places``.
    """

    def __init__(self, args: Sequence[Any], places: Sequence[int]) -> None:
        self._places = array("q", places)
        self.values = array("q", map(Tensor.data_ptr, map(args.__getitem__, places)))
        self._words = self._places.buffer_info()[0], self.values.buffer_info()[0], len(places)

    def still(self, args: list[Any]) -> bool:
        """Whether those of ``args`` lie there too.

        Raises:
            TypeError, RuntimeError: one is no tensor, or has no memory. IndexError: there are fewer arguments.
        """
        functions = _functions()
        if functions is not None and type(args) is list:
            answer = functions.gemma_npu_lie_at(args, *self._words)
            if answer >= 0:
                return bool(answer)
        return Addresses(args, self._places).values == self.values


class Values:
    """The objects some dicts hold now, in their order. Both are kept, and known by their addresses: never copied."""

    def __init__(self, dicts: Sequence[dict[str, Any]]) -> None:
        self._dicts = list(dicts)
        self._objects = self._now()
        self._words = [array("q", map(id, each)) for each in (self._dicts, self._objects)]
        self._arguments = [word for each in self._words for word in each.buffer_info()]

    def _now(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._dicts)))

    def still(self) -> bool:
        """Whether they hold the same ones."""
        functions = _functions()
        if functions is not None:
            return bool(functions.gemma_npu_hold(*self._arguments))
        now = self._now()
        return len(now) == len(self._objects) and all(map(operator.is_, now, self._objects))
