"""Plan: what is to be planned, checked once: sizes, what they cost on which rank, and what samples count."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chronica_hvd import checks
from chronica_hvd.cost import CostModel, FittedCost
from chronica_hvd.measured import Measured
from chronica_hvd.options import PlanOptions
from chronica_hvd.timing import Work

#: A rank this many times slower than the fastest is a mistake rather than a machine.
LARGEST_SPEED_RATIO = 2.0**20


class Workload:
    """The samples of a data set and the ranks that share them.

    Attributes
    ----------
    sizes
        (samples,) as given, read in place where possible.
    speeds
        (ranks,) relative speed of each rank, as given; 1.0 each for a count.
    indices
        The samples of every epoch in drawn order, or ``None`` where they are drawn anew.
    cost
        The :class:`CostModel`, or the (samples,) array of costs.
    loss_weights
        (samples,) or ``None`` where all weigh 1.
    effective_speeds
        (ranks,) speed ÷ rank_scale.
    comm
        Duration of the allreduce, of the options or, where they say 0, of a fitted cost.
    """

    sizes: NDArray[Any]
    speeds: tuple[float, ...]
    cost: CostModel | NDArray[np.float64]

    def __init__(self, sizes: Any, ranks: Any, options: PlanOptions) -> None:
        self.sizes = checks.non_negative("sizes", sizes)
        self.speeds = _speeds(ranks)
        self._pad_to = options.pad_to
        self._is_padded = options.padding == "max"
        self.indices = self._indices(options.indices)
        self.loss_weights = self._loss_weights(options.loss_weight)
        self._refuse_oversized(options.max_size)
        self._is_cut = options.micro_batches != 1
        self.cost = self._cost(options.cost, self._is_cut)
        self.comm = options.comm or (self.cost.comm if isinstance(self.cost, FittedCost) else 0.0)
        self.effective_speeds = self._effective_speeds()
        self._check_costs(options.min_local_batch)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.speeds)

    @property
    def samples(self) -> int:
        """Number of samples of an epoch, before any is dropped."""
        return int(self.sizes.size if self.indices is None else self.indices.size)

    @property
    def fixed_cost(self) -> float:
        """What every micro-batch costs besides its samples, for the solvers.

        They know of no floor. With one micro-batch a rank that makes no difference to the longest rank; with several,
        small ones must not look cheap.
        """
        return max(self.own_fixed_cost, self.floor) if self._is_cut else self.own_fixed_cost

    @property
    def own_fixed_cost(self) -> float:
        """What every micro-batch costs besides its samples."""
        return self.cost.fixed if isinstance(self.cost, CostModel) else 0.0

    @property
    def floor(self) -> float:
        """What a micro-batch costs at least."""
        return self.cost.floor if isinstance(self.cost, CostModel) else 0.0

    def keep_sizes(self) -> None:
        """Keep sizes of our own, that nobody changes; those of a memory map stay where they are."""
        if not isinstance(self.sizes, np.memmap):
            self.sizes = self.sizes.copy()

    def lengths(self, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the size each sample is computed at when it is its batch's longest: after ``pad_to``."""
        return self._padded(self.sizes[samples])

    def costs(self, samples: NDArray[np.int64], lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what each sample adds to its micro-batch (padded: where it is the longest)."""
        return self.cost.sample_costs(lengths) if isinstance(self.cost, CostModel) else self.cost[samples]

    def work(self, batch: NDArray[np.int64], length: float) -> Work:
        """Return what is computed for a micro-batch of these samples, padded to ``length``."""
        samples = len(batch)
        if self._is_padded:
            size, size2 = samples * length, samples * length**2
        else:
            sizes = self.lengths(batch)
            size, size2 = float(sizes.sum()), float((sizes * sizes).sum())
        flops = 0.0
        if isinstance(self.cost, CostModel) and self.cost.is_in_flops:
            # Without what is fixed, which stands for time, not operations.
            flops = self.cost.per_sample * samples + (self.cost.per_size * size + self.cost.per_size2 * size2)
        return Work(samples, *(min(round(amount), checks.LARGEST_INT64) for amount in (size, size2, flops)))

    def works(
        self, samples: NDArray[np.int64], offsets: NDArray[np.int64], lengths: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return n, S1 and S2 of consecutive micro-batches; ``offsets`` says where each begins, and the last ends."""
        held = np.diff(offsets).astype(np.float64)
        if self._is_padded:
            return held, held * lengths, held * lengths**2
        sizes = self.lengths(samples)
        return held, np.add.reduceat(sizes, offsets[:-1]), np.add.reduceat(sizes * sizes, offsets[:-1])

    def _padded(self, sizes: NDArray[Any]) -> NDArray[np.float64]:
        lengths: NDArray[np.float64] = sizes.astype(np.float64)
        if self._pad_to is None:
            return lengths
        if np.ndim(self._pad_to) == 0:
            return self._pad_to * np.ceil(lengths / self._pad_to)  # type: ignore[no-any-return]
        allowed: NDArray[np.float64] = np.unique(np.asarray(self._pad_to, dtype=np.float64))
        return allowed[np.minimum(np.searchsorted(allowed, lengths), allowed.size - 1)]

    def _used(self, values: NDArray[Any]) -> NDArray[Any]:
        return values if self.indices is None else values[self.indices]

    def _indices(self, indices: Any) -> NDArray[np.int64] | None:
        if indices is None:
            return None
        array = checks.non_negative("indices", indices)
        if array.dtype.kind == "f":
            raise TypeError(f"indices must hold integers, not {array.dtype}")
        if array.max() >= self.sizes.size:
            raise ValueError(f"indices must be below the number of sizes, {self.sizes.size}; {array.max()} was given")
        return array.astype(np.int64)

    def _loss_weights(self, loss_weight: Any) -> NDArray[np.float64] | None:
        if isinstance(loss_weight, str):
            if loss_weight != "sizes":
                return None
            weights, what = self.sizes.astype(np.float64), "sizes (they are the loss weights)"
        else:
            weights, what = checks.non_negative("loss_weight", loss_weight).astype(np.float64), "loss_weight"
            checks.same_length("loss_weight", weights, self.sizes.size, "sample")
        if not self._used(weights).any():
            raise ValueError(f"{what} must not be 0 for all samples of the epoch: no sample would count")
        return weights

    def _refuse_oversized(self, max_size: float | None) -> None:
        """Refuse a sample that no allowed length or micro-batch can hold."""
        used = self._used(self.sizes)
        position = int(np.argmax(used))
        sample = position if self.indices is None else int(self.indices[position])
        largest = f"sample {sample} has a size of {self.sizes[sample]}"
        if self._pad_to is not None and np.ndim(self._pad_to) > 0 and used[position] > np.max(self._pad_to):
            raise ValueError(f"{largest}, more than the largest length of pad_to, {np.max(self._pad_to)}")
        length = float(self._padded(used[position : position + 1])[0])
        if max_size is not None and length > max_size:
            padded = f", padded to {length:g}" if length != used[position] else ""
            raise ValueError(
                f"{largest}{padded}, more than max_size, {max_size:g}: no micro-batch may hold it. "
                "Raise max_size, or cut or leave out such samples"
            )

    def _cost(self, cost: Any, cut: bool) -> CostModel | NDArray[np.float64]:
        if cost is None:
            # By size alone a micro-batch would cost nothing, and every length would get its own.
            return CostModel(fixed=_mean(self.sizes)) if cut and self._is_padded else CostModel()
        if isinstance(cost, CostModel):
            if cost.rank_scale is not None and len(cost.rank_scale) != self.ranks:
                raise ValueError(
                    f"the cost's rank_scale must have one value per rank: {self.ranks} are needed, "
                    f"{len(cost.rank_scale)} were given"
                )
            if cost.is_in_flops and cost.fixed == 0.0 and cut and self._is_padded:
                return dataclasses.replace(cost, fixed=float(cost.sample_costs(np.array(_mean(self.sizes)))))
            return cost
        if isinstance(cost, Measured):
            raise TypeError("cost=Measured(...) is for a BatchSampler, which measures; a plan takes its sampler.cost")
        if callable(cost) or isinstance(cost, str):
            raise TypeError(f"cost must be a CostModel, an array of costs or None, not {cost!r}")
        costs = checks.non_negative("cost", cost).astype(np.float64)
        checks.same_length("cost", costs, self.sizes.size, "sample")
        if self._is_padded:
            raise ValueError(
                'an array of costs needs padding="none": the cost of a padded batch is not a sum over samples'
            )
        return costs

    def _effective_speeds(self) -> NDArray[np.float64]:
        scale: Any = 1.0
        if isinstance(self.cost, CostModel) and self.cost.rank_scale is not None:
            scale = np.asarray(self.cost.rank_scale)
        with np.errstate(over="ignore", under="ignore"):
            speeds: NDArray[np.float64] = np.asarray(self.speeds) / scale
        if not (np.isfinite(speeds) & (speeds > 0.0)).all():
            raise ValueError(f"speed ÷ rank_scale must be positive and finite on every rank, not {speeds.tolist()}")
        if speeds.max() / LARGEST_SPEED_RATIO > speeds.min():
            raise ValueError(
                f"the ranks' speeds must not differ by more than a factor of {LARGEST_SPEED_RATIO:g}, "
                f"not as {speeds.tolist()} do; leave out a rank that slow"
            )
        return speeds

    def _check_costs(self, fillers: int) -> None:
        """Refuse costs whose loads overflow, where the sizes would look innocent."""
        slowest = self.effective_speeds.min()
        with np.errstate(over="ignore"):
            if isinstance(self.cost, CostModel):
                largest = float(self.cost.sample_costs(self._padded(self.sizes.max(keepdims=True)))[0])
            else:
                largest = float(self.cost.max())
            # Every sample alone in its micro-batch, and each rank's fillers: no sum of loads is larger.
            each = np.float64(largest) + max(self.fixed_cost, self.floor)
            load = each * (float(self.samples) + float(self.ranks) * fillers) / slowest
        if not np.isfinite(load):
            raise ValueError(
                f"the largest sample costs {each:g} and the slowest rank has a speed of {slowest:g}: "
                "a rank's load would overflow; scale costs and speeds towards 1"
            )


def _mean(sizes: NDArray[Any]) -> float:
    """Return the mean, summed in the order of the samples: the same on every machine."""
    chunk = 1 << 16
    total = 0.0
    for first in range(0, sizes.size, chunk):
        total += float(np.cumsum(sizes[first : first + chunk], dtype=np.float64)[-1])
    return total / sizes.size


def _speeds(ranks: Any) -> tuple[float, ...]:
    """Return the ranks' relative speeds from a count or a sequence."""
    if checks.dimensions("ranks", ranks) == 0:
        return (1.0,) * checks.integer("ranks", ranks, least=1, most=2**20)
    speeds = checks.vector("ranks (speeds)", ranks).astype(np.float64)
    if not (np.isfinite(speeds) & (speeds > 0)).all():
        raise ValueError(f"the ranks' speeds must be positive and finite, not {speeds.tolist()}")
    return tuple(map(float, speeds))
