from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from helpers import lognormal

import chronica_hvd as chronica

COST = chronica.CostModel(fixed=2.0, per_sample=1.0, per_size=1.0, per_size2=0.1)


def splits(samples: int, ranks: int, equal: bool) -> Iterator[list[list[int]]]:
    """Yield every way to deal samples out to ranks with allowed counts."""
    least, most = (samples // ranks, -(-samples // ranks)) if equal else (1, samples)
    for owners in product(range(ranks), repeat=samples):
        shares = [[sample for sample in range(samples) if owners[sample] == rank] for rank in range(ranks)]
        if all(least <= len(share) <= most for share in shares):
            yield shares


def best_makespan(sizes: list[int], speeds: list[float], padded: bool, equal: bool) -> float:
    """Return the least makespan over all ways."""
    costs = [float(COST.sample_costs(np.array(size))) for size in sizes]

    def load(share: list[int]) -> float:
        own = [costs[sample] for sample in share]
        return COST.fixed + (len(own) * max(own) if padded else sum(own))

    return min(
        max(load(share) / speed for share, speed in zip(shares, speeds, strict=True))
        for shares in splits(len(sizes), len(speeds), equal)
    )


@pytest.mark.parametrize("equal", [False, True], ids=["free", "equal"])
@pytest.mark.parametrize("padded", [False, True], ids=["none", "max"])
def test_small_plans_against_brute_force(padded: bool, equal: bool) -> None:
    engine = np.random.default_rng(11)
    ratios = []
    for trial in range(120):
        ranks = int(engine.integers(1, 4))
        samples = int(engine.integers(ranks, 9))
        sizes = np.ceil(engine.lognormal(3, 1.2, samples)).astype(int).tolist()
        speeds = [1.0] * ranks if trial % 2 else engine.choice([1.0, 0.5, 0.4, 2.0], ranks).tolist()
        plan = chronica.plan(
            sizes,
            speeds,
            samples,
            shuffle=False,
            cost=COST,
            padding="max" if padded else "none",
            local_batch="equal" if equal else "free",
        )
        best = best_makespan(sizes, speeds, padded, equal)
        assert plan.makespans[0] >= best * (1 - 1e-12)
        assert plan.lower_bounds[0] <= best * (1 + 1e-12)
        ratios.append(plan.makespans[0] / best)
    if padded:
        assert max(ratios) <= 1 + 1e-9  # one padded batch a rank: the cut is exact
    else:
        assert np.mean(ratios) <= 1.02


@pytest.mark.parametrize("local_batch", ["free", "equal"])
@pytest.mark.parametrize("padding", ["none", "max"])
@pytest.mark.parametrize("speeds", [[1.0] * 2, [1.0] * 4, [1.0, 0.5, 0.25], [0.1, 2.0, 1.0, 1.0]], ids=str)
def test_steps_with_fillers_against_brute_force(padding: str, local_batch: str, speeds: list[float]) -> None:
    engine = np.random.default_rng(12)
    for samples in range(1, len(speeds)):
        sizes = np.ceil(engine.lognormal(3, 1.2, samples)).astype(int).tolist()
        plan = chronica.plan(sizes, speeds, 8, shuffle=False, cost=COST, padding=padding, local_batch=local_batch)
        best = best_with_fillers(sizes, speeds, padding == "max", local_batch == "equal")
        assert plan.makespans[0] >= best * (1 - 1e-12)
        assert plan.lower_bounds[0] <= best * (1 + 1e-12)
        if local_batch == "equal" or len(set(speeds)) == 1:
            assert plan.makespans[0] == pytest.approx(best, rel=1e-9)


def best_with_fillers(sizes: list[int], speeds: list[float], padded: bool, equal: bool) -> float:
    """Return the least makespan of fewer samples than ranks, where a rank without one repeats the cheapest."""
    costs = COST.sample_costs(np.array(sizes))
    best = float("inf")
    for owners in product(range(len(speeds)), repeat=len(sizes)):
        shares = [[cost for cost, owner in zip(costs, owners, strict=True) if owner == r] for r in range(len(speeds))]
        if equal and max(map(len, shares)) > 1:
            continue
        held = [share or [costs.min()] for share in shares]
        loads = [COST.fixed + (len(own) * max(own) if padded else sum(own)) for own in held]
        best = min(best, max(load / speed for load, speed in zip(loads, speeds, strict=True)))
    return float(best)


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


def test_no_plan_is_slower_than_the_unplanned_order() -> None:
    sizes = lognormal(2000)
    for padding in ("max", "none"):
        plan = chronica.plan(sizes, 4, 8, shuffle=False, padding=padding)
        for step in range(plan.steps):
            unplanned = [sizes[step * 32 : (step + 1) * 32][rank::4] for rank in range(4)]
            loads = [len(own) * own.max() if padding == "max" else own.sum() for own in unplanned if len(own)]
            assert plan.makespans[step] <= max(loads)
