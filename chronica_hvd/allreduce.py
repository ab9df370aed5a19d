"""Model: how long the allreduce takes, from what ranks wait for it after their compute."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

#: Waits and what hides them must add up to so much less spread than the waits have alone.
LEAST_SPREAD = 0.8


def duration(waits: Sequence[float], tails: Sequence[float], known: float) -> float:
    """Return the duration C of the allreduce.

    Horovod sends nothing before the last backward pass of a step begins. With that pass, of duration d, the allreduce
    overlaps, and what is seen of it is the larger of C − d and of a rest that always comes behind. Which of both it is,
    the steps tell: where it is C − d, w + d differs less from step to step than w. Otherwise C is only known not to
    exceed w + d; what was known before is then kept within these bounds, or plans would turn to and fro: one that hides
    the allreduce cannot see it.

    The same bits everywhere: only arithmetic in a fixed order.

    Parameters
    ----------
    waits
        The smallest wait w of the ranks in each step; NaN: unknown.
    tails
        The duration d that was planned for each of these steps.
    known
        C so far; 0: nothing.
    """
    pairs = [(wait, tail) for wait, tail in zip(waits, tails, strict=True) if wait >= 0.0 and tail >= 0.0]
    if not pairs:
        return known
    sums = [wait + tail for wait, tail in pairs]
    seen = [wait for wait, _ in pairs]
    if _spread(sums) < LEAST_SPREAD * _spread(seen):
        return median(sums)
    return max(median(seen), min(known, median(sums)))


def _spread(values: list[float]) -> float:
    """Return the median absolute deviation from the median."""
    middle = median(values)
    return median([abs(value - middle) for value in values])
