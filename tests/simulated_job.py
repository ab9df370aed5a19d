"""A job whose micro-batches take what a true cost says, planned by a measured one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import chronica_hvd as chronica
from chronica_hvd.rows import summarize

DTYPE = chronica.StepTimer().drain().dtype

#: True costs in nanoseconds: by size, and with each of the other terms.
TRUTHS = {
    "by size": chronica.CostModel(0.0, 0.0, 3e3, 0.0),
    "quadratic": chronica.CostModel(2e5, 0.0, 1e3, 4.0),
    "with all terms": chronica.CostModel(4e6, 3e5, 2e3, 0.5),
    "launch-bound": chronica.CostModel(0.0, 0.0, 3e3, 1.0, floor=1.2e7),
    "by samples": chronica.CostModel(1e5, 1e6, 100.0, 0.0),
}

#: Changes measured times, given those of all micro-batches and their ranks.
Disturb = Callable[[NDArray[np.float64], NDArray[np.int64]], NDArray[np.float64]]


class Block(NamedTuple):
    """What a block of steps took in truth: Σ makespan as planned, planned by the default, and planned by the truth."""

    measured: float
    default: float
    best: float
    loads: NDArray[np.float64]  # (steps, ranks) in truth, as planned
    is_changed: bool  # whether there is another model afterwards


class SimulatedJob:
    """One block of steps after the other, with a refresh behind each.

    Attributes
    ----------
    truth, scale, disturb
        What micro-batches take, how many times longer on each rank, and what is measured instead; may be changed.
    measured
        The cost that follows.
    """

    def __init__(self, truth: chronica.CostModel, ranks: int, noise: float, seed: int, **options: Any) -> None:
        self.engine = np.random.default_rng(seed)
        self.truth, self.ranks, self.noise = truth, ranks, noise
        self.scale = np.ones(ranks)
        self.disturb: Disturb = lambda times, rank: times
        self.measured = chronica.Measured()
        self.batch_size = int(options.pop("batch_size", 8))
        self.steps = int(options.pop("steps", 64))
        self.options = options
        self.places = [(0, rank) for rank in range(ranks)]
        self.comm = 0.0
        self.planned = chronica.CostModel()
        self.plan: chronica.Plan | None = None

    def block(self) -> Block:
        """Plan a block, take its times, and follow them."""
        sizes = np.clip(self.engine.lognormal(5.5, 0.8, self.batch_size * self.ranks * self.steps), 8, 4096)
        sizes = sizes.astype(np.int64)
        is_cut = self.options.get("micro_batches", 1) != 1
        default = chronica.CostModel(fixed=float(sizes.mean())) if is_cut else chronica.CostModel()
        believed = self.measured.model(default, self.places, self.ranks)
        oracle = dataclasses.replace(self.truth, rank_scale=self.scale)
        results = [self._run(sizes, cost) for cost in (believed, default, oracle)]
        (self.plan, work, times, rank, step), *_ = results
        loads = np.zeros((self.plan.steps, self.ranks))
        np.add.at(loads, (step, rank), times)
        exact = [self._makespans(*one) for one in results]
        new = self.measured.follow(
            self._rows(work, times, rank, step, believed), self.places, *self._waits(times, step)
        )
        self.planned = new
        return Block(exact[0], exact[1], exact[2], loads, new is not believed)

    def _run(self, sizes: NDArray[np.int64], cost: chronica.CostModel) -> tuple[Any, ...]:
        plan = chronica.plan(sizes, self.ranks, self.batch_size, cost=cost, shuffle=False, **self.options)
        samples = np.diff(plan.offsets).astype(np.float64)
        if plan.padding == "max":
            work = np.stack([samples, samples * plan.lengths, samples * plan.lengths**2])
        else:
            taken = sizes[plan.indices].astype(np.float64)
            work = np.stack([samples, *(np.add.reduceat(one, plan.offsets[:-1]) for one in (taken, taken**2))])
        of_batches = np.repeat(np.arange(plan.parts.size - 1), np.diff(plan.parts))
        rank, step = of_batches % self.ranks, of_batches // self.ranks
        return plan, work, self.truth.predict(*work) * self.scale[rank], rank, step

    def _makespans(self, plan: chronica.Plan, work: Any, times: Any, rank: Any, step: Any) -> float:
        loads = np.zeros((plan.steps, self.ranks))
        np.add.at(loads, (step, rank), times)
        return float(loads.max(axis=1).sum())

    def _rows(self, work: Any, times: Any, rank: Any, step: Any, believed: chronica.CostModel) -> NDArray[np.float64]:
        records = np.zeros(times.size, DTYPE)
        records["step"] = step
        for name, amount in zip(("samples", "size", "size2"), work, strict=True):
            records[name] = np.round(amount)
        noisy = times * np.exp(self.engine.normal(0.0, self.noise, times.size))
        records["elapsed_ns"] = np.round(self.disturb(noisy, rank))
        return np.array([summarize(records[rank == one], believed) for one in range(self.ranks)])

    def _waits(self, times: Any, step: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the waits for the allreduce that would be seen, and how long it could overlap, as planned, in ns."""
        assert self.plan is not None
        loads, tails = self.plan.loads, self.plan.tails
        overlaps = (loads.max(axis=1) - (loads - tails).max(axis=1)) * (times.sum() / loads.sum())
        if self.comm == 0.0:
            return np.full(self.plan.steps, np.nan), overlaps
        return np.maximum(0.0, self.comm - overlaps), overlaps
