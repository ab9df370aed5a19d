"""Model: costs fitted to records, and what a fit comes to in nanoseconds."""

from __future__ import annotations

from statistics import median_low
from typing import Any

import numpy as np

from chronica_hvd import cells, checks
from chronica_hvd.cost import CostModel, FittedCost, coefficients_of
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
    for array in arrays:
        _check(array)
    begin = scaled(start or CostModel(), 1.0)
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


def _check(records: Any) -> None:
    names = getattr(getattr(records, "dtype", None), "names", None) or ()
    missing = [name for name in ("samples", "size", "size2", "elapsed_ns") if name not in names]
    if missing:
        raise TypeError(
            f"records must be a structured array as StepTimer.drain() returns; it lacks {missing} in {records!r}"
        )
    for name in ("elapsed_ns", "samples", "size", "size2"):
        checks.non_negative(f"{name} of the records", records[name])
    if (records["elapsed_ns"] == 0).any():
        position = int(np.argmin(records["elapsed_ns"]))
        raise ValueError(f"elapsed_ns of the records must be positive; position {position} holds 0")
