"""Report: for whom the other ranks waited in each step, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Causes that a rank is named for.
OF_A_RANK = ("data", "device", "input", "loop")

#: Below this share of the ranks' time nobody is named for having kept others waiting.
LEAST_SHARE = 0.02
#: Nor below this slowdown for a slow device.
LEAST_SLOWDOWN = 1.05
#: An epoch is divided into at most so many groups of consecutive steps, to tell what is steady from noise.
GROUPS = 16
#: Fewer groups say nothing; of two levels each must last for three, so that a single stall makes none.
LEAST_GROUPS, LEAST_OF_LEVEL = 4, 3
#: A steady factor closer to 1 is none.
LEAST_CHANGE = 0.01
#: Nor do ranks differ by less.
LEAST_NS = 1000.0
#: Smaller changes in the course of the epoch, in multiples of these, are none.
LEAST_STEP = 15.0


@dataclass(frozen=True)
class Straggler:
    """A rank that kept the others waiting, or has a slow device that the plan relieves.

    Attributes
    ----------
    rank
        Which one.
    cause
        ``"data"`` (its work is predicted to take longer), ``"device"`` (it takes longer than predicted, by a steady
        factor), ``"input"`` (it waits for its loader) or ``"loop"`` (other work of the loop between steps).
    waiting
        Seconds that the others waited for it, all together.
    share
        The same as a share of the time of all ranks.
    factor
        How many times longer than on the median rank the same work takes on its device: of its slow steps if the cause
        is ``"device"``, else over the epoch.
    """

    rank: int
    cause: str
    waiting: float
    share: float
    factor: float


@dataclass(frozen=True)
class Attribution:
    """What follows from the times (steps, ranks), in ns, of steps of which all is known.

    Attributes
    ----------
    compute, data_wait, other, wait
        They add up to the step. ``other`` is what the loop does besides.
    planned
        The plan's loads, in any unit.
    work
        What the compute should take on ranks of equal speed, in any unit.
    is_first
        (steps,) whether nothing is known of the time between a step and the one before.
    """

    compute: Array
    data_wait: Array
    other: Array
    wait: Array
    planned: Array
    work: Array
    is_first: NDArray[np.bool_]

    @cached_property
    def wire(self) -> Array:
        """(steps,) the smallest wait."""
        return np.asarray(self.wait.min(axis=1, initial=np.inf))

    @cached_property
    def peer_wait(self) -> Array:
        """(steps, ranks) what a rank waited longer than that."""
        return self.wait - self.wire[:, None]

    @cached_property
    def spent(self) -> float:
        """The time of all ranks together."""
        return float((self.compute + self.data_wait + self.other + self.wait).sum())

    @cached_property
    def _ratios(self) -> Array:
        """(groups, ranks) compute ÷ work."""
        work = in_unit_of(self.compute, self.work)
        return _ratio(_sums(np.where(work > 0.0, self.compute, 0.0)), _sums(work))

    @cached_property
    def slowdown(self) -> Array:
        """(ranks,) compute ÷ work, relative to the median rank."""
        means = _mean(self._ratios)
        return _ratio(means, _of_median_rank(means))

    @cached_property
    def factor(self) -> Array:
        """(steps, ranks) the same, as it changes in the epoch; 1 where it can be noise."""
        reference = [_median_rank(self._ratios)]
        factors = 1.0 + _levels(_ratio(self._ratios, self._ratios[:, reference]) - 1.0, LEAST_CHANGE)
        return _by_step(_ratio(factors, _of_median_rank(factors)), len(self.work))

    @cached_property
    def waiting(self) -> dict[str, Array]:
        """By cause, (ranks,) how long the others waited for each rank, all together."""
        steps, ranks = self.compute.shape
        last = self.wait.argmin(axis=1) if ranks else np.zeros(steps, np.int64)

        def excess(values: Array) -> Array:
            """Return (steps,) by how much the last rank exceeds the mean of the others."""
            own = values[np.arange(steps), last]
            return np.asarray(own - (values.sum(axis=1) - own) / max(ranks - 1, 1))

        work = in_unit_of(self.compute, self.work, self.factor)
        slow = excess(work * (self.factor - 1.0))
        # What a slow rank varies by, more than others usually do, is its device's too.
        varies = np.maximum(excess(_far(self.compute - work * self.factor)), 0.0)
        slow += np.where(self.factor[np.arange(steps), last] > 1.0, varies, 0.0)
        # What a slow rank is given less makes up for its slowness: only the rest is waited for.
        longer = np.maximum(excess(work) + slow, 0.0)
        device = np.clip(slow, 0.0, longer)
        data = np.clip(excess(in_unit_of(self.compute, self.planned)) - device, 0.0, longer - device)
        parts = {
            "data": data,
            "device": device,
            "input": np.maximum(excess(_without_jitter(self.data_wait)), 0.0),
            "loop": np.maximum(excess(_without_jitter(self.other)), 0.0),
            "plan": longer - device - data,
        }
        total = self.peer_wait.sum(axis=1)
        explained = np.sum(list(parts.values()), axis=0)
        parts["noise"] = np.maximum(total / max(ranks - 1, 1) - explained, 0.0)
        scale = _ratio(total, explained + parts["noise"])
        shares = {cause: part * scale for cause, part in parts.items()}
        at_start = ("input", "loop", "noise")
        shares["start"] = np.where(self.is_first, np.sum([shares[cause] for cause in at_start], axis=0), 0.0)
        shares |= {cause: np.where(self.is_first, 0.0, shares[cause]) for cause in at_start}
        return {cause: np.bincount(last, share, ranks).astype(np.float64) for cause, share in shares.items()}

    def stragglers(self, ranks: list[int]) -> tuple[Straggler, ...]:
        """Return who is to be named, the largest waiting first; ``ranks`` has the number of each."""
        named = []
        for cause in OF_A_RANK if len(self.compute) else ():
            for place, rank in enumerate(ranks):
                ns = float(self.waiting[cause][place])
                share = ns / self.spent if self.spent > 0.0 else 0.0
                factor, factors = float(self.slowdown[place]), self.factor[:, place]
                is_slow = cause == "device" and min(factor, factors[-1]) >= LEAST_SLOWDOWN
                if share >= LEAST_SHARE or is_slow:
                    if cause == "device" and factors.max() > 1.0:
                        factor = float(factors[factors > 1.0].mean())
                    named.append(Straggler(rank, cause, ns / 1e9, share, factor))
        return tuple(sorted(named, key=lambda straggler: -straggler.waiting))

    @property
    def prediction_error(self) -> float:
        """Median relative error of the planned loads; NaN where unknown."""
        planned = in_unit_of(self.compute, self.planned)
        errors = np.abs(_ratio(self.compute, planned) - 1.0)[planned > 0.0]
        return float(np.median(errors)) if errors.size else math.nan


def in_unit_of(compute: Array, loads: Array, factor: Array | float = 1.0) -> Array:
    """Return loads in ns: times a factor, a step's add up to its compute; 0 in steps where one is unknown."""
    total = (loads * factor).sum(axis=1, keepdims=True)
    return np.where(total > 0.0, loads * _ratio(compute.sum(axis=1, keepdims=True), total), 0.0)


def _without_jitter(times: Array) -> Array:
    """Return what is steady of each rank's times, and in single steps what is far beyond their usual spread."""
    means = _sums(times) / _sums(np.ones_like(times))
    steady = _by_step(_levels(means - means[:, [_median_rank(means)]], LEAST_NS), len(times))
    return steady + _far(times - steady)


def _far(times: Array) -> Array:
    """Return what times differ by from their rank's median, where that is far more than usual; else 0."""
    if not len(times):
        return times
    rest = times - np.median(times, axis=0)
    spread = 1.4826 * _of_median_rank(np.median(np.abs(rest), axis=0))  # as a standard deviation
    return np.where(np.abs(rest) > _beyond(len(rest)) * spread, rest, 0.0)


def _levels(values: Array, least: float) -> Array:
    """Return (groups, ranks) the steady part of values that would be 0 but for it; 0 where it can be noise."""
    if len(values) < LEAST_GROUPS:
        return np.zeros_like(values)
    # From one group to the next, so that changes of the level are not in it.
    noise = np.median(np.abs(np.diff(values, axis=0)), axis=0) / (0.6745 * math.sqrt(2.0))
    return _level(values, np.maximum(noise, np.median(noise)), least)


def _level(values: Array, noise: Array, least: float) -> Array:
    """Return (groups, ranks) the level of each rank, which may change."""

    def error(groups: int, spread: Array) -> Array:
        return np.asarray(_beyond(groups) / math.sqrt(groups) * spread)

    best, split = np.zeros(len(noise)), np.zeros(len(noise), np.int64)
    for place in range(LEAST_OF_LEVEL, len(values) - LEAST_OF_LEVEL + 1):
        before, after = values[:place], values[place:]
        limit = np.maximum(np.hypot(error(place, noise), error(len(after), noise)), LEAST_STEP * least)
        # The means of all are what tells where: the others are much the same one group off.
        gain = np.abs(before.mean(axis=0) - after.mean(axis=0)) * math.sqrt(place * len(after))
        is_best = (np.abs(_mean(before) - _mean(after)) > limit) & (gain > best)
        best, split = np.where(is_best, gain, best), np.where(is_best, place, split)
    # Slow waves are noise too, and not in the differences between neighbours.
    spread = np.maximum(noise, 1.2 * _kept(values).std(axis=0))
    mean, limit = _mean(values), np.maximum(error(len(values), spread), least)
    levels = np.tile(np.where(np.abs(mean) > limit, mean, 0.0), (len(values), 1))
    for place in set(split.tolist()) - {0}:
        ranks = split == place
        for part in (slice(place), slice(place, None)):
            levels[part, ranks] = _level(values[part, ranks], noise[ranks], least)
    return levels


def _beyond(values: int) -> float:
    """Return how many standard deviations noise hardly ever exceeds, where they are known from so many values."""
    return 4.0 * (1.0 + 4.0 / max(values, 1))


def _sums(values: Array) -> Array:
    """Return the sums over groups of consecutive steps."""
    starts = np.arange(0, len(values), _group_size(len(values)))
    return np.add.reduceat(values, starts, axis=0) if len(values) else values


def _by_step(values: Array, steps: int) -> Array:
    return np.repeat(values, _group_size(steps), axis=0)[:steps]


def _group_size(steps: int) -> int:
    return max(1, -(-steps // GROUPS))


def _kept(values: Array) -> Array:
    """Return values of groups, of three or more without the largest and the smallest."""
    return np.sort(values, axis=0)[1:-1] if len(values) >= 3 else values


def _mean(values: Array) -> Array:
    """Return the mean over groups of those kept."""
    kept = _kept(values)
    return np.asarray(kept.mean(axis=0) if len(kept) else np.ones(values.shape[1:]))


def _median_rank(values: Array) -> int:
    """Return the rank with the median of (groups, ranks) values; of an even number the lower one.

    So that of two ranks the slower one is slow, not the other one fast.
    """
    means = _mean(values)
    return int(np.argsort(means, kind="stable")[(means.size - 1) // 2])


def _of_median_rank(values: Array) -> Array:
    """Return the median over ranks, of an even number the lower one."""
    middle = (values.shape[-1] - 1) // 2
    return np.sort(values, axis=-1)[..., middle : middle + 1]


def _ratio(a: Array, b: Array) -> Array:
    """Return a ÷ b, 1 where b is not positive."""
    return np.divide(a, b, out=np.ones(np.broadcast_shapes(a.shape, b.shape)), where=b > 0.0)
