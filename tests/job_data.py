"""A random job's data, and the global batches that are drawn from it."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from helpers import distributed_sampler_steps, step_samples
from job_options import LONGEST
from numpy.typing import NDArray
from random_jobs import Job

import chronica_hvd as chronica

FEATURES, VOCABULARY = 4, 11
COMPUTES_IN = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.float64}


@dataclass(frozen=True)
class Batch:
    indices: torch.Tensor
    features: torch.Tensor  # (samples, FEATURES)
    tokens: torch.Tensor  # (samples, longest), padded with a token that would be felt
    is_token: torch.Tensor  # (samples, longest)
    targets: torch.Tensor


class Data(torch.utils.data.Dataset[int]):
    """What a job trains on; an item is its index."""

    def __init__(self, job: Job) -> None:
        random = np.random.default_rng(job.seed)
        self.job = job
        self.dtype = COMPUTES_IN[job.dtype]
        self.sizes = np.array(job.sizes)
        self.features = torch.from_numpy(random.normal(size=(len(self.sizes), FEATURES))).to(self.dtype)
        # So far off that the errors have one sign: gradients that cancel out would have no digits left to compare.
        self.targets = torch.from_numpy(random.normal(8.0, size=len(self.sizes))).to(self.dtype)
        self.tokens = torch.from_numpy(random.integers(0, VOCABULARY, (len(self.sizes), LONGEST)))
        self.planned_weights = torch.from_numpy(self._planned_weights()).to(self.dtype)
        true_weights = self.planned_weights if job.amounts is None else torch.tensor(job.amounts)
        self.loss_weights = true_weights.to(self.dtype)

    def _planned_weights(self) -> NDArray[np.float64]:
        if isinstance(self.job.loss_weight, list):
            return np.array(self.job.loss_weight)
        return self.sizes.astype(np.float64) if self.job.loss_weight == "sizes" else np.ones(len(self.sizes))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, indices: list[int]) -> Batch:
        longest = int(self.sizes[indices].max())
        tokens = self.tokens[indices, :longest].clone()
        is_token = torch.arange(longest) < torch.from_numpy(self.sizes[indices])[:, None]
        tokens[~is_token] = 0
        return Batch(torch.tensor(indices), self.features[indices], tokens, is_token, self.targets[indices])

    @property
    def plan_options(self) -> dict[str, Any]:
        options = {**self.job.plan, "loss_weight": self.job.loss_weight}
        if isinstance(options["cost"], dict):
            options["cost"] = chronica.CostModel(**options["cost"])
        return options

    def sampler(self, **changes: Any) -> chronica.BatchSampler:
        """Return the sampler that the job's ranks train with."""
        replicas = {} if self.job.speeds is None else {"num_replicas": self.job.speeds}
        return chronica.BatchSampler(self.sizes, self.job.batch_size, **{**replicas, **self.plan_options, **changes})

    def evaluation_sampler(self) -> chronica.BatchSampler:
        order = ("shuffle", "drop_last", "reorder", "window", "max_moved", "first", "normalize")
        options = {name: value for name, value in self.plan_options.items() if name not in order}
        replicas = {} if self.job.speeds is None else {"num_replicas": self.job.speeds}
        return chronica.BatchSampler(self.sizes, self.job.batch_size, evaluation=True, **replicas, **options)

    def drawn(self, epoch: int) -> list[int]:
        """Return the samples of an epoch in the order in which they are drawn."""
        options = self.job.plan
        if "indices" in options:
            return options["indices"]  # type: ignore[no-any-return]
        drawing = {name: options[name] for name in ("shuffle", "seed")}
        single = distributed_sampler_steps(len(self), 1, 1, **drawing, epoch=epoch)
        return list(itertools.chain(*single))

    def steps(self, epoch: int, state: Any = None, done: Sequence[list[int]] = ()) -> tuple[list[list[int]], int]:
        """Return the samples of each global batch as they are trained on, sorted, and which of them comes first.

        Each drawn sample counts once: ``done`` are the global batches that another world has trained on, which left
        the sampler in ``state``.
        """
        if state is None and not self.job.moves_samples:
            return cut(self.job, self.drawn(epoch)), 0
        sampler = self.sampler(num_replicas=self.job.speeds or self.job.ranks, rank=0)
        if state is None:
            sampler.set_epoch(epoch)
        else:
            sampler.load_state_dict(state)
        plan = sampler.plan
        first = plan.steps - len(sampler)
        drawn = cut(self.job, self.drawn(epoch) if first else without(self.drawn(epoch), done))
        steps = [step_samples(plan, step) for step in range(plan.steps)] if self.job.moves_samples else drawn
        assert steps[:first] == list(done)[:first]
        assert sorted(map(len, steps)) == sorted(map(len, drawn))
        if not self.job.plan["drop_last"]:
            assert sorted(itertools.chain(*steps)) == sorted(itertools.chain(*drawn))
        if self.job.plan["reorder"] == "batch" and not done:
            assert sorted(steps) == sorted(drawn), "whole steps change their place"
        return steps, first


def cut(job: Job, samples: list[int]) -> list[list[int]]:
    """Return the global batches of samples in the order drawn."""
    size = job.batch_size * job.ranks
    steps = [sorted(samples[first : first + size]) for first in range(0, len(samples), size)]
    return [step for step in steps if len(step) == size or not job.plan["drop_last"]]


def without(samples: list[int], done: Sequence[list[int]]) -> list[int]:
    """Return the samples that are left, in order; one that is there several times is done as often as it was taken."""
    taken = collections.Counter(itertools.chain(*done))
    left = []
    for sample in samples:
        if taken[sample]:
            taken[sample] -= 1
        else:
            left.append(sample)
    assert not +taken, "every sample taken was drawn"
    return left
