"""Model: a rank's records since the last exchange, summed up in a row of fixed length that can be exchanged."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chronica_hvd import cells
from chronica_hvd.cells import Cells
from chronica_hvd.cost import CostModel, cost_of_work
from chronica_hvd.least_squares import Sums, solve
from chronica_hvd.shape import LEAST_SHARE_OF_MEAN, levels

#: Cells of each half of the records, and single records for the median error.
CELLS, SINGLES = 16, 16
_HEAD, _SINGLE = 5, 4
#: Length of a row.
ROW = _HEAD + 2 * CELLS * cells.COLUMNS + SINGLES * _SINGLE

#: Groups of consecutive records that a rank's speed is found from.
GROUPS = 8
#: No number of a row is as large: int64's squares, nor NaN.
LARGEST = 1e40
#: So many deviations from the rest a record is an outlier.
OUTLIER = 3.0
#: Where more than this share are no outliers, no floor is looked for; it must leave less than that of the errors.
FEW_OUTLIERS, LEAST_REST = 0.97, 0.9


class Row(NamedTuple):
    """What a row says of a rank.

    Attributes
    ----------
    records
        How many micro-batches were measured.
    step_time
        Mean compute of a step in nanoseconds.
    error
        Standard error of the rank's speed, relative to it.
    pauses
        How many times longer than the records without outliers all of them took on average: what is once in a while
        interrupted is slow.
    halves
        The cells of each half of the records, outliers left out, pauses in their times.
    singles
        (≤ SINGLES, 4) n, S1, S2 and time of some records of the second half.
    """

    records: float
    step_time: float
    error: float
    pauses: float
    halves: tuple[Cells, Cells]
    singles: NDArray[np.float64]

    @classmethod
    def unpack(cls, row: NDArray[np.float64]) -> Row | None:
        """Return what a row says; ``None`` where nothing was measured, or it is no row of ours."""
        values = np.asarray(row, dtype=np.float64)
        if values.shape != (ROW,) or not (values.min() >= 0.0 and values.max() < LARGEST and values[0] > 0.0):
            return None
        middle = _HEAD + CELLS * cells.COLUMNS
        end = middle + CELLS * cells.COLUMNS
        first, second = (
            half[(half[:, 0] > 0.0) & (half[:, 4] > 0.0)]
            for half in (part.reshape(CELLS, -1) for part in (values[_HEAD:middle], values[middle:end]))
        )
        singles = values[end:].reshape(SINGLES, _SINGLE)
        head = values[:_HEAD].tolist()
        if len(first) + len(second) == 0:
            return None
        return cls(
            head[0],
            head[2] / max(head[1], 1.0),
            head[3],
            max(head[4], 1e-9),
            (first, second),
            singles[singles[:, 3] > 0.0],
        )

    def errors(self, shape: CostModel) -> list[float]:
        """Return |predicted − measured| ÷ measured of the single records, by a shape fitted to the first half.

        The level is the first half's too, unless nothing is in there: of a record that is alone.
        """
        of_first, of_all = levels(shape, [self.halves[0], np.vstack(self.halves)])
        n, size, size2, time = self.singles.T
        predicted = cost_of_work(shape, n, size, size2) * ((of_first or of_all) / self.pauses)
        errors: list[float] = np.abs(predicted / time - 1.0).tolist()
        return errors


def summarize(records: NDArray[Any], model: CostModel) -> NDArray[np.float64]:
    """Return (ROW,) what the records say; zeros where they say nothing. Never raises for what the records hold.

    Parameters
    ----------
    records
        Structured array with the fields ``step, samples, size, size2, elapsed_ns``, oldest first.
    model
        What was believed; only its shape matters.
    """
    row = np.zeros(ROW)
    with np.errstate(all="ignore"):
        work = np.stack([records[name].astype(np.float64) for name in ("samples", "size", "size2", "elapsed_ns")])
        is_valid = (work >= 0.0).all(axis=0) & (work[3] > 0.0)
        work = work[:, is_valid]
        if work.shape[1] == 0:
            return row
        time = work[3]
        predicted, is_kept = _robust_fit(work[:3], time, model)
        level, error = _level(time, predicted)
        kept = work.copy()
        pauses = level * float(predicted[is_kept].sum() / time[is_kept].sum())
        kept[3] *= pauses
        steps = time.size
        if "step" in (records.dtype.names or ()):  # several loops may number theirs alike
            steps = np.count_nonzero(np.diff(records["step"][is_valid])) + 1
        row[:_HEAD] = time.size, steps, level * float(predicted.sum()), error, pauses
        # At random: consecutive records may differ as a step's micro-batches do, by turns.
        order = np.random.default_rng(0).permutation(time.size)
        halves = order[: time.size // 2], order[time.size // 2 :]
        for begin, half in zip((_HEAD, _HEAD + CELLS * cells.COLUMNS), halves, strict=True):
            of_half = kept[:, half[is_kept[half]]]
            merged = cells.merge(np.vstack([np.ones(of_half.shape[1]), of_half]).T, CELLS)
            row[begin : begin + merged.size] = merged.ravel()
        singles = work[:, halves[1][:SINGLES]].T
        row[ROW - SINGLES * _SINGLE :][: singles.size] = singles.ravel()
    return row if np.isfinite(row).all() else np.zeros(ROW)


def _robust_fit(
    work: NDArray[np.float64], time: NDArray[np.float64], model: CostModel
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return what a model fitted to most of these records predicts for all, and which are not outliers.

    The model has a floor where that leaves less unexplained: where most micro-batches are at the floor, those above it
    are no outliers.
    """
    additive = predicted, is_kept = _fit_to_most(work, time, model, 0.0)
    if is_kept.mean() > FEW_OUTLIERS:
        return additive
    floored = _fit_to_most(work, time, model, float(np.median(time)))
    errors, others = (float(np.abs(time / one - 1.0).clip(0.0, 1.0).mean()) for one in (predicted, floored[0]))
    return floored if others < LEAST_REST * errors else additive


def _fit_to_most(
    work: NDArray[np.float64], time: NDArray[np.float64], model: CostModel, floor: float
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Do what :func:`_robust_fit` says, with a floor that begins at this, or with none."""
    columns = np.vstack([np.ones_like(time), work])
    predicted = np.asarray(cost_of_work(model, *work), dtype=np.float64) + np.zeros_like(time)
    if not (predicted > 0.0).all():
        predicted = np.ones_like(time)
    is_kept = np.ones(time.size, dtype=np.bool_)
    is_above = predicted * float(np.median(time / predicted)) >= floor
    for turn in range(10):
        error = time / predicted
        middle = float(np.median(error))
        predicted = predicted * middle
        error = error / middle - 1.0
        spread = max(1.4826 * float(np.median(np.abs(error))), 1e-3)
        is_kept = np.abs(error) <= OUTLIER * spread
        # At first what deviates more than most counts less, so that even a third of outliers bends nothing; then not.
        softly = np.minimum(1.0, spread / np.maximum(np.abs(error), spread)) ** 2
        weight = (softly if turn < 7 else is_kept.astype(np.float64)) * is_above
        weighted = columns * (weight / np.maximum(predicted, LEAST_SHARE_OF_MEAN * float(predicted.mean())) ** 2)
        sums = Sums((weighted @ columns.T).tolist(), (weighted @ time).tolist(), float(weighted[0] @ (time * time)))
        fitted = np.asarray(solve(sums)) @ columns
        if floor > 0.0 and not is_above.all():
            floor = float(np.median(time[~is_above]))
        is_above = fitted >= floor
        fitted = np.maximum(fitted, floor)
        if not (np.isfinite(fitted).all() and fitted.min() > 0.0):
            break
        predicted = fitted
    return predicted, is_kept


def _level(time: NDArray[np.float64], predicted: NDArray[np.float64]) -> tuple[float, float]:
    """Return measured ÷ predicted, and its relative standard error.

    The mean over groups of consecutive records, none of which may be further from their median than records differ
    within groups: a pause that returns again and again counts in full, one that comes once does not.
    """
    groups = np.array_split(np.stack([time, predicted]), min(GROUPS, time.size), axis=1)
    means = np.array([float(took.sum() / said.sum()) for took, said in groups])
    middle = float(np.median(means))
    within = float(np.median([_error_of_mean(*group) for group in groups]))
    between = 1.4826 * float(np.median(np.abs(means - middle)))
    most = 2.0 * max(within, between, 0.005 * middle)
    means = means.clip(middle - most, middle + most)
    level = float(means.mean())
    of_groups = float(means.std(ddof=1)) if means.size > 1 else 0.0
    # How much very few records differ says little: of one, nothing.
    return level, max(max(of_groups, within) / np.sqrt(means.size) / level, 4.0 / time.size**2)


def _error_of_mean(time: NDArray[np.float64], predicted: NDArray[np.float64]) -> float:
    """Return the standard error of Σ time ÷ Σ predicted; 0 for one record."""
    if time.size < 2:
        return 0.0
    rest = time - predicted * (time.sum() / predicted.sum())
    return float(np.sqrt((rest * rest).sum() * time.size / (time.size - 1)) / predicted.sum())
