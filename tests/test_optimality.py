from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
from brute_force import INFINITY, SmallStep
from helpers import lognormal

import chronica_hvd as chronica

#: What is planned where nothing else is said: memory without bounds.
UNBOUNDED = 1e30


def draw_step(engine: np.random.Generator, most_samples: int = 8, **fields: Any) -> SmallStep:
    """Draw the sizes, speeds and fixed cost of a small step; on ranks of one speed where the allreduce counts."""
    least = fields.get("least", 1)
    ranks = int(engine.integers(1, 5))
    samples = int(engine.integers(ranks * least, max(most_samples, ranks * least) + 1))
    even = fields.get("comm", 0.0) > 0.0 or engine.integers(2) == 0
    return SmallStep(
        sizes=tuple(np.ceil(engine.lognormal(3, 1.2, samples)).astype(int).tolist()),
        speeds=(1.0,) * ranks if even else tuple(engine.choice([1.0, 0.5, 0.4, 2.0], ranks).tolist()),
        cost=chronica.CostModel(
            fixed=float(engine.choice([0, 5, 50])),
            per_sample=1.0,
            per_size=1.0,
            per_size2=float(engine.choice([0, 0.02])),
        ),
        **fields,
    )


def plan_of(step: SmallStep) -> chronica.Plan:
    """Plan it as one step."""
    return chronica.plan(
        step.sizes,
        step.speeds,
        len(step.sizes),
        shuffle=False,
        cost=step.cost,
        padding="max" if step.padded else "none",
        local_batch="equal" if step.equal else "free",
        micro_batches=step.micro_batches,
        min_local_batch=step.least,
        max_size=min(step.capacity, UNBOUNDED),
        comm=step.comm,
    )


def ratios_to_the_best(trials: int, seed: int = 11, **fields: Any) -> list[float]:
    """Return planned ÷ best end of small steps; checks that no plan beats the best and no bound exceeds it."""
    engine = np.random.default_rng(seed)
    ratios = []
    for _ in range(trials):
        step = draw_step(engine, **fields)
        plan, best = plan_of(step), step.best()
        end = float(plan.step_times(step.comm)[0])
        assert end >= best * (1 - 1e-9), step
        assert plan.lower_bounds[0] <= best * (1 + 1e-9), step
        assert plan.makespans[0] >= plan.lower_bounds[0]
        ratios.append(end / best)
    return ratios


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 10], ids=lambda most: f"micro{most}")
@pytest.mark.parametrize("equal", [False, True], ids=["free", "equal"])
@pytest.mark.parametrize("padded", [False, True], ids=["none", "max"])
def test_small_plans_against_brute_force(padded: bool, equal: bool, micro_batches: int) -> None:
    ratios = ratios_to_the_best(60, padded=padded, equal=equal, micro_batches=micro_batches)
    assert statistics.mean(ratios) <= 1.02
    if padded and micro_batches == 1:
        assert max(ratios) <= 1 + 1e-9  # one padded batch a rank: the cut is exact


@pytest.mark.parametrize("equal", [False, True], ids=["free", "equal"])
@pytest.mark.parametrize("padded", [False, True], ids=["none", "max"])
@pytest.mark.parametrize("micro_batches", [1, 2], ids=lambda most: f"micro{most}")
def test_plans_of_up_to_ten_samples_against_brute_force(padded: bool, equal: bool, micro_batches: int) -> None:
    ratios = ratios_to_the_best(20, seed=5, most_samples=10, padded=padded, equal=equal, micro_batches=micro_batches)
    assert statistics.mean(ratios) <= 1.02


@pytest.mark.parametrize(("micro_batches", "least"), [(1, 2), (2, 2), (10, 2), (1, 3)])
@pytest.mark.parametrize("padded", [False, True], ids=["none", "max"])
def test_least_counts_against_brute_force(padded: bool, micro_batches: int, least: int) -> None:
    ratios = ratios_to_the_best(30, padded=padded, micro_batches=micro_batches, least=least)
    assert statistics.mean(ratios) <= 1.02


@pytest.mark.parametrize("comm", [20.0, 60.0, 200.0])
@pytest.mark.parametrize("micro_batches", [1, 2, 10], ids=lambda most: f"micro{most}")
@pytest.mark.parametrize("padded", [False, True], ids=["none", "max"])
def test_overlapping_plans_against_brute_force(padded: bool, micro_batches: int, comm: float) -> None:
    ratios = ratios_to_the_best(30, padded=padded, micro_batches=micro_batches, comm=comm)
    assert statistics.mean(ratios) <= 1.02


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 10], ids=lambda most: f"micro{most}")
@pytest.mark.parametrize("padded", [False, True], ids=["none", "max"])
def test_capped_plans_against_brute_force(padded: bool, micro_batches: int) -> None:
    """Caps so tight that some steps have no plan at all: refused are those, and hardly any other."""
    engine = np.random.default_rng(12)
    ratios, refused = [], 0
    for _ in range(80):
        drawn = draw_step(engine, padded=padded, micro_batches=micro_batches)
        share = sum(drawn.sizes) / len(drawn.speeds) / engine.choice([1.0, 2.0])
        step = SmallStep(**{**vars(drawn), "capacity": float(max(*drawn.sizes, int(share)))})
        best = step.best()
        try:
            plan = plan_of(step)
        except ValueError:
            refused += best < INFINITY
            continue
        for rank in range(plan.ranks):
            assert all(step.batch_cost(batch.tolist()) < INFINITY for batch in plan.batches(0, rank))
        assert plan.makespans[0] >= best * (1 - 1e-9)
        ratios.append(plan.makespans[0] / best)
    assert len(ratios) >= 20
    assert refused <= 1
    assert statistics.mean(ratios) <= 1.02


@pytest.mark.parametrize("local_batch", ["free", "equal"])
@pytest.mark.parametrize("padding", ["none", "max"])
@pytest.mark.parametrize("micro_batches", [1, "auto"])
@pytest.mark.parametrize("least", [1, 2, 3])
@pytest.mark.parametrize("speeds", [[1.0] * 2, [1.0] * 4, [1.0, 0.5, 0.25], [0.1, 2.0, 1.0, 1.0]], ids=str)
def test_steps_with_fillers_against_brute_force(
    padding: str, local_batch: str, micro_batches: int | str, least: int, speeds: list[float]
) -> None:
    engine = np.random.default_rng(12)
    cost = chronica.CostModel(fixed=2.0, per_sample=1.0, per_size=1.0, per_size2=0.1)
    for samples in range(1, len(speeds) if local_batch == "equal" else min(9, len(speeds) * least)):
        sizes = tuple(np.ceil(engine.lognormal(3, 1.2, samples)).astype(int).tolist())
        plan = chronica.plan(
            sizes,
            speeds,
            8,
            shuffle=False,
            cost=cost,
            padding=padding,
            local_batch=local_batch,
            micro_batches=micro_batches,
            min_local_batch=least,
            max_size=UNBOUNDED,
        )
        best = best_with_fillers(plan, sizes, speeds, cost, padding == "max", local_batch == "equal", least)
        assert plan.makespans[0] >= best * (1 - 1e-9)
        assert plan.lower_bounds[0] <= best * (1 + 1e-9)
        if len(set(speeds)) == 1:
            assert plan.makespans[0] <= best * 1.05


def best_with_fillers(
    plan: chronica.Plan,
    sizes: tuple[int, ...],
    speeds: list[float],
    cost: chronica.CostModel,
    padded: bool,
    equal: bool,
    least: int,
) -> float:
    """Return the best end where each rank is a filler or not, over all choices of the ranks with real samples."""
    most = 1 if all(len(plan.batches(0, rank)) == 1 for rank in range(plan.ranks)) else 10
    fillers = sorted(sizes)[:least] * (1 if len(sizes) >= least else least)
    filler = SmallStep(tuple(fillers[:least]), (1.0,), cost, padded, micro_batches=most).finishes()[-1]
    best = INFINITY
    for chosen in range(1, 1 << len(speeds)):
        own = tuple(speed for rank, speed in enumerate(speeds) if chosen >> rank & 1)
        others = [speed for rank, speed in enumerate(speeds) if not chosen >> rank & 1]
        needed = 1 if equal else min(least, len(sizes))
        if needed * len(own) > len(sizes) or (equal and len(own) < len(sizes)):
            continue
        real = SmallStep(sizes, own, cost, padded, least=needed, micro_batches=most).best()
        best = min(best, max([real, *(filler / speed for speed in others)]))
    return best


@pytest.mark.parametrize(("ranks", "limit"), [(8, 1.0002), (32, 1.0002), ([1, 1, 1, 0.5], 1.0005)])
def test_free_counts_are_near_the_bound(ranks: int | list[float], limit: float) -> None:
    assert _large_plan(ranks, "free").optimality <= limit


@pytest.mark.parametrize("ranks", [8, 32])
def test_equal_counts_are_near_their_bound(ranks: int) -> None:
    assert _large_plan(ranks, "equal").optimality <= 1.002


def _large_plan(ranks: int | list[float], local_batch: str) -> chronica.Plan:
    """Return a plan of transformer-like costs 12 h² L + 2 h L² with h = 4096 and a global batch of 256."""
    hidden = 4096.0
    cost = chronica.CostModel(per_size=12 * hidden**2, per_size2=2 * hidden)
    count = ranks if isinstance(ranks, int) else len(ranks)
    return chronica.plan(
        lognormal(256 * 100, mean=5.5), ranks, 256 // count, cost=cost, padding="none", local_batch=local_batch
    )


@pytest.mark.parametrize(("pad_to", "limit"), [(None, 1.06), (64, 1.09)])
def test_padded_micro_batches_are_near_unpadded_work(pad_to: int | None, limit: float) -> None:
    sizes = lognormal(256 * 100, mean=6.0, largest=4096)
    cost = chronica.CostModel(fixed=150.0, per_size=1.0, per_size2=1 / 2048)
    plan = chronica.plan(sizes, 8, 32, cost=cost, micro_batches="auto", pad_to=pad_to)
    assert plan.makespans.sum() <= limit * cost.sample_costs(sizes).sum() / 8
    assert plan.optimality <= 1.01


def test_a_window_relieves_steps_that_one_sample_dominates() -> None:
    sizes = lognormal(128 * 64 * 4, mean=6.0)
    cost = chronica.CostModel(per_size=1.0, per_size2=1 / 2048)
    drawn, moved = (chronica.plan(sizes, 32, 4, cost=cost, padding="none", reorder=r) for r in ("batch", "window"))
    assert drawn.imbalance > 4.0
    assert moved.imbalance <= 1.01
    assert moved.moved <= 0.25
