"""What the example measures: the cost of a batch before training, and where the time went after it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import chronica_hvd as chronica

CALIBRATION_SHAPES = 12
CALIBRATION_REPEATS = 3


@dataclass
class Run:
    """An epoch of training, as one rank saw it.

    Attributes
    ----------
    losses
        Mean loss over the global batch of each step.
    tokens
        Bytes of text in this rank's batches, without padding.
    seconds
        Wall time of the epoch.
    records
        (micro-batches,) this rank's timer records.
    """

    losses: list[float]
    tokens: int
    seconds: float
    records: NDArray[Any]

    def per_step(self, values: NDArray[Any], name: str) -> NDArray[np.float64]:
        """Return (steps, ranks) the sums over each rank's micro-batches of a value each; a collective."""
        sums = np.bincount(self.records["step"], values)
        every: NDArray[np.float64] = hvd.allgather(torch.from_numpy(sums), name=name).numpy()
        return every.reshape(hvd.size(), -1).T

    def idle_share(self) -> float:
        """Return the share of the ranks' time spent waiting for the slowest of them; a collective."""
        return _idle_share(self.per_step(self.records["elapsed_ns"], "elapsed"))

    def summary(self, cost: chronica.CostModel) -> dict[str, Any]:
        """Return the run's figures; a collective."""
        records = self.records
        tokens = int(hvd.allreduce(torch.tensor([self.tokens]), op=hvd.Sum, name="tokens"))
        elapsed = self.per_step(records["elapsed_ns"], "elapsed")
        predicted = self.per_step(cost.predict(records["samples"], records["size"], records["size2"]), "predicted")
        micro_batches = self.per_step(np.ones(len(records)), "micro_batches")
        return {
            "steps_per_s": len(self.losses) / self.seconds,
            "tokens_per_s": tokens / self.seconds,
            "compute_share": float(elapsed.mean(axis=1).sum()) / 1e9 / self.seconds,
            "idle_share": _idle_share(elapsed),
            "predicted_idle_share": _idle_share(predicted),
            "padding_share": 1.0 - tokens / float(self.per_step(records["size"], "size").sum()),
            "micro_batches": float(micro_batches.mean()),
            "final_loss": self.losses[-1],
            "losses": self.losses,
        }


def _idle_share(times: NDArray[Any]) -> float:
    """Return 1 − Σ mean / Σ max over the ranks of (steps, ranks) times."""
    return float(1.0 - times.mean(axis=1).sum() / times.max(axis=1).sum())


def calibrate(loss: Callable[[Tensor, Tensor], Tensor], sizes: list[int], batch_size: int) -> chronica.CostModel:
    """Time shapes of a first plan on every rank and fit what a padded micro-batch costs; the same on every rank."""
    guess = chronica.CostModel(fixed=float(np.mean(sizes)), per_size=1, per_size2=1 / max(sizes))
    plan = chronica.plan(sizes, hvd.size(), batch_size, cost=guess, micro_batches="auto")
    shapes = sorted(plan.shapes(), key=math.prod)
    # Spread over the work in them rather than over their number: most are small.
    places = np.searchsorted(
        np.cumsum([math.prod(shape) for shape in shapes]),
        np.linspace(0, 1, CALIBRATION_SHAPES) * sum(map(math.prod, shapes)),
    )
    chosen = [shapes[min(int(place), len(shapes) - 1)] for place in places]
    timer = chronica.StepTimer()
    # Before any timing the largest batch of plain training, so that the memory for all others has been had once.
    for samples, longest in [(batch_size, max(sizes)), *chosen * CALIBRATION_REPEATS]:
        text = torch.randint(256, (samples, int(longest)))
        timer.start(samples=samples, size=samples * int(longest), size2=samples * int(longest) ** 2)
        loss(text, torch.full((samples,), int(longest))).backward()
        timer.stop()
    records = timer.drain()[1:]
    # Of all ranks, so that all get the same cost.
    every = hvd.allgather(torch.from_numpy(records.view(np.int64)), name="calibration").numpy()
    return chronica.CostModel.fit(every.view(records.dtype), start=guess)
