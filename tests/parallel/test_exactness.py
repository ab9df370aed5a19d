"""Ranks that train on planned batches get what one process gets from the same global batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import LONG_STEPS, cases
from launch import alone, launched_once, succeeded
from training import EPOCHS, Data, reference, relative_errors

import chronica_hvd

pytestmark = pytest.mark.parallel

ALONE = [
    "mlp-sizes-free-max-tail1",
    "mlp-array-free-max-tail1",
    "clip",
    "speeds",
    "scheduler",
    "steps-workers",
    "amounts",
    "cut-amounts",
    "accumulate",
    "cut-losses-accumulate",
    "closure",
    "cut-closure-lbfgs",
    "groups",
    "bfloat16",
    "scaler-inf",
    "adam-broadcast",
]
EVERY = [(ranks, name) for ranks in (2, 3) for name in cases(ranks)] + [(1, name) for name in ALONE]
every_case = pytest.mark.parametrize(("ranks", "name"), EVERY)
launched = launched_once("train", lambda ranks: ALONE if ranks == 1 else ())


@every_case
def test_parameters_equal_a_single_process(ranks: int, name: str, launched: Any, saw_error: Any) -> None:
    case = cases(ranks)[name]
    expected = reference(case, ranks)
    for rank in range(ranks):
        errors = relative_errors(launched(ranks).parameters(name, rank), expected)
        saw_error(case.promise, max(errors.values()))
        assert all(error <= case.limit for error in errors.values()), errors


def weights_of(data: Data, plan: chronica_hvd.Plan, step: int, rank: int) -> np.ndarray:
    """Return a rank's factors in a step: as planned, or by the true amounts that the job says it has read."""
    if not data.case.amounts:
        return plan.micro_weights(step, rank)
    unit = plan.ranks / plan.divisors[step] if plan.divisors[step] else 1.0
    amounts = np.array([data.amounts[batch].sum() for batch in plan.batches(step, rank)])
    return amounts * unit if plan.counts[step, rank] else np.zeros(len(amounts))


@every_case
def test_batches_and_weights_are_the_plans(ranks: int, name: str, launched: Any) -> None:
    data = Data(cases(ranks)[name], ranks)
    plans = [data.plan(epoch) for epoch in range(EPOCHS)]
    for rank in range(ranks):
        result = launched(ranks).arrays(name, rank)
        batches = [batch for plan in plans for step in range(plan.steps) for batch in plan.batches(step, rank)]
        assert result["lengths"].tolist() == [len(batch) for batch in batches]
        assert result["indices"].tolist() == np.concatenate(batches).tolist()
        weights = [weights_of(data, plan, step, rank) for plan in plans for step in range(plan.steps)]
        assert (result["weights"] == np.concatenate(weights)[:, None]).all()
        last = [micro_weights[-1:] for micro_weights in weights]
        assert len(result["weights_after"]) in (0, len(last))
        assert not result["weights_after"].size or (result["weights_after"] == last).all()
        assert result["fingerprints"].tolist() == [plan.fingerprint for plan in plans]


@every_case
def test_each_step_holds_what_the_distributed_sampler_draws(ranks: int, name: str, launched: Any) -> None:
    data = Data(cases(ranks)[name], ranks)
    plans = [data.plan(epoch) for epoch in range(EPOCHS)]
    counts = np.concatenate([plan.counts for plan in plans])
    seen: list[list[int]] = [[] for _ in counts]
    for rank in range(ranks):
        indices = launched(ranks).arrays(name, rank)["indices"]
        held = [sum(map(len, plan.batches(step, rank))) for plan in plans for step in range(plan.steps)]
        for step, taken in enumerate(np.split(indices, np.cumsum(held)[:-1])):
            seen[step] += taken[: counts[step, rank]].tolist()  # of a filler nothing
    drawn = [step for epoch in range(EPOCHS) for step in data.drawn(epoch)]
    assert [sorted(step) for step in seen] == [sorted(step.tolist()) for step in drawn]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_cases_hold_what_they_are_meant_to(ranks: int) -> None:
    """Fillers, a step without any weight, ranks without weight, uneven weights: else the tests above prove less."""
    plans = {name: Data(case, ranks).plan(epoch=0) for name, case in cases(ranks).items()}
    fillers = {name for name, plan in plans.items() if (plan.counts == 0).any()}
    assert {name for name in plans if name.endswith("tail1")} <= fillers
    assert {"clip", "scaler", "sparse", "sum", "groups", "fillers-without-backward"} <= fillers
    assert ranks == 2 or "fewer-samples-than-ranks" in fillers
    assert all(np.ptp(plan.weights[0]) > 0.1 for name, plan in plans.items() if "sizes-free-max" in name)
    without_weight = plans["mlp-array-free-max-tail1"]
    assert (without_weight.weights[1] == 0).all()
    assert (without_weight.counts[1] > 0).all()
    assert plans["long"].steps == LONG_STEPS
    small_and_large = plans["fp16-small-and-large"].weights
    assert small_and_large.max() > 8
    assert ((small_and_large > 0) & (small_and_large < 1 / 64)).any()
    micro_batches = {name: np.diff(plan.parts).reshape(plan.counts.shape) for name, plan in plans.items()}
    for name, numbers in micro_batches.items():
        if "micro" in name or ("cut" in name and "fewer" not in name):
            assert numbers.max() > 1, name
        if "cut" in name and "fewer" not in name and cases(ranks)[name].pieces is None:
            assert np.ptp(numbers, axis=0).min() > 0, "every rank has another number of them in some step"
            assert np.ptp(numbers, axis=1).max() > 0, "some step has another number of them on some rank"
    of_two = "cut-fillers-of-two-without-backward"
    assert (micro_batches[of_two][plans[of_two].counts == 0] == 2).any()


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_cut_into_micro_batches_changes_nothing(ranks: int, launched: Any) -> None:
    plans = [Data(cases(ranks)[name], ranks).plan(0) for name in ("base", "cut", "cut-again")]
    assert len({plan.fingerprint for plan in plans}) == 3
    whole, *cut = [launched(ranks).parameters(name, 0) for name in ("base", "cut", "cut-again")]
    for parameters in cut:
        errors = relative_errors(parameters, whole)
        assert max(errors.values()) <= 1e-13, errors


@pytest.mark.parametrize("ranks", [2, 3])
def test_plans_are_compared_once_per_block_and_by_name(ranks: int, launched: Any) -> None:
    for rank in range(ranks):
        names = launched(ranks).arrays("long", rank)["gathered"].tolist()
        assert len(names) == EPOCHS * -(-LONG_STEPS // 64)
        assert len(set(names)) == 1
        assert names[0].startswith("chronica.")


def test_plain_python_is_exact_as_one_rank(tmp_path: Any) -> None:
    result = succeeded(alone("train", tmp_path, *ALONE))
    for name in ALONE:
        case = cases(1)[name]
        errors = relative_errors(result.parameters(name, 0), reference(case, 1))
        assert all(error <= case.limit for error in errors.values()), (name, errors)


@pytest.mark.parametrize("samples", [858, 3, 4, 5])
@pytest.mark.parametrize("local_batch", ["free", "equal"])
def test_four_declared_ranks_lose_and_double_nothing(samples: int, local_batch: str) -> None:
    sizes = np.random.default_rng(samples).integers(1, 100, samples)
    taken: list[list[int]] = []
    for rank in range(4):
        sampler = chronica_hvd.BatchSampler(sizes, 8, num_replicas=4, rank=rank, local_batch=local_batch)
        loader = chronica_hvd.DataLoader(range(samples), batch_sampler=sampler, collate_fn=list)
        batches = list(loader)
        assert len(batches) == len(loader) == -(-samples // 32)
        counts = sampler.plan.counts[:, rank]
        assert [len(batch) for batch in batches] == np.maximum(counts, 1).tolist()
        taken += [batch[:count] for batch, count in zip(batches, counts.tolist(), strict=True)]
    assert sorted(index for batch in taken for index in batch) == list(range(samples))
