"""Plan: from sizes, costs and speeds to who takes what, one block of steps after the other."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chronica_hvd import _core, checks
from chronica_hvd.blocks import Assigned, assign, offsets
from chronica_hvd.cost import CostModel
from chronica_hvd.options import PlanOptions
from chronica_hvd.plans import Plan
from chronica_hvd.reorder import reordered
from chronica_hvd.workload import Workload


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

    Pure, deterministic, and the same on every machine. Step k holds the samples that torch's ``DistributedSampler`` of
    the same seed and epoch gives all ranks in step k (its repeated tail aside); only who takes them, in which
    micro-batches, is decided here (but see ``reorder`` and ``first``). Of all ways the plan aims at the least makespan
    (largest load of a step), then the least total load, then even counts. Threads: one, or ``CHRONICA_THREADS`` of the
    environment.

    Parameters
    ----------
    sizes
        (samples,) size of every sample of the data set: integers or floats, not negative.
    ranks
        A count, or the relative speeds of the ranks (``[1, 1, 0.5]``: rank 2 is half as fast).
    batch_size
        Samples per rank and step on average; a step holds ``batch_size · ranks``, the last one what is left.
    indices
        Samples of this (with a sampler: of every) epoch in drawn order, as dataset indices; one given twice counts
        twice. ``None``: what ``DistributedSampler`` draws.
    cost
        A :class:`CostModel`; an array of each sample's cost (with ``padding="none"``); ``None``: cost by size. Then a
        padded micro-batch also costs the mean size whatever is in it, if there may be several.
    padding
        ``"max"``: a micro-batch's samples are padded to its longest; ``"none"``: a sample costs what it costs alone.
    local_batch
        ``"free"``: any count of at least ``min_local_batch``; ``"equal"``: ``batch_size`` on every rank (in the short
        last step ⌊m ÷ ranks⌋ or one more).
    reorder
        ``"batch"``: samples stay in the step they were drawn for. ``"window"``: the largest ones of a window are
        gathered in few steps, where a sample that outweighs a rank's share keeps nobody waiting. Every step keeps its
        number of samples, and the short last step is left alone.
    window
        Steps in a window; more than the epoch has: the whole epoch.
    max_moved
        Share of a window's samples that may change their step.
    micro_batches
        At most so many per rank and step, or ``"auto"``: as many as pay off, never slower than one.
    max_size
        Largest micro-batch allowed, as samples · longest (``padding="none"``: Σ size). ``None``: the largest that plain
        batches of the epoch would have, on ranks of more than mean speed (÷ rank_scale) more in proportion; a plan
        never fails for it. Fillers, the shares of a policy other than ``"balanced"``, and with one micro-batch a rank
        the steps in which ``reorder="window"`` gathers large samples may exceed it.
    pad_to
        Lengths are padded to a multiple of this integer, or to the next of these lengths, so that there are few shapes.
    comm
        Duration of the allreduce, in the unit of cost; 0: that of a :class:`FittedCost`. It overlaps with
        the last backward pass of a step only: see :meth:`Plan.step_times`, which is then what the plan minimises.
    min_local_batch
        Least samples of a rank. Only where a step has too few, ranks without real samples repeat its cheapest ones, so
        many of them, with weight 0.
    normalize
        ``"step"``: each step's loss is divided by the step's total loss weight (what ``None`` means with
        ``reorder="batch"``). ``"epoch"``: by the epoch's mean total, so that each unit of weight counts alike. To be
        chosen with ``reorder="window"`` and a ``loss_weight`` other than ``"samples"``.
    shuffle, seed, epoch
        The drawn order, as for ``DistributedSampler``.
    drop_last
        Leave out the short last step.
    loss_weight
        What a sample counts in the denominator of the mean loss: ``"samples"`` (1), ``"sizes"`` (its size), an array
        (any weight per sample, not negative), or ``"sum"`` for losses that are summed, not averaged.
    policy
        ``"balanced"``: as said above. ``"plain"``: rank r takes every ranks-th sample of a step from the r-th on, as
        with ``DistributedSampler``. ``"static"``, ``"dynamic"``, ``"guided"``: those of Chronica (CCGrid 2023, doi
        10.1109/CCGrid57682.2023.00033), by cost, over a step or with ``reorder="window"`` over a window, which they
        deal anew: ``max_moved`` does not bind them. All four have equal counts.
    first
        ``"largest"``: the step with the largest micro-batch changes places with the first one, so that memory runs out
        at once or never.

    Raises
    ------
    TypeError, ValueError
        A value is not allowed: the message says what was given and what is allowed. No way was found to keep
        ``max_size``: the message names the sample or the step.
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
    return Planner(sizes, ranks, batch_size, options).plan(options.epoch)


class Planner:
    """Plans any epoch of a data set whose sizes, costs and options were checked once."""

    def __init__(self, sizes: Any, ranks: Any, batch_size: int, options: PlanOptions) -> None:
        self.workload = Workload(sizes, ranks, options)
        self.batch_size = checks.integer("batch_size", batch_size, least=1, most=2**40)
        self.options = options
        if options.min_local_batch > self.batch_size:
            raise ValueError(
                f"min_local_batch must be at most batch_size, {self.batch_size}; {options.min_local_batch} was given"
            )
        if options.drop_last and self.workload.samples < self.global_batch:
            raise ValueError(
                f"drop_last leaves nothing: {self.workload.samples} samples are fewer than one global batch of "
                f"{self.batch_size} on each of {self.workload.ranks} ranks"
            )

    def with_cost(self, cost: CostModel) -> Planner:
        """Return a planner of the same data and options by another cost, which knows its allreduce itself.

        Raises
        ------
        ValueError
            The ranks' loads or speeds would be out of range.
        """
        options = dataclasses.replace(self.options, cost=cost, comm=0.0, indices=self.workload.indices)
        return Planner(self.workload.sizes, self.workload.speeds, self.batch_size, options)

    @property
    def global_batch(self) -> int:
        """Samples in a full step, over all ranks."""
        return self.batch_size * self.workload.ranks

    @property
    def keeps_order(self) -> bool:
        """Whether step k holds the k-th ``global_batch`` of the samples that it is given to plan."""
        return self.options.reorder == "batch" and self.options.first is None

    def order(self, epoch: int, left: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Return the samples of an epoch in drawn order: step k draws the k-th ``global_batch`` of them.

        ``left``: which places of that order are to be planned, ascending; ``None``: all.
        """
        if self.workload.indices is not None:
            order = self.workload.indices
        elif self.options.shuffle:
            order = _core.permutation(self.workload.samples, (self.options.seed + epoch) % 2**64)
        else:
            order = np.arange(self.workload.samples, dtype=np.int64)
        if left is not None:
            order = order[left]
        if self.options.drop_last:
            order = order[: order.size // self.global_batch * self.global_batch]
        return order

    def plan(self, epoch: int, left: NDArray[np.int64] | None = None) -> Plan:
        """Plan one epoch, or those places of its drawn order that are ``left``."""
        work, options = self.workload, self.options
        drawn = self.order(epoch, left)
        if drawn.size == 0:
            return self._plan_of_nothing()
        # A global batch beyond the data is one short step; the bound keeps absurd batch sizes within int64.
        global_batch = min(self.global_batch, -(-drawn.size // work.ranks) * work.ranks)
        lengths = work.lengths(drawn)
        capacity = self._capacity(lengths)
        order, places = drawn, None
        if options.reorder != "batch" or options.policy != "balanced":
            places = reordered(work.costs(drawn, lengths), work, options, global_batch, options.seed + epoch)
        if places is not None:
            order, lengths = drawn[places], lengths[places]
        assigned = assign(order, lengths, capacity, work, options, global_batch)
        del lengths
        if options.first == "largest":
            full_steps = max(1, drawn.size // global_batch)
            assigned = assigned.with_largest_first(full_steps, options.padding == "max")
        indices = order[assigned.places]
        shape = (assigned.bounds.size, work.ranks)
        mean_total = None
        if options.normalize == "epoch":  # of the whole epoch, however much of it is left
            mean_total = self._mean_total(drawn if left is None else self.order(epoch))
        factors, weights, divisors, spread = self._weights(indices, assigned, mean_total)
        return Plan(
            indices=indices,
            offsets=offsets(assigned.held),
            parts=offsets(assigned.micro_batches),
            lengths=assigned.lengths,
            factors=factors,
            counts=assigned.counts.reshape(shape),
            weights=weights,
            divisors=divisors,
            loads=assigned.loads.reshape(shape),
            tails=assigned.tails.reshape(shape),
            lower_bounds=assigned.bounds,
            padding=options.padding,
            padding_waste=self._padding_waste(drawn, assigned),
            moved=self._moved(assigned, places, global_batch),
            weight_spread=spread,
        )

    def _plan_of_nothing(self) -> Plan:
        """Return a plan without steps: the epoch is over."""
        whole, real = np.empty(0, dtype=np.int64), np.empty(0)
        per_rank = np.empty((0, self.workload.ranks))
        return Plan(
            indices=whole,
            offsets=np.zeros(1, dtype=np.int64),
            parts=np.zeros(1, dtype=np.int64),
            lengths=real,
            factors=real,
            counts=per_rank.astype(np.int64),
            weights=per_rank,
            divisors=real,
            loads=per_rank,
            tails=per_rank,
            lower_bounds=real,
            padding=self.options.padding,
            padding_waste=0.0,
            moved=0.0,
            weight_spread=1.0,
        )

    def _capacity(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (ranks,) the largest micro-batch of each rank: ``max_size``, else as with plain batches."""
        if self.options.max_size is not None:
            return np.full(self.workload.ranks, self.options.max_size, dtype=np.float64)
        speeds = self.workload.effective_speeds
        grown: NDArray[np.float64] = np.maximum(1.0, speeds / speeds.mean())
        # Sums of sizes that are no whole numbers depend on their order: none is to fail by its last bits.
        return self._largest_plain_batch(lengths) * (1.0 + 1e-12) * grown

    def _largest_plain_batch(self, lengths: NDArray[np.float64]) -> float:
        """Return the largest batch where rank r takes every ranks-th sample of a step from the r-th on."""
        ranks = self.workload.ranks

        def largest(batches: NDArray[np.float64], counts: Any) -> float:
            """Return that of (steps, samples, ranks) lengths, zeros where a rank has fewer samples."""
            if self.options.padding == "none":
                return float(batches.sum(axis=1).max(initial=0.0))
            return float((batches.max(axis=1, initial=0.0) * counts).max(initial=0.0))

        full = lengths.size // self.global_batch * self.global_batch
        short = lengths[full:]
        filled = np.zeros(-(-short.size // ranks) * ranks)
        filled[: short.size] = short
        counts = -(-(short.size - np.arange(ranks)) // ranks)
        of_short = largest(filled.reshape(1, -1, ranks), counts)
        if full == 0:
            return of_short
        return max(of_short, largest(lengths[:full].reshape(-1, self.batch_size, ranks), self.batch_size))

    def _weights(
        self, indices: NDArray[np.int64], assigned: Assigned, mean_total: float | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], float]:
        """Return the micro-batches' and the ranks' gradient factors ranks · W / ΣW, the ΣW, and their spread."""
        if self.workload.loss_weights is None:
            amounts = assigned.held.astype(np.float64)
        else:
            amounts = np.add.reduceat(self.workload.loss_weights[indices], offsets(assigned.held)[:-1])
        amounts[~assigned.is_real] = 0.0
        of_ranks = np.add.reduceat(amounts, offsets(assigned.micro_batches)[:-1]).reshape(-1, self.workload.ranks)
        totals = of_ranks.sum(axis=1)
        median = float(np.median(totals))
        spread = float(totals.max()) / median if median > 0.0 else math.inf
        if isinstance(self.options.loss_weight, str) and self.options.loss_weight == "sum":
            ranks_are_real = (assigned.counts > 0).reshape(of_ranks.shape)
            none = np.full_like(totals, np.nan)
            return assigned.is_real.astype(np.float64), ranks_are_real.astype(np.float64), none, spread
        if mean_total is not None:
            totals = np.full_like(totals, mean_total)
        return (
            self.workload.ranks * _shares(amounts, np.repeat(totals, assigned.step_batches)),
            self.workload.ranks * _shares(of_ranks, totals[:, None]),
            totals,
            spread,
        )

    def _mean_total(self, order: NDArray[np.int64]) -> float:
        """Return the mean over the steps, in which these samples are taken, of their total loss weight."""
        weights = self.workload.loss_weights
        total = float(order.size if weights is None else weights[order].sum())
        return total / -(-order.size // self.global_batch)

    def _padding_waste(self, drawn: NDArray[np.int64], assigned: Assigned) -> float:
        if self.options.padding == "none":
            return 0.0
        padded = float((assigned.held * assigned.lengths)[assigned.is_real].sum())
        real = float(self.workload.sizes[drawn].sum(dtype=np.float64))
        return max(0.0, 1.0 - real / padded) if padded > 0.0 else 0.0

    def _moved(self, assigned: Assigned, places: NDArray[np.int64] | None, global_batch: int) -> float:
        """Return the share of the samples that are not in the step they were drawn for."""
        if places is None and self.options.first is None:
            return 0.0
        drawn = assigned.places if places is None else places[assigned.places]
        is_moved = drawn // global_batch != assigned.steps
        return float(is_moved[np.repeat(assigned.is_real, assigned.held)].mean())


def _shares(parts: NDArray[np.float64], totals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return parts ÷ totals, 0 where a total is: a step without any loss weight has gradient 0."""
    return np.divide(parts, totals, out=np.zeros_like(parts), where=totals > 0.0)
