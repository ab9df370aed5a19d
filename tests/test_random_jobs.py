"""Random jobs on ranks of this process: no wrong gradient, no lost sample.

``CHRONICA_RANDOM_JOBS=1000`` draws so many of them.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from inprocess import run_ranks
from job_check import LIMITS, check
from job_model import Model
from job_training import StepLoop, Trained, Training, trained_within
from random_jobs import Job, random_job

WEIGHTS = {"samples", "sizes", "array", "sum"}
OPTIMIZER_OPTIONS = (
    "groups",
    "compression",
    "gradient_predivide_factor",
    "sparse_as_dense",
    "lookahead",
    "backward_passes_per_step",
)
#: What must occur in jobs, besides options.
KINDS: list[Callable[[Job], bool]] = [
    lambda job: job.losses > 1,
    lambda job: job.average == "closure",
    lambda job: job.average == "closure" and job.plan["micro_batches"] != 1,
    lambda job: bool(job.skips) and job.skips_after == 0,
    lambda job: bool(job.skips) and job.skips_after > 0,
    lambda job: bool(job.skips) and job.steps_per_update > 1,
    lambda job: job.zeroes,
    lambda job: job.second_every == 1,
    lambda job: job.second_every > 1,
    lambda job: job.second_every > 1 and "lookahead" in job.optimizer,
    lambda job: job.evaluates,
    lambda job: job.resumes is not None and job.resumes["ranks"] != job.ranks,
    lambda job: job.resumes is not None and job.resumes["batch_size"] != job.batch_size,
    lambda job: job.resumes is not None and job.moves_samples,
    lambda job: job.model == "gated" and "groups" in job.optimizer and job.ranks > 1,
    lambda job: job.steps_per_update > 1 and "lookahead" in job.optimizer,
    lambda job: job.steps_per_update > 1 and job.fillers == "skipped",
]
JOBS = int(os.environ.get("CHRONICA_RANDOM_JOBS", "300"))


@pytest.fixture(scope="module", autouse=True)
def _one_torch_thread() -> Any:
    """The tensors are small, and where rounding falls must not depend on the machine's cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("number", range(JOBS))
def test_a_random_job_equals_a_single_process(number: int, saw_error: Callable[[str, float], None]) -> None:
    job = random_job(number)
    print(f"random_job({number}) is {job}")  # shown where it fails
    errors = check(job, trained_within(job))
    if not job.is_rounded:
        saw_error(f"random jobs ({job.dtype})", max(errors.values()) * LIMITS[job.dtype])


def plain_job(**changes: Any) -> Job:
    """Return a job of 3 ranks with micro-batches, uneven weights and fillers in its last step."""
    plan = {"reorder": "batch", "first": None, "normalize": None, "cost": None, "drop_last": False, "shuffle": True}
    job = Job(
        ranks=3,
        batch_size=3,
        sizes=[5, 60, 3, 9, 1, 7, 22, 2, 4, 8, 30, 6, 1, 2, 40, 5, 3, 9, 11],
        seed=3,
        model="dense",
        dtype="float64",
        epochs=2,
        loss_weight="sizes",
        amounts=None,
        speeds=None,
        plan={**plan, "seed": 0, "micro_batches": "auto", "min_local_batch": 1},
        optimizer={"op": "Average"},
        loop="steps",
        fillers="nan",
        average="before",
        clips=False,
    )
    return dataclasses.replace(job, **changes)


@pytest.mark.parametrize("micro_batches", [1, "auto"])
def test_average_with_a_lookahead_and_several_steps_per_update(micro_batches: Any) -> None:
    options = {"op": "Average", "lookahead": 1, "backward_passes_per_step": 2}
    job = plain_job(optimizer=options, loop="ahead")
    job = dataclasses.replace(job, plan={**job.plan, "micro_batches": micro_batches})
    check(job, trained_within(job))


@pytest.mark.parametrize("average", ["before", "after"])
def test_fillers_left_out_with_several_steps_per_update(average: str) -> None:
    options = {"op": "Average", "backward_passes_per_step": 2}
    sizes = [1] * (3 * 9 + 1)  # the last step has one sample, and is the second of its update
    job = plain_job(sizes=sizes, optimizer=options, fillers="skipped", average=average)
    check(job, trained_within(job))


def _scale_a_gradient(ranks: list[Trained]) -> None:
    for rank in ranks:
        rank.gradients[3]["0.hidden.bias"] *= 1.0 + 1e-10


def _scale_the_gradient_of_a_rank(ranks: list[Trained]) -> None:
    ranks[1].gradients[0]["0.hidden.bias"] *= 1.0 + 1e-15


def _lose_a_gradient(ranks: list[Trained]) -> None:
    for rank in ranks:
        rank.gradients[3]["0.hidden.bias"][:] = float("nan")


def _change_a_parameter(ranks: list[Trained]) -> None:
    for rank in ranks:
        rank.parameters["0.out.bias"] = rank.parameters["0.out.bias"] * (1.0 + 1e-10)


def _change_a_loss(ranks: list[Trained]) -> None:
    ranks[0].losses[1] *= 1.0 + 1e-10


def _lose_a_sample(ranks: list[Trained]) -> None:
    ranks[2].taken[0][-1].pop()


def _repeat_a_sample(ranks: list[Trained]) -> None:
    ranks[2].taken[0][-1].append(ranks[0].taken[0][0][0])


def _lose_a_step(ranks: list[Trained]) -> None:
    ranks[2].taken.pop()


@pytest.mark.parametrize(
    "spoil",
    [
        _scale_a_gradient,
        _scale_the_gradient_of_a_rank,
        _lose_a_gradient,
        _change_a_parameter,
        _change_a_loss,
        _lose_a_sample,
        _repeat_a_sample,
        _lose_a_step,
    ],
)
def test_what_is_wrong_is_noticed(spoil: Callable[[list[Trained]], None]) -> None:
    job = plain_job()
    legs = trained_within(job)
    check(job, legs)
    spoiled = copy.deepcopy(legs)
    spoil(spoiled[0])
    with pytest.raises(AssertionError):
        check(job, spoiled)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss_weight": "sum", "optimizer": {"op": "Sum"}},
        {"dtype": "float32", "loss_weight": "samples"},
        {"optimizer": {"op": "Average", "compression": "fp16"}},
        {"model": "sparse", "loss_weight": "samples"},
        {"model": "gated", "optimizer": {"op": "Average", "groups": 2}},
    ],
)
def test_a_weight_that_is_a_little_wrong_is_noticed(changes: dict[str, Any]) -> None:
    """On one rank, in one step; by as much as each dtype lets be seen."""
    job = plain_job(**changes)
    wrong_by = 0.3 if job.is_compressed else 1e-9 if job.dtype == "float64" else 3e-3
    loss = StepLoop._backward

    def wrong_loss(step: StepLoop, model: Model, optimizer: Any, batch: Any) -> torch.Tensor:
        is_meant = step.sampler.world.rank == 1 and len(step.trained.taken) == 2
        return loss(step, model, optimizer, batch, 1.0 + wrong_by * is_meant)

    check(job, trained_within(job))
    with mock.patch.object(StepLoop, "_backward", wrong_loss):
        ranks = trained_within(job)
    with pytest.raises(AssertionError, match="gradients of"):
        check(job, ranks)


def test_ranks_that_are_not_weighed_are_noticed() -> None:
    """As with plain Horovod: every rank's mean counts alike."""
    job = plain_job()
    with mock.patch("chronica_hvd.DistributedOptimizer", _horovods_own):
        job = dataclasses.replace(job, plan={**job.plan, "micro_batches": 1}, loop="plain")
        ranks = trained_within(job)
    with pytest.raises(AssertionError, match=r"gradients of 0\.hidden"):
        check(job, ranks)


def _horovods_own(optimizer: Any, named_parameters: Any, *, sampler: Any, **options: Any) -> Any:
    import horovod.torch as hvd

    return hvd.DistributedOptimizer(optimizer, named_parameters, **options)


def test_the_turns_that_ranks_take_change_nothing() -> None:
    job = plain_job(optimizer={"op": "Average", "groups": 2})
    every = [run_ranks(job.ranks, lambda _: Training(job).run(), seed=seed)[0] for seed in range(6)]
    for other in every[1:]:
        np.testing.assert_array_equal(other.parameters["0.hidden.weight"], every[0].parameters["0.hidden.weight"])


def test_the_jobs_are_of_all_kinds() -> None:
    """Else the test above proves less than it says."""
    drawn = [random_job(number) for number in range(300)]
    _at_least(8, drawn, lambda job: job.ranks, {1, 2, 3, 4, 5})
    _at_least(30, drawn, lambda job: job.model, {"dense", "gated", "bag", "sparse", "image"})
    _at_least(20, drawn, lambda job: job.dtype, {"float32", "float64", "bfloat16"})
    _at_least(30, drawn, lambda job: job.loop, {"plain", "steps", "ahead", "steps_ahead"})
    _at_least(20, drawn, lambda job: "array" if isinstance(job.loss_weight, list) else job.loss_weight, WEIGHTS)
    for name, values in {
        "micro_batches": {1, 2, 3, "auto"},
        "padding": {"max", "none"},
        "local_batch": {"free", "equal"},
        "reorder": {"batch", "window"},
        "normalize": {None, "step", "epoch"},
        "policy": {"balanced", "plain", "static", "dynamic", "guided"},
        "first": {None, "largest"},
        "min_local_batch": {1, 2, 3},
        "drop_last": {False, True},
    }.items():
        _at_least(10, drawn, lambda job, name=name: job.plan[name], values)
    for name in OPTIMIZER_OPTIONS:
        _at_least(10, drawn, lambda job, name=name: name in job.optimizer, {True})
    _at_least(20, drawn, lambda job: job.amounts is not None, {True})
    _at_least(20, drawn, lambda job: job.fillers, {"nan", "skipped"})
    _at_least(5, drawn, lambda job: "indices" in job.plan, {True})
    _at_least(5, drawn, lambda job: job.plan.get("max_size") is not None, {True})
    _at_least(20, drawn, lambda job: job.optimizer["op"], {"Average", "Sum"})
    _at_least(20, drawn, lambda job: 0 in job.sizes, {True})
    for kind in KINDS:
        _at_least(5, drawn, kind, {True})


def _at_least(times: int, drawn: list[Job], kind_of: Callable[[Job], Any], kinds: set[Any]) -> None:
    found = [kind_of(job) for job in drawn]
    counts = {kind: found.count(kind) for kind in kinds}
    assert min(counts.values()) >= times, counts


def test_a_job_is_json() -> None:
    for number in range(20):
        job = random_job(number)
        assert Job(**json.loads(json.dumps(dataclasses.asdict(job)))) == job
