"""Model: cells, groups of alike micro-batches, so that many records are told in few numbers.

A cell is five floats: how many records it stands for, and their mean n, S1, S2 and time. A model that is linear in n,
S1 and S2 says of these means just what it says of the records on average. Every rank merges the same cells to the same
bits: elementwise arithmetic, stable sorting and exactly rounded sums only.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

#: (cells, 5) of count, n, S1, S2, time.
Cells = NDArray[np.float64]

COLUMNS = 5
NONE: Cells = np.zeros((0, COLUMNS))


def merge(cells: Cells, most: int) -> Cells:
    """Return at most so many cells that hold the same records, alike ones together; empty ones are left out."""
    cells = cells[cells[:, 0] > 0.0]
    if len(cells) <= most:
        return cells
    _, samples, size, size2, _ = cells.T
    # What tells shapes apart: their number of samples, the mean size, and how far sizes differ within.
    keys = np.stack([samples, _ratio(size, samples), _ratio(size2, size)])
    keys += 1e-3 * keys.max(axis=1, keepdims=True)  # so that next to nothing is not infinitely far from it
    groups = [np.arange(len(cells))]
    while 2 * len(groups) <= most:
        halves = [half for group in groups for half in _halves(keys, group)]
        if len(halves) == len(groups):
            break
        groups = halves
    return np.array([_mean(cells[group]) for group in groups])


def _halves(keys: NDArray[np.float64], group: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the halves of a group along what differs most in it; the group itself where all are alike."""
    of_group = keys[:, group]
    spread = _ratio(of_group.max(axis=1), of_group.min(axis=1))
    if spread.max() <= 1.0:
        return [group]
    order = group[np.argsort(of_group[int(np.argmax(spread))], kind="stable")]
    return [order[: len(order) // 2], order[len(order) // 2 :]]


def _mean(cells: Cells) -> list[float]:
    count = math.fsum(cells[:, 0].tolist())
    return [count, *(math.fsum(column) / count for column in (cells[:, 1:] * cells[:, :1]).T.tolist())]


def _ratio(numerator: NDArray[np.float64], denominator: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0.0)
