"""Training that stops and goes on in another launch, of the same ranks or of others, is as if it had not stopped."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import step_samples
from launch import Launch, horovodrun, succeeded
from resuming import resuming
from training import EPOCHS, Case, Data, build, collate, relative_errors, sgd

import chronica_hvd

pytestmark = pytest.mark.parallel

#: A launch: ranks, samples per rank and step, steps (0: to the end of the last epoch).
Leg = tuple[int, int, int]
OTHERS: list[Leg] = [(2, 4, 3), (3, 3, 6), (2, 4, 0)]
STOPPED: list[Leg] = [(2, 4, 3), (2, 4, 4), (2, 4, 0)]
WHOLE: list[Leg] = [(2, 4, 0)]
NAMES = [case.name for case in resuming(2)]
every_case = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that runs legs, each going on from the one before, and returns their launches."""

    @functools.cache
    def launch(legs: tuple[Leg, ...]) -> list[Launch]:
        *before, (ranks, batch_size, steps) = legs
        launches = launch(tuple(before)) if before else []
        checkpoint = [str(launches[-1].folder)] if launches else []
        folder: Path = tmp_path_factory.mktemp("leg")
        return [*launches, succeeded(horovodrun(ranks, "resume", folder, str(batch_size), str(steps), *checkpoint))]

    return lambda legs: launch(tuple(legs))


def case_of(name: str, ranks: int) -> Case:
    return next(case for case in resuming(ranks) if case.name == name)


def global_batches(name: str, legs: list[Leg]) -> list[tuple[list[int], float]]:
    """Return the samples of every step, and what the sum of their weighed losses is divided by."""
    data = Data(case_of(name, 1), 1)
    batches: list[tuple[list[int], float]] = []
    for epoch in range(EPOCHS):
        left = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
        for ranks, batch_size, steps in legs if epoch == 0 else legs[-1:]:
            case = case_of(name, ranks)
            options = {**case.plan, "loss_weight": case.loss_weight, "indices": left}
            plan = chronica_hvd.plan(data.sizes, case.speeds or ranks, batch_size, epoch=epoch, **options)
            # Of the whole epoch, however much of it is left.
            mean_total = data.loss_weights.sum() / -(-len(data) // (ranks * batch_size))
            for step in range(steps or plan.steps):
                samples = step_samples(plan, step)
                total = data.loss_weights[samples].sum()
                batches.append((samples, mean_total if case.plan.get("normalize") == "epoch" else total))
                left = [sample for sample in left if sample not in samples]
    return batches


def reference(name: str, legs: list[Leg]) -> dict[str, np.ndarray]:
    """Train in this process on the same global batches; return the final parameters."""
    case = case_of(name, 1)
    data = Data(case, 1)
    model = build(case)
    optimizer = sgd(case, model)
    for samples, divisor in global_batches(name, legs):
        indices, inputs, targets = collate([data[index] for index in samples])
        weights = torch.from_numpy(data.loss_weights)[indices]
        optimizer.zero_grad()
        ((weights * model.losses(inputs, targets)).sum() / divisor).backward()
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


@every_case
@pytest.mark.parametrize("legs", [OTHERS, WHOLE], ids=["other-worlds", "whole"])
def test_parameters_equal_a_single_process(name: str, legs: list[Leg], launched: Any, saw_error: Any) -> None:
    expected = reference(name, legs)
    for rank in range(2):
        errors = relative_errors(launched(legs)[-1].parameters(name, rank), expected)
        saw_error("resume", max(errors.values()))
        assert max(errors.values()) <= 1e-12, errors


@every_case
def test_the_same_ranks_go_on_bit_for_bit(name: str, launched: Any) -> None:
    for rank in range(2):
        [whole] = [launch.arrays(name, rank) for launch in launched(WHOLE)]
        stopped = [launch.arrays(name, rank) for launch in launched(STOPPED)]
        for key in ("indices", "lengths"):
            assert np.concatenate([arrays[key] for arrays in stopped]).tolist() == whole[key].tolist()
        parameters = launched(WHOLE)[0].parameters(name, rank)
        for key, value in launched(STOPPED)[-1].parameters(name, rank).items():
            assert (value == parameters[key]).all(), key


@every_case
@pytest.mark.parametrize("legs", [OTHERS, STOPPED], ids=["other-worlds", "stopped"])
def test_states_are_equal_on_all_ranks(name: str, legs: list[Leg], launched: Any) -> None:
    for launch, (ranks, _, steps) in zip(launched(legs), legs, strict=True):
        states = [launch.json(rank)["states"][name] for rank in range(ranks)]
        assert all(state == states[0] for state in states)
        assert states[0]["epoch"] == (0 if steps else EPOCHS - 1)
        kept = torch.load(launch.folder / f"{name}.pt", weights_only=True)["sampler"]
        assert kept == states[0]


@every_case
def test_samplers_that_serve_an_optimizer_can_be_copied(name: str, launched: Any) -> None:
    assert launched(OTHERS)[1].json(rank=2)["copies"][name] == [True, True, True]


def test_the_cases_hold_what_they_are_meant_to() -> None:
    """A filler in the end, several micro-batches, samples that move: else the tests above prove less."""
    batches = {name: global_batches(name, OTHERS) for name in NAMES}
    assert len(batches["plain"]) == 3 + 6 + 10 + 19
    assert len(batches["plain"][18][0]) == 1
    assert len(batches["drop-last"]) == 3 + 6 + 9 + 18
    for name in ("window", "window-micro", "first"):
        for leg in (slice(3), slice(9)):
            both = [[sample for samples, _ in batches[one][leg] for sample in samples] for one in (name, "plain")]
            assert set(both[0]) != set(both[1])
    for name in ("micro", "micro-ahead", "window-micro"):
        plan = chronica_hvd.plan(Data(case_of(name, 2), 2).sizes, 2, 4, **case_of(name, 2).plan)
        assert np.diff(plan.parts).max() > 1
