"""Windows and policies: which step and which rank a sample goes to before anything is balanced."""

from __future__ import annotations

import bisect
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from helpers import check, distributed_sampler_steps, lognormal
from hypothesis import given, settings
from hypothesis import strategies as st

import chronica_hvd as chronica

POLICIES = ("plain", "static", "dynamic", "guided")
WINDOW: dict[str, Any] = {"reorder": "window", "padding": "none"}


def steps_of(plan: chronica.Plan) -> list[list[int]]:
    """Return the samples of each step, sorted."""
    return [
        sorted(int(i) for r in range(plan.ranks) if plan.counts[k, r] for batch in plan.batches(k, r) for i in batch)
        for k in range(plan.steps)
    ]


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 5000), st.just(2**40)), min_size=1, max_size=150),
    speeds=st.lists(st.sampled_from([1.0, 1.0, 0.5, 3.0]), min_size=1, max_size=4),
    batch_size=st.integers(1, 5),
    window=st.integers(1, 30),
    max_moved=st.sampled_from([0.0, 0.05, 0.25, 1.0]),
    padding=st.sampled_from(["max", "none"]),
)
def test_samples_move_within_their_window_only(
    sizes: list[int], speeds: list[float], batch_size: int, window: int, max_moved: float, padding: str
) -> None:
    options = {"padding": padding, "cost": chronica.CostModel(fixed=3, per_size=1, per_size2=0.01)}
    plan = chronica.plan(sizes, speeds, batch_size, reorder="window", window=window, max_moved=max_moved, **options)
    drawn = distributed_sampler_steps(len(sizes), len(speeds), batch_size, shuffle=True, seed=0, epoch=0)
    held = steps_of(plan)
    check(plan, sizes, batch_size, held)
    assert [len(step) for step in held] == [len(step) for step in drawn]
    full = len(sizes) // (batch_size * len(speeds))
    assert held[full:] == drawn[full:]
    for first in range(0, full, window):
        in_window = slice(first, min(first + window, full))
        assert sorted(chain(*held[in_window])) == sorted(chain(*drawn[in_window]))
    moved = sum(len(set(now) - set(before)) for now, before in zip(held, drawn, strict=True))
    assert plan.moved == pytest.approx(moved / len(sizes))
    assert plan.moved <= max_moved
    if max_moved == 0.0:
        assert plan == chronica.plan(sizes, speeds, batch_size, **options)


def test_even_data_is_left_alone() -> None:
    sizes = lognormal(64 * 50, sigma=0.1)
    assert chronica.plan(sizes, 8, 8, **WINDOW).moved == 0.0
    assert chronica.plan([5] * 640, 4, 8, **WINDOW) == chronica.plan([5] * 640, 4, 8, padding="none")


def test_heavy_steps_and_what_samples_count_in_them() -> None:
    sizes = lognormal(32 * 64 * 2)
    options = {**WINDOW, "loss_weight": "sizes"}
    drawn = chronica.plan(sizes, 8, 4, padding="none", loss_weight="sizes")
    step, epoch = (chronica.plan(sizes, 8, 4, normalize=by, **options) for by in ("step", "epoch"))
    assert step.imbalance == epoch.imbalance < drawn.imbalance
    assert step.weight_spread == epoch.weight_spread > drawn.weight_spread > 1.0
    np.testing.assert_allclose(step.weights.sum(axis=1), 8, rtol=1e-13)
    # Each unit of weight counts alike: a micro-batch's factor is its own share of the epoch's mean total.
    held = np.add.reduceat(sizes[epoch.indices], epoch.offsets[:-1])
    np.testing.assert_allclose(epoch.factors, 8 * held / (sizes.sum() / epoch.steps), rtol=1e-13)
    with pytest.raises(ValueError, match="each unit of weight counts alike"):
        chronica.plan(sizes, 8, 4, **options)
    assert chronica.plan(sizes, 8, 4, **WINDOW).weight_spread == 1.0


@pytest.mark.parametrize("options", [{}, {"reorder": "window", "window": 3}, {"reorder": "window", "window": 10**6}])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("samples", "ranks", "batch_size"), [(1, 3, 2), (7, 3, 2), (24, 4, 3), (215, 4, 5), (64, 1, 8)]
)
def test_policies_deal_everything_evenly(
    options: dict[str, Any], policy: str, samples: int, ranks: int, batch_size: int
) -> None:
    sizes = lognormal(samples)
    plan = chronica.plan(sizes, ranks, batch_size, policy=policy, micro_batches=2, **options)
    drawn = distributed_sampler_steps(samples, ranks, batch_size, shuffle=True, seed=0, epoch=0)
    held = steps_of(plan)
    check(plan, sizes, batch_size, held)
    assert [len(step) for step in held] == [len(step) for step in drawn]
    if not options or policy == "plain":
        assert held == drawn
        assert plan.moved == 0.0
    assert sorted(chain(*held)) == list(range(samples))
    for step, counts in zip(held, plan.counts, strict=True):
        assert counts.tolist() == [len(step) // ranks + (rank < len(step) % ranks) for rank in range(ranks)]


def test_plain_is_what_distributed_sampler_does() -> None:
    dataset = torch.utils.data.TensorDataset(torch.zeros(96))
    plan = chronica.plan(lognormal(96), 4, 8, policy="plain", seed=3, epoch=2)
    for rank in range(4):
        sampler = torch.utils.data.DistributedSampler(dataset, 4, rank, seed=3)
        sampler.set_epoch(2)
        order = list(sampler)
        for step in range(3):
            assert sorted(plan.batches(step, rank)[0]) == sorted(order[step * 8 : (step + 1) * 8])


def nearest(remaining: list[int], target: float) -> int:
    """Take the size nearest to ``target`` out of a sorted list; of two equally near ones the larger."""
    above = bisect.bisect_left(remaining, target)
    if above > 0 and (above == len(remaining) or target - remaining[above - 1] < remaining[above] - target):
        above -= 1
    return remaining.pop(above)


def test_static_fills_the_ranks_one_by_one() -> None:
    sizes = lognormal(40).tolist()
    plan = chronica.plan(sizes, 4, 5, policy="static", padding="none", reorder="window", window=2)
    remaining = sorted(sizes)
    capacity = round(np.mean(sizes) * 5)
    expected = []
    for _ in range(2):
        loads = []
        for _ in range(4):
            load = 0
            for _ in range(5):
                load += nearest(remaining, capacity - load)
            loads.append(float(load))
        expected.append(loads)
    assert sorted(plan.loads.tolist()) == sorted(expected)


def test_guided_has_the_least_padding() -> None:
    sizes = np.sort(lognormal(240))
    plan = chronica.plan(sizes, 3, 4, policy="guided", reorder="window", window=20)
    held = np.sort(sizes[plan.indices].reshape(20, 3, 4), axis=2)
    assert sorted(map(tuple, held.reshape(60, 4))) == sorted(map(tuple, sizes.reshape(60, 4)))
    assert (np.diff(held[:, :, 0], axis=1) >= 0).all()  # the larger ones on the higher ranks


def test_dynamic_brings_ranks_of_any_speed_together() -> None:
    sizes = lognormal(4000)
    speeds = [1.0, 0.5, 2.0]
    keywords: dict[str, Any] = {"padding": "none", "reorder": "window", "window": 200}
    plan, plain = (chronica.plan(sizes, speeds, 8, policy=policy, **keywords) for policy in ("dynamic", "plain"))
    assert plan.imbalance < 1 + (plain.imbalance - 1) / 4
    assert plan == chronica.plan(sizes, speeds, 8, policy="dynamic", **keywords)
    assert plan != chronica.plan(sizes, speeds, 8, policy="dynamic", seed=1, **keywords)
