"""Model: from the rows of all ranks to a cost and the ranks' speeds, changed only where measurement says so.

After the exchange every rank computes the same bits from the same rows: see ``shape.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from chronica_hvd import cells, checks
from chronica_hvd.cells import Cells
from chronica_hvd.cost import CostModel, FittedCost, coefficients_of, cost_of_work
from chronica_hvd.rows import ROW, Row, summarize
from chronica_hvd.shape import at_level, bounded, compare, difference, fit_shape, levels, predicts_anything, scaled

__all__ = ["ROW", "Outcome", "Row", "fit_records", "fitted_cost", "lower_median", "refit", "summarize"]

#: A change of less than this, of a rank's speed or of what micro-batches take, leaves the plan alone.
LEAST_CHANGE = 0.02
#: So many standard errors a change must exceed: of a rank's speed (there are many ranks), and of the shape.
CERTAINTY_OF_SPEED, CERTAINTY = 3.0, 2.0
#: Cells that stand for everything measured before, and what of their weight is left after each refresh.
MEMORY_CELLS, MEMORY_KEPT = 64, 0.75
#: Ranks whose speed has not changed are pooled in so many; which ones have is found by turns, at most so many.
POOLED_CELLS, MOST_TURNS = 128, 4
#: No rank is taken to be more times slower or faster than this than the median rank.
LARGEST_SCALE = 16.0


class Outcome(NamedTuple):
    """What a refresh comes to.

    Attributes
    ----------
    shape
        Without the ranks' scales.
    unit, unit_before
        Nanoseconds per unit of ``shape``, and of the model before, on a rank of scale 1, pauses aside.
    scales
        (ranks,) how many times longer than predicted each rank takes; the same floats as before where within the noise.
    drifts
        (ranks,) by how many standard errors each scale has been off, in this and, ever less, in earlier refreshes.
    is_new
        Whether the shape is another one.
    memory
        Cells to be remembered, in ``shape``'s unit.
    records
        How many records it stands on.
    median_error
        Of records that a fit to the others had not seen.
    """

    shape: CostModel
    unit: float
    unit_before: float
    scales: list[float]
    drifts: list[float]
    is_new: bool
    memory: Cells
    records: int
    median_error: float


#: The same kind of model fitted to the one half, to the other half, and to all.
Fits = tuple[CostModel, CostModel, CostModel]


def refit(
    rows: Sequence[Row | None],
    current: CostModel,
    scales: Sequence[float],
    drifts: Sequence[float],
    memory: Cells,
    start: CostModel,
    *,
    certainty: float = CERTAINTY,
) -> Outcome | None:
    """Return what the rows say of the cost and the speeds; ``None`` where they say nothing.

    Parameters
    ----------
    rows
        Of each rank; ``None``: nothing measured.
    current
        The model so far, ``rank_scale`` aside; where nothing else predicts held-out cells better, it stays.
    scales
        (ranks,) so far.
    drifts
        (ranks,) as in the outcome before; 0 at first.
    memory
        Cells of earlier refreshes.
    start
        What the measurements began with.
    certainty
        Standard errors by which something else must be better. 0: whatever is better, and what is fitted comes first.
    """
    of_ranks = [cells.NONE if row is None else np.vstack(row.halves) for row in rows]
    everything = np.vstack(of_ranks)
    if len(everything) == 0:
        return None
    if not predicts_anything(current, everything):
        current = start = CostModel(fixed=1.0, per_size=0.0)
    begin = [scale * _unit(current, of_ranks, scales) for scale in scales]
    halves = [[cells.NONE if row is None else row.halves[half] for row in rows] for half in (0, 1)]

    def fit_to(own: Sequence[Cells], remembered: Cells, changed: set[int], with_floor: bool) -> CostModel:
        """Fit to ranks of which some have changed; the others are as if one."""
        level = levels(current, [remembered])[0]
        others = [at_level(group, 1.0 / begin[rank]) for rank, group in enumerate(own) if rank not in changed]
        groups = [cells.merge(np.vstack([cells.NONE, *others]), POOLED_CELLS), *(own[rank] for rank in sorted(changed))]
        factors = [1.0, *(begin[rank] for rank in sorted(changed)), level]
        free = range(1, len(factors))
        shape = fit_shape([*groups, remembered], current, factors, free, with_floor=with_floor)
        return bounded(shape, start, np.vstack([*groups, remembered]))

    def whole(remembered: Cells, with_floor: bool) -> tuple[CostModel, set[int]]:
        """Return the fit to all, and the ranks that have changed by it.

        Scales are as before unless the fit says otherwise: the rank that holds the long samples may always be the same
        one, and must not be mistaken for a slow one.
        """
        changed: set[int] = set()
        for _ in range(MOST_TURNS):
            model = fit_to(of_ranks, remembered, changed, with_floor)
            steady, _ = _steady(model, of_ranks, scales, drifts, rows)
            now = {rank for rank in range(len(rows)) if steady[rank] != scales[rank]}
            if now == changed:
                break
            changed = now
        return model, changed

    def folds(model: CostModel, changed: set[int], remembered: Cells) -> Fits:
        first, second = (fit_to(own, remembered, changed, model.floor > 0.0) for own in halves)
        return first, second, model

    best: Fits = (current, current, current)
    kept = memory
    if certainty > 0.0 and _steady(current, of_ranks, scales, drifts, rows)[0] != list(scales):
        certainty = min(certainty, 1.0)  # the plan changes anyway
    additive, floored = whole(memory, with_floor=False), whole(memory, with_floor=True)
    has_floor = floored[0].floor > 0.0
    differs = [
        certainty == 0.0 or difference(model, current, everything) > LEAST_CHANGE for model, _ in (additive, floored)
    ]
    if differs[1] if has_floor and current.floor > 0.0 else any(differs):
        contenders: list[Fits] = [(start, start, start), folds(*additive, memory)]
        for contender in contenders:
            if _is_better(contender, best, halves, certainty):
                best = contender
        if len(memory):
            afresh = folds(*whole(cells.NONE, with_floor=False), cells.NONE)
            if _is_better(afresh, best, halves, certainty):
                best, kept = afresh, cells.NONE
                floored = whole(cells.NONE, with_floor=True)
        if floored[0].floor > 0.0:
            contender = folds(*floored, kept)
            if _is_better(contender, best, halves, max(certainty, 1.0)):
                best = contender
    shape = best[2]
    is_new = shape is not current
    steady, drifting = _steady(shape, of_ranks, scales, drifts, rows)
    remembered = _remembered(shape, of_ranks, kept)
    pauses = lower_median([row.pauses for row in rows if row is not None])
    typical = [
        level / (row.pauses if row else 1.0) for level, row in zip(levels(best[0], halves[0]), rows, strict=True)
    ]
    return Outcome(
        shape,
        _unit(shape, of_ranks, steady) / pauses,
        _unit(current, of_ranks, scales) / pauses,
        steady,
        drifting,
        is_new,
        remembered,
        round(math.fsum(remembered[:, 0].tolist())),
        median_error(best[0], rows, typical),
    )


def _unit(model: CostModel, of_ranks: Sequence[Cells], scales: Sequence[float]) -> float:
    """Return nanoseconds per unit of the model on a rank of scale 1: the lower median, which is one rank's."""
    ratios = [level / scale for level, scale in zip(levels(model, of_ranks), scales, strict=True) if level > 0.0]
    return lower_median(ratios) if ratios else 1.0


def lower_median(values: list[float]) -> float:
    """Return the median, of two in the middle the lesser: one of the values."""
    return sorted(values)[(len(values) - 1) // 2]


def _steady(
    model: CostModel,
    of_ranks: Sequence[Cells],
    scales: Sequence[float],
    drifts: Sequence[float],
    rows: Sequence[Row | None],
) -> tuple[list[float], list[float]]:
    """Return the ranks' scales, changed where off by more than the noise, now or again and again; and the drifts."""
    relative = [level / scale for level, scale in zip(levels(model, of_ranks), scales, strict=True)]
    unit = _unit(model, of_ranks, scales)
    error = max((row.error for row, one in zip(rows, relative, strict=True) if row and one == unit), default=0.0)
    steady, drifting = list(scales), list(drifts)
    for rank, row in enumerate(rows):
        if row is None or relative[rank] <= 0.0:
            continue
        change = relative[rank] / unit - 1.0
        errors = change / max(LEAST_CHANGE / CERTAINTY_OF_SPEED, math.sqrt(row.error * row.error + error * error))
        # Of errors that are independent and of variance 1, this too has a variance of 1 in the end.
        drifting[rank] = (errors + drifts[rank]) / math.sqrt(2.0)
        if abs(change) > LEAST_CHANGE and max(abs(errors), abs(drifting[rank])) > CERTAINTY_OF_SPEED:
            steady[rank], drifting[rank] = scales[rank] * (1.0 + change), 0.0
    middle = lower_median(steady)
    return [min(max(scale, middle / LARGEST_SCALE), middle * LARGEST_SCALE) for scale in steady], drifting


def _is_better(model: Fits, than: Fits, halves: Sequence[Sequence[Cells]], certainty: float) -> bool:
    """Whether a model predicts each half better than another, by a fit to the other half."""
    gains, errors = zip(*(compare(model[fold], than[fold], halves[1 - fold]) for fold in (0, 1)), strict=True)
    return math.fsum(gains) > certainty * math.sqrt(math.fsum(error * error for error in errors))


def _remembered(shape: CostModel, of_ranks: Sequence[Cells], memory: Cells) -> Cells:
    """Return cells for the next refresh, at the level of the shape: those of now, and older ones that count less."""
    older = memory.copy()
    older[:, 0] *= MEMORY_KEPT
    groups = (older, *of_ranks)
    # A group may be empty, or all its micro-batches be predicted to take no time.
    at_shape = [
        at_level(group, 1.0 / level) for group, level in zip(groups, levels(shape, groups), strict=True) if level
    ]
    return cells.merge(np.vstack(at_shape or [cells.NONE]), MEMORY_CELLS)


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
    middle = lower_median(outcome.scales)
    shape = scaled(outcome.shape, outcome.unit * middle)
    return FittedCost(
        *coefficients_of(shape),
        rank_scale=[scale / middle for scale in outcome.scales] if has_scale else None,
        floor=shape.floor,
        form="floor" if shape.floor > 0.0 else "additive",
        records=outcome.records,
        median_error=outcome.median_error,
        comm=comm,
    )


def median_error(model: CostModel, rows: Sequence[Row | None], scales: Sequence[float]) -> float:
    """Return the median |predicted − measured| ÷ measured of the rows' single records; 0 without any."""
    errors: list[float] = []
    for row, scale in zip(rows, scales, strict=True):
        if row is not None and len(row.singles):
            n, size, size2, time = row.singles.T
            errors += np.abs(cost_of_work(model, n, size, size2) * scale / time - 1.0).tolist()
    errors.sort()
    return (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2.0 if errors else 0.0


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
