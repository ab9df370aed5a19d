"""Plan: which rank takes which samples in each step of an epoch, and what its gradient counts."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
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
        (entries,) dataset indices: step by step, rank by rank, micro-batch by micro-batch. A filler's repeated samples
        stand here too.
    offsets
        (micro-batches + 1,) where in ``indices`` each micro-batch begins.
    parts
        (steps · ranks + 1,) where among the micro-batches each rank's part of each step begins.
    lengths
        (micro-batches,) the length that a micro-batch's samples are padded to; without padding the sum of their sizes.
    factors
        (micro-batches,) the factor on the gradient of each micro-batch's mean loss: see :meth:`micro_weights`.
    counts
        (steps, ranks) real samples; 0 where a rank holds only a filler.
    weights
        (steps, ranks) the factor on the gradient of the mean loss over all of a rank's samples. A step's add up to
        ``ranks`` (to 0 where all its loss weights are 0; with ``normalize="epoch"`` to more in a step of more than the
        mean loss weight). With ``loss_weight="sum"`` each is 1, a filler's 0.
    divisors
        (steps,) the total loss weight that a step's loss is divided by: its own, or with ``normalize="epoch"`` the
        epoch's mean. NaN with ``loss_weight="sum"``.
    loads
        (steps, ranks) predicted time: cost · rank_scale ÷ speed, fixed costs and fillers included.
    tails
        (steps, ranks) predicted time of the last micro-batch's backward pass, which the allreduce overlaps with.
    lower_bounds
        (steps,) no assignment of the step's samples has a smaller largest load.
    padding
        ``"max"`` or ``"none"``.
    padding_waste
        1 − Σ size / Σ (n · max size): the share of the padded batches that is padding; 0 without padding.
    moved
        Share of the samples that changed their step.
    weight_spread
        Largest ÷ median total loss weight of a step.
    """

    indices: NDArray[np.int64]
    offsets: NDArray[np.int64]
    parts: NDArray[np.int64]
    lengths: NDArray[np.float64]
    factors: NDArray[np.float64]
    counts: NDArray[np.int64]
    weights: NDArray[np.float64]
    divisors: NDArray[np.float64]
    loads: NDArray[np.float64]
    tails: NDArray[np.float64]
    lower_bounds: NDArray[np.float64]
    padding: str
    padding_waste: float
    moved: float
    weight_spread: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    @property
    def steps(self) -> int:
        """Number of steps, the same on every rank."""
        return int(self.counts.shape[0])

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self.counts.shape[1])

    def batches(self, step: int, rank: int) -> list[NDArray[np.int64]]:
        """Return the micro-batches of a rank in a step, as read-only arrays of dataset indices; the largest is last."""
        part = self.part(step, rank)
        borders = self.offsets[part.start : part.stop + 1].tolist()
        return [self.indices[first:end] for first, end in itertools.pairwise(borders)]

    def micro_weights(self, step: int, rank: int) -> NDArray[np.float64]:
        """Return the factor on the gradient of each micro-batch's mean loss.

        They add up to ``weights[step, rank]``; with ``loss_weight="sum"`` each is 1, a filler's 0.
        """
        return self.factors[self.part(step, rank)]

    def part(self, step: int, rank: int) -> slice:
        """Return which of all micro-batches are a rank's in a step; IndexError beyond the plan."""
        step = checks.integer("step", step)
        rank = checks.integer("rank", rank)
        if not (0 <= step < self.steps and 0 <= rank < self.ranks):
            raise IndexError(
                f"the plan has steps 0 to {self.steps - 1} on ranks 0 to {self.ranks - 1}, not ({step}, {rank})"
            )
        place = step * self.ranks + rank
        return slice(int(self.parts[place]), int(self.parts[place + 1]))

    @cached_property
    def makespans(self) -> NDArray[np.float64]:
        """(steps,) the largest load of each step."""
        return _frozen(self.loads.max(axis=1))

    def step_times(self, comm: float = 0.0) -> NDArray[np.float64]:
        """Return (steps,) the predicted time of each step with an allreduce of ``comm``, in the unit of cost.

        Horovod sends nothing before a rank's last backward pass of a step begins; from then on the two overlap. With
        the end T_r of a rank's compute and the duration d_r of its last backward pass a step takes
        max(max T_r, comm + max(T_r − d_r)).
        """
        comm = checks.real("comm", comm, least=0.0)
        return _frozen(np.maximum(self.makespans, comm + (self.loads - self.tails).max(axis=1)))

    def shapes(self) -> dict[tuple[int, int | float], int]:
        """Return how often each padded shape (samples, length) occurs, the largest first, fillers included.

        Without padding the length is the sum of the sizes.
        """
        pairs = np.stack([np.diff(self.offsets).astype(np.float64), self.lengths])
        (samples, lengths), times = np.unique(pairs, axis=1, return_counts=True)
        area = samples * lengths if self.padding == "max" else lengths
        order = np.lexsort((samples, area))[::-1]
        return {(int(samples[i]), _number(lengths[i])): int(times[i]) for i in order}

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
        for array in (self.indices, self.offsets, self.parts, self.counts, self.weights, self.factors):
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


def _frozen(array: NDArray[np.float64]) -> NDArray[np.float64]:
    array.flags.writeable = False
    return array


def _number(value: np.float64) -> int | float:
    """Return a whole number as an int."""
    return int(value) if value.is_integer() else float(value)
