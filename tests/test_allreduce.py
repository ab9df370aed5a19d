"""The allreduce's duration is found where it is seen, and not forgotten where it is not."""

from __future__ import annotations

import numpy as np
import pytest

from chronica_hvd.allreduce import duration

LATENCY = 1.0


def waits(comm: float, tails: np.ndarray, random: np.random.Generator, noise: float = 0.3) -> list[float]:
    return (np.maximum(LATENCY, comm - tails) + random.exponential(noise, tails.size)).tolist()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("comm", [30.0, 60.0])
def test_what_sticks_out_behind_the_last_backward_pass(comm: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    tails = random.uniform(8, 20, 40)
    assert duration(waits(comm, tails, random), tails.tolist(), 0.0) == pytest.approx(comm, rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_hidden_is_not_made_out_to_be_long(seed: int) -> None:
    random = np.random.default_rng(seed)
    tails = random.uniform(8, 20, 40)
    assert duration(waits(3.0, tails, random), tails.tolist(), 0.0) <= 2.0


@pytest.mark.parametrize("seed", range(5))
def test_plans_do_not_turn_to_and_fro(seed: int) -> None:
    """Plans that follow hide the allreduce, and yet it is not forgotten."""
    random = np.random.default_rng(seed)
    known, tails = 0.0, random.uniform(8, 20, 40)
    found = []
    for _ in range(10):
        known = duration(waits(30.0, tails, random), tails.tolist(), known)
        found.append(known)
        tails = np.maximum(random.uniform(8, 20, 40), known)  # as a plan would have it
    assert min(found) >= 28.0
    assert max(found) <= 33.0


def test_an_allreduce_that_has_become_shorter_is_bounded_by_what_hides_it() -> None:
    assert duration([1.0] * 8, [20.0] * 8, 50.0) == 21.0
    assert duration([1.0] * 8, [60.0] * 8, 50.0) == 50.0
    assert duration([7.0] * 8, [60.0] * 8, 5.0) == 7.0


def test_few_steps_and_unknown_ones() -> None:
    nan = float("nan")
    assert duration([], [], 3.0) == 3.0
    assert duration([nan, nan], [1.0, 2.0], 3.0) == 3.0
    assert duration([2.0], [10.0], 0.0) == 2.0
    assert duration([nan, 2.0, 4.0], [1.0, 5.0, 5.0], 0.0) == 3.0
