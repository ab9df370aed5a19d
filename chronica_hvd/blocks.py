"""Plan: blocks of steps, assigned by the extension one after the other and joined to an epoch."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chronica_hvd import _core
from chronica_hvd.options import PlanOptions
from chronica_hvd.workload import Workload

#: Steps that are planned at once, and between two comparisons of the ranks' plans.
BLOCK_STEPS = 64
#: Of a micro-batch's time: a backward pass has twice the forward pass's matrix products.
BACKWARD_SHARE = 2.0 / 3.0


class Assigned(NamedTuple):
    """Who takes what in consecutive steps.

    Attributes
    ----------
    places
        (entries,) places in the order the steps were assigned from: step by step, rank by rank, micro-batch by
        micro-batch; fillers included.
    held
        (micro-batches,) samples in each.
    lengths
        (micro-batches,) what a micro-batch is padded to; without padding its summed size.
    micro_batches
        (steps · ranks,) micro-batches of each rank.
    counts
        (steps · ranks,) real samples; 0 for a rank of fillers.
    loads, tails
        (steps · ranks,) predicted time of a rank, and of its last backward pass.
    bounds
        (steps,) no assignment is faster.
    """

    places: NDArray[np.int64]
    held: NDArray[np.int64]
    lengths: NDArray[np.float64]
    micro_batches: NDArray[np.int64]
    counts: NDArray[np.int64]
    loads: NDArray[np.float64]
    tails: NDArray[np.float64]
    bounds: NDArray[np.float64]

    @property
    def is_real(self) -> NDArray[np.bool_]:
        """(micro-batches,) whether a micro-batch holds samples that count."""
        return np.repeat(self.counts > 0, self.micro_batches)

    @property
    def step_batches(self) -> NDArray[np.int64]:
        """(steps,) micro-batches of each step."""
        ranks = self.counts.size // self.bounds.size
        batches: NDArray[np.int64] = self.micro_batches.reshape(-1, ranks).sum(axis=1)
        return batches

    @property
    def steps(self) -> NDArray[np.int64]:
        """(entries,) the step of each entry."""
        of_batches = np.repeat(np.arange(self.bounds.size), self.step_batches)
        return np.repeat(of_batches, self.held)

    def with_largest_first(self, candidates: int, padded: bool) -> Assigned:
        """Return the same steps, the first one changed for that of the largest micro-batch among so many."""
        first_batches = offsets(self.step_batches)
        areas = self.held * self.lengths if padded else self.lengths
        largest = int(np.argmax(np.maximum.reduceat(areas, first_batches[:-1])[:candidates]))
        ranks = self.counts.size // self.bounds.size
        steps = np.arange(self.bounds.size + 1)
        first_entries = offsets(self.held)[first_batches]
        borders = (first_entries, first_batches, first_batches, *[steps * ranks] * 4, steps)
        return Assigned(*(_swapped(array, border, largest) for array, border in zip(self, borders, strict=True)))


def assign(
    order: NDArray[np.int64],
    lengths: NDArray[np.float64],
    capacity: NDArray[np.float64],
    work: Workload,
    options: PlanOptions,
    global_batch: int,
) -> Assigned:
    """Assign the steps of an epoch.

    Parameters
    ----------
    order, lengths
        (samples,) the samples step by step and their padded sizes; for a policy already dealt rank by rank.
    capacity
        (ranks,) the largest micro-batch of each.

    Raises
    ------
    ValueError
        ``max_size`` cannot be kept in a step, which is named.
    """
    threads = _threads()
    # Places take most of the memory: each block's are copied here at once, the fillers of a short last step included.
    places = np.empty(order.size + work.ranks * options.min_local_batch, dtype=np.int64)
    entries = 0
    blocks: list[tuple[NDArray[Any], ...]] = []
    for begin in range(0, order.size, BLOCK_STEPS * global_batch):
        of_block = slice(begin, begin + BLOCK_STEPS * global_batch)
        costs = work.costs(order[of_block], lengths[of_block])
        others: list[Any]
        of_entries, *others, infeasible = _core.assign(
            costs,
            lengths[of_block],
            work.effective_speeds,
            capacity,
            fixed_cost=work.fixed_cost,
            is_hard=options.max_size is not None,
            global_batch=global_batch,
            least=options.min_local_batch,
            micro_batches=order.size if isinstance(options.micro_batches, str) else options.micro_batches,
            comm=work.comm,
            padded=options.padding == "max",
            equal_counts=options.local_batch == "equal",
            is_dealt=options.policy != "balanced",
            threads=threads,
        )
        if infeasible >= 0:
            raise ValueError(
                f"max_size={options.max_size:g} could not be kept in step {begin // global_batch + infeasible}: no way "
                f"was found to compute its samples in micro-batches of that size, micro_batches={options.micro_batches}"
                f' of them at most on each of {work.ranks} ranks. Raise max_size, or give micro_batches="auto"'
            )
        np.add(of_entries, begin, out=places[entries : entries + of_entries.size])
        entries += of_entries.size
        if work.floor > 0.0:
            others = list(_with_floor(Assigned(of_entries, *others), costs, work, options, global_batch)[1:])
        blocks.append(tuple(others))
    return Assigned(places[:entries], *(np.concatenate(arrays) for arrays in zip(*blocks, strict=True)))


def _with_floor(
    block: Assigned, costs: NDArray[np.float64], work: Workload, options: PlanOptions, global_batch: int
) -> Assigned:
    """Return a block with times and bounds under a floor, of which the solvers know nothing.

    ``costs``: (samples,) in the order the steps were assigned from.
    """
    speeds = work.effective_speeds
    least = np.tile(work.floor / speeds, block.bounds.size)
    bounds = np.maximum(block.bounds, work.floor / speeds.min())
    over = work.fixed_cost - work.own_fixed_cost  # what the solvers took to be fixed besides
    tails = np.maximum(BACKWARD_SHARE * least, block.tails - over * BACKWARD_SHARE / np.tile(speeds, block.bounds.size))
    if options.micro_batches == 1:
        return block._replace(loads=np.maximum(block.loads, least), tails=tails, bounds=bounds)
    of_entries = costs[block.places]
    if options.padding == "max":
        each = block.held * np.maximum.reduceat(of_entries, offsets(block.held)[:-1])
    else:
        each = np.add.reduceat(of_entries, offsets(block.held)[:-1])
    each = np.maximum(work.floor, work.own_fixed_cost + each)
    loads = np.add.reduceat(each, offsets(block.micro_batches)[:-1]) / np.tile(speeds, block.bounds.size)
    # No micro-batch is more than twice as long for the solvers, and none shorter than its samples alone.
    firsts = np.arange(0, costs.size, global_batch)
    total = np.add.reduceat(costs, firsts) / speeds.sum()
    longest = np.maximum(work.floor, work.own_fixed_cost + np.maximum.reduceat(costs, firsts)) / speeds.max()
    halved = block.bounds * (0.5 if over > 0.0 else 1.0)
    bounds = np.maximum.reduce([halved, total, longest, np.full_like(total, work.floor / speeds.min())])
    return block._replace(loads=loads, tails=tails, bounds=bounds)


def offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each of consecutive runs begins, and where the last ends."""
    ends = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=ends[1:])
    return ends


def _swapped(array: NDArray[Any], borders: NDArray[np.int64], other: int) -> NDArray[Any]:
    """Return ``array`` with the first of the runs between ``borders`` and another one changed for each other."""
    if other == 0:
        return array
    runs = [(other, other + 1), (1, other), (0, 1), (other + 1, borders.size - 1)]
    return np.concatenate([array[borders[first] : borders[end]] for first, end in runs])


def _threads() -> int:
    """Return how many threads plan: one, since every rank plans for itself, unless the environment says more."""
    given = os.environ.get("CHRONICA_THREADS", "1")
    if not given.isdecimal() or not 1 <= int(given) <= 1024:
        raise ValueError(f"the environment variable CHRONICA_THREADS must be a number from 1 to 1024, not {given!r}")
    return int(given)
