"""Model: the shape of the cost, fitted to cells of all ranks.

Elementwise arithmetic and exactly rounded sums only: every rank gets the same bits from the same cells.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from chronica_hvd.cells import Cells
from chronica_hvd.cost import CostModel, coefficients_of, cost_of_work
from chronica_hvd.least_squares import Sums, added, solve, sums_of

#: Fewer records than these leave more of the start's shape the fewer they are.
FEW_RECORDS = 32
#: How far from the start's a coefficient's share of the time may be expected to lie.
EXPECTED_CHANGE = 0.3
#: Errors are relative to what is predicted; of what takes less than this share of the mean, to that: it matters less.
LEAST_SHARE_OF_MEAN = 0.1
#: Where less than this share of the time depends on the work, it is not known how; see :func:`bounded`.
LEAST_VARYING, BEYOND_LARGEST = 0.15, 1.5
#: Shape and free factors are found by turns, at most so many.
MOST_ROUNDS = 20
#: What is below the floor is found by turns, at most so many.
MOST_FLOORS = 8
#: Fewer cells below a floor do not show it.
LEAST_BELOW = 2


def levels(model: CostModel, groups: Sequence[Cells]) -> list[float]:
    """Return for each group all that was measured ÷ all that was predicted; 0 where it is empty or that is."""
    return [level_of(group, _predicted(model, group)) for group in groups]


def fit_shape(
    groups: Sequence[Cells],
    start: CostModel,
    factors: Sequence[float],
    free: Collection[int],
    *,
    with_floor: bool = False,
) -> CostModel:
    """Fit the shape to groups of cells.

    Parameters
    ----------
    groups
        Cells of each rank, and others that share a factor of their own.
    start
        Where the fit begins; measured ÷ factor is in its unit.
    factors
        (groups,) how many times longer than the shape says each group takes.
    free
        Which groups' factors are only where to begin, not known.
    with_floor
        Whether small micro-batches may all take the same time.
    """
    used = [place for place, group in enumerate(groups) if len(group) and factors[place] > 0.0]
    cells = [groups[place] for place in used]
    now = [factors[place] for place in used]
    is_free = [place in free for place in used]
    prior = start if start.floor == 0.0 else additive(coefficients_of(start))
    shape = prior
    for _ in range(3 if cells else 0):
        shape, now = _refit(cells, prior, shape, now, is_free)
    if cells and with_floor:
        at_one = [at_level(group, 1.0 / factor) for group, factor in zip(cells, now, strict=True)]
        shape = _with_floor(np.vstack(at_one), shape)
    return shape


def with_known_floor(shape: CostModel, known: CostModel, cells: Cells) -> CostModel:
    """Return the shape with the floor known before, if it has none and no cells would show it.

    Plans avoid micro-batches below the floor, so that nothing says any more that it is there.
    """
    if shape.floor > 0.0 or np.count_nonzero(_predicted(shape, cells) < known.floor) >= LEAST_BELOW:
        return shape
    return additive(coefficients_of(shape), known.floor)


def bounded(shape: CostModel, start: CostModel, cells: Cells) -> CostModel:
    """Return the shape, or where it says that all cells take about the same time, a floor with the start above it.

    What micro-batches cost that are larger than any measured is not known then, and must not be taken to be nothing: a
    plan would put everything into them. The floor ends somewhat beyond the largest cell, so that larger ones are tried.
    """
    by_start = _predicted(start, cells)
    largest = BEYOND_LARGEST * float(by_start.max(initial=0.0))
    # What of the time depends on the work: above the floor, where there is one.
    linear = _predicted(additive(coefficients_of(shape)), cells)
    above = _weighted_mean(cells[:, 0] * (linear > shape.floor), linear)
    mean = _weighted_mean(cells[:, 0], np.maximum(linear, shape.floor))
    if above - shape.fixed > LEAST_VARYING * above or largest <= 0.0 or by_start.max() == by_start.min():
        return shape
    return additive([one * mean / largest for one in coefficients_of(start)], floor=mean)


def compare(better: CostModel, than: CostModel, halves: Sequence[Cells]) -> tuple[float, float, float]:
    """Return by how much one model's relative errors are less than another's in sum, its variance, and the errors.

    Each group of cells has a level of its own, so that only shapes are compared.
    """
    gains: list[float] = []
    of_other: list[float] = []
    for cells in halves:
        if len(cells) < 2:
            continue
        errors = []
        for model in (than, better):
            predicted = _predicted(model, cells)
            predicted = predicted * level_of(cells, predicted)
            errors.append(cells[:, 0] * np.abs(cells[:, 4] - predicted) / _at_least(cells, predicted))
        of_other += errors[0].tolist()
        gains += (errors[0] - errors[1]).tolist()
    return math.fsum(gains), math.fsum(gain * gain for gain in gains), math.fsum(of_other)


def difference(model: CostModel, other: CostModel, cells: Cells) -> float:
    """Return by how much two shapes differ, as the root of the mean squared relative difference over the cells."""
    as_measured = cells.copy()
    as_measured[:, 4] = _predicted(model, cells)
    predicted = _predicted(other, cells)
    predicted = predicted * level_of(as_measured, predicted)
    error = (as_measured[:, 4] - predicted) / _at_least(cells, predicted)
    return math.sqrt(_weighted_mean(cells[:, 0], error * error))


def additive(coefficients: Sequence[float], floor: float = 0.0) -> CostModel:
    """Return the model of fixed, per_sample, per_size and per_size2."""
    fixed, per_sample, per_size, per_size2 = coefficients
    return CostModel(fixed, per_sample, per_size, per_size2, floor=floor)


def scaled(model: CostModel, factor: float) -> CostModel:
    """Return the model's shape in another unit."""
    return additive([one * factor for one in coefficients_of(model)], model.floor * factor)


def _refit(
    cells: list[Cells], start: CostModel, shape: CostModel, factors: list[float], is_free: list[bool]
) -> tuple[CostModel, list[float]]:
    """Return shape and factors of least squares, weighted by what ``shape`` predicts."""
    parts = []
    for group in cells:
        predicted = _at_least(group, _predicted(shape, group))
        columns = np.vstack([np.ones(len(group)), group[:, 1:4].T])
        parts.append(sums_of(columns, group[:, 4], group[:, 0] / (predicted * predicted)))
    counts = np.concatenate(cells)[:, 0].tolist()
    points, records = len(counts), math.fsum(counts)
    rounds = 0
    while True:
        total = added(part.with_target(1.0 / factor) for part, factor in zip(parts, factors, strict=True))
        coefficients = solve(_drawn_to(start, total, points, records))
        change = 0.0
        for place, part in enumerate(parts):
            across, square = part.fitted(coefficients)
            if is_free[place] and across > 0.0 and square > 0.0:
                change = max(change, abs(across / square / factors[place] - 1.0))
                factors[place] = across / square
        rounds += 1
        if change < 1e-5 or rounds == MOST_ROUNDS:
            return additive(coefficients), factors


def _drawn_to(start: CostModel, sums: Sums, points: int, records: float) -> Sums:
    """Add pseudo-records of the start to the sums: for each column, some whose work is in that column only.

    Their number weighs how much the times scatter against how much a coefficient may be expected to differ, so that it
    matters only for what was not measured; with few records at all there are more.
    """
    free = solve(sums)
    across, square = sums.fitted(free)
    scatter = max(0.0, sums.square - 2.0 * across + square) / max(1, points - len(free) + free.count(0.0))
    number = scatter / (EXPECTED_CHANGE * EXPECTED_CHANGE) + max(0.0, FEW_RECORDS / records - 1.0) / 4.0
    gram = [list(row) for row in sums.gram]
    moment = list(sums.moment)
    for place, coefficient in enumerate(coefficients_of(start)):
        added_weight = number * gram[place][place] / records
        gram[place][place] += added_weight
        moment[place] += added_weight * coefficient
    return Sums(gram, moment, sums.square)


def _with_floor(cells: Cells, shape: CostModel) -> CostModel:
    """Return the best fit with a floor that was found; ``shape`` where none was."""
    best, least = shape, math.inf
    ascending = sorted(cells[:, 4].tolist())
    for quarter in (1, 2, 3):
        trial = _with_floor_from(ascending[quarter * (len(ascending) - 1) // 4], cells, shape)
        if trial is None:
            continue
        predicted = _predicted(trial, cells)
        error = (cells[:, 4] - predicted) / _at_least(cells, predicted)
        squares = math.fsum((cells[:, 0] * error * error).tolist())
        if squares < least:
            best, least = trial, squares
    return best


def _with_floor_from(floor: float, cells: Cells, shape: CostModel) -> CostModel | None:
    """Return the fit that a floor leads to, if any.

    By turns: cells predicted below the floor make the floor, the others the rest.
    """
    count, time = cells[:, 0], cells[:, 4]
    linear = shape
    were_below = np.zeros(len(cells), dtype=np.bool_)
    for _ in range(MOST_FLOORS):
        predicted = _predicted(linear, cells)
        is_below = predicted < floor
        if not LEAST_BELOW <= np.count_nonzero(is_below) <= len(cells) - 2 * LEAST_BELOW:
            return None
        if (is_below == were_below).all():
            break
        were_below = is_below
        floor = _weighted_mean(count[is_below], time[is_below])
        above = cells[~is_below]
        expected = np.maximum(predicted[~is_below], floor)
        weight = above[:, 0] / (expected * expected)
        sums = sums_of(np.vstack([np.ones(len(above)), above[:, 1:4].T]), above[:, 4], weight)
        linear = additive(solve(_drawn_to(shape, sums, len(above), math.fsum(above[:, 0].tolist()))))
    return additive(coefficients_of(linear), floor)


def predicts_anything(model: CostModel, cells: Cells) -> bool:
    """Whether a model predicts any time for cells."""
    return bool(np.max(_predicted(model, cells), initial=0.0) > 0.0)


def at_level(cells: Cells, factor: float) -> Cells:
    """Return the cells with their times multiplied."""
    return np.column_stack([cells[:, :4], cells[:, 4] * factor])


def level_of(cells: Cells, predicted: NDArray[np.float64]) -> float:
    """Return all that cells took ÷ all that was predicted for them; 0 where that is 0."""
    total = math.fsum((cells[:, 0] * predicted).tolist())
    return math.fsum((cells[:, 0] * cells[:, 4]).tolist()) / total if total > 0.0 else 0.0


def _predicted(model: CostModel, cells: Cells) -> NDArray[np.float64]:
    predicted: NDArray[np.float64] = cost_of_work(model, cells[:, 1], cells[:, 2], cells[:, 3]) + np.zeros(len(cells))
    return predicted


def _at_least(cells: Cells, predicted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what errors are relative to."""
    least = LEAST_SHARE_OF_MEAN * _weighted_mean(cells[:, 0], predicted)
    return np.maximum(predicted, least) if least > 0.0 else np.ones(len(cells))


def _weighted_mean(weight: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    total = math.fsum(weight.tolist())
    return math.fsum((weight * values).tolist()) / total if total > 0.0 else 0.0
