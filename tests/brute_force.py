"""The best plan of a small step, by trying everything."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

import chronica_hvd as chronica

INFINITY = float("inf")


@dataclass(frozen=True)
class SmallStep:
    """A step of a few samples, and what the ranks may do with it."""

    sizes: tuple[int, ...]
    speeds: tuple[float, ...]
    cost: chronica.CostModel
    padded: bool = True
    equal: bool = False
    least: int = 1
    micro_batches: int = 1
    capacity: float = INFINITY
    comm: float = 0.0

    def batch_cost(self, samples: list[int]) -> float:
        """Return the cost of one micro-batch; infinite if it is too large."""
        sizes = np.array([self.sizes[sample] for sample in samples], dtype=np.float64)
        entered = np.full(len(sizes), sizes.max()) if self.padded else sizes
        if entered.sum() > self.capacity:
            return INFINITY
        return float(self.cost.predict(len(sizes), entered.sum(), (entered**2).sum()))

    def finishes(self) -> list[float]:
        """Return (2^samples,) when a rank of speed 1 holding a set of samples finishes the step, at best."""
        samples = len(self.sizes)
        batch = [INFINITY] * (1 << samples)
        for held in range(1, 1 << samples):
            batch[held] = self.batch_cost([i for i in range(samples) if held >> i & 1])

        @cache
        def loads(held: int, most: int) -> frozenset[tuple[float, float]]:
            """Every way to compute a set in at most so many micro-batches: (load, largest micro-batch)."""
            if held == 0:
                return frozenset({(0.0, 0.0)})
            if most == 0:
                return frozenset()
            first = held & -held
            rest = held ^ first
            ways = set()
            part = rest
            while True:
                own = batch[part | first]
                if own < INFINITY:
                    ways |= {(load + own, max(largest, own)) for load, largest in loads(rest ^ part, most - 1)}
                if part == 0:
                    break
                part = (part - 1) & rest
            # Of two ways with the same load the one with the longer last backward pass is better.
            return frozenset(pareto(ways))

        return [self.best_way(loads(held, self.micro_batches)) for held in range(1 << samples)]

    def best_way(self, ways: frozenset[tuple[float, float]]) -> float:
        return min((max(load, self.comm + load - largest * 2 / 3) for load, largest in ways), default=INFINITY)

    def best(self) -> float:
        """Return the earliest end of the step over all ways to deal the samples out; speeds with comm = 0 only."""
        samples, ranks = len(self.sizes), len(self.speeds)
        finish = self.finishes()
        size = [held.bit_count() for held in range(1 << samples)]
        least = samples // ranks if self.equal else self.least
        most = -(-samples // ranks) if self.equal else samples
        allowed = [held for held in range(1 << samples) if least <= size[held] <= most]
        ends = {0: 0.0}
        for speed in self.speeds:
            after: dict[int, float] = {}
            for taken, end in ends.items():
                for held in allowed:
                    if held & taken == 0:
                        now = max(end, finish[held] / speed)
                        if now < after.get(held | taken, INFINITY):
                            after[held | taken] = now
            ends = after
        return ends.get((1 << samples) - 1, INFINITY)


def pareto(ways: set[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the ways that no other beats in both load and largest micro-batch."""
    kept: list[tuple[float, float]] = []
    for load, largest in sorted(ways, key=lambda way: (way[0], -way[1])):
        if not kept or largest > kept[-1][1]:
            kept.append((load, largest))
    return kept
