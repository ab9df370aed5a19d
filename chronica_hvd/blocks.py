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
    blocks: list[Assigned] = []
    for begin in range(0, order.size, BLOCK_STEPS * global_batch):
        of_block = slice(begin, begin + BLOCK_STEPS * global_batch)
        places, *others, infeasible = _core.assign(
            work.costs(order[of_block], lengths[of_block]),
            lengths[of_block],
            work.effective_speeds,
            capacity,
            fixed_cost=work.fixed_cost,
            is_hard=options.max_size is not None,
            global_batch=global_batch,
            least=options.min_local_batch,
            micro_batches=order.size if isinstance(options.micro_batches, str) else options.micro_batches,
            comm=options.comm,
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
        places += begin
        blocks.append(Assigned(places, *others))
    joined: list[Any] = [np.concatenate(arrays) for arrays in zip(*blocks, strict=True)]
    return Assigned(*joined)


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
