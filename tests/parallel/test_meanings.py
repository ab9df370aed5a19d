"""What averages, ``torch.autograd.grad`` and an optimizer without a sampler mean on several ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import base, micro_batched, skipping
from launch import Launch, launched_once
from training import Data

pytestmark = pytest.mark.parallel

#: Kind of value → type of its average, and its relative rounding error.
KINDS = {
    "float": ("float", 1e-15),
    "int": ("float", 1e-15),
    "bool": ("float", 1e-15),
    "float64": ("torch.float64", 1e-15),
    "float32": ("torch.float32", 2e-7),
    "float16": ("torch.float16", 2**-11),
    "bfloat16": ("torch.bfloat16", 2**-8),
    "int64": ("torch.float64", 1e-15),
    "int32": ("torch.float64", 1e-15),
    "not_contiguous": ("torch.float32", 2e-7),
}
each_size = pytest.mark.parametrize("ranks", [1, 2, 3])
launched = launched_once("meanings")


def expected_average(kind: str, step: int, weights: np.ndarray) -> list[float]:
    """Return the mean over the global batch of what the job gave on each rank."""
    numbers = 1.0 + 4 * np.arange(len(weights)) + step
    values = (numbers > 5.0).astype(float) if kind == "bool" else numbers
    mean = float((weights * values).sum() / len(weights))
    row = [mean] * {"float64": 6, "float16": 4}.get(kind, 1)
    return [mean, mean, 1.0, 1.0] if kind == "not_contiguous" else row


def check_averages(launch: Launch, ranks: int, loop: str, when: str, kind: str) -> None:
    plan = Data(base(ranks, loop), ranks).plan(epoch=0)
    name, rounding = KINDS[kind]
    for rank in range(ranks):
        steps = launch.json(rank)[loop]
        assert len(steps) == plan.steps
        for step, averaged in enumerate(steps):
            expected = expected_average(kind, step, plan.weights[step])
            assert averaged[when][kind]["type"] == name
            assert averaged[when][kind]["values"] == pytest.approx(expected, rel=rounding, abs=0.0)


@each_size
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_average_is_the_mean_over_the_global_batch(ranks: int, when: str, kind: str, launched: Any) -> None:
    """Asked before the optimizer's step and after it."""
    check_averages(launched(ranks), ranks, "training", when, kind)


@each_size
def test_average_follows_a_loop_without_an_optimizer(ranks: int, launched: Any) -> None:
    check_averages(launched(ranks), ranks, "evaluation", "before", "float")


@each_size
@pytest.mark.parametrize("loop", ["micro_training", "micro_evaluation"])
def test_average_of_micro_batches(ranks: int, loop: str, launched: Any) -> None:
    plan = Data(micro_batched(ranks, loop), ranks).plan(epoch=0)
    for rank in range(ranks):
        steps = launched(ranks).json(rank)[loop]
        assert len(steps) == plan.steps
        for step, averaged in enumerate(steps):
            terms = [
                weight * (1.0 + 4 * other + step + number / 8)
                for other in range(ranks)
                for number, weight in enumerate(plan.micro_weights(step, other))
            ]
            assert averaged == pytest.approx([sum(terms) / ranks] * len(averaged), rel=1e-14)


@each_size
@pytest.mark.parametrize("most", [1, 3])
def test_steps_that_all_ranks_skip_leave_the_others_their_weights(ranks: int, most: int, launched: Any) -> None:
    plan = Data(skipping(ranks, most), ranks).plan(epoch=0)
    trained = [step for step in range(plan.steps) if step % 4 not in (1, 2)]
    for rank in range(ranks):
        assert launched(ranks).json(rank)["skips"][str(most)] == pytest.approx(plan.weights[trained, rank], rel=1e-14)


@each_size
def test_an_optimizer_that_does_not_know_the_sampler_is_warned_of(ranks: int, launched: Any) -> None:
    for rank in range(ranks):
        unweighed, weighed = launched(ranks).json(rank)["forgotten_sampler"]
        assert ranks == 1 or "by an optimizer that does not know it" in unweighed  # alone, all weights are 1
        assert ranks == 1 or "DistributedOptimizer(..., sampler=sampler)" in unweighed
        assert weighed == ""


@each_size
def test_averages_work_in_inference_mode(ranks: int, launched: Any) -> None:
    for rank in range(ranks):
        assert launched(ranks).json(rank)["inference_mode"] == pytest.approx([1.0] * 3, rel=1e-15)


@each_size
def test_autograd_grad_is_not_weighed(ranks: int, launched: Any) -> None:
    results = [launched(ranks).json(rank)["autograd_grad"] for rank in range(ranks)]
    assert all(result["equal"] and result["untouched"] for result in results), results
    weights = Data(base(ranks, "autograd_grad"), ranks).plan(epoch=0).weights[0].tolist()
    assert [result["weight"] for result in results] == weights
    assert ranks == 1 or all(weight != 1.0 for weight in weights)


@each_size
@pytest.mark.parametrize("options", ["defaults", "sum", "passes", "predivide", "groups"])
def test_without_a_sampler_it_is_horovods_optimizer(ranks: int, options: str, launched: Any) -> None:
    for rank in range(ranks):
        result = launched(ranks).json(rank)["without_sampler"][options]
        assert result["error"] <= 1e-12
        assert result["weights"] == [1.0]
