"""Measure: what tells whether sizes are those of a data set and a function, in this process and in others."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from chronica_hvd.sizes_cache import digest

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(...))


def cache_key(dataset: Any, size_fn: Any, samples: int, key: str) -> str:
    """Return what tells data sets and functions apart, as hexadecimal digits; see :func:`measure_sizes`."""
    seen: dict[int, Any] = {}
    described = [samples, key, *_of_data(dataset, seen), list(_of_value(size_fn, seen))]
    done = 0
    while done < len(seen):  # functions name further ones; by turns, for they may be many
        values = list(seen.values())[done:]
        done += len(values)
        described += [list(_of_function(value, seen)) for value in values if isinstance(value, types.FunctionType)]
    return digest(repr(described).encode("utf-8", "surrogatepass"))


def _of_data(dataset: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Yield the type, what its ``__getitem__`` runs, and which samples a ``Subset`` has of what."""
    yield _name(type(dataset))
    yield list(_of_value(getattr(type(dataset), "__getitem__", None), seen))
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(dataset, torch_data.Subset):
        chosen = np.fromiter(dataset.indices, dtype=np.int64, count=len(dataset.indices))
        yield digest(chosen.tobytes())
        yield from _of_data(dataset.dataset, seen)


def _of_value(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Yield of a constant its value, of anything else its type and what it consists of; note functions in ``seen``."""
    if isinstance(value, _CONSTANTS):
        yield repr(value)
        return
    is_new = id(value) not in seen
    seen[id(value)] = value  # itself too, or another object could have its number
    yield _name(type(value))
    if not is_new or isinstance(value, types.FunctionType):
        return
    if isinstance(value, types.MethodType):
        yield list(_of_value(value.__func__, seen))
        yield list(_of_value(value.__self__, seen))
    elif isinstance(value, functools.partial):
        parts = value.func, *value.args, *sorted(value.keywords.items())
        yield [list(_of_value(part, seen)) for part in parts]
    elif isinstance(value, tuple):
        yield [list(_of_value(part, seen)) for part in value]
    elif isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
        yield _name(value)
    else:
        held = getattr(value, "__dict__", {})
        yield sorted((name, repr(part)) for name, part in held.items() if isinstance(part, _CONSTANTS))
        for function in (held.get("__wrapped__"), inspect.getattr_static(type(value), "__call__", None)):
            yield list(_of_value(function, seen))


def _of_function(function: types.FunctionType, seen: dict[int, Any]) -> Iterator[Any]:
    """Yield the code, the values it was made with, and the constants and functions of its own module that it names."""
    yield list(_of_code(function.__code__))
    yield list(_of_value(function.__defaults__, seen))
    yield list(_of_value(tuple(sorted((function.__kwdefaults__ or {}).items())), seen))
    for cell in function.__closure__ or ():
        try:
            yield list(_of_value(cell.cell_contents, seen))
        except ValueError:  # not set yet
            continue
    for name in sorted(_names(function.__code__)):
        value = function.__globals__.get(name)
        is_own = inspect.isfunction(value) and value.__module__ == function.__module__
        if is_own or (value is not None and isinstance(value, _CONSTANTS)):
            yield name, list(_of_value(value, seen))


def _of_code(code: types.CodeType) -> Iterator[Any]:
    """Yield what runs, without the lines and files it comes from."""
    yield code.co_code, code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield list(_of_code(constant))
        else:  # a set's order differs between processes
            yield sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {*code.co_names}.union(*inner)


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', getattr(value, '__name__', ''))}"
