"""Model: from the rows of all ranks to a shape and the ranks' speeds, changed only where measurement says so.

After the exchange every rank computes the same bits from the same rows: see ``shape.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median, median_low
from typing import NamedTuple

import numpy as np

from chronica_hvd import cells
from chronica_hvd.cells import Cells
from chronica_hvd.cost import CostModel, cost_of_work
from chronica_hvd.rows import Row
from chronica_hvd.shape import (
    at_level,
    bounded,
    compare,
    difference,
    fit_shape,
    levels,
    predicts_anything,
    with_known_floor,
)

#: A change of less than this, of a rank's speed or of what micro-batches take, leaves the plan alone.
LEAST_CHANGE = 0.02
#: So many standard errors a change must exceed: of a rank's speed (there are many ranks), and of the shape.
CERTAINTY_OF_SPEED, CERTAINTY = 3.5, 2.0
#: Cells that stand for everything measured before, and what of their weight is left after each refresh: less where the
#: shape has changed, as what was measured before may not hold any more.
MEMORY_CELLS, MEMORY_KEPT, MEMORY_KEPT_AFTER_CHANGE = 64, 0.75, 0.25
#: Ranks whose speed has not changed are pooled in so many; which ones have is found by turns, at most so many.
POOLED_CELLS, MOST_TURNS = 128, 4
#: No rank is found to be more times slower or faster than this than the median rank, unless it was known to be.
LARGEST_SCALE = 16.0
#: A model that is better by less than this share of the errors is no better.
LEAST_GAIN = 0.03
#: In place of a half: both.
ALL = 2


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


@dataclass(frozen=True)
class Contender:
    """A shape that may be taken.

    Attributes
    ----------
    shape
        Fitted to all records.
    changed
        The ranks that have become faster or slower by it.
    memory
        The cells of earlier refreshes that agree with it.
    fit_half
        Fits to one half of the records; most refreshes need no more than the shape.
    """

    shape: CostModel
    changed: frozenset[int]
    memory: Cells
    fit_half: Callable[[int], CostModel]

    @cached_property
    def folds(self) -> tuple[CostModel, CostModel]:
        """Fitted to the one half, and to the other."""
        return self.fit_half(0), self.fit_half(1)


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
    refit = _Refit(rows, current, scales, drifts, memory, start)
    return refit.outcome(certainty) if refit.is_measured else None


class _Refit:
    """The work of :func:`refit`."""

    def __init__(
        self,
        rows: Sequence[Row | None],
        current: CostModel,
        scales: Sequence[float],
        drifts: Sequence[float],
        memory: Cells,
        start: CostModel,
    ) -> None:
        self.rows, self.scales, self.drifts, self.memory = rows, scales, drifts, memory
        self.halves = [[cells.NONE if row is None else row.halves[half] for row in rows] for half in (0, 1)]
        self.of_ranks = [np.vstack(of_rank) for of_rank in zip(*self.halves, strict=True)]
        self.everything = np.vstack(self.of_ranks)
        self.is_measured = len(self.everything) > 0
        if not predicts_anything(current, self.everything):
            current = start = CostModel(fixed=1.0, per_size=0.0)
        self.current, self.start = current, start
        unit = self.unit(current, scales)
        self.begin = [scale * unit for scale in scales]

    def outcome(self, certainty: float) -> Outcome:
        best = self.best(certainty)
        steady, drifts = self.steady(best.shape)
        remembered = self.remembered(best)
        measured = [row for row in self.rows if row is not None]
        pauses = median_low(row.pauses for row in measured)
        return Outcome(
            best.shape,
            self.unit(best.shape, steady) / pauses,
            self.unit(self.current, self.scales) / pauses,
            steady,
            drifts,
            best.shape is not self.current,
            remembered,
            round(math.fsum(remembered[:, 0].tolist())),
            median_error(best.folds[0], measured),
        )

    def best(self, certainty: float) -> Contender:
        """Return the contender that predicts held-out cells best; what there is, unless another is really better."""
        now = self.as_it_is(self.current, self.memory)
        additive, floored = (self.fitted(self.memory, with_floor) for with_floor in (False, True))
        has_floor = self.current.floor > 0.0 and floored.shape.floor > 0.0
        same, other = (floored, additive) if has_floor else (additive, floored)
        differ = self.is_other(same) or (not has_floor and self.is_other(other))
        if certainty > 0.0 and not now.changed and not differ:
            return now
        least = min(certainty, 1.0) if now.changed else certainty  # the plan changes anyway
        # What was measured before led away from the start, and so does not hold any more where that is better again.
        best = self.better(self.as_it_is(self.start, cells.NONE), now, least)
        best = self.better(same, best, least, fewer=1)
        if len(self.memory):
            # Whether everything before is to be forgotten.
            best = self.better(self.fitted(cells.NONE, has_floor), best, max(certainty, CERTAINTY), fewer=2)
        if best.memory is not self.memory:
            other = self.fitted(cells.NONE, not has_floor)
        if (other.shape.floor > 0.0) == (best.shape.floor > 0.0):
            return best
        # Where plans avoid what is below the floor, only the memory knows of it.
        return self.better(other, best, max(certainty, 1.0), remembered=best.memory)

    def as_it_is(self, shape: CostModel, memory: Cells) -> Contender:
        return Contender(shape, self.changed(shape), memory, lambda half: shape)

    def fitted(self, memory: Cells, with_floor: bool) -> Contender:
        """Fit a shape; scales are as before unless that says otherwise.

        The rank that holds the long samples may always be the same one, and must not be mistaken for a slow one.
        """
        changed: frozenset[int] = frozenset()
        for _ in range(MOST_TURNS):
            shape = self.fit_to(ALL, memory, changed, with_floor)
            now = self.changed(shape)
            if now == changed:
                break
            changed = now
        fit_half = partial(self.fit_to, memory=memory, changed=changed, with_floor=with_floor)
        return Contender(shape, changed, memory, fit_half)

    def fit_to(self, half: int, memory: Cells, changed: frozenset[int], with_floor: bool) -> CostModel:
        """Fit to cells of ranks of which some have changed; the others are as if one."""
        own = self.of_ranks if half == ALL else self.halves[half]
        others = [at_level(group, 1.0 / self.begin[rank]) for rank, group in enumerate(own) if rank not in changed]
        pooled = cells.merge(np.vstack([cells.NONE, *others]), POOLED_CELLS)
        groups = [pooled, *(own[rank] for rank in sorted(changed)), memory]
        factors = [1.0, *(self.begin[rank] for rank in sorted(changed)), *levels(self.current, [memory])]
        shape = fit_shape(groups, self.current, factors, range(1, len(groups)), with_floor=with_floor)
        together = np.vstack(groups)
        return bounded(with_known_floor(shape, self.current, together), self.start, together)

    def is_other(self, contender: Contender) -> bool:
        """Whether a shape makes a difference to plans."""
        return difference(contender.shape, self.current, self.everything) > LEAST_CHANGE

    def better(
        self,
        contender: Contender,
        best: Contender,
        certainty: float,
        *,
        fewer: int = 10**9,
        remembered: Cells = cells.NONE,
    ) -> Contender:
        """Return the contender if it predicts each half better by a fit to the other, else what was best.

        By so many standard errors; or if it is no worse and says of ``fewer`` ranks fewer that their speed changed.
        """
        if len(best.changed) - len(contender.changed) >= fewer:
            certainty = min(certainty, -1.0)
        compared = [
            compare(contender.folds[fold], best.folds[fold], [*self.halves[1 - fold], remembered]) for fold in (0, 1)
        ]
        gain, squares, errors = (math.fsum(one) for one in zip(*compared, strict=True))
        least = LEAST_GAIN * errors if certainty > 0.0 else -math.inf
        return contender if gain > max(certainty * math.sqrt(squares), least) else best

    def changed(self, shape: CostModel) -> frozenset[int]:
        """Return the ranks that are faster or slower than they were by this shape."""
        return frozenset(rank for rank, scale in enumerate(self.steady(shape)[0]) if scale != self.scales[rank])

    def unit(self, shape: CostModel, scales: Sequence[float]) -> float:
        """Return nanoseconds per unit of the shape on a rank of scale 1: the lower median, which is one rank's."""
        return _unit(self.relative(shape, scales))

    def relative(self, shape: CostModel, scales: Sequence[float]) -> list[float]:
        """Return (ranks,) nanoseconds per unit of the shape on each rank, were it of scale 1; 0: nothing measured."""
        return [level / scale for level, scale in zip(levels(shape, self.of_ranks), scales, strict=True)]

    def steady(self, shape: CostModel) -> tuple[list[float], list[float]]:
        """Return the ranks' scales, changed where off by more than the noise, now or by and by; and drifts."""
        relative = self.relative(shape, self.scales)
        unit = _unit(relative)
        error = max(
            (row.error for row, one in zip(self.rows, relative, strict=True) if row and one == unit), default=0.0
        )
        steady, drifting = list(self.scales), list(self.drifts)
        for rank, row in enumerate(self.rows):
            if row is None or relative[rank] <= 0.0:
                continue
            change = relative[rank] / unit - 1.0
            errors = change / max(LEAST_CHANGE / CERTAINTY_OF_SPEED, math.sqrt(row.error * row.error + error * error))
            # Of errors that are independent and of variance 1, this too has a variance of 1 in the end.
            drifting[rank] = (errors + self.drifts[rank]) / math.sqrt(2.0)
            if abs(change) > LEAST_CHANGE and max(abs(errors), abs(drifting[rank])) > CERTAINTY_OF_SPEED:
                steady[rank], drifting[rank] = self.scales[rank] * (1.0 + change), 0.0
        middle = median_low(steady)
        least, most = middle / LARGEST_SCALE, middle * LARGEST_SCALE
        steady = [
            min(max(scale, min(known, least)), max(known, most))
            for scale, known in zip(steady, self.scales, strict=True)
        ]
        return steady, drifting

    def remembered(self, best: Contender) -> Cells:
        """Return cells for the next refresh, at the level of the shape: those of now, and older ones weigh less."""
        older = best.memory.copy()
        older[:, 0] *= MEMORY_KEPT_AFTER_CHANGE if self.is_other(best) else MEMORY_KEPT
        groups = [group for group in (older, *self.of_ranks) if len(group)]
        scaled = zip(groups, levels(best.shape, groups), strict=True)
        at_shape = [at_level(group, 1.0 / level) for group, level in scaled if level > 0.0]
        return cells.merge(np.vstack([cells.NONE, *at_shape]), MEMORY_CELLS)


def _unit(relative: list[float]) -> float:
    return median_low([one for one in relative if one > 0.0] or [1.0])


def median_error(shape: CostModel, rows: Sequence[Row]) -> float:
    """Return the median |predicted − measured| ÷ measured of single records, by a fit to the other half; 0 of none.

    A rank's level is the other half's too, unless nothing is in there: of a record that is alone.
    """
    errors: list[float] = []
    for row in rows:
        of_other, of_all = levels(shape, [row.halves[0], np.vstack(row.halves)])
        n, size, size2, time = row.singles.T
        level = (of_other or of_all) / row.pauses
        errors += np.abs(cost_of_work(shape, n, size, size2) * level / time - 1.0).tolist()
    return median(errors) if errors else 0.0
