"""One planning problem of the benchmark, as we plan it, as FlatFlow does, and as torch's DistributedSampler deals."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import flatflow_rival
import numpy as np
from numpy.typing import NDArray

import chronica_hvd as chronica

FLATFLOW = flatflow_rival.load()
HIDDEN = flatflow_rival.HIDDEN


@dataclass(frozen=True)
class Case:
    """What is planned: lognormal(mu, 1) sizes clipped at ``cut``, for ``ranks`` × ``batch``."""

    samples: int
    ranks: int
    batch: int
    mu: float = 5.5
    cut: int = 8192
    cost: tuple[float, float, float, float] = (0.0, 0.0, 12.0 * HIDDEN * HIDDEN, 2.0 * HIDDEN)  # CostModel's
    speeds: tuple[float, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def but(self, **options: Any) -> Case:
        """Return the case with other options of the plan."""
        return dataclasses.replace(self, options={**self.options, **options})

    def sizes(self) -> NDArray[np.int64]:
        """Draw the sizes."""
        drawn = np.random.default_rng(0).lognormal(self.mu, 1.0, self.samples)
        return np.clip(drawn, 1, self.cut).astype(np.int64)

    def model(self) -> chronica.CostModel:
        """Return the cost model."""
        return chronica.CostModel(*self.cost)

    def plan(self, sizes: NDArray[np.int64]) -> chronica.Plan:
        """Plan it; sizes may be others than the case's own."""
        return chronica.plan(sizes, self.speeds or self.ranks, self.batch, cost=self.model(), **self.options)

    def plan_in_order(self) -> chronica.Plan:
        """Plan without shuffling, so that all tools get the same steps."""
        return self.but(shuffle=False).plan(self.sizes())

    def makespan(self, batches: NDArray[np.int64]) -> float:
        """Return Σ over the steps of the largest load; batches: (steps, ranks, batch) indices."""
        sizes = self.sizes()[batches].astype(np.float64)
        if self.options.get("padding") != "none":
            sizes[:] = sizes.max(axis=2, keepdims=True)
        loads = self.model().predict(sizes.shape[2], sizes.sum(axis=2), (sizes * sizes).sum(axis=2))
        return float((loads / np.asarray(self.speeds or 1.0)).max(axis=1).sum())

    def plain(self) -> float:
        """Return the makespan of what DistributedSampler deals: rank r takes order[r::ranks] of each step."""
        steps = np.arange(self.samples).reshape(-1, self.batch, self.ranks)
        return self.makespan(steps.transpose(0, 2, 1))

    def flatflow(self) -> float:
        """Return the makespan of FlatFlow's batches, whose counts are equal and which know no speeds."""
        return self.makespan(flatflow_rival.batches(FLATFLOW, self.sizes(), self.ranks, self.batch))
