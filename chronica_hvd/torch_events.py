"""What the timer asks torch about a CUDA device; and torch's own events, where the driver's cannot be had."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch

from chronica_hvd import _core


def require_device(index: int | None) -> None:
    """Raise unless torch has CUDA and, as far as that is known without initialising it, such a device.

    Raises
    ------
    ValueError
        There are devices, but none of this index.
    RuntimeError
        torch was built without CUDA, or sees no device.
    """
    otherwise = "StepTimer() times on the host, which measures a device only where the code synchronises"
    if torch.version.cuda is None and torch.version.hip is None:
        raise RuntimeError(f"torch {torch.__version__} was built without CUDA; {otherwise}")
    count = _known_devices()
    if count == 0:
        raise RuntimeError(f"no CUDA device is visible to torch {torch.__version__}; {otherwise}")
    if index is not None and count is not None and index >= count:
        raise ValueError(
            f"device must be one of the {count} visible, 'cuda:0' to 'cuda:{count - 1}', not 'cuda:{index}'"
        )


def _known_devices() -> int | None:
    """Return how many devices are visible; None where only initialising CUDA would tell, which forbids to fork."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.device_count()
    ask = getattr(torch.cuda, "_device_count_nvml" if torch.version.hip is None else "_device_count_amdsmi", None)
    count = -1 if ask is None else int(ask())
    return None if count < 0 else count


def has_driver() -> bool:
    """Whether the extension can record the driver's events itself; warns where it should and cannot."""
    if torch.version.hip is not None:
        return False
    problem = _core.cuda_driver_problem()
    if problem is not None:
        warnings.warn(
            f"{problem}; the timer records torch.cuda.Event instead, which costs more and may disturb a CUDA graph "
            "that another thread captures",
            RuntimeWarning,
            stacklevel=3,
        )
    return problem is None


def device(index: int | None) -> int | Callable[[], int]:
    """Return the index, or the function that tells at the first start which device is current."""
    return torch.cuda.current_device if index is None else index


def current_stream() -> Callable[[int], int]:
    """Return torch's quickest function from a device's index to the handle of its current stream."""
    quickest: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return quickest or (lambda index: int(torch.cuda.current_stream(index).cuda_stream))


class Interval(NamedTuple):
    """Two events and the stream on which both are recorded."""

    stream: torch.cuda.Stream
    start: torch.cuda.Event
    stop: torch.cuda.Event


class TorchEventClock:
    """A clock for ``_core.StepTimer`` by torch's events: for ROCm, and where the driver's functions are not found.

    It never waits, and records nothing on a stream that is being captured. It does not know of captures by other
    threads: drain the timer outside of them.

    Parameters
    ----------
    index
        The device; ``None``: the one that is current at the first interval.
    """

    name = "torch.cuda.Event"

    def __init__(self, index: int | None) -> None:
        self.index = index

    def begin(self) -> Interval | None:
        """Begin an interval on the current stream; None while that is being captured."""
        if self.index is None:
            self.index = torch.cuda.current_device()
        stream = torch.cuda.current_stream(self.index)
        if _is_capturing(stream):
            return None
        interval = Interval(stream, _event(), _event())
        interval.start.record(stream)
        return interval

    def end(self, interval: Interval) -> bool:
        """End an interval, or let it end now instead; False while its stream is being captured."""
        if _is_capturing(interval.stream):
            return False
        interval.stop.record(interval.stream)
        return True

    def ready(self, interval: Interval) -> bool:
        """Whether the device has reached the end; not asked, and False, while this thread captures."""
        return not torch.cuda.is_current_stream_capturing() and bool(interval.stop.query())  # type: ignore[no-untyped-call]

    def elapsed_ns(self, interval: Interval) -> int:
        """Return the length of an interval that is ready, in nanoseconds."""
        milliseconds: float = interval.start.elapsed_time(interval.stop)
        return round(milliseconds * 1e6)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
