"""Model: how long the allreduce takes, from what ranks wait for it after their compute."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: A difference of waits must exceed so many standard errors.
CERTAINTY = 3.0


def duration(waits: Sequence[float], tails: Sequence[float], known: float) -> float:
    """Return the duration C of the allreduce.

    Horovod sends nothing before the last backward pass of a step begins. Of that pass's duration d the allreduce is
    overlapped, and what is seen of it is max(w, C − d), w being what always comes behind. Which of both it is, the
    steps tell: where it is C − d, waits are the shorter the longer d is. Otherwise C is only known not to exceed w + d;
    what was known before is then kept within these bounds, or plans would turn to and fro: one that hides the allreduce
    cannot see it.

    The same bits everywhere: only arithmetic in a fixed order.

    Parameters
    ----------
    waits
        The smallest wait of the ranks in each step; NaN: unknown.
    tails
        The duration d that was planned for each of these steps.
    known
        C so far; 0: nothing.
    """
    pairs = sorted((tail, wait) for wait, tail in zip(waits, tails, strict=True) if wait >= 0.0 and tail >= 0.0)
    if not pairs:
        return known
    short, long = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
    sums = _median([wait + tail for tail, wait in pairs])
    if short:
        longer = _median([tail for tail, _ in long]) - _median([tail for tail, _ in short])
        waits_of_short, waits_of_long = [wait for _, wait in short], [wait for _, wait in long]
        less = _median(waits_of_short) - _median(waits_of_long)
        error = math.sqrt(_variance(waits_of_short) + _variance(waits_of_long))
        if longer > 0.0 and less > max(longer / 2.0, CERTAINTY * error):
            return sums
    wait = _median([wait for _, wait in pairs])
    return max(wait, min(known, sums))


def _median(values: list[float]) -> float:
    ascending = sorted(values)
    return (ascending[(len(ascending) - 1) // 2] + ascending[len(ascending) // 2]) / 2.0


def _variance(values: list[float]) -> float:
    """Return the variance of a median, from the median absolute deviation of normally distributed values."""
    middle = _median(values)
    deviation = 1.4826 * _median([abs(value - middle) for value in values])
    return 1.571 * deviation * deviation / len(values)
