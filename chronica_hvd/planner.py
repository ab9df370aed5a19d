"""Plan: from sizes, costs and speeds to who takes what, one block of steps after the other."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chronica_hvd import _core, checks
from chronica_hvd.options import PlanOptions
from chronica_hvd.plans import Plan
from chronica_hvd.workload import Workload

#: Steps that are planned at once, and between two comparisons of the ranks' plans.
BLOCK_STEPS = 64


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
        self._threads = _threads()

    @property
    def global_batch(self) -> int:
        """Samples in a full step, over all ranks."""
        return self.batch_size * self.workload.ranks

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the samples of an epoch in drawn order: step k draws the k-th ``global_batch`` of them."""
        if self.workload.indices is not None:
            order = self.workload.indices
        elif self.options.shuffle:
            order = _core.permutation(self.workload.samples, (self.options.seed + epoch) % 2**64)
        else:
            order = np.arange(self.workload.samples, dtype=np.int64)
        if self.options.drop_last:
            order = order[: order.size // self.global_batch * self.global_batch]
        return order

    def plan(self, epoch: int) -> Plan:
        """Plan one epoch, block by block."""
        work = self.workload
        order = self.order(epoch)
        # A global batch beyond the data is one short step; the bound keeps absurd batch sizes within int64.
        global_batch = min(self.global_batch, max(order.size, work.ranks))
        lengths = work.lengths(order)
        capacity = self._capacity(lengths, global_batch)
        block = BLOCK_STEPS * global_batch
        parts = []
        for begin in range(0, order.size, block):
            drawn = slice(begin, begin + block)
            positions, *others = self._assign(order[drawn], lengths[drawn], capacity, global_batch, begin)
            parts.append((order[drawn][positions], *others))
        indices, held, lengths, micro_batches, counts, loads, tails, bounds = (
            np.concatenate(part) for part in zip(*parts, strict=True)
        )
        shape = (bounds.size, work.ranks)
        factors, weights, spread = self._weights(indices, held, micro_batches, counts.reshape(shape))
        return Plan(
            indices=indices,
            offsets=_offsets(held),
            parts=_offsets(micro_batches),
            lengths=lengths,
            factors=factors,
            counts=counts.reshape(shape),
            weights=weights,
            loads=loads.reshape(shape),
            tails=tails.reshape(shape),
            lower_bounds=bounds,
            padding=self.options.padding,
            padding_waste=self._padding_waste(order, held, lengths, np.repeat(counts > 0, micro_batches)),
            moved=0.0,
            weight_spread=spread,
        )

    def _assign(
        self,
        order: NDArray[np.int64],
        lengths: NDArray[np.float64],
        capacity: NDArray[np.float64],
        global_batch: int,
        begin: int,
    ) -> tuple[NDArray[Any], ...]:
        """Plan one block, which begins at this place of the epoch's order."""
        options = self.options
        *arrays, infeasible = _core.assign(
            self.workload.costs(order, lengths),
            lengths,
            self.workload.effective_speeds,
            capacity,
            fixed_cost=self.workload.fixed_cost,
            is_hard=options.max_size is not None,
            global_batch=global_batch,
            least=options.min_local_batch,
            micro_batches=order.size if isinstance(options.micro_batches, str) else options.micro_batches,
            comm=options.comm,
            padded=options.padding == "max",
            equal_counts=options.local_batch == "equal",
            is_dealt=options.policy != "balanced",
            threads=self._threads,
        )
        if infeasible >= 0:
            raise ValueError(
                f"max_size={options.max_size:g} cannot be kept in step {begin // global_batch + infeasible}: its "
                f"samples do not fit into {options.micro_batches} micro-batch(es) of that size on each of "
                f'{self.workload.ranks} ranks. Raise max_size or micro_batches (or give micro_batches="auto")'
            )
        return tuple(arrays)

    def _capacity(self, lengths: NDArray[np.float64], global_batch: int) -> NDArray[np.float64]:
        """Return (ranks,) the largest micro-batch of each rank: of ``max_size``, else as with plain batches."""
        ranks = self.workload.ranks
        if self.options.max_size is not None:
            return np.full(ranks, self.options.max_size)
        # Plain: rank r takes every ranks-th sample of a step from the r-th on. (steps, samples per rank, ranks)
        full = lengths.size // global_batch * global_batch
        steps = [lengths[:full].reshape(-1, max(1, global_batch // ranks), ranks)] if full else []
        short = lengths[full:]
        if short.size:
            each = -(-short.size // ranks)
            filled = np.zeros((1, each, ranks))
            filled.ravel()[: short.size] = short
            steps.append(filled)
        largest = 0.0
        for batches in steps:
            if self.options.padding == "none":
                largest = max(largest, float(batches.sum(axis=1).max()))
            else:
                held = np.full(ranks, batches.shape[1])
                if batches is not steps[0] or not full:
                    held = np.array([len(range(rank, short.size, ranks)) for rank in range(ranks)])
                largest = max(largest, float((batches.max(axis=1) * held).max()))
        speeds = self.workload.effective_speeds
        return largest * np.maximum(1.0, speeds / speeds.mean())

    def _weights(
        self,
        indices: NDArray[np.int64],
        held: NDArray[np.int64],
        micro_batches: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        """Return the micro-batches' and the ranks' gradient factors ranks · W / ΣW, and the spread of the steps' ΣW."""
        is_real = np.repeat(counts.ravel() > 0, micro_batches)
        if self.workload.loss_weights is None:
            amounts = held.astype(np.float64)
        else:
            amounts = np.add.reduceat(self.workload.loss_weights[indices], _offsets(held)[:-1])
        amounts[~is_real] = 0.0
        first = _offsets(micro_batches)[:-1]
        of_ranks = np.add.reduceat(amounts, first).reshape(counts.shape)
        totals = of_ranks.sum(axis=1)
        median = float(np.median(totals))
        spread = float(totals.max()) / median if median > 0.0 else math.inf
        if isinstance(self.options.loss_weight, str) and self.options.loss_weight == "sum":
            return is_real.astype(np.float64), (counts > 0).astype(np.float64), spread
        if self.options.normalize == "epoch":
            totals = np.full_like(totals, totals.mean())
        # A step without any loss weight has gradient 0.
        scale = np.divide(self.workload.ranks, totals, out=np.zeros_like(totals), where=totals > 0.0)
        steps = np.repeat(np.arange(len(counts)), micro_batches.reshape(counts.shape).sum(axis=1))
        return amounts * scale[steps], of_ranks * scale[:, None], spread

    def _padding_waste(
        self,
        order: NDArray[np.int64],
        held: NDArray[np.int64],
        lengths: NDArray[np.float64],
        is_real: NDArray[np.bool_],
    ) -> float:
        if self.options.padding == "none":
            return 0.0
        padded = float((held * lengths)[is_real].sum())
        real = float(self.workload.sizes[order].sum(dtype=np.float64))
        return max(0.0, 1.0 - real / padded) if padded > 0.0 else 0.0


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each of consecutive runs begins, and where the last ends."""
    offsets = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _threads() -> int:
    """Return how many threads plan: one, since every rank plans for itself, unless the environment says more."""
    given = os.environ.get("CHRONICA_THREADS", "1")
    if not given.isdecimal() or not 1 <= int(given) <= 1024:
        raise ValueError(f"the environment variable CHRONICA_THREADS must be a number from 1 to 1024, not {given!r}")
    return int(given)
