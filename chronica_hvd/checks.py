"""Checks of what users give: every error says what was given, what is allowed and, where it helps, what to do."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_INT64 = 2**63 - 1


def _is_number(value: object) -> bool:
    """Whether a value may be one real number, of Python's or an array library's: no bool, text, time; not masked."""
    if type(value) in (int, float):  # most are
        return True
    if isinstance(value, bool) or not any(hasattr(type(value), name) for name in ("__float__", "__index__")):
        return False
    dtype: Any = getattr(value, "dtype", None)
    if dtype is None:
        return True
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    is_single = getattr(value, "shape", None) == () and not np.ma.is_masked(value)
    return is_single and name.startswith(("int", "uint", "float", "bfloat"))


def integer(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """Return ``value`` as an int between ``least`` and ``most``; a bool or a float is a TypeError."""
    try:
        number = operator.index(value) if _is_number(value) else None  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        number = None
    if number is None:
        raise TypeError(f"{name} must be an integer, not {value!r} of type {type(value).__name__}")
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, not {number}")
    return number


def real(name: str, value: object, least: float = -math.inf) -> float:
    """Return ``value`` as a finite float of at least ``least``; a bool, a string or an array is a TypeError."""
    try:
        number = float(value) if _is_number(value) else None  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        raise TypeError(f"{name} must be a number, not {value!r} of type {type(value).__name__}")
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {number}")
    if number < least:
        raise ValueError(f"{name} must be at least {least:g}, not {number:g}")
    return number


def boolean(name: str, value: object) -> bool:
    """Return ``value`` as a bool; anything but True and False is a TypeError."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def choice(name: str, value: object, allowed: Sequence[str | None]) -> None:
    """Raise a ValueError unless ``value`` is one of ``allowed``."""
    if not (value is None or isinstance(value, str)) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def vector(name: str, values: Any) -> NDArray[Any]:
    """Return ``values`` as a one-dimensional array of integers or floats, read in place where possible, not empty."""
    array = _array(name, values, "a one-dimensional array of numbers")
    if array.ndim != 1:
        given = f", {values!r} of type {type(values).__name__}; give a list or an array" if array.ndim == 0 else ""
        raise ValueError(f"{name} must be one-dimensional, not of shape {array.shape}{given}")
    if array.size == 0:
        raise ValueError(f"{name} is empty; at least one value is needed")
    if array.dtype == np.uint64 or array.dtype == object:
        array = _as_numbers(name, array)
    _refuse_other_kinds(name, array)
    return array


def _array(name: str, values: Any, what: str) -> NDArray[Any]:
    if np.ma.is_masked(values):
        raise TypeError(f"{name} must hold a number everywhere, not masked values; fill or drop them")
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be {what}: {error}") from None


def _refuse_other_kinds(name: str, array: NDArray[Any]) -> None:
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must hold integers or floats, not {array.dtype}")


def _as_numbers(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Turn unsigned and Python numbers into int64 (float64 if there are floats), or say which one does not fit."""
    if array.dtype == object:
        for position, value in enumerate(array):
            if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
                raise TypeError(f"{name} must hold numbers, not {value!r} (position {position})")
        if any(isinstance(value, float | np.floating) for value in array):
            return array.astype(np.float64)
    _refuse_first(name, array, array < 0, "not be negative")
    _refuse_first(name, array, array > LARGEST_INT64, f"be at most {LARGEST_INT64} (int64)")
    return array.astype(np.int64)


def non_negative(name: str, values: Any) -> NDArray[Any]:
    """Return ``values`` as a vector (see :func:`vector`) whose values are finite, not negative and within int64."""
    array = vector(name, values)
    if array.dtype.kind == "f":
        _refuse_first(name, array, ~np.isfinite(array), "be finite")
        _refuse_first(name, array, array >= np.float64(2**63), f"be at most {LARGEST_INT64} (int64)")
    if array.dtype.kind != "u":
        _refuse_first(name, array, array < 0, "not be negative")
    return array


def amounts(name: str, values: Any) -> NDArray[np.float64]:
    """Return a number, or an array of any shape, as float64; all must be finite and not negative."""
    if dimensions(name, values) == 0:
        return np.asarray(real(name, values, least=0.0))
    array = _array(name, values, "a number or an array of numbers")
    _refuse_other_kinds(name, array)
    flat = array.astype(np.float64, copy=False).ravel()
    if not (flat.min(initial=0.0) >= 0.0 and flat.max(initial=0.0) < math.inf):  # false for NaN
        _refuse_first(name, flat, ~np.isfinite(flat), "be finite")
        _refuse_first(name, flat, flat < 0, "not be negative")
    return flat.reshape(array.shape)


def dimensions(name: str, values: Any) -> int:
    """Return how many dimensions ``values`` has; ragged ones are a TypeError."""
    try:
        return np.ndim(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a number or a one-dimensional array of numbers: {error}") from None


def _refuse_first(name: str, array: NDArray[Any], wrong: NDArray[np.bool_], rule: str) -> None:
    if wrong.any():
        position = int(np.argmax(wrong))
        raise ValueError(f"{name} must {rule}; position {position} holds {array[position]}")


def same_length(name: str, array: NDArray[Any], expected: int, what: str) -> None:
    """Raise a ValueError unless ``array`` has ``expected`` values, one per ``what``."""
    if array.size != expected:
        raise ValueError(f"{name} must have one value per {what}: {expected} are needed, {array.size} were given")
