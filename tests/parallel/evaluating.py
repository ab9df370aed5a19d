"""What the ranks evaluate, and what a single process gets: used by the job and its tests."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import lognormal, recut_sampler
from torch import nn

import chronica_hvd

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
FEATURES = 3


@dataclass(frozen=True)
class Evaluation:
    """Samples (deterministic in their number), and how they are evaluated."""

    samples: int
    batch_size: int = 4
    loss_weight: str = "samples"  # "array": a weight per sample, 0 for some; "sum": amounts are given
    options: dict[str, Any] = field(default_factory=dict)  # of the sampler
    speeds: tuple[float, ...] | None = None
    cut: bool = False  # into other micro-batches than the plan's
    by_hand: bool = False
    workers: int = 0

    @property
    def sizes(self) -> np.ndarray:
        return lognormal(self.samples, largest=500, seed=self.samples)

    @property
    def values(self) -> np.ndarray:
        """(samples, FEATURES) what is to be averaged."""
        return np.random.default_rng(self.samples).normal(size=(self.samples, FEATURES)) * self.sizes[:, None]

    @property
    def weights(self) -> np.ndarray:
        """(samples,) what each counts."""
        if self.loss_weight == "sizes":
            return self.sizes.astype(np.float64)
        if self.loss_weight == "samples":
            return np.ones(self.samples)
        return np.random.default_rng(1 + self.samples).choice([0.0, 0.5, 3.0, 1.0], self.samples)

    def sampler(self, rank: int, ranks: int, process_set: Any = None) -> chronica_hvd.BatchSampler:
        given: dict[str, Any] = {"evaluation": True, **self.options, "process_set": process_set}
        given["loss_weight"] = self.weights if self.loss_weight == "array" else self.loss_weight
        if self.by_hand:
            given |= {"num_replicas": ranks, "rank": rank}
        if self.speeds is not None:
            given["num_replicas"] = self.speeds
        sampler = chronica_hvd.BatchSampler(self.sizes, self.batch_size, **given)
        return recut_sampler(sampler, seed=self.samples) if self.cut else sampler

    def means(self, samples: list[int]) -> np.ndarray:
        """(FEATURES,) the weighted mean over samples of one micro-batch or of all; NaN where none counts."""
        weights = self.weights[samples]
        with np.errstate(invalid="ignore"):
            return (weights[:, None] * self.values[samples]).sum(axis=0) / np.float64(weights.sum())


def evaluations(ranks: int) -> dict[str, Evaluation]:
    """Return the evaluations for this number of ranks, by name."""
    automatic = {"micro_batches": "auto"}
    return {
        "indivisible": Evaluation(8 * ranks + 1),
        "less-than-a-step": Evaluation(ranks + 1),
        "fewer-samples-than-ranks": Evaluation(ranks - 1),
        "one-sample": Evaluation(1, options=automatic),
        "sizes": Evaluation(61, loss_weight="sizes", options=automatic),
        "array": Evaluation(60, loss_weight="array"),
        "without-padding": Evaluation(59, loss_weight="array", options={**automatic, "padding": "none"}),
        "cut": Evaluation(12 * ranks + 1, loss_weight="array", options=automatic, cut=True),
        "fillers-of-two": Evaluation(4 * ranks + 1, options={**automatic, "min_local_batch": 2}, cut=True),
        "speeds": Evaluation(70, loss_weight="sizes", speeds=(1.0, 0.5, 2.0)[:ranks]),
        "equal": Evaluation(71, options={"local_batch": "equal"}),
        "amounts": Evaluation(62, loss_weight="sum", options=automatic),
        "by-hand": Evaluation(37, by_hand=True),
        "workers": Evaluation(43, options=automatic, workers=2),
        "not-by-size": Evaluation(45, loss_weight="sizes", options={**automatic, "evaluation": False}),
        "indices": Evaluation(50, options={"indices": list(range(0, 50, 3))}),
        "long": Evaluation(400 * ranks + 1, batch_size=2),
    }


def block(of: str) -> str:
    """Return the block of Python in the guide that holds a text."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (found,) = (text for text in blocks if of in text)
    return str(found)


class Normalised(nn.Module):
    """float64; a hidden layer whose statistics are over the batch, and a mean squared error."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.before, self.norm, self.after = nn.Linear(FEATURES, 6), norm, nn.Linear(6, 1)
        self.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.after(torch.tanh(self.norm(self.before(inputs)))).square().mean(dim=1)
