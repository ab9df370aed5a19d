"""A GPU or the host, and what differs between the two for the check."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

#: Cycles of torch's spinning kernel that its speed is told by: some tens of milliseconds.
CALIBRATION_CYCLES = 50_000_000


class Reference(Protocol):
    """Another clock around the same work."""

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End, on the stream of the beginning."""

    def elapsed_ns(self) -> float:
        """Return the time between, once the device is through."""


class TorchEvents:
    """A new pair of ``torch.cuda.Event`` on the stream that is current at the start."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        """Record the first event."""
        self._stream = torch.cuda.current_stream()
        self._begin.record(self._stream)

    def stop(self) -> None:
        """Record the second event."""
        self._end.record(self._stream)

    def elapsed_ns(self) -> float:
        """Return the time between the events."""
        return float(self._begin.elapsed_time(self._end)) * 1e6


class HostClock:
    """Python's clock of the host."""

    def start(self) -> None:
        """Read the clock."""
        self._begin_ns = time.perf_counter_ns()

    def stop(self) -> None:
        """Read it again."""
        self._end_ns = time.perf_counter_ns()

    def elapsed_ns(self) -> float:
        """Return the time between."""
        return float(self._end_ns - self._begin_ns)


class Device:
    """Where the check computes.

    Parameters
    ----------
    name
        ``"cuda"`` or ``"cpu"``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_cuda = name == "cuda"
        if self.is_cuda:
            self._cycles_per_s = self._calibrate()
        else:
            torch.set_num_threads(1)  # so that other processes on the host disturb little

    def synchronize(self) -> None:
        """Wait until everything enqueued is through."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def reference(self) -> Reference:
        """Return another clock for a measurement."""
        return TorchEvents() if self.is_cuda else HostClock()

    def spin(self, seconds: float) -> None:
        """Keep the current stream busy for about so long; on the host that is the caller."""
        if self.is_cuda:
            torch.cuda._sleep(int(seconds * self._cycles_per_s))
            return
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    def hold(self, seconds: float) -> None:
        """Keep the current stream busy so that the host gets ahead of it: what follows then waits in a full queue.

        Only so does a pair of events hold nothing but the work between them, rather than the host's way from one call
        to the next.
        """
        if self.is_cuda:
            self.spin(seconds)

    def is_busy(self) -> bool:
        """Whether the current stream has work left."""
        return self.is_cuda and not torch.cuda.current_stream().query()

    def _calibrate(self) -> float:
        """Return the cycles per second of torch's spinning kernel."""
        events: Any = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for _ in range(2):  # the first wakes the device up
            torch.cuda._sleep(CALIBRATION_CYCLES)  # busy meanwhile: the host's way between the calls is not timed
            events[0].record()
            torch.cuda._sleep(CALIBRATION_CYCLES)
            events[1].record()
            torch.cuda.synchronize()
        return CALIBRATION_CYCLES / (float(events[0].elapsed_time(events[1])) / 1e3)


def warm_up(device: Device, timer: Any, work: Callable[[], object]) -> None:
    """Have everything created that the first measurement creates."""
    timer.start()
    work()
    timer.stop()
    device.synchronize()
    timer.drain()
