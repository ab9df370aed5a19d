"""What one process makes of a random job, and how the ranks' results are held against it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from job_training import Data, Model, Trained, sgd
from numpy.typing import NDArray
from random_jobs import Job

LIMITS = {"float64": 1e-12, "float32": 1e-5}  # on relative L2 errors: what another order of summation costs


def reference(job: Job) -> Trained:
    """Train in one process on the global batches, with torch alone."""
    data, model, trained = Data(job), Model(job), Trained()
    optimizer = sgd(job, model)
    factor = job.ranks if job.optimizer["op"] == "Sum" else 1
    for epoch in range(job.epochs):
        steps = data.steps(epoch)
        every = list(zip(steps, _shares(data, steps), strict=True))
        for first in range(0, len(every), job.steps_per_update):
            update = every[first : first + job.steps_per_update]
            if job.is_compressed:
                trained.magnitudes.append(_magnitudes(model, data, update, factor))
            optimizer.zero_grad()
            for step, shares in update:
                loss = (shares * model.losses(data.collate(step))).sum()
                (loss * factor).backward()
                trained.taken.append([step])
                trained.losses.append(loss.item())
            trained.gradients.append(model.gradients())
            if job.ranks > 1:  # Horovod sends zeros for what nobody has used, and momentum goes on
                _fill(model)
            optimizer.step()
    return trained.end(model)


def _fill(model: Model) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _shares(data: Data, steps: list[list[int]]) -> list[torch.Tensor]:
    """Return what each sample of each step counts in the step's loss."""
    weights, job = data.loss_weights, data.job
    divisors = [float(weights[step].sum()) for step in steps]
    if job.plan["normalize"] == "epoch":  # as planned, whatever is true
        divisors = [float(np.mean([float(data.planned_weights[step].sum()) for step in steps]))] * len(steps)
    if job.loss_weight == "sum":
        divisors = [float(job.ranks)] * len(steps)
    return [
        weights[step] / divisor if divisor else 0.0 * weights[step]
        for step, divisor in zip(steps, divisors, strict=True)
    ]


def _magnitudes(
    model: Model, data: Data, update: list[tuple[list[int], torch.Tensor]], factor: float
) -> dict[str, NDArray[Any]]:
    """Return Σ |share · factor · gradient of a sample's loss| by parameter: no sum of a part of them is larger."""
    every = []
    for index, share in [pair for step, shares in update for pair in zip(step, shares, strict=True)]:
        model.zero_grad()
        (factor * share * model.losses(data.collate([index]))).sum().backward()
        every.append(model.gradients())
    return {name: sum(np.abs(gradients[name]) for gradients in every) for name in every[0]}


def check(job: Job, ranks: list[Trained]) -> float:
    """Compare what the ranks have trained with one process; returns the largest error ÷ what is allowed."""
    expected = reference(job)
    assert len(ranks) == job.ranks
    _check_batches(job, ranks, expected)
    for trained in ranks[1:]:
        for name in expected.parameters:
            np.testing.assert_array_equal(trained.parameters[name], ranks[0].parameters[name])
            np.testing.assert_array_equal(trained.all_gradients(name), ranks[0].all_gradients(name))
    errors = dict(_errors(job, ranks[0], expected))
    wrong = {what: error for what, error in errors.items() if not error <= 1.0}  # a NaN is wrong
    assert not wrong, f"error ÷ allowed error: {wrong}"
    return max(errors.values())


def _check_batches(job: Job, ranks: list[Trained], expected: Trained) -> None:
    """Each sample of a step is taken once, over all ranks, but by ranks that have a filler."""
    data = Data(job)
    plans = [data.plan(epoch) for epoch in range(job.epochs)]
    counts = np.concatenate([plan.counts for plan in plans])
    least = job.plan["min_local_batch"]
    for trained in ranks:
        assert len(trained.taken) == len(counts) == len(expected.taken)
    for step, (samples,) in enumerate(expected.taken):
        held = [sorted(itertools.chain(*trained.taken[step])) for trained in ranks]
        real = [indices for indices, count in zip(held, counts[step], strict=True) if count > 0]
        assert sorted(itertools.chain(*real)) == samples, f"step {step}"
        fillers = [len(indices) for indices, count in zip(held, counts[step], strict=True) if count == 0]
        assert fillers == [least] * len(fillers)
        assert len(samples) < job.ranks * least or min(map(len, held)) >= least, f"step {step} needs no filler"


def _errors(job: Job, trained: Trained, expected: Trained) -> Iterator[tuple[str, float]]:
    """Yield what is compared, and the error ÷ what is allowed."""
    limit = LIMITS[job.dtype]
    yield "losses", relative_error(np.array(trained.losses), np.array(expected.losses)) / limit
    for name in expected.parameters:
        found, wanted = trained.all_gradients(name), expected.all_gradients(name)
        if job.is_compressed:
            magnitudes = np.stack([magnitudes[name] for magnitudes in expected.magnitudes])
            yield f"gradients of {name}", float(np.max(np.abs(found - wanted) / _half_precision(job, magnitudes)))
        else:
            yield f"gradients of {name}", relative_error(found, wanted) / limit
        yield name, relative_error(trained.parameters[name], expected.parameters[name]) / limit


def _half_precision(job: Job, magnitudes: NDArray[Any]) -> NDArray[Any]:
    """Return what half precision may lose: each rank's part is rounded, scaled twice, and added to the others'.

    Each loses half a unit in the last of 11 bits, of no more than the parts' magnitudes together; numbers that are too
    small for that a fixed amount.
    """
    operations = job.ranks + 4
    return operations * (2.0**-11 * magnitudes + 2.0**-23)


def relative_error(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    return float(np.linalg.norm(found - wanted) / (np.linalg.norm(wanted) or 1.0))
