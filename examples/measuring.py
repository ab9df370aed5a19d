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

CALIBRATION_SHAPES = 8
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
        (steps, ranks) timer records of all ranks.
    """

    losses: list[float]
    tokens: int
    seconds: float
    records: NDArray[Any]

    @property
    def idle_share(self) -> float:
        """The share of the ranks' time spent waiting for the slowest of them."""
        return idle_share(self.records["elapsed_ns"])

    def summary(self, cost: chronica.CostModel) -> dict[str, Any]:
        """Return the run's figures; a collective."""
        tokens = int(hvd.allreduce(torch.tensor([self.tokens]), op=hvd.Sum, name="tokens"))
        records = self.records
        return {
            "steps_per_s": len(self.losses) / self.seconds,
            "tokens_per_s": tokens / self.seconds,
            "compute_share": float(records["elapsed_ns"].mean(axis=1).sum()) / 1e9 / self.seconds,
            "idle_share": self.idle_share,
            "predicted_idle_share": idle_share(cost.predict(records["samples"], records["size"], records["size2"])),
            "padding_share": 1.0 - tokens / int(records["size"].sum()),
            "final_loss": self.losses[-1],
            "losses": self.losses,
        }


def idle_share(times: NDArray[Any]) -> float:
    """Return 1 − Σ mean / Σ max over the ranks of (steps, ranks) times."""
    return float(1.0 - times.mean(axis=1).sum() / times.max(axis=1).sum())


def gather(records: NDArray[Any], name: str) -> NDArray[Any]:
    """Return (records, ranks) of all ranks' timer records; every rank has the same number. A collective."""
    flat = torch.from_numpy(records.view(np.int64).reshape(len(records), -1))
    every: NDArray[Any] = hvd.allgather(flat, name=name).numpy()
    return every.reshape(-1).view(records.dtype).reshape(hvd.size(), len(records)).T


def calibrate(loss: Callable[[Tensor, Tensor], Tensor], sizes: list[int], batch_size: int) -> chronica.CostModel:
    """Time eight shapes of a first plan on every rank and fit what a padded batch costs; the same on every rank."""
    plan = chronica.plan(sizes, hvd.size(), batch_size, cost=chronica.CostModel(per_size=1, per_size2=1 / max(sizes)))
    batches = (plan.batches(step, rank)[0] for step in range(plan.steps) for rank in range(plan.ranks))
    shapes = sorted({(len(batch), max(sizes[sample] for sample in batch)) for batch in batches}, key=math.prod)
    chosen = [shapes[int(place)] for place in np.linspace(0, len(shapes) - 1, CALIBRATION_SHAPES).round()]
    timer = chronica.StepTimer()
    # Before any timing the largest batch of plain training, so that the memory for all others has been had once.
    for samples, longest in [(batch_size, max(sizes)), *chosen * CALIBRATION_REPEATS]:
        text = torch.randint(256, (samples, longest))
        timer.start(samples=samples, size=samples * longest, size2=samples * longest**2)
        loss(text, torch.full((samples,), longest)).backward()
        timer.stop()
    # (repeats · shapes, ranks) → (repeats, shapes, ranks); the median of a shape forgets what disturbed one of them.
    records = gather(timer.drain()[1:], "calibration").reshape(CALIBRATION_REPEATS, CALIBRATION_SHAPES, -1)
    typical = records[0, :, 0].copy()
    typical["elapsed_ns"] = np.median(records["elapsed_ns"], axis=(0, 2))
    return chronica.CostModel.fit(typical)
