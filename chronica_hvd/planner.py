"""Plan: from sizes, costs and speeds to who takes what, one block of steps after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from chronica_hvd import _core, checks
from chronica_hvd.cost import CostModel
from chronica_hvd.options import PlanOptions
from chronica_hvd.plans import Plan

#: Steps that are planned at once, and between two comparisons of the ranks' plans.
BLOCK_STEPS = 64

#: A rank this many times slower than the fastest is a mistake rather than a machine.
LARGEST_SPEED_RATIO = 2.0**20


def plan(
    sizes: Any,
    ranks: Any,
    batch_size: int,
    *,
    indices: Any = None,
    cost: Any = None,
    padding: str = "max",
    local_batch: str = "free",
    reorder: str = "batch",
    window: int = 64,
    max_moved: float = 0.25,
    micro_batches: int | str = 1,
    max_size: float | None = None,
    pad_to: Any = None,
    comm: float = 0.0,
    min_local_batch: int = 1,
    normalize: str | None = None,
    shuffle: bool = True,
    seed: int = 0,
    epoch: int = 0,
    drop_last: bool = False,
    loss_weight: Any = "samples",
    policy: str = "balanced",
    first: str | None = None,
) -> Plan:
    """Plan an epoch: which rank takes which samples in which step, so that all ranks finish together.

    Pure and deterministic. Step k holds the samples that torch's ``DistributedSampler`` of the same seed and epoch
    gives all ranks in step k (its repeated tail aside); only who takes them is decided here.

    Parameters
    ----------
    sizes
        (samples,) size of every sample of the data set: integers or floats, not negative.
    ranks
        A count, or the relative speeds of the ranks (``[1, 1, 0.5]``: rank 2 is half as fast).
    batch_size
        Samples per rank and step on average; a step holds ``batch_size · ranks``, the last one what is left.
    indices
        Samples of this epoch in drawn order, as dataset indices; one given twice counts twice. ``None``: what
        ``DistributedSampler`` draws.
    cost
        A :class:`CostModel`; an array of each sample's cost (with ``padding="none"``); ``None``: cost by size.
    padding
        ``"max"``: a rank's samples are padded to its longest; ``"none"``: a sample costs what it costs alone.
    local_batch
        ``"free"``: any count of at least one; ``"equal"``: ``batch_size`` on every rank.
    shuffle, seed, epoch
        The drawn order, as for ``DistributedSampler``.
    drop_last
        Leave out the short last step.
    loss_weight
        What a sample counts in the denominator of the mean loss: ``"samples"`` (1), ``"sizes"`` (its size), an array
        (any weight per sample, not negative), or ``"sum"`` for losses that are summed, not averaged.
    reorder, window, max_moved, micro_batches, max_size, pad_to, comm, min_local_batch, normalize, policy, first
        Checked, but only their defaults are built.

    Raises
    ------
    TypeError, ValueError
        A value is not allowed: the message says what was given and what is allowed.
    NotImplementedError
        All values are allowed, but one asks for something not built yet.
    """
    options = PlanOptions(
        indices=indices,
        cost=cost,
        padding=padding,
        local_batch=local_batch,
        reorder=reorder,
        window=window,
        max_moved=max_moved,
        micro_batches=micro_batches,
        max_size=max_size,
        pad_to=pad_to,
        comm=comm,
        min_local_batch=min_local_batch,
        normalize=normalize,
        shuffle=shuffle,
        seed=seed,
        epoch=epoch,
        drop_last=drop_last,
        loss_weight=loss_weight,
        policy=policy,
        first=first,
    )
    planner = Planner(sizes, ranks, batch_size, options)
    options.refuse_unbuilt()
    return planner.plan(options.epoch)


class Planner:
    """The sizes, costs and options of a data set, checked once; plans any epoch.

    Attributes
    ----------
    speeds
        (ranks,) relative speed of each rank, as given; 1.0 each for a count.
    cost
        The :class:`CostModel`, or the (samples,) array of costs.
    effective_speeds
        (ranks,) speed ÷ rank_scale.
    """

    speeds: tuple[float, ...]
    cost: CostModel | NDArray[np.float64]

    def __init__(self, sizes: Any, ranks: Any, batch_size: int, options: PlanOptions) -> None:
        self.sizes = checks.non_negative("sizes", sizes)
        self.speeds = _speeds(ranks)
        self.batch_size = checks.integer("batch_size", batch_size, least=1, most=2**40)
        self.options = options
        self.indices = self._indices(options.indices)
        self.loss_weights = self._loss_weights(options.loss_weight)
        self.cost = self._cost(options.cost)
        self.effective_speeds = self._effective_speeds()
        self._check_costs()
        if options.min_local_batch > self.batch_size:
            raise ValueError(
                f"min_local_batch must be at most batch_size, {self.batch_size}; {options.min_local_batch} was given"
            )
        samples = self.sizes.size if self.indices is None else self.indices.size
        if options.drop_last and samples < self.global_batch:
            raise ValueError(
                f"drop_last leaves nothing: {samples} samples are fewer than one global batch of {self.batch_size} "
                f"on each of {self.ranks} ranks"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.speeds)

    @property
    def global_batch(self) -> int:
        """Samples in a full step, over all ranks."""
        return self.batch_size * self.ranks

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the samples of an epoch in drawn order: step k holds the k-th ``global_batch`` of them."""
        if self.indices is not None:
            order = self.indices
        elif self.options.shuffle:
            order = _core.permutation(self.sizes.size, (self.options.seed + epoch) % 2**64)
        else:
            order = np.arange(self.sizes.size, dtype=np.int64)
        if self.options.drop_last:
            order = order[: order.size // self.global_batch * self.global_batch]
        return order

    def plan(self, epoch: int) -> Plan:
        """Plan one epoch, block by block."""
        order = self.order(epoch)
        # A global batch beyond the data is one short step; the bound keeps absurd batch sizes within int64.
        global_batch = min(self.global_batch, max(order.size, self.ranks))
        block = BLOCK_STEPS * global_batch
        assigned = [
            self._assign(order[begin : begin + block], global_batch, begin) for begin in range(0, order.size, block)
        ]
        positions, counts, loads, bounds = (np.concatenate(parts) for parts in zip(*assigned, strict=True))
        counts = counts.reshape(-1, self.ranks)
        offsets = np.zeros(counts.size + 1, dtype=np.int64)
        np.cumsum(np.maximum(counts, 1).ravel(), out=offsets[1:])  # a filler holds one sample
        indices = order[positions]
        weights, weight_spread = self._weights(indices, offsets, counts)
        return Plan(
            indices=indices,
            offsets=offsets,
            parts=np.arange(counts.size + 1),
            lengths=np.maximum.reduceat(self.sizes[indices].astype(np.float64), offsets[:-1]),
            factors=weights.ravel().copy(),
            counts=counts,
            weights=weights,
            loads=loads.reshape(counts.shape),
            tails=loads.reshape(counts.shape) * (2 / 3),
            padding=self.options.padding,
            lower_bounds=bounds,
            padding_waste=self._padding_waste(indices, offsets, counts),
            moved=0.0,
            weight_spread=weight_spread,
        )

    def _assign(
        self, order: NDArray[np.int64], global_batch: int, begin: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Plan one block; its positions count from the beginning of the epoch."""
        if isinstance(self.cost, CostModel):
            costs, fixed = self.cost.sample_costs(self.sizes[order]), self.cost.fixed
        else:
            costs, fixed = self.cost[order], 0.0
        positions, _, counts, loads, bounds = _core.assign(
            costs,
            fixed,
            self.effective_speeds,
            global_batch=global_batch,
            padded=self.options.padding == "max",
            equal_counts=self.options.local_batch == "equal",
        )
        return positions + begin, counts, loads, bounds

    def _weights(
        self, indices: NDArray[np.int64], offsets: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], float]:
        """Return the gradient factors ranks · W_r / ΣW (0 where ΣW is 0), and the spread of the steps' ΣW."""
        if self.loss_weights is None:
            amounts = counts.astype(np.float64)
        else:
            amounts = np.add.reduceat(self.loss_weights[indices], offsets[:-1]).reshape(counts.shape)
            amounts[counts == 0] = 0.0
        totals = amounts.sum(axis=1, keepdims=True)
        median = float(np.median(totals))
        spread = float(totals.max()) / median if median > 0.0 else 1.0
        if isinstance(self.options.loss_weight, str) and self.options.loss_weight == "sum":
            return (counts > 0).astype(np.float64), spread
        return self.ranks * np.divide(amounts, totals, out=np.zeros_like(amounts), where=totals > 0.0), spread

    def _padding_waste(
        self, indices: NDArray[np.int64], offsets: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> float:
        if self.options.padding == "none":
            return 0.0
        sizes = self.sizes[indices].astype(np.float64)
        real = counts.ravel() > 0
        padded = float((counts.ravel() * np.maximum.reduceat(sizes, offsets[:-1]))[real].sum())
        held = float(np.add.reduceat(sizes, offsets[:-1])[real].sum())
        return max(0.0, 1.0 - held / padded) if padded > 0.0 else 0.0

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
        """Return each sample's loss weight; ``None`` where all weigh 1."""
        if isinstance(loss_weight, str):
            if loss_weight != "sizes":
                return None
            weights, what = self.sizes.astype(np.float64), "sizes (they are the loss weights)"
        else:
            weights, what = checks.non_negative("loss_weight", loss_weight).astype(np.float64), "loss_weight"
            checks.same_length("loss_weight", weights, self.sizes.size, "sample")
        used = weights if self.indices is None else weights[self.indices]
        if not used.any():
            raise ValueError(f"{what} must not be 0 for all samples of the epoch: no sample would count")
        return weights

    def _cost(self, cost: Any) -> CostModel | NDArray[np.float64]:
        if cost is None:
            return CostModel()
        if isinstance(cost, CostModel):
            if cost.rank_scale is not None and len(cost.rank_scale) != self.ranks:
                raise ValueError(
                    f"the cost's rank_scale must have one value per rank: {self.ranks} are needed, "
                    f"{len(cost.rank_scale)} were given"
                )
            return cost
        if callable(cost) or isinstance(cost, str):
            raise TypeError(f"cost must be a CostModel, an array of costs or None, not {cost!r}")
        costs = checks.non_negative("cost", cost).astype(np.float64)
        checks.same_length("cost", costs, self.sizes.size, "sample")
        if self.options.padding != "none":
            raise ValueError(
                'an array of costs needs padding="none": the cost of a padded batch is not a sum over samples'
            )
        return costs

    def _effective_speeds(self) -> NDArray[np.float64]:
        """Return (ranks,) speed ÷ rank_scale, what a rank's cost is divided by."""
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

    def _check_costs(self) -> None:
        """Refuse costs whose loads overflow, where the sizes would look innocent."""
        slowest = self.effective_speeds.min()
        with np.errstate(over="ignore"):
            if isinstance(self.cost, CostModel):
                largest = float(self.cost.sample_costs(self.sizes.max())) + self.cost.fixed
            else:
                largest = float(self.cost.max())
            samples = self.sizes.size if self.indices is None else self.indices.size
            # Every sample alone in its micro-batch, and a filler per rank: no sum of loads is larger.
            load = np.float64(largest) * (samples + self.ranks) / slowest
        if not np.isfinite(load):
            raise ValueError(
                f"the largest sample costs {largest:g} and the slowest rank has a speed of {slowest:g}: "
                "a rank's load would overflow; scale costs and speeds towards 1"
            )


def _speeds(ranks: Any) -> tuple[float, ...]:
    """Return the ranks' relative speeds from a count or a sequence."""
    if checks.dimensions("ranks", ranks) == 0:
        return (1.0,) * checks.integer("ranks", ranks, least=1, most=2**20)
    speeds = checks.vector("ranks (speeds)", ranks).astype(np.float64)
    if not (np.isfinite(speeds) & (speeds > 0)).all():
        raise ValueError(f"the ranks' speeds must be positive and finite, not {speeds.tolist()}")
    return tuple(map(float, speeds))
