"""What several tests need: data, and plans spelled out."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

import chronica_hvd as chronica


def lognormal(
    count: int, mean: float = 5.0, sigma: float = 1.0, largest: int = 8192, seed: int = 0
) -> NDArray[np.int64]:
    """Heavy-tailed sizes of at least 1."""
    drawn = np.random.default_rng(seed).lognormal(mean, sigma, count)
    return np.minimum(np.ceil(drawn), largest).astype(np.int64)


def step_samples(plan: chronica.Plan, step: int) -> list[int]:
    """Return the samples that count in a step, over all ranks, sorted."""
    ranks = [rank for rank in range(plan.ranks) if plan.counts[step, rank] > 0]
    return sorted(int(i) for rank in ranks for batch in plan.batches(step, rank) for i in batch)


def check(plan: chronica.Plan, sizes: Any, batch_size: int, steps: list[list[int]], least: int = 1) -> None:
    """Everything that holds for every plan whose step k must hold the samples ``steps[k]``."""
    sizes = np.asarray(sizes)
    assert plan.steps == len(steps)
    for step, samples in enumerate(steps):
        assert step_samples(plan, step) == samples
        for rank in range(plan.ranks):
            held = np.concatenate(plan.batches(step, rank))
            assert len(held) == (plan.counts[step, rank] or least)
            if plan.counts[step, rank] == 0:
                assert len(samples) < plan.ranks * least
                cheapest = np.sort(np.resize(np.sort(sizes[samples])[:least], least))
                assert np.sort(sizes[held]).tolist() == cheapest.tolist()
                assert plan.weights[step, rank] == 0.0
                assert not plan.micro_weights(step, rank).any()
            np.testing.assert_allclose(plan.micro_weights(step, rank).sum(), plan.weights[step, rank], rtol=1e-14)
    assert plan.counts.sum(axis=1).tolist() == [len(samples) for samples in steps]
    assert (plan.counts.sum(axis=1) <= batch_size * plan.ranks).all()
    assert (plan.makespans >= plan.lower_bounds).all()
    assert (plan.tails <= plan.loads).all()
    np.testing.assert_array_equal(plan.makespans, plan.loads.max(axis=1))


def distributed_sampler_steps(
    samples: int, ranks: int, batch_size: int, *, shuffle: bool, seed: int, epoch: int
) -> list[list[int]]:
    """Return the samples that torch's DistributedSampler gives all ranks in each step, its repeated tail left out."""
    dataset = torch.utils.data.TensorDataset(torch.zeros(samples))
    per_rank = []
    for rank in range(ranks):
        sampler = DistributedSampler(dataset, ranks, rank, shuffle=shuffle, seed=seed)
        sampler.set_epoch(epoch)
        per_rank.append(list(sampler))
    # The order drawn: rank r holds every ranks-th sample from the r-th on; the tail that repeats the head is cut off.
    drawn = [indices[place] for place in range(len(per_rank[0])) for indices in per_rank][:samples]
    size = batch_size * ranks
    return [sorted(drawn[first : first + size]) for first in range(0, samples, size)]


def recut(
    plan: chronica.Plan, loss_weights: NDArray[np.float64] | str, seed: int, pieces: int | None = None
) -> chronica.Plan:
    """Return the plan with each rank's batch of each step cut anew, into micro-batches that ``seed`` draws.

    ``loss_weights`` are the samples' (``"sum"``: losses are summed). Each batch is cut into ``pieces`` where it has
    enough samples, by default into 1 to 4 as drawn.
    """
    random = np.random.default_rng(seed)
    indices, counts, factors = [], [], []
    for step in range(plan.steps):
        for rank in range(plan.ranks):
            whole = np.concatenate(plan.batches(step, rank))
            number = min(pieces or int(random.integers(1, 5)), len(whole))
            places = np.sort(random.choice(np.arange(1, len(whole)), number - 1, replace=False))
            batches = np.split(random.permutation(whole), places)
            indices += batches
            counts.append(number)
            weight = plan.weights[step, rank]
            if isinstance(loss_weights, str):
                factors += [weight] * number
            else:
                total = loss_weights[whole].sum()
                factors += [weight * loss_weights[batch].sum() / total if total > 0.0 else 0.0 for batch in batches]
    return dataclasses.replace(
        plan,
        indices=np.concatenate(indices),
        offsets=np.cumsum([0, *map(len, indices)]),
        parts=np.cumsum([0, *counts]),
        lengths=np.ones(len(indices)),
        factors=np.array(factors),
    )


def recut_sampler(sampler: chronica.BatchSampler, seed: int, pieces: int | None = None) -> chronica.BatchSampler:
    """Return the sampler with its plans cut anew (see :func:`recut`)."""
    planner = sampler._planner
    weights: NDArray[np.float64] | str | None = planner.workload.loss_weights
    if isinstance(planner.options.loss_weight, str) and planner.options.loss_weight == "sum":
        weights = "sum"
    elif weights is None:
        weights = np.ones(sampler.samples)
    plan = planner.plan
    planner.plan = lambda epoch, left: recut(plan(epoch, left), weights, seed + epoch, pieces)  # type: ignore
    return sampler
