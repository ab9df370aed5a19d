"""Model: costs fitted to records, and what a fit comes to in nanoseconds."""

from __future__ import annotations

import math
from statistics import median_low
from typing import Any

import numpy as np

from chronica_hvd import cells, checks
from chronica_hvd.cost import CostModel, FittedCost, coefficients_of, cost_of_work
from chronica_hvd.refit import Outcome, refit
from chronica_hvd.rows import Row, summarize
from chronica_hvd.shape import scaled


def fit_records(records: Any, start: CostModel | None) -> FittedCost:
    """Do what :meth:`CostModel.fit` says."""
    if start is not None and not isinstance(start, CostModel):
        raise TypeError(f"start must be a CostModel or None, not {start!r}")
    is_one = not isinstance(records, list | tuple)
    arrays = [records] if is_one else list(records)
    if not arrays:
        raise ValueError("records is empty; at least one array of records is needed")
    for rank, array in enumerate(arrays):
        _check(array, "the records" if is_one else f"the records of rank {rank}")
    begin = _of_unit_mean(start or CostModel(), arrays)
    rows = [Row.unpack(summarize(array, begin)) for array in arrays]
    outcome = refit(rows, begin, [1.0] * len(rows), [0.0] * len(rows), cells.NONE, begin, certainty=0.0)
    if outcome is None:
        raise ValueError("the records say nothing that could be fitted")
    return fitted_cost(outcome, has_scale=not is_one)


def fitted_cost(outcome: Outcome, *, has_scale: bool = True, comm: float = 0.0) -> FittedCost:
    """Return an outcome in nanoseconds, the median rank's scale being 1."""
    middle = median_low(outcome.scales)
    shape = scaled(outcome.shape, outcome.unit * middle)
    return FittedCost(
        *coefficients_of(shape),
        rank_scale=[scale / middle for scale in outcome.scales] if has_scale else None,
        floor=shape.floor,
        records=outcome.records,
        median_error=outcome.median_error,
        comm=comm,
    )


def _of_unit_mean(start: CostModel, arrays: list[Any]) -> CostModel:
    """Return the start's shape in a unit in which it predicts 1 on average, whatever unit it was given in."""
    with np.errstate(over="ignore"):
        predicted = [
            cost_of_work(start, *(array[name].astype(np.float64) for name in ("samples", "size", "size2")))
            for array in arrays
        ]
        mean = float(np.mean(np.concatenate(predicted)))
        factor = 1.0 / mean if mean > 0.0 else 1.0
    if not (math.isfinite(mean) and math.isfinite(factor)):
        raise ValueError(f"start predicts {mean:g} for these records; give it in a unit nearer to 1: {start!r}")
    return scaled(start, factor)


def _check(records: Any, what: str) -> None:
    names = getattr(getattr(records, "dtype", None), "names", None) or ()
    missing = [name for name in ("samples", "size", "size2", "elapsed_ns") if name not in names]
    if missing or np.ma.isMaskedArray(records):
        lacks = f"; it lacks {missing} in {records!r}" if missing else ", not a masked one"
        raise TypeError(f"{what} must be a structured array as StepTimer.drain() returns{lacks}")
    for name in ("elapsed_ns", "samples", "size", "size2"):
        checks.non_negative(f"{name} of {what}", records[name])
    if (records["elapsed_ns"] == 0).any():
        position = int(np.argmin(records["elapsed_ns"]))
        raise ValueError(f"elapsed_ns of {what} must be positive; position {position} holds 0")
