"""Two optimizers in one job, and process sets, are each as exact as one optimizer for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import base, process_sets
from launch import launched_once
from training import Case, Data, build, collate, mean, relative_errors, sgd

pytestmark = pytest.mark.parallel
each_size = pytest.mark.parametrize("ranks", [2, 3])
launched = launched_once("sharing")

Targets = Callable[[torch.Tensor], torch.Tensor]


class Alone:
    """A model trained by a single process."""

    def __init__(self, case: Case, data: Data, seed: int) -> None:
        self.data = data
        self.model = build(case, seed)
        self.optimizer = sgd(case, self.model)

    def train(self, drawn: np.ndarray, targets_of: Targets | None = None) -> None:
        indices, inputs, targets = collate([self.data[index] for index in drawn])
        self.optimizer.zero_grad()
        losses = self.model.losses(inputs, targets if targets_of is None else targets_of(inputs))
        mean(losses, torch.from_numpy(self.data.loss_weights)[indices]).backward()
        self.optimizer.step()

    def parameters(self, name: str) -> dict[str, np.ndarray]:
        return {f"{name}.{key}": value.detach().numpy() for key, value in self.model.named_parameters()}


def check(
    arrays: dict[str, np.ndarray], expected: dict[str, np.ndarray], saw_error: Callable[[str, float], None]
) -> None:
    errors = relative_errors({key: arrays[key] for key in expected}, expected)
    saw_error("two optimizers, process sets", max(errors.values()))
    assert max(errors.values()) <= 1e-12, errors


@each_size
@pytest.mark.parametrize(("name", "every"), [("rivals", 1), ("seldom", 3)])
def test_two_optimizers_on_one_sampler(ranks: int, name: str, every: int, launched: Any, saw_error: Any) -> None:
    case = base(ranks, name)
    data = Data(case, ranks)
    first, second = Alone(case, data, 1), Alone(case, data, 2)
    numbers = []
    for epoch in range(2):
        for step, drawn in enumerate(data.drawn(epoch)):
            first.train(drawn)
            numbers.append(float(step))
            if step % every == every - 1:
                second.train(drawn, lambda inputs: first.model(inputs).detach())
    for rank in range(ranks):
        arrays = launched(ranks).arrays(name, rank)
        check(arrays, {**first.parameters("first"), **second.parameters("second")}, saw_error)
        assert arrays["averages"] == pytest.approx(numbers, rel=1e-14)


@each_size
def test_two_optimizers_each_on_a_sampler_of_its_own(ranks: int, launched: Any, saw_error: Any) -> None:
    expected = {}
    for name, case in (("first", base(ranks, "one")), ("second", base(ranks, "other", plan={"seed": 3}))):
        one = Alone(case, Data(case, ranks), 1)
        for drawn in one.data.drawn(epoch=0):
            one.train(drawn)
        expected |= one.parameters(name)
    for rank in range(ranks):
        check(launched(ranks).arrays("neighbours", rank), expected, saw_error)


@each_size
def test_process_sets_train_apart(ranks: int, launched: Any, saw_error: Any) -> None:
    for number, members in enumerate(process_sets(ranks)):
        case = base(len(members), f"set{number}", samples=25 + number)
        one = Alone(case, Data(case, len(members)), 1)
        for drawn in one.data.drawn(epoch=0):
            one.train(drawn)
        plan = one.data.plan(epoch=0)
        means = (plan.weights * np.arange(len(members))).sum(axis=1) / len(members)
        for rank in members:
            arrays = launched(ranks).arrays("set", rank)
            check(arrays, one.parameters("first"), saw_error)
            assert arrays["averages"] == pytest.approx(means, rel=1e-14)
