"""The same work timed by StepTimer and by another clock, one around the other by turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu_check.block import Outcome
from gpu_check.device import Device

TOLERANCE = 0.01  # of the other clock's median
SLACK_NS = 5_000.0
#: Measurements enqueued behind one hold of the queue, and how long the hold is: longer than the host needs for them.
BURST = 20
HOLD_S = 0.01


@dataclass
class Comparison:
    """Pairs of measurements, in nanoseconds.

    Attributes
    ----------
    ours_ns, other_ns
        By StepTimer and by the other clock, of the same work.
    slack_ns
        By how much the medians may differ besides 1 %.
    """

    ours_ns: list[float] = field(default_factory=list)
    other_ns: list[float] = field(default_factory=list)
    slack_ns: float = SLACK_NS

    @property
    def differences_ns(self) -> Any:
        """Ours less the other."""
        return np.subtract(self.ours_ns, self.other_ns)

    @property
    def median_difference_ns(self) -> float:
        """The median of ours less the other."""
        return float(np.median(self.differences_ns))

    @property
    def allowed_ns(self) -> float:
        """By how much the medians may differ."""
        return TOLERANCE * float(np.median(self.other_ns)) + self.slack_ns

    def figures(self) -> dict[str, Any]:
        """Return the medians and the largest difference."""
        return {
            "measurements": len(self.ours_ns),
            "ours_median_ms": round(float(np.median(self.ours_ns)) / 1e6, 6),
            "other_median_ms": round(float(np.median(self.other_ns)) / 1e6, 6),
            "median_difference_us": round(self.median_difference_ns / 1e3, 3),
            "largest_difference_us": round(float(np.abs(self.differences_ns).max()) / 1e3, 3),
        }


def compare(
    device: Device,
    timer: Any,
    work: Callable[[], object],
    repeats: int,
    aside: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, Comparison]:
    """Time ``work`` so often, ours outside of the other clock and inside of it by turns.

    ``aside`` is entered after the starts and left after the stops.

    Raises
    ------
    RuntimeError
        A measurement is missing.
    """
    others = []
    for turn in range(repeats):
        if turn % BURST == 0:
            device.synchronize()
            device.hold(HOLD_S)
        others.append(device.reference())
        clocks = [timer, others[-1]] if turn % 2 == 0 else [others[-1], timer]
        for clock in clocks:
            clock.start()
        with aside():
            work()
            for clock in reversed(clocks):
                clock.stop()
    device.synchronize()
    ours_ns = harvest(timer, repeats)["elapsed_ns"].tolist()
    other_ns = [other.elapsed_ns() for other in others]
    return {
        "ours_outside": Comparison(ours_ns[0::2], other_ns[0::2]),
        "ours_inside": Comparison(ours_ns[1::2], other_ns[1::2]),
    }


def agree(comparisons: Iterable[Comparison]) -> bool:
    """Whether the median differences, their mean where the clocks were around each other by turns, are allowed.

    What the outer clock measures besides, the recording of the inner one, cancels in the mean.
    """
    given = list(comparisons)
    mean_ns = sum(comparison.median_difference_ns for comparison in given) / len(given)
    return abs(mean_ns) <= min(comparison.allowed_ns for comparison in given)


def harvest(timer: Any, expected: int) -> Any:
    """Return the records of a timer whose device is through; a RuntimeError where one is missing."""
    records = timer.drain()
    if len(records) != expected:
        raise RuntimeError(
            f"{len(records)} of {expected} measurements came back; {timer.skipped} were skipped, "
            f"{timer.overwritten} overwritten, last driver error: {timer.failure}"
        )
    return records


def outcome(cases: dict[str, dict[str, Comparison]], **figures: Any) -> Outcome:
    """Return the outcome of a block that compares in several cases, each by :func:`compare`."""
    compared = {case: {order: one.figures() for order, one in orders.items()} for case, orders in cases.items()}
    differences = {
        f"{case}, {order}": (one["median_difference_us"], one["other_median_ms"])
        for case, orders in compared.items()
        for order, one in orders.items()
    }
    case = max(differences, key=lambda case: abs(differences[case][0]))
    difference_us, of_ms = differences[case]
    return Outcome(
        f"clocks differ most in {case}: {difference_us:+.1f} us of {of_ms:.3f} ms (medians)",
        {**figures, **compared},
        ok=all(agree(orders.values()) for orders in cases.values()),
    )
