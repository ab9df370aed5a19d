"""What of a random job takes effect: an option may be drawn for steps that are never reached."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from job_data import Data
from job_training import can_begin_anew
from random_jobs import Job

import chronica_hvd as chronica
from chronica_hvd.blocks import BLOCK_STEPS

EFFECTS = {
    "a loop left in the middle of a step",
    "a second block",
    "samples moved",
    "zero_grad(set_to_none=False) between updates",
    "a filler",
    "a step left out on a rank",
    "a further step of an update left out on a rank",
    "true amounts that are all 0",
    "a rank's true amount of 0 beside others",
    "a second optimizer left out",
    "a second optimizer that reads ahead",
    "several steps per update with micro-batches",
    "several steps per update with micro-batches and a lookahead",
    "several losses with micro-batches",
    "a closure with micro-batches",
    "a sparse gradient that a rank does not have",
    "parameters that no rank uses",
    "parameters that a rank does not use",
    "groups with unused parameters",
    "a closure of several ranks",
    "gradients of another layout",
    "a skip with gradients",
    "a skip before the first backward pass",
    "a skip in the middle of micro-batches",
    "a skip in the middle of micro-batches, with gradients",
    "a skip of an update's further step",
    "a resumed epoch",
    "an epoch resumed on other ranks",
    "an epoch resumed with other batches",
    "an epoch resumed whose samples move",
}


def effects(job: Job) -> set[str]:
    """Return which of :data:`EFFECTS` the job's first leg has."""
    return set(_of_job(job))


def _of_job(job: Job) -> Iterator[str]:
    data = Data(job)
    sampler = data.sampler(num_replicas=job.speeds or job.ranks, rank=0)
    reached = 0
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        plan = sampler.plan
        schedule = job.schedule(reached, plan.steps, epoch)
        update: list[_Step] = []
        for step, verdict in enumerate(schedule):
            update.append(_Step(job, data, plan, step))
            yield from _of_step(job, update[-1], verdict, len(update))
            if verdict == "update":
                yield from _of_update(job, update)
            if verdict != "part":
                update = []
        if job.begins_anew and can_begin_anew(plan, 0):
            yield "a loop left in the middle of a step"
        if len(schedule) > BLOCK_STEPS:
            yield "a second block"
        if job.moves_samples and plan.moved > 0.0:
            yield "samples moved"
        if job.zeroes and sum(verdict != "part" for verdict in schedule) > 1:
            yield "zero_grad(set_to_none=False) between updates"
        reached += len(schedule)
        if job.stops_in(epoch):
            if len(schedule) < plan.steps:
                yield from _of_resuming(job)
            return


class _Step:
    """What each rank has of a step."""

    def __init__(self, job: Job, data: Data, plan: chronica.Plan, number: int) -> None:
        batches = [plan.batches(number, rank) for rank in range(job.ranks)]
        held = [np.concatenate(rank).tolist() for rank in batches]
        self.number = number
        self.most = max(map(len, batches))  # micro-batches of a rank
        self.fillers = plan.counts[number] == 0
        self.amounts = np.array([float(data.loss_weights[indices].sum()) for indices in held]) * ~self.fillers
        self.left_out = np.zeros(job.ranks, bool)  # ranks that have no backward pass in it
        if job.fillers == "skipped":
            self.left_out = self.fillers.copy()
            if job.amounts is not None and job.plan["micro_batches"] == 1:
                self.left_out |= self.amounts == 0.0
        self.layers = [set((data.features[indices, 0] < 0.7).tolist()) for indices in held]  # of a gated model


def _of_step(job: Job, step: _Step, verdict: str, place: int) -> Iterator[str]:
    """Yield the effects of an update's step number ``place``, counted from 1."""
    if verdict == "skip":
        yield from _of_skip(job, step, place)
        return
    if step.fillers.any():
        yield "a filler"
    if step.left_out.any():
        yield "a step left out on a rank"
        if place > 1:
            yield "a further step of an update left out on a rank"
    if job.amounts is not None:
        if not step.amounts.any():
            yield "true amounts that are all 0"
        elif not step.amounts.all():
            yield "a rank's true amount of 0 beside others"
    if job.second_every > 1 and step.number % job.second_every:
        yield "a second optimizer left out"
    if job.second_every and "lookahead" in job.optimizer:
        yield "a second optimizer that reads ahead"
    if step.most > 1:
        if place > 1:
            yield "several steps per update with micro-batches"
            if "lookahead" in job.optimizer:
                yield "several steps per update with micro-batches and a lookahead"
        if job.losses > 1:
            yield "several losses with micro-batches"
        if job.average == "closure":
            yield "a closure with micro-batches"


def _of_update(job: Job, update: list[_Step]) -> Iterator[str]:
    """Yield the effects of all steps of an update together."""
    if job.ranks == 1:
        return
    if job.model == "sparse" and not job.optimizer["sparse_as_dense"]:
        left_out = np.logical_and.reduce([step.left_out for step in update])
        if left_out.any() and not left_out.all():
            yield "a sparse gradient that a rank does not have"
    if job.model == "gated":
        layers: list[set[bool]] = [set().union(*rank) for rank in zip(*(step.layers for step in update), strict=True)]
        if len(set().union(*layers)) == 1:
            yield "parameters that no rank uses"
        if min(map(len, layers)) == 1:
            yield "parameters that a rank does not use"
            if "groups" in job.optimizer:
                yield "groups with unused parameters"
    if job.average == "closure":
        yield "a closure of several ranks"
    if job.model == "image":
        yield "gradients of another layout"


def _of_skip(job: Job, step: _Step, place: int) -> Iterator[str]:
    is_middle = "steps" in job.loop and max(1, job.skips_after) < step.most
    yield "a skip with gradients" if job.skips_after else "a skip before the first backward pass"
    if is_middle:
        yield "a skip in the middle of micro-batches"
        if job.skips_after:
            yield "a skip in the middle of micro-batches, with gradients"
    if place > 1:
        yield "a skip of an update's further step"


def _of_resuming(job: Job) -> Iterator[str]:
    """Yield the effects of going on in the middle of an epoch."""
    assert job.resumes is not None
    yield "a resumed epoch"
    if job.resumes["ranks"] != job.ranks:
        yield "an epoch resumed on other ranks"
    if job.resumes["batch_size"] != job.batch_size:
        yield "an epoch resumed with other batches"
    if job.moves_samples:
        yield "an epoch resumed whose samples move"
