"""How long a step takes when the allreduce overlaps with the last backward passes."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import lognormal

import chronica_hvd as chronica

COST = chronica.CostModel(fixed=150.0, per_size=1.0, per_size2=1 / 2048)
GRADIENTS = 2000


def simulate(ends: np.ndarray, tails: np.ndarray, comm: float) -> float:
    """Return the end of a step in which the gradients are sent one by one, each when every rank has it.

    ends, tails: (ranks,) the end of a rank's compute, and how long its last backward pass takes. A gradient is ready
    when its part of that pass is done; one is on the wire at a time.
    """
    ready = (ends - tails)[:, None] + tails[:, None] * np.arange(1, GRADIENTS + 1) / GRADIENTS  # (ranks, gradients)
    wire = 0.0
    for every in ready.max(axis=0):
        wire = max(wire, every) + comm / GRADIENTS
    return wire


@pytest.mark.parametrize("micro_batches", [1, 2, "auto"])
def test_step_times_against_an_event_simulation(micro_batches: int | str) -> None:
    engine = np.random.default_rng(3)
    for trial in range(8):
        comm = float(engine.uniform(0.05, 1.5)) * 30_000
        plan = chronica.plan(
            lognormal(256, mean=6, seed=trial), [1, 1, 0.7, 1], 64, cost=COST, micro_batches=micro_batches, comm=comm
        )
        predicted = plan.step_times(comm)[0]
        assert predicted == pytest.approx(simulate(plan.loads[0], plan.tails[0], comm), rel=0.01)


def test_any_ends_and_tails_against_an_event_simulation() -> None:
    engine = np.random.default_rng(4)
    for _ in range(50):
        ends = engine.uniform(1, 3, 5)
        tails = ends * engine.uniform(0.1, 0.9, 5)
        comm = float(engine.uniform(0, 3))
        formula = max(ends.max(), comm + (ends - tails).max())
        assert formula == pytest.approx(simulate(ends, tails, comm), rel=0.01)


def test_a_long_allreduce_makes_the_last_micro_batch_longer() -> None:
    sizes = lognormal(256 * 8, mean=6, largest=4096)
    without, with_comm, once = (
        chronica.plan(sizes, 8, 32, cost=COST, comm=comm, micro_batches=most)
        for comm, most in ((0.0, "auto"), (20_000.0, "auto"), (20_000.0, 1))
    )
    times = [plan.step_times(20_000.0).sum() for plan in (without, with_comm, once)]
    assert times[1] < 0.95 * times[0]
    assert times[1] < times[2]
    assert with_comm.tails.mean() > without.tails.mean()
    assert without.makespans.sum() < with_comm.makespans.sum()  # of compute alone it is not the best


def test_step_times_without_an_allreduce_are_the_makespans() -> None:
    plan = chronica.plan(lognormal(100), 3, 5)
    np.testing.assert_array_equal(plan.step_times(), plan.makespans)
    with pytest.raises(ValueError, match="comm must be at least 0, not -1"):
        plan.step_times(-1)
