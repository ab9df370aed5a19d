"""Plan: which rank takes which samples in each step of an epoch, and what its gradient counts."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from chronica_hvd import checks


@dataclass(frozen=True, eq=False)
class Plan:
    """The steps of one epoch for all ranks. Frozen; its arrays are read-only.

    Attributes
    ----------
    indices
        (entries,) dataset indices: step by step, rank by rank. A filler's repeated sample stands here too.
    offsets
        (steps · ranks + 1,) where in ``indices`` each rank's part of each step begins.
    counts
        (steps, ranks) real samples; 0 where a rank holds only a filler.
    weights
        (steps, ranks) the factor on the gradient of a rank's mean loss; a step's add up to ``ranks`` (to 0 where all
        its loss weights are 0; with ``loss_weight="sum"`` each is 1, a filler's 0).
    loads
        (steps, ranks) predicted time: cost · rank_scale ÷ speed, the fixed cost and fillers included.
    lower_bounds
        (steps,) no assignment of the step's samples has a smaller largest load.
    padding_waste
        1 − Σ size / Σ (n · max size): the share of the padded batches that is padding; 0 without padding.
    moved
        Share of the samples that changed their step.
    weight_spread
        Largest ÷ median total loss weight of a step.
    """

    indices: NDArray[np.int64]
    offsets: NDArray[np.int64]
    counts: NDArray[np.int64]
    weights: NDArray[np.float64]
    loads: NDArray[np.float64]
    lower_bounds: NDArray[np.float64]
    padding_waste: float
    moved: float
    weight_spread: float

    def __post_init__(self) -> None:
        for array in (self.indices, self.offsets, self.counts, self.weights, self.loads, self.lower_bounds):
            array.flags.writeable = False

    @property
    def steps(self) -> int:
        """Number of steps, the same on every rank."""
        return int(self.counts.shape[0])

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self.counts.shape[1])

    def batches(self, step: int, rank: int) -> list[NDArray[np.int64]]:
        """Return the micro-batches of a rank in a step, as read-only arrays of dataset indices."""
        first = self._place(step, rank)
        return [self.indices[self.offsets[first] : self.offsets[first + 1]]]

    def micro_weights(self, step: int, rank: int) -> NDArray[np.float64]:
        """Return the factor on the gradient of each micro-batch's mean loss; they add up to ``weights[step, rank]``."""
        self._place(step, rank)
        return self.weights[step, rank : rank + 1]

    def _place(self, step: int, rank: int) -> int:
        """Return where a rank's part of a step stands in ``offsets``; IndexError beyond the plan."""
        step = checks.integer("step", step)
        rank = checks.integer("rank", rank)
        if not (0 <= step < self.steps and 0 <= rank < self.ranks):
            raise IndexError(
                f"the plan has steps 0 to {self.steps - 1} on ranks 0 to {self.ranks - 1}, not ({step}, {rank})"
            )
        return step * self.ranks + rank

    @cached_property
    def makespans(self) -> NDArray[np.float64]:
        """(steps,) the largest load of each step."""
        largest: NDArray[np.float64] = self.loads.max(axis=1)
        largest.flags.writeable = False
        return largest

    @property
    def imbalance(self) -> float:
        """Σ makespan / Σ mean load: 1 means that nobody waits. Says nothing of the work that padding adds."""
        return _ratio(float(self.makespans.sum()), float(self.loads.mean(axis=1).sum()))

    @property
    def optimality(self) -> float:
        """Σ makespan / Σ lower bound: 1 means that no assignment of the same steps is faster."""
        return _ratio(float(self.makespans.sum()), float(self.lower_bounds.sum()))

    @cached_property
    def fingerprint(self) -> str:
        """Hash (16 hex digits) of who takes what with which weight; equal plans have equal ones on any machine."""
        digest = hashlib.blake2b(repr(self.counts.shape).encode(), digest_size=8)
        for array in (self.indices, self.offsets, self.counts, self.weights):
            little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
            digest.update(np.ascontiguousarray(little_endian).data)
        return digest.hexdigest()

    def __reduce__(self) -> tuple[type[Plan], tuple[object, ...]]:
        # Copies and pickles are made by the constructor, so that their arrays are read-only too.
        return Plan, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def __eq__(self, other: object) -> bool:
        return self.fingerprint == other.fingerprint if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"Plan({self.steps} steps on {self.ranks} ranks, {int(self.counts.sum())} samples, "
            f"imbalance {self.imbalance:.4f}, optimality {self.optimality:.4f}, "
            f"padding {self.padding_waste:.1%}, {self.fingerprint})"
        )


def _ratio(numerator: float, denominator: float) -> float:
    """Return a ratio that is at least 1 in exact arithmetic, and 1 for 0/0."""
    return max(1.0, numerator / denominator) if denominator > 0.0 else 1.0
