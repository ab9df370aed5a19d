from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import check, distributed_sampler_steps, lognormal, step_samples
from hypothesis import given, settings
from hypothesis import strategies as st

import chronica_hvd as chronica

MODES = [
    {"padding": padding, "local_batch": local_batch} for padding in ("max", "none") for local_batch in ("free", "equal")
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(mode.values()))
@pytest.mark.parametrize(
    ("samples", "ranks", "batch_size"),
    [
        (1, 1, 1),
        (1, 4, 8),
        (3, 4, 8),
        (4, 4, 1),
        (5, 4, 1),
        (64, 2, 32),
        (65, 2, 32),
        (100, 3, 7),
        (858, 4, 8),
        (999, 7, 5),
        (50, 2, 1000),
        (523, 2, 2),  # several blocks of steps
    ],
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_counts_once_where_distributed_sampler_puts_it(
    mode: dict[str, str], samples: int, ranks: int, batch_size: int, shuffle: bool
) -> None:
    sizes = lognormal(samples)
    for seed, epoch in ((0, 0), (3, 5), (-9, 2)):
        plan = chronica.plan(sizes, ranks, batch_size, shuffle=shuffle, seed=seed, epoch=epoch, **mode)
        steps = distributed_sampler_steps(samples, ranks, batch_size, shuffle=shuffle, seed=seed, epoch=epoch)
        check(plan, sizes, batch_size, steps)
        np.testing.assert_allclose(plan.weights.sum(axis=1), ranks, rtol=1e-14)
        if mode["local_batch"] == "equal":
            counts = plan.counts.sum(axis=1) // ranks
            assert ((plan.counts == counts[:, None]) | (plan.counts == counts[:, None] + 1)).all()


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**63 - 1)), min_size=1, max_size=60),
    speeds=st.lists(st.sampled_from([1.0, 1.0, 0.5, 0.3, 3.0]), min_size=1, max_size=6),
    batch_size=st.integers(1, 9),
    mode=st.sampled_from(MODES),
    seed=st.integers(-(2**63), 2**64 - 1),
    fixed=st.sampled_from([0.0, 5.0]),
)
def test_any_sizes_and_speeds(
    sizes: list[int], speeds: list[float], batch_size: int, mode: dict[str, str], seed: int, fixed: float
) -> None:
    cost = chronica.CostModel(fixed=fixed, per_size2=0.25)
    plan = chronica.plan(sizes, speeds, batch_size, seed=seed, cost=cost, **mode)
    steps = distributed_sampler_steps(len(sizes), len(speeds), batch_size, shuffle=True, seed=seed, epoch=0)
    check(plan, sizes, batch_size, steps)
    assert plan == chronica.plan(np.array(sizes), speeds, batch_size, seed=seed, cost=cost, **mode)


def test_drop_last_drops_only_the_short_step() -> None:
    sizes = lognormal(100)
    whole, dropped = (chronica.plan(sizes, 3, 7, drop_last=drop) for drop in (False, True))
    assert (whole.steps, dropped.steps) == (5, 4)
    assert [step_samples(dropped, k) for k in range(4)] == [step_samples(whole, k) for k in range(4)]
    for steps in (1, 4):  # nothing to drop
        assert chronica.plan(sizes[: steps * 21], 3, 7, drop_last=True).steps == steps


def test_indices_are_the_drawn_order() -> None:
    sizes = lognormal(50)
    order = [7, 3, 49, 3, 0, 11, 20]
    plan = chronica.plan(sizes, 2, 2, indices=order, epoch=9)
    assert [step_samples(plan, step) for step in range(plan.steps)] == [[3, 3, 7, 49], [0, 11, 20]]
    assert chronica.plan(sizes, 2, 2, indices=np.array(order, dtype=np.int16)) == plan


@pytest.mark.parametrize(
    ("loss_weight", "amounts"),
    [("samples", [1, 1, 1, 1]), ("sizes", [8, 2, 2, 4]), ([0.0, 3.0, 1.0, 0.5], [0.0, 3.0, 1.0, 0.5])],
)
def test_weights_are_shares_of_the_loss(loss_weight: Any, amounts: list[float]) -> None:
    sizes = [8, 2, 2, 4]
    plan = chronica.plan(sizes, 2, 2, shuffle=False, loss_weight=loss_weight)
    held = [sum(amounts[i] for i in plan.batches(0, rank)[0]) for rank in range(2)]
    assert plan.weights[0].tolist() == [2 * amount / sum(amounts) for amount in held]


def test_a_step_without_weight_weighs_nothing() -> None:
    plan = chronica.plan([1] * 8, 2, 2, shuffle=False, loss_weight=[0, 0, 0, 0, 1, 1, 2, 4])
    assert plan.weights[0].tolist() == [0.0, 0.0]
    assert plan.weights[1].sum() == 2.0
    assert plan.weight_spread == 2.0  # the steps' totals are 0 and 8, their median 4


def test_summed_losses_are_not_weighed() -> None:
    plan = chronica.plan([5, 4, 3], 4, 2, loss_weight="sum")
    assert sorted(plan.weights[0].tolist()) == [0.0, 1.0, 1.0, 1.0]
    assert ((plan.weights > 0) == (plan.counts > 0)).all()


def test_figures_by_hand() -> None:
    # Largest first, padded: rank 0 takes [8], rank 1 takes [2, 2, 2]; loads 1 + 8 and 1 + 3 · 2.
    plan = chronica.plan([2, 8, 2, 2], 2, 2, shuffle=False, cost=chronica.CostModel(fixed=1))
    assert [plan.batches(0, rank)[0].tolist() for rank in range(2)] == [[1], [0, 2, 3]]
    assert plan.loads.tolist() == [[9.0, 7.0]]
    assert plan.counts.tolist() == [[1, 3]]
    assert plan.weights.tolist() == [[0.5, 1.5]]
    assert plan.makespans.tolist() == plan.lower_bounds.tolist() == [9.0]
    assert (plan.imbalance, plan.optimality) == (9 / 8, 1.0)
    assert (plan.padding_waste, plan.moved, plan.weight_spread) == (0.0, 0.0, 1.0)
    equal = chronica.plan([2, 8, 2, 4], 2, 2, shuffle=False, local_batch="equal")
    assert equal.loads.tolist() == [[16.0, 4.0]]
    assert equal.padding_waste == 1 - 16 / 20
    assert chronica.plan([2, 8, 2, 4], 2, 2, padding="none").padding_waste == 0.0


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(mode.values()))
@pytest.mark.parametrize("loss_weight", ["samples", "sizes", "array", "sum"])
@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 7), (4, 8), ([1, 0.5, 0.25], 5), (8, 4)])
def test_figures_from_their_definitions(
    mode: dict[str, str], loss_weight: str, ranks: int | list[float], batch_size: int
) -> None:
    sizes = lognormal(259, seed=4)  # the last step is short, on 8 ranks with fillers
    amounts = {"sizes": sizes, "array": sizes % 7 * 0.5}.get(loss_weight, np.ones(259))
    given = amounts if loss_weight == "array" else loss_weight
    cost = chronica.CostModel(fixed=20, per_sample=3, per_size=2, per_size2=0.01)
    plan = chronica.plan(sizes, ranks, batch_size, cost=cost, loss_weight=given, **mode)
    speeds = [1.0] * ranks if isinstance(ranks, int) else ranks
    totals, real, padded = [], 0, 0
    for step in range(plan.steps):
        batches = [plan.batches(step, rank)[0] for rank in range(plan.ranks)]
        is_real = plan.counts[step] > 0
        held = np.array([amounts[batch].sum() for batch in batches]) * is_real
        totals.append(held.sum())
        weights = is_real if loss_weight == "sum" else plan.ranks * held / held.sum()
        np.testing.assert_allclose(plan.weights[step], weights, rtol=1e-14)
        for rank, size in enumerate([sizes[batch] for batch in batches]):
            entered = np.full_like(size, size.max()) if mode["padding"] == "max" else size
            load = cost.predict(len(size), entered.sum(), (entered**2).sum()) / speeds[rank]
            # Costs are rounded relative to the largest of their step.
            assert plan.loads[step, rank] == pytest.approx(load, abs=1e-10 * plan.makespans[step])
            real, padded = real + size.sum() * is_real[rank], padded + entered.sum() * is_real[rank]
    assert plan.imbalance == pytest.approx(plan.loads.max(axis=1).sum() / plan.loads.mean(axis=1).sum(), rel=1e-14)
    assert plan.optimality == pytest.approx(plan.loads.max(axis=1).sum() / plan.lower_bounds.sum(), rel=1e-14)
    assert plan.padding_waste == pytest.approx(1 - real / padded, abs=1e-14)
    assert plan.weight_spread == pytest.approx(max(totals) / np.median(totals), rel=1e-14)
    assert plan.moved == 0.0


@pytest.mark.parametrize("size", [0.1, 1 / 3, 7, 2**62 - 1])
def test_without_padding_nothing_is_wasted(size: float) -> None:
    for samples, ranks, batch_size in ((10, 1, 10), (37, 3, 7), (1001, 3, 7), (1001, 2, 100)):
        assert 0.0 <= chronica.plan([size] * samples, ranks, batch_size).padding_waste <= 1e-15


def test_fillers_are_in_loads_only() -> None:
    plan = chronica.plan([10, 4], 3, 2, shuffle=False)
    assert plan.counts.tolist() == [[1, 1, 0]]
    assert plan.loads.tolist() == [[10.0, 4.0, 4.0]]
    assert plan.batches(0, 2)[0].tolist() == [1]
    assert plan.padding_waste == 0.0


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(mode.values()))
@pytest.mark.parametrize(
    "sizes",
    [[0] * 40, [7] * 40, [3, 900] * 20, list(range(40)), [1] * 39 + [2**40], [2**63 - 1] * 40],
    ids=["zero", "equal", "two", "sorted", "giant", "largest"],
)
def test_strange_sizes(mode: dict[str, str], sizes: list[int]) -> None:
    plan = chronica.plan(sizes, 3, 5, **mode)
    check(plan, sizes, 5, distributed_sampler_steps(40, 3, 5, shuffle=True, seed=0, epoch=0))
    if not any(sizes):
        assert (plan.imbalance, plan.optimality) == (1.0, 1.0)


@pytest.mark.parametrize("cost", [None, chronica.CostModel(fixed=3, per_size=0)], ids=["by size", "fixed"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(mode.values()))
def test_of_equally_fast_plans_the_counts_are_even(mode: dict[str, str], cost: chronica.CostModel | None) -> None:
    plan = chronica.plan([0] * 40, 3, 5, cost=cost, **mode)
    assert (plan.counts.max(axis=1) - plan.counts.min(axis=1)).tolist() == [0, 0, 1]


@pytest.mark.parametrize("dtype", ["u1", "i2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", ">i4"])
def test_any_dtype_gives_the_same_plan(dtype: str) -> None:
    sizes = lognormal(200, largest=250)
    assert chronica.plan(sizes.astype(dtype), 3, 4) == chronica.plan(sizes, 3, 4)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.uint64, np.array, torch.tensor])
def test_any_type_of_integer_gives_the_same_plan(kind: Any) -> None:
    sizes = lognormal(50)
    plan = chronica.plan(sizes, kind(3), kind(4), seed=kind(255), epoch=kind(9), window=kind(2))
    assert plan == chronica.plan(sizes, 3, 4, seed=255, epoch=9)


def test_sizes_are_read_from_a_memory_map(tmp_path: Path) -> None:
    sizes = lognormal(300).astype(np.int32)
    sizes.tofile(tmp_path / "sizes")
    mapped = np.memmap(tmp_path / "sizes", dtype=np.int32, mode="r")
    assert chronica.plan(mapped, 3, 4, loss_weight="sizes") == chronica.plan(sizes, 3, 4, loss_weight="sizes")


def test_rank_scale_is_the_inverse_of_speed() -> None:
    sizes = lognormal(500)
    scaled = chronica.plan(sizes, 3, 8, cost=chronica.CostModel(rank_scale=[1, 2, 4]))
    slower = chronica.plan(sizes, [1, 0.5, 0.25], 8)
    assert scaled == slower
    np.testing.assert_array_equal(scaled.loads, slower.loads)


def test_an_array_of_costs_is_as_good_as_its_model() -> None:
    sizes = lognormal(500)
    model = chronica.CostModel(per_sample=3, per_size=2, per_size2=0.5)
    by_model = chronica.plan(sizes, 4, 8, cost=model, padding="none")
    assert chronica.plan(sizes, 4, 8, cost=model.sample_costs(sizes), padding="none") == by_model


@pytest.mark.parametrize("copied", [lambda plan: plan, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_plans_and_their_copies_are_frozen(copied: Callable[[chronica.Plan], chronica.Plan]) -> None:
    original = chronica.plan([3, 1, 2], 2, 1)
    assert (original.makespans > 0).all()
    plan = copied(original)
    assert plan == original
    assert plan.optimality == original.optimality
    names = ("indices", "offsets", "parts", "lengths", "factors", "counts", "weights", "loads", "tails", "lower_bounds")
    for name in (*names, "makespans"):
        assert not getattr(plan, name).flags.writeable, name
    assert not plan.batches(0, 0)[0].flags.writeable
    with pytest.raises(AttributeError):
        plan.moved = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(("step", "rank"), [(-1, 0), (2, 0), (0, -1), (0, 2)])
def test_beyond_the_plan(step: int, rank: int) -> None:
    plan = chronica.plan([3, 1, 2], 2, 1)
    for ask in (plan.batches, plan.micro_weights):
        with pytest.raises(IndexError, match=r"steps 0 to 1 on ranks 0 to 1"):
            ask(step, rank)


def test_the_fingerprint_tells_plans_apart() -> None:
    sizes = lognormal(100)
    same = {"sizes": sizes, "ranks": 2, "batch_size": 4}
    others = [
        {"seed": 1}, {"epoch": 2}, {"batch_size": 5}, {"ranks": 3}, {"ranks": [1, 0.5]}, {"shuffle": False},
        {"drop_last": True}, {"loss_weight": "sizes"}, {"loss_weight": "sum"}, {"padding": "none"},
        {"local_batch": "equal"}, {"cost": chronica.CostModel(per_size2=1)}, {"sizes": sizes[::-1]},
        {"indices": range(99)}, {"loss_weight": sizes % 3}, {"batch_size": 100}, {"micro_batches": 2},
        {"policy": "plain"}, {"policy": "guided"}, {"first": "largest"}, {"pad_to": 512}, {"min_local_batch": 4},
        {"loss_weight": "sizes", "normalize": "epoch"},
    ]  # fmt: skip
    plans = [chronica.plan(**{**same, **other}) for other in ({}, *others)]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    assert len(set(plans)) == len(plans)
    assert plans[0] == chronica.plan(**same)
    assert plans[0] != plans[1]
    assert plans[0] != "a plan"


def test_the_fingerprint_is_the_same_in_another_process() -> None:
    program = "import chronica_hvd as c; print(c.plan(list(range(1, 99)), 3, 4, seed=5).fingerprint)"
    run = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONHASHSEED": "77"}, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == chronica.plan(list(range(1, 99)), 3, 4, seed=5).fingerprint
