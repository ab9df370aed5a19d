from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import check, distributed_sampler_steps, lognormal
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import chronica_hvd as chronica

COST = chronica.CostModel(fixed=150.0, per_sample=1.0, per_size=1.0, per_size2=1 / 2048)


def batch_sizes(plan: chronica.Plan, step: int, rank: int, sizes: Any) -> list[tuple[int, float]]:
    """Return (samples, padded size; or summed size) of each micro-batch."""
    of_batches = [np.asarray(sizes, dtype=np.float64)[batch] for batch in plan.batches(step, rank)]
    return [(len(own), len(own) * own.max() if plan.padding == "max" else own.sum()) for own in of_batches]


def largest(plan: chronica.Plan, sizes: Any, rank: int | None = None) -> float:
    """Return the size of the plan's largest micro-batch, on one rank or all."""
    ranks = range(plan.ranks) if rank is None else [rank]
    return max(size for r in ranks for step in range(plan.steps) for _, size in batch_sizes(plan, step, r, sizes))


options = st.fixed_dictionaries(
    {
        "padding": st.sampled_from(["max", "none"]),
        "local_batch": st.sampled_from(["free", "equal"]),
        "micro_batches": st.sampled_from([1, 2, 3, "auto"]),
        "comm": st.sampled_from([0.0, 0.0, 100.0, 1e4]),
        "seed": st.integers(0, 2**32),
        "cost": st.sampled_from(
            [None, COST, chronica.CostModel(per_size2=0.5), chronica.CostModel(fixed=9, per_size=0)]
        ),
    }
)
some_sizes = st.lists(st.one_of(st.integers(0, 20), st.integers(0, 5000), st.just(2**40)), min_size=1, max_size=80)
some_speeds = st.lists(st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.3, 3.0]), min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(sizes=some_sizes, speeds=some_speeds, batch_size=st.integers(1, 12), options=options, data=st.data())
def test_any_plan(
    sizes: list[int], speeds: list[float], batch_size: int, options: dict[str, Any], data: st.DataObject
) -> None:
    least = data.draw(st.integers(1, batch_size), "min_local_batch")
    plan = chronica.plan(sizes, speeds, batch_size, min_local_batch=least, **options)
    steps = distributed_sampler_steps(len(sizes), len(speeds), batch_size, shuffle=True, seed=options["seed"], epoch=0)
    check(plan, sizes, batch_size, steps, least)
    check_figures(plan, np.asarray(sizes, dtype=np.float64), speeds, options)
    assert (plan.counts.sum(axis=1, keepdims=True) < least * plan.ranks).any() or (
        options["local_batch"] == "equal" or (plan.counts >= least).all()
    )
    again = chronica.plan(np.array(sizes, dtype=np.float64), speeds, batch_size, min_local_batch=least, **options)
    assert plan == again


def check_figures(plan: chronica.Plan, sizes: Any, speeds: list[float], options: dict[str, Any]) -> None:
    """Loads, tails, lengths and the order of micro-batches from their definitions."""
    most = math.inf if options["micro_batches"] == "auto" else options["micro_batches"]
    cost = options["cost"]
    if cost is None:
        packed_or_whole = options["padding"] == "none" or most == 1
        cost = chronica.CostModel() if packed_or_whole else chronica.CostModel(fixed=float(sizes.mean()))
    shapes: dict[tuple[int, float], int] = {}
    for step in range(plan.steps):
        for rank in range(plan.ranks):
            batches = plan.batches(step, rank)
            assert len(batches) <= max(most, 1)
            costs = []
            for batch in batches:
                own = sizes[batch]
                entered = np.full_like(own, own.max()) if plan.padding == "max" else own
                costs.append(cost.predict(len(own), entered.sum(), (entered**2).sum()) / speeds[rank])
                shape = (len(own), float(own.max() if plan.padding == "max" else own.sum()))
                shapes[shape] = shapes.get(shape, 0) + 1
            tolerance = 1e-9 * plan.makespans[step]
            assert plan.loads[step, rank] == pytest.approx(sum(costs), abs=tolerance)
            assert plan.tails[step, rank] == pytest.approx(costs[-1] * 2 / 3, abs=tolerance)
            assert costs[-1] >= max(costs) - tolerance
    assert plan.shapes() == shapes
    areas = [n * length if plan.padding == "max" else length for n, length in plan.shapes()]
    assert areas == sorted(areas, reverse=True)
    comm = options["comm"]
    step_times = np.maximum(plan.loads.max(axis=1), comm + (plan.loads - plan.tails).max(axis=1))
    np.testing.assert_array_equal(plan.step_times(comm), step_times)


@settings(max_examples=150, deadline=None)
@given(sizes=some_sizes, speeds=some_speeds, batch_size=st.integers(1, 12), options=options)
def test_never_slower_nor_larger_than_plain(
    sizes: list[int], speeds: list[float], batch_size: int, options: dict[str, Any]
) -> None:
    plan, plain = (
        chronica.plan(sizes, speeds, batch_size, **{**options, "policy": policy}) for policy in ("balanced", "plain")
    )
    tolerance = 1 + 1e-12
    comm = options["comm"]
    is_full = plain.counts.sum(axis=1) >= plan.ranks
    assert (plan.step_times(comm)[is_full] <= plain.step_times(comm)[is_full] * tolerance).all()
    if options["micro_batches"] == "auto":
        once = chronica.plan(
            sizes, speeds, batch_size, **{**options, "micro_batches": 1, "cost": plan_cost(sizes, options)}
        )
        assert (plan.step_times(comm) <= once.step_times(comm) * tolerance).all()
    whole = chronica.plan(sizes, speeds, batch_size, **{**options, "policy": "plain", "micro_batches": 1})
    for rank, speed in enumerate(speeds):
        grown = max(1.0, speed / np.mean(speeds))
        assert largest(plan, sizes, rank) <= largest(whole, sizes) * grown * tolerance


def plan_cost(sizes: list[int], options: dict[str, Any]) -> chronica.CostModel:
    """Return the cost that micro-batches are planned with."""
    if options["cost"] is not None:
        return options["cost"]
    return chronica.CostModel(fixed=0.0 if options["padding"] == "none" else float(np.mean(sizes)))


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=60),
    speeds=some_speeds,
    batch_size=st.integers(1, 9),
    options=options,
    cap=st.integers(1, 300),
)
def test_max_size_is_never_exceeded(
    sizes: list[int], speeds: list[float], batch_size: int, options: dict[str, Any], cap: int
) -> None:
    assume(cap >= max(sizes))
    try:
        plan = chronica.plan(sizes, speeds, batch_size, max_size=cap, **options)
    except ValueError:
        with pytest.raises(ValueError, match=f"max_size={cap} could not be kept in step"):
            chronica.plan(sizes, speeds, batch_size, max_size=cap, **options)
        assert options["micro_batches"] != "auto"
        return
    steps = distributed_sampler_steps(len(sizes), len(speeds), batch_size, shuffle=True, seed=options["seed"], epoch=0)
    check(plan, sizes, batch_size, steps)
    assert largest(plan, sizes) <= cap


@pytest.mark.parametrize("padding", ["max", "none"])
def test_any_cap_can_be_kept_with_enough_micro_batches(padding: str) -> None:
    sizes = lognormal(3000, largest=4096)
    for cap in (4096, 5000, 20_000):
        plan = chronica.plan(sizes, 4, 32, cost=COST, micro_batches="auto", padding=padding, max_size=cap)
        assert largest(plan, sizes) <= cap


def test_sums_of_fractions_do_not_fail_by_their_last_bits() -> None:
    engine = np.random.default_rng(2)
    for _ in range(200):
        sizes = engine.lognormal(5, 1, int(engine.integers(2, 30)))
        plan, plain = (
            chronica.plan(sizes, 1, sizes.size, padding="none", cost=COST, micro_batches=3, policy=policy)
            for policy in ("balanced", "plain")
        )
        assert len(plan.batches(0, 0)) == 1
        assert plan.makespans[0] == pytest.approx(plain.makespans[0], rel=1e-12)


def test_costs_apart_from_sizes_are_dealt_no_worse_in_micro_batches() -> None:
    engine = np.random.default_rng(3)
    for seed in range(20):
        sizes = lognormal(256, mean=6, largest=4096, seed=seed)
        costs = engine.random(256) * 100
        once, auto = (
            chronica.plan(sizes, 8, 8, padding="none", cost=costs, micro_batches=most) for most in (1, "auto")
        )
        assert (auto.makespans <= once.makespans * (1 + 1e-12)).all()


def test_pad_to_leaves_few_lengths() -> None:
    sizes = lognormal(4000, largest=4096)
    by_step = chronica.plan(sizes, 4, 16, cost=COST, micro_batches="auto", pad_to=64)
    lengths = [256, 512, 1024, 2048, 4096]
    by_list = chronica.plan(sizes, 4, 16, cost=COST, micro_batches="auto", pad_to=lengths[::-1])
    assert by_list == chronica.plan(
        sizes, 4, 16, cost=COST, micro_batches="auto", pad_to=torch.tensor(lengths, dtype=torch.int32)
    )
    assert all(length % 64 == 0 for _, length in by_step.shapes())
    assert {length for _, length in by_list.shapes()} <= set(lengths)
    for plan in (by_step, by_list):
        for batch, length in zip(np.split(plan.indices, plan.offsets[1:-1]), plan.lengths, strict=True):
            assert sizes[batch].max() <= length
    padded = sum(n * length * times for (n, length), times in by_step.shapes().items())
    assert by_step.padding_waste == pytest.approx(1 - sizes.sum() / padded)


@pytest.mark.parametrize("micro_batches", [1, "auto"])
@pytest.mark.parametrize("padding", ["max", "none"])
def test_the_largest_step_comes_first(micro_batches: int | str, padding: str) -> None:
    sizes = lognormal(32 * 70 + 5)
    keywords: dict[str, Any] = {"cost": COST, "micro_batches": micro_batches, "padding": padding}
    drawn, first = (chronica.plan(sizes, 4, 8, first=first, **keywords) for first in (None, "largest"))
    step = next(k for k in range(1, drawn.steps) if drawn.batches(k, 0)[0].tolist() == first.batches(0, 0)[0].tolist())
    assert largest(first, sizes) == max(size for r in range(4) for _, size in batch_sizes(first, 0, r, sizes))
    for k in range(drawn.steps):
        other = {0: step, step: 0}.get(k, k)
        for rank in range(4):
            for ours, theirs in zip(first.batches(k, rank), drawn.batches(other, rank), strict=True):
                np.testing.assert_array_equal(ours, theirs)
            np.testing.assert_array_equal(first.micro_weights(k, rank), drawn.micro_weights(other, rank))
        assert first.loads[k].tolist() == drawn.loads[other].tolist()
        assert first.lower_bounds[k] == drawn.lower_bounds[other]
    assert first.moved == 64 / sizes.size
    assert drawn.moved == 0.0


def test_by_size_alone_a_micro_batch_costs_the_mean_size() -> None:
    sizes = lognormal(640)
    planned = chronica.plan(sizes, 2, 16, micro_batches="auto")
    assert planned == chronica.plan(
        sizes, 2, 16, micro_batches="auto", cost=chronica.CostModel(fixed=float(sizes.mean()), per_size=1)
    )
    given = chronica.plan(sizes, 2, 16, micro_batches="auto", cost=chronica.CostModel())  # as it is: free
    assert len(given.lengths) > len(planned.lengths)


@pytest.mark.parametrize("loss_weight", ["samples", "sizes", "array", "sum"])
@pytest.mark.parametrize("normalize", ["step", "epoch"])
def test_weights_of_micro_batches(loss_weight: str, normalize: str) -> None:
    sizes = lognormal(203, seed=4)
    amounts = {"sizes": sizes, "array": sizes % 7 * 0.5}.get(loss_weight, np.ones(203))
    given = amounts if loss_weight == "array" else loss_weight
    plan = chronica.plan(
        sizes, [1, 0.5, 1], 8, cost=COST, micro_batches=3, loss_weight=given, normalize=normalize, min_local_batch=4
    )
    assert plan.counts[-1].sum() == 11  # so a rank holds fillers
    totals = np.array(
        [sum(amounts[b].sum() for r in range(3) if plan.counts[k, r] for b in plan.batches(k, r)) for k in range(9)]
    )
    divisors = totals if normalize == "step" else np.full(9, totals.mean())
    for step in range(plan.steps):
        for rank in range(3):
            is_real = plan.counts[step, rank] > 0
            held = np.array([amounts[batch].sum() for batch in plan.batches(step, rank)]) * is_real
            expected = np.full_like(held, is_real) if loss_weight == "sum" else 3 * held / divisors[step]
            np.testing.assert_allclose(plan.micro_weights(step, rank), expected, rtol=1e-14)
            whole = float(is_real) if loss_weight == "sum" else expected.sum()
            np.testing.assert_allclose(plan.weights[step, rank], whole, rtol=1e-14)
    assert plan.weight_spread == pytest.approx(totals.max() / np.median(totals), rel=1e-14)


def test_a_plan_of_steps_without_weight_has_no_finite_spread() -> None:
    plan = chronica.plan([1] * 12, 2, 2, shuffle=False, loss_weight=[0] * 8 + [1] * 4)
    assert plan.weight_spread == math.inf
