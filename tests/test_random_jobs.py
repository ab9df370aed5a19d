"""Random jobs on ranks of this process: no wrong gradient, no lost sample.

1000 of them, or as many as ``CHRONICA_RANDOM_JOBS`` of the environment says. Each is named by its number:
``random_job(17)`` is the job of ``test_a_random_job_equals_a_single_process[17]``.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
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
from job_effects import EFFECTS, effects
from job_model import Model
from job_training import StepLoop, Trained, Training, trained_within
from random_jobs import Job, random_job

JOBS = int(os.environ.get("CHRONICA_RANDOM_JOBS", "1000"))


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


def test_a_rank_without_gradients_gets_them_in_the_layout_of_the_parameters() -> None:
    """Horovod gives it contiguous zeros, on which torch would add what has another layout."""
    sizes = [1] * (3 * 9 + 1)  # in the last step of an epoch two ranks hold fillers
    job = plain_job(model="image", sizes=sizes, fillers="skipped")
    check(job, trained_within(job))


def test_sparse_gradients_are_told_of_in_the_step_after_one_that_was_given_up() -> None:
    """A rank that has none in its first update must know that the others' are sparse."""
    options = {"op": "Average", "sparse_as_dense": False}
    job = plain_job(model="sparse", sizes=[1] * 10, optimizer=options, fillers="skipped", skips=[0])
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
    job = dataclasses.replace(job, plan={**job.plan, "refresh": None})  # what is measured is never the same
    every = [run_ranks(job.ranks, lambda _: Training(job).run(), seed=seed)[0] for seed in range(6)]
    for other in every[1:]:
        np.testing.assert_array_equal(other.parameters["0.hidden.weight"], every[0].parameters["0.hidden.weight"])


#: What options of jobs must have: each of the values so many times in 300 jobs.
MAIN = 50
RARE = 10
VALUES: list[tuple[int, Callable[[Job], Any], set[Any]]] = [
    (MAIN, lambda job: min(job.ranks, 3), {2, 3}),
    (RARE, lambda job: job.ranks, {1, 2, 3, 4, 5}),
    (MAIN, lambda job: job.model, {"dense", "gated", "bag", "sparse", "image"}),
    (MAIN, lambda job: job.dtype, {"float64", "float32"}),
    (RARE, lambda job: job.dtype, {"bfloat16"}),
    (MAIN, lambda job: job.loop, {"plain", "steps"}),
    (RARE, lambda job: job.loop, {"ahead", "steps_ahead"}),
    (MAIN, lambda job: job.fillers, {"nan", "skipped"}),
    (MAIN, lambda job: job.average, {"before", "after"}),
    (RARE, lambda job: job.average, {"closure"}),
    (MAIN, lambda job: job.clips, {False, True}),
    (MAIN, lambda job: job.steps_per_update > 1, {False, True}),
    (RARE, lambda job: job.steps_per_update, {1, 2, 3}),
    (RARE, lambda job: job.losses, {1, 2, 3}),
    (RARE, lambda job: job.second_every, {1, 2}),
    (MAIN, lambda job: job.evaluates, {False, True}),
    (MAIN, lambda job: "array" if isinstance(job.loss_weight, list) else job.loss_weight, {"samples", "sizes", "sum"}),
    (MAIN, lambda job: isinstance(job.loss_weight, list), {True}),
    (RARE, lambda job: job.amounts is not None, {True}),
    (MAIN, lambda job: 0 in job.sizes, {False, True}),
    (MAIN, lambda job: job.plan["micro_batches"], {1, "auto"}),
    (RARE, lambda job: job.plan["micro_batches"], {2, 3}),
    (MAIN, lambda job: job.plan["padding"], {"max", "none"}),
    (MAIN, lambda job: job.plan["local_batch"], {"free", "equal"}),
    (MAIN, lambda job: job.plan["reorder"], {"batch", "window"}),
    (MAIN, lambda job: job.plan["normalize"], {None, "step", "epoch"}),
    (MAIN, lambda job: job.plan["policy"], {"balanced"}),
    (RARE, lambda job: job.plan["policy"], {"plain", "static", "dynamic", "guided"}),
    (MAIN, lambda job: job.plan["first"], {None, "largest"}),
    (MAIN, lambda job: job.plan["min_local_batch"], {1, 2, 3}),
    (RARE, lambda job: job.plan["drop_last"], {True}),
    (RARE, lambda job: "indices" in job.plan, {True}),
    (RARE, lambda job: job.plan.get("max_size") is not None, {True}),
    (RARE, lambda job: type(job.plan["cost"]), {type(None), dict, list}),
    (MAIN, lambda job: job.optimizer["op"], {"Average", "Sum"}),
    (MAIN, lambda job: "groups" in job.optimizer, {True}),
    (RARE, lambda job: job.optimizer.get("groups"), {1, 2, 3}),
    (MAIN, lambda job: "gradient_predivide_factor" in job.optimizer, {True}),
    (RARE, lambda job: "compression" in job.optimizer, {True}),
    (RARE, lambda job: job.optimizer.get("sparse_as_dense"), {False, True}),
    (MAIN, lambda job: "lookahead" in job.optimizer, {True}),
]


@pytest.fixture(scope="module")
def drawn() -> list[Job]:
    return [random_job(number) for number in range(300)]


@pytest.mark.parametrize("place", range(len(VALUES)))
def test_the_jobs_have_all_options(place: int, drawn: list[Job]) -> None:
    """Else the test above proves less than it says."""
    least, value_of, values = VALUES[place]
    found = collections.Counter(map(value_of, drawn))
    assert min(found[value] for value in values) >= least, found


def test_all_effects_are_had(drawn: list[Job]) -> None:
    found = collections.Counter(itertools.chain.from_iterable(map(effects, drawn)))
    assert found.keys() <= EFFECTS
    assert min(found[effect] for effect in EFFECTS) >= RARE, found


def test_a_job_is_drawn_by_its_number_alone() -> None:
    assert random_job(7) == random_job(7) != random_job(8)
    assert len({repr(random_job(number)) for number in range(100)}) == 100


def test_a_job_is_json() -> None:
    for number in range(20):
        job = random_job(number)
        assert Job(**json.loads(json.dumps(dataclasses.asdict(job)))) == job
