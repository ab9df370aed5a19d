"""Measure: what each micro-batch and each step of the training loop took on this rank."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chronica_hvd.timer import StepTimer

#: Tells micro-batches apart: the number of their step since training began, and their place in it.
Place = tuple[int, int]

STEP_FIELDS = ("epoch", "step", "micro_batches", "data_wait_ns", "synchronize_ns", "finished_ns")


class Work(NamedTuple):
    """What a micro-batch holds: as the fields of the same names of :class:`StepTimer`'s records."""

    samples: int
    size: int
    size2: int
    flops: int


class Reader:
    """Hands out the records of a :class:`Timing`, each of them once; oldest first.

    Attributes
    ----------
    overwritten
        How many were forgotten, because more than ``capacity`` of a kind came between two calls.
    """

    def __init__(self, timing: Timing, capacity: int) -> None:
        self._timing = timing
        self._capacity = capacity
        self._micro_batches: deque[NDArray[Any]] = deque()
        self._steps: deque[tuple[int, ...]] = deque(maxlen=capacity)
        self.overwritten = 0

    def add_micro_batches(self, records: NDArray[Any]) -> None:
        """Keep what the timer has handed out."""
        if self._micro_batches and not len(records):
            return
        self._micro_batches.append(records)
        while (superfluous := sum(map(len, self._micro_batches)) - self._capacity) > 0:
            oldest = self._micro_batches.popleft()
            self.overwritten += min(superfluous, len(oldest))
            if len(oldest) > superfluous:
                self._micro_batches.appendleft(oldest[superfluous:])

    def add_step(self, record: tuple[int, ...]) -> None:
        """Keep the record of a step."""
        self.overwritten += len(self._steps) == self._capacity
        self._steps.append(record)

    def micro_batches(self) -> NDArray[Any]:
        """Return what is new: see :meth:`Timing.micro_batches`."""
        with self._timing.collecting():
            new = np.concatenate(self._micro_batches)
            self._micro_batches.clear()
        return new

    def steps(self) -> NDArray[Any]:
        """Return what is new: see :meth:`Timing.steps`."""
        records = []
        with contextlib.suppress(IndexError):  # other threads may be adding to them, or asking too
            for _ in range(len(self._steps)):
                records.append(self._steps.popleft())
        return np.array(records, dtype=[(name, "<i8") for name in STEP_FIELDS])


class Timing:
    """The times of this rank's steps: ``optimizer.timing``.

    Compute is timed on the device (see :class:`StepTimer`) from the moment the loop takes a micro-batch until its
    backward pass is through, so that neither loading nor waiting for other ranks is in it; the rest by the host's
    clock. Nothing here waits for the device.

    Parameters
    ----------
    device
        Where the model computes, as for :class:`StepTimer`.
    capacity
        How many micro-batches, and how many steps, are kept until they are asked for.

    Attributes
    ----------
    timer
        The timer of the micro-batches.
    """

    def __init__(self, device: Any = None, capacity: int = 4096) -> None:
        self.timer = StepTimer(device, capacity)
        self._capacity = capacity
        self._collecting = threading.Lock()
        self._readers: list[Reader] = []
        self._user = self.reader()
        self._open: Place | None = None
        self._ended: Place | None = None  # the last one
        self._has_warned = False

    def micro_batches(self) -> NDArray[Any]:
        """Return the records of the micro-batches computed since the last call, oldest first, and forget them.

        As :meth:`StepTimer.drain`: ``step`` is the step of its epoch (so ask at least once per epoch); ``samples``,
        ``size`` and ``size2`` are what was computed, rounded (padded: n, n · max and n · max²; fillers included);
        ``flops`` is the estimate, where the sampler's cost comes from :func:`chronica_hvd.flops.estimate`, and else 0.
        What a device has not finished yet comes next time.
        """
        return self._user.micro_batches()

    def steps(self) -> NDArray[Any]:
        """Return the records of the steps synchronized since the last call, oldest first, and forget them.

        A structured array of int64: ``epoch``, ``step``, ``micro_batches`` (how many this rank has computed),
        ``data_wait_ns`` (waiting for the loader, over all of them), ``synchronize_ns`` (spent in ``synchronize()``: on
        the host that is waiting for the slowest rank and the allreduce; on a CUDA device also for the rest of the own
        compute), and ``finished_ns``, when it returned (as ``time.monotonic_ns()``).
        """
        return self._user.steps()

    @property
    def overwritten(self) -> int:
        """How many records, of micro-batches or steps, were lost because nobody asked for them in time."""
        return self.timer.overwritten + self._user.overwritten

    def reader(self) -> Reader:
        """Return a reader of its own, which takes nothing from others; it gets what is recorded from now on."""
        reader = Reader(self, self._capacity)
        self._readers.append(reader)
        return reader

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Give all readers what the timer has finished, and let one thread at a time take it."""
        with self._collecting:
            records = self.timer.drain()
            for reader in self._readers:
                reader.add_micro_batches(records)
            yield

    def begin(self, place: Place, step: int, work: Work) -> None:
        """Note that the compute of a micro-batch begins; one that has begun and not ended is given up."""
        self._open = place
        self.timer.start(step, *work)

    def is_open(self, place: Place) -> bool:
        """Whether the compute of this micro-batch has begun and not ended."""
        return self._open == place

    def end(self, place: Place) -> None:
        """Note that a backward pass of a micro-batch is through; of several the last one counts."""
        if self.is_open(place):
            self._open, self._ended = None, place
            self.timer.stop()
        elif place == self._ended:
            self.timer.extend()

    def finish(self, *record: int) -> None:
        """Keep the record of a step that has been synchronized: the fields of :meth:`steps`."""
        for reader in self._readers:
            reader.add_step(record)
        if self.timer.failure and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"micro-batches could not be timed on the device ({self.timer.failure}); training is not affected, "
                f"but {self.timer.skipped} records are missing so far",
                RuntimeWarning,
                stacklevel=2,
            )
