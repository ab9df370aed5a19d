"""What one process makes of a random job."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from job_data import COMPUTES_IN, Data, cut, without
from job_model import Model, filled, is_trained, networks, trainer
from job_training import Trained
from numpy.typing import NDArray
from random_jobs import Job

Shares = list[tuple[list[int], torch.Tensor]]  # of each step of an update: the samples, and what each counts


def reference(job: Job, state: Any = None) -> list[Trained]:
    """Train in one process on the global batches, with torch alone; returns what becomes of each leg.

    ``state`` is that of the sampler when the second leg begins.
    """
    models = [model.to(COMPUTES_IN[job.dtype]) for model in networks(job)]
    optimizers = [trainer(job, model) for model in models]
    legs: list[Trained] = []
    begins_in, done = 0, []  # type: ignore[var-annotated]
    for leg in job.legs:
        trained = Trained()
        legs.append(trained)
        for model in models:
            model.zero_grad()  # without momentum for what goes unused on one rank, unless gradients are set to 0
        data = Data(leg)
        for epoch in range(begins_in, leg.epochs):
            is_rest = leg is not job and epoch == begins_in
            steps, first = data.steps(epoch, state, done) if is_rest else data.steps(epoch)
            shares = _shares(data, steps, epoch)
            update: Shares = []
            schedule = leg.schedule(len(trained.taken), len(steps) - first, epoch)
            for step, verdict in enumerate(schedule, first):
                trained.taken.append([steps[step]])
                update.append((steps[step], shares[step]))
                if verdict == "update":
                    pairs = [(m, o) for m, o in zip(models, optimizers, strict=True) if is_trained(leg, m, step)]
                    _update(leg, data, trained, update, pairs)
                elif verdict == "skip":
                    # The losses of its steps before the last one were averaged before it was given up.
                    trained.losses += [_loss(models[0], data, [one]).item() for one in update[:-1]]
                    for model in models:
                        if is_trained(leg, model, step):
                            model.zero_grad()
                if verdict != "part":
                    update = []
            if leg.stops_in(epoch):
                begins_in, done = epoch, steps[: first + len(schedule)]
                if len(done) == len(steps):  # what drop_last has dropped is not taken up again
                    done = [*done, without(data.drawn(epoch), done)]
                break
        for model in models:
            trained.parameters |= model.values()
        if leg.evaluates and leg.resumes is None:
            trained.evaluations.append(_evaluation(data, models[0]))
    return legs


def _update(job: Job, data: Data, trained: Trained, update: Shares, pairs: list[tuple[Model, Any]]) -> None:
    factor = job.ranks if job.optimizer["op"] == "Sum" else 1
    trained.gradients.append({})
    trained.magnitudes.append({})
    trained.losses += [_loss(pairs[0][0], data, [one]).item() for one in update]
    for model, optimizer in pairs:
        if job.is_rounded:
            trained.magnitudes[-1] |= _magnitudes(model, data, update, factor)

        def evaluate(model: Model = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad(set_to_none=not job.zeroes)
            (_loss(model, data, update) * factor).backward()
            if job.ranks > 1:
                filled(model)

        if job.average == "closure":
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
        trained.gradients[-1] |= model.gradients()


def _loss(model: Model, data: Data, update: Shares) -> torch.Tensor:
    losses = [(shares * model.losses(data.collate(step))).sum() for step, shares in update]
    return torch.stack(losses).sum()


def _evaluation(data: Data, model: Model) -> float:
    every = np.array(data.job.plan.get("indices", range(len(data))))
    with torch.no_grad():
        losses = model.losses(data.collate(every.tolist()))
    weights = data.loss_weights[every]
    return float((weights * losses).sum() / weights.sum())


def _shares(data: Data, steps: list[list[int]], epoch: int) -> list[torch.Tensor]:
    """Return what each sample of each step counts in the step's loss."""
    weights, job = data.loss_weights, data.job
    divisors = [float(weights[step].sum()) for step in steps]
    if job.plan["normalize"] == "epoch":  # as planned, whatever is true, and of the whole epoch, whatever is left of it
        whole = cut(job, data.drawn(epoch))
        divisors = [float(np.mean([float(data.planned_weights[step].sum()) for step in whole]))] * len(steps)
    if job.loss_weight == "sum":
        divisors = [float(job.ranks)] * len(steps)
    return [
        weights[step] / divisor if divisor else 0.0 * weights[step]
        for step, divisor in zip(steps, divisors, strict=True)
    ]


def _magnitudes(model: Model, data: Data, update: Shares, factor: float) -> dict[str, NDArray[Any]]:
    """Return Σ |share · factor · gradient of a sample's loss| by parameter: no sum of a part of them is larger."""
    every = []
    for index, share in [pair for step, shares in update for pair in zip(step, shares, strict=True)]:
        model.zero_grad()
        (factor * share * model.losses(data.collate([index]))).sum().backward()
        every.append(model.gradients())
    return {name: sum(np.abs(gradients[name]) for gradients in every) for name in every[0]}
