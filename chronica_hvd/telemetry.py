"""Gather: what a rank tells the others of its times, as a row of fixed length, and what all ranks' rows say."""

from __future__ import annotations

import hashlib
import platform
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chronica_hvd.blocks import BLOCK_STEPS
from chronica_hvd.cost import CostModel
from chronica_hvd.measured import Place
from chronica_hvd.rows import ROW as SUMMARY
from chronica_hvd.rows import summarize
from chronica_hvd.timing import Reader, Timing
from chronica_hvd.world import World

#: Of a row: where the rank is (its host, as a number, and its number there) and up to where steps are granted.
HEADER = 3

#: Times of each step, in nanoseconds; NaN: unknown.
TIMES = ("compute", "data_wait", "wait", "period")

#: What a fit stands on at most: the latest records, of so many rows.
MOST_RECORDS, MOST_ROWS = 4096, 64

#: Steps that a row has room for: a block, and those of an update that reaches beyond it.
SLOTS = BLOCK_STEPS + 16

ROW = HEADER + SUMMARY + len(TIMES) * SLOTS


class StepTimes(NamedTuple):
    """Times of consecutive steps, in nanoseconds, each (steps,) of a rank or (steps, ranks) of all; NaN: unknown.

    Attributes
    ----------
    compute
        Own compute of all micro-batches.
    data_wait
        Waiting for the loader.
    wait
        Waiting in ``synchronize()``, for the slowest rank and for the allreduce.
    period
        From the end of the step before to the end of this one.
    """

    compute: NDArray[np.float64]
    data_wait: NDArray[np.float64]
    wait: NDArray[np.float64]
    period: NDArray[np.float64]


class Gathered(NamedTuple):
    """What all ranks have told of a stretch of steps.

    Attributes
    ----------
    places
        (host, local rank) of each rank.
    granted
        The step that no rank's loader has asked for, nor any behind it.
    summaries
        (ranks, rows.ROW) what the fit needs of the ranks' records.
    times
        (steps, ranks) each.
    """

    places: tuple[Place, ...]
    granted: int
    summaries: NDArray[np.float64]
    times: StepTimes


def host_number() -> int:
    """Return a number for this host, that float64 holds exactly."""
    return int.from_bytes(hashlib.blake2b(platform.node().encode(), digest_size=6).digest(), "little")


class Telemetry:
    """The records of one loop over the loader, row by row.

    Parameters
    ----------
    timing
        Who has the records.
    world
        This rank.
    """

    def __init__(self, timing: Timing, world: World) -> None:
        self._reader: Reader = timing.reader()
        self._place = host_number(), world.local_rank
        self._unfitted: deque[NDArray[Any]] = deque(maxlen=MOST_ROWS)  # records that no row has summed up
        self._later: list[NDArray[Any]] = []  # records of steps that were not told of yet
        self.begin()

    def begin(self) -> None:
        """Begin with another loop, whose steps are numbered anew."""
        self._begun_ns = time.monotonic_ns()
        self._finished_ns = np.nan  # the last step of the row before
        self._unfitted += self._later
        self._later.clear()
        self._reader.steps()

    def row(self, steps: range, micro_batches: int, granted: int, model: CostModel | None) -> NDArray[np.float64]:
        """Return what is new, of these ``steps``: the finished ones, and the last one if that is about to be.

        Parameters
        ----------
        micro_batches
            Of the last step, if it is not finished.
        model
            The cost that all ranks agree on, if one is to be fitted now, to what was recorded since the last time.
        """
        records = np.concatenate([*self._later, self._reader.micro_batches()])
        # A device may finish what it was given in a loop before this one.
        is_older = records["start_ns"] < self._begun_ns
        is_later = ~is_older & (records["step"] >= steps.stop)
        self._later = [records[is_later]]
        self._unfitted.append(records[~is_later])
        summary = np.zeros(SUMMARY)
        if model is not None:
            summary = summarize(np.concatenate(self._unfitted)[-MOST_RECORDS:], model)
            self._unfitted.clear()
        times = self._times(steps, micro_batches, records[~is_older & ~is_later])
        return np.concatenate([[*self._place, granted], summary, *times])

    def _times(self, steps: range, micro_batches: int, records: NDArray[Any]) -> StepTimes:
        finished = self._reader.steps()
        # An update may finish several steps, which then share its time evenly.
        updates, of_step, shares = np.unique(finished["finished_ns"], return_inverse=True, return_counts=True)
        periods = np.diff(updates, prepend=self._finished_ns)
        if len(updates):
            self._finished_ns = float(updates[-1])
        place = finished["step"] - steps.start
        is_told = (place >= 0) & (place < SLOTS)
        place = place[is_told]

        def by_step(values: Any) -> NDArray[np.float64]:
            of_all = np.full(SLOTS, np.nan)
            of_all[place] = values[is_told]
            return of_all

        awaited = by_step(finished["micro_batches"])
        if 0 < len(steps) <= SLOTS and np.isnan(awaited[len(steps) - 1]):
            awaited[len(steps) - 1] = micro_batches
        compute, data_wait = _sums(records, steps.start, awaited), by_step(finished["data_wait_ns"])
        busy = np.zeros(len(updates))  # in all of an update's steps
        np.add.at(busy, of_step[is_told], (compute + data_wait)[place])
        # On a device, synchronize() waits for the rest of the own compute too.
        wait = np.fmin(finished["synchronize_ns"], np.maximum(periods - busy, 0.0)[of_step])
        others = (periods - busy)[of_step] / shares[of_step]
        return StepTimes(compute, data_wait, by_step(wait / shares[of_step]), compute + data_wait + by_step(others))


def _sums(records: NDArray[Any], first: int, awaited: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the compute of each step from ``first`` on; NaN where a micro-batch that is awaited has no time."""
    place = records["step"] - first
    is_right = (place >= 0) & (place < len(awaited)) & (records["elapsed_ns"] > 0)
    place, elapsed = place[is_right], records["elapsed_ns"][is_right]
    sums = np.bincount(place, elapsed, minlength=len(awaited))
    return np.where(np.bincount(place, minlength=len(awaited)) == awaited, sums, np.nan)


def gathered(rows: NDArray[np.float64], steps: int) -> Gathered:
    """Return what (ranks, ROW) rows say of so many steps."""
    header, summaries, times = np.split(rows, [HEADER, HEADER + SUMMARY], axis=1)
    places = tuple((int(host), int(local_rank)) for host, local_rank, _ in header)
    if len(set(places)) < len(places):  # hosts of one name
        places = tuple((-1, rank) for rank in range(len(places)))
    of_steps = np.full((len(TIMES), steps, len(rows)), np.nan)
    told = times.reshape(len(rows), len(TIMES), SLOTS).transpose(1, 2, 0)[:, :steps]
    of_steps[:, : told.shape[1]] = told
    return Gathered(places, int(header[:, 2].max()), summaries, StepTimes(*of_steps))
