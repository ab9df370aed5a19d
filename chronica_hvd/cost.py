"""Model: what a micro-batch costs, predicted from the sizes of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from chronica_hvd import checks
from chronica_hvd.least_squares import solve, sums_of

COEFFICIENTS = ("fixed", "per_sample", "per_size", "per_size2")


@dataclass(frozen=True)
class CostModel:
    """Cost of a micro-batch: ``max(floor, fixed + per_sample · n + per_size · S1 + per_size2 · S2)``.

    n is its number of samples; S1 = Σ size and S2 = Σ size² without padding, S1 = n · max and S2 = n · max² where the
    samples are padded to the longest. The unit is the caller's (seconds, FLOPs, tokens): only ratios matter to a plan.
    The default is cost by size.

    Parameters
    ----------
    fixed, per_sample, per_size, per_size2
        The coefficients; finite, none negative.
    rank_scale
        How many times longer than predicted each rank takes, one positive number per rank; ``None``: all as predicted.
    floor
        The least a micro-batch costs, however small it is: where a device waits for the host to launch its work, small
        micro-batches all take the same time. Finite, not negative.

    Raises
    ------
    TypeError, ValueError
        A coefficient is not a number, negative or not finite; a rank's scale is not positive.
    """

    fixed: float = 0.0
    per_sample: float = 0.0
    per_size: float = 1.0
    per_size2: float = 0.0
    rank_scale: Sequence[float] | None = None
    floor: float = 0.0

    #: Whether the unit is FLOPs, so that timer records can carry the prediction as theirs.
    is_in_flops: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in (*COEFFICIENTS, "floor"):
            object.__setattr__(self, name, checks.real(name, getattr(self, name), least=0.0))
        if self.rank_scale is not None:
            scale = checks.non_negative("rank_scale", self.rank_scale)
            if (scale <= 0).any():
                raise ValueError(f"rank_scale must be positive on every rank, not {scale.tolist()}")
            object.__setattr__(self, "rank_scale", tuple(map(float, scale)))

    def sample_costs(self, sizes: NDArray[Any]) -> NDArray[np.float64]:
        """Return what each sample adds to its micro-batch, from its size (padded: of the longest, times n).

        The order of the operations is fixed and nothing is fused, so that every rank gets the same numbers.
        """
        size = checks.amounts("sizes", sizes)
        return self.per_sample + (self.per_size * size + self.per_size2 * (size * size))

    def predict(self, samples: Any, size: Any, size2: Any) -> Any:
        """Return the cost of micro-batches from n, S1 and S2 (numbers or arrays of one shape).

        Raises
        ------
        TypeError, ValueError
            One is not a number or an array of numbers, negative, not finite, or of another shape.
        """
        given = {"samples": samples, "size": size, "size2": size2}
        n, s1, s2 = (checks.amounts(name, values) for name, values in given.items())
        if len({n.shape, s1.shape, s2.shape} - {()}) > 1:
            raise ValueError(f"samples, size and size2 must have one shape, not {n.shape}, {s1.shape} and {s2.shape}")
        cost = cost_of_work(self, n, s1, s2)
        return cost if np.ndim(cost) else float(cost)

    @classmethod
    def fit(cls, records: Any, *, start: CostModel | None = None) -> FittedCost:
        """Fit the coefficients to measured times, in nanoseconds.

        Least squares of the *relative* errors with no coefficient negative (Lawson and Hanson 1974, chapter 23), on the
        columns [1, n, S1, S2], started from ``start``: its shape, scaled to the times, is what few records leave as it
        is and many replace. Outliers (first steps, garbage collection) are left out of the shape. Where small
        micro-batches take the same time whatever they hold, a floor is fitted beside; the form that predicts held-out
        records better is kept, the one without a floor if there is little between them.

        Parameters
        ----------
        records
            Structured array with the integer fields ``samples, size, size2, elapsed_ns``, as :meth:`StepTimer.drain`
            returns it; at least one record, of different shapes if more than one coefficient is to be told apart. Or a
            list of such arrays, one per rank: ``rank_scale`` is then fitted too, the median rank's being 1. ``size``
            and ``size2`` being integers, state sizes in a unit of which a sample has many: of sizes around 0.1 little
            is left.
        start
            What is believed so far, in any unit; ``None``: by size.

        Raises
        ------
        TypeError
            The fields are missing; ``start`` is not a CostModel.
        ValueError
            There are no records, or a value is not finite or negative, or a time 0.
        """
        from chronica_hvd.fit import fit_records  # which needs CostModel itself

        return fit_records(records, start)


@dataclass(frozen=True, repr=False)
class FittedCost(CostModel):
    """A :class:`CostModel` in nanoseconds that was fitted to measured times, and how far it can be trusted.

    Parameters
    ----------
    records
        How many records it stands on: outliers left out, and those of earlier refreshes counted the less the older.
    median_error
        The median |predicted − measured| ÷ measured of records that the fit had not seen, unless there is one only.
    comm
        Duration of the allreduce in nanoseconds; 0: not measured. Plans use it where their own ``comm`` is 0.
    """

    records: int = 0
    median_error: float = 0.0
    comm: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("records", "median_error", "comm"):
            kind = checks.integer if name == "records" else checks.real
            object.__setattr__(self, name, kind(name, getattr(self, name), least=0))

    @property
    def form(self) -> str:
        """``"additive"``, or ``"floor"`` where small micro-batches all take the same time."""
        return "floor" if self.floor > 0.0 else "additive"

    def __repr__(self) -> str:
        terms = zip(coefficients_of(self), ("", " · n", " · S1", " · S2"), strict=True)
        cost = " + ".join(f"{value:.4g}{of}" for value, of in terms if value) or "0"
        cost = f"max({self.floor:.4g}, {cost})" if self.floor else cost
        scale = "" if self.rank_scale is None else f", scales {', '.join(f'{one:.3g}' for one in self.rank_scale)}"
        comm = f", allreduce {self.comm:.4g} ns" if self.comm else ""
        return (
            f"FittedCost({cost} ns, {self.form}, from {self.records} records, median error {self.median_error:.1%}"
            f"{scale}{comm})"
        )


def coefficients_of(model: CostModel) -> tuple[float, float, float, float]:
    """Return fixed, per_sample, per_size and per_size2."""
    return model.fixed, model.per_sample, model.per_size, model.per_size2


def cost_of_work(model: CostModel, samples: Any, size: Any, size2: Any) -> Any:
    """Return what :meth:`CostModel.predict` does, of numbers that are known to be right."""
    cost = model.fixed + model.per_sample * samples + (model.per_size * size + model.per_size2 * size2)
    return np.maximum(model.floor, cost) if model.floor > 0.0 else cost


def non_negative_least_squares(columns: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    """Return x ≥ 0 that minimises |columns · x − target|², for (records, columns), to as many digits as there are.

    The normal equations tell which coefficients are 0 but have half of the others' digits.
    """
    solution = np.array(solve(sums_of(columns.T, target, np.ones(len(target)))))
    chosen = solution > 0.0
    scale = np.linalg.norm(columns[:, chosen], axis=0)
    solution[chosen] = np.maximum(0.0, np.linalg.lstsq(columns[:, chosen] / scale, target, rcond=None)[0] / scale)
    return [float(value) for value in solution]
