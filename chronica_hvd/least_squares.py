"""Model: least squares with no coefficient negative, from sums that can be added up over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: What more coefficients must take away from the weighted sum of squares: a tie keeps the simpler model.
TIE = 1e-11


class Sums(NamedTuple):
    """The normal equations of a weighted least squares problem.

    Attributes
    ----------
    gram
        Σ weight · column · column, row by row of the symmetric matrix.
    moment
        Σ weight · column · target.
    square
        Σ weight · target².
    """

    gram: Sequence[Sequence[float]]
    moment: Sequence[float]
    square: float

    def with_target(self, factor: float) -> Sums:
        """Return the sums of the same columns with ``target · factor``."""
        return Sums(self.gram, [one * factor for one in self.moment], self.square * factor * factor)

    def fitted(self, coefficients: Sequence[float]) -> tuple[float, float]:
        """Return Σ weight · prediction · target, and Σ weight · prediction²."""
        across = math.fsum(x * m for x, m in zip(coefficients, self.moment, strict=True))
        products = (math.fsum(g * x for g, x in zip(row, coefficients, strict=True)) for row in self.gram)
        return across, math.fsum(x * product for x, product in zip(coefficients, products, strict=True))


def sums_of(columns: NDArray[np.float64], target: NDArray[np.float64], weight: NDArray[np.float64]) -> Sums:
    """Return the sums of (columns, records), the same to the last bit on every machine."""
    weighted = columns * weight
    size = len(columns)
    gram = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i, size):
            gram[i][j] = gram[j][i] = math.fsum((weighted[i] * columns[j]).tolist())
    moment = [math.fsum((one * target).tolist()) for one in weighted]
    return Sums(gram, moment, math.fsum((weight * target * target).tolist()))


def added(parts: Iterable[Sums]) -> Sums:
    """Return the sums of all records together."""
    grams, moments, squares = zip(*parts, strict=True)
    gram = [[math.fsum(of_ranks) for of_ranks in zip(*rows, strict=True)] for rows in zip(*grams, strict=True)]
    return Sums(gram, [math.fsum(of_ranks) for of_ranks in zip(*moments, strict=True)], math.fsum(squares))


def solve(sums: Sums) -> list[float]:
    """Return the coefficients, none negative, of the least sum of squares.

    With few columns the problem is solved exactly by solving the unconstrained one for every subset of them and keeping
    the best whose solution is not negative (Lawson and Hanson 1974, chapter 23, describe the problem).
    """
    size = len(sums.moment)
    scale = [math.sqrt(sums.gram[i][i]) for i in range(size)]
    columns = [i for i in range(size) if scale[i] > 0.0]
    gram = {(i, j): sums.gram[i][j] / scale[i] / scale[j] for i in columns for j in columns}
    moment = {i: sums.moment[i] / scale[i] for i in columns}
    best, gained = [0.0] * size, 0.0
    for chosen in (subset for count in range(1, len(columns) + 1) for subset in combinations(columns, count)):
        solution = _solved([[gram[i, j] for j in chosen] for i in chosen], [moment[i] for i in chosen])
        if solution is None or min(solution) < 0.0:
            continue
        gain = math.fsum(x * moment[i] for x, i in zip(solution, chosen, strict=True))  # of the sum of squares
        if gain > gained + TIE * sums.square:
            best, gained = [0.0] * size, gain
            for x, i in zip(solution, chosen, strict=True):
                best[i] = x / scale[i]
    return best


def _solved(matrix: list[list[float]], target: list[float]) -> list[float] | None:
    """Solve a positive definite system with ones on its diagonal by elimination; ``None`` where it is singular."""
    size = len(target)
    for i in range(size):
        if matrix[i][i] < 1e-10:
            return None
        for k in range(i + 1, size):
            factor = matrix[k][i] / matrix[i][i]
            for j in range(i, size):
                matrix[k][j] -= factor * matrix[i][j]
            target[k] -= factor * target[i]
    for i in range(size - 1, -1, -1):
        for j in range(i + 1, size):
            target[i] -= matrix[i][j] * target[j]
        target[i] /= matrix[i][i]
    return target
