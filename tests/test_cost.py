from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from brute_force import SmallStep
from numpy.typing import NDArray

import chronica_hvd as chronica

DTYPE = chronica.StepTimer().drain().dtype
NAMES = ("fixed", "per_sample", "per_size", "per_size2")
MODELS = [
    chronica.CostModel(5e6, 2e5, 3e3, 4.0),
    chronica.CostModel(0.0, 0.0, 3e3, 0.0),
    chronica.CostModel(1e7, 0.0, 0.0, 8.0),
    chronica.CostModel(0.0, 1e6, 0.0, 0.0),
]


def records(model: chronica.CostModel, count: int = 60, seed: int = 0) -> NDArray[Any]:
    """Return records of padded batches of varied shapes that take exactly what the model says."""
    engine = np.random.default_rng(seed)
    made = np.zeros(count, DTYPE)
    length = engine.integers(16, 4096, count)
    made["samples"] = engine.integers(1, 64, count)
    made["size"] = made["samples"] * length
    made["size2"] = made["size"] * length
    made["elapsed_ns"] = np.round(model.predict(made["samples"], made["size"], made["size2"]))
    return made


def changed(name: str, value: Any, dtype: Any = np.int64) -> NDArray[Any]:
    """Return three good records, one value of which is replaced."""
    made = records(MODELS[0], count=3).astype([(field, dtype) for field in DTYPE.names])
    made[name][1] = value
    return made


def test_predict() -> None:
    model = chronica.CostModel(fixed=7, per_sample=5, per_size=3, per_size2=2)
    assert model.predict(2, 10, 60) == 7 + 5 * 2 + 3 * 10 + 2 * 60
    assert model.predict(np.array([0, 1]), np.array([0, 2]), np.array([0, 4])).tolist() == [7.0, 7 + 5 + 6 + 8]
    assert model.sample_costs(np.array([0, 4])).tolist() == [5.0, 5 + 3 * 4 + 2 * 16]
    assert chronica.CostModel().sample_costs(np.array([3, 9])).tolist() == [3.0, 9.0]
    with_floor = dataclasses.replace(model, floor=100.0)
    assert with_floor.predict(2, 10, 60) == 167.0
    assert with_floor.predict(np.array([0, 1, 2]), np.array([0, 2, 10]), np.array([0, 4, 60])).tolist() == [
        100,
        100,
        167,
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", MODELS)
def test_fit_finds_the_coefficients(model: chronica.CostModel, seed: int) -> None:
    # The coefficients are whole numbers, so the times are too, and nothing is lost to rounding.
    fitted = chronica.CostModel.fit(records(model, seed=seed))
    for name in NAMES:
        assert getattr(fitted, name) == pytest.approx(getattr(model, name), rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("model", MODELS)
def test_fit_predicts_despite_noise_and_outliers(model: chronica.CostModel) -> None:
    engine = np.random.default_rng(1)
    noisy = records(model, count=200)
    noisy["elapsed_ns"] = noisy["elapsed_ns"] * engine.normal(1.0, 0.02, 200)
    noisy["elapsed_ns"][::40] *= 20  # a page fault, the garbage collector
    fitted = chronica.CostModel.fit(noisy)
    fresh = records(model, seed=2)
    errors = fitted.predict(fresh["samples"], fresh["size"], fresh["size2"]) / fresh["elapsed_ns"] - 1
    assert np.median(np.abs(errors)) < 0.05
    assert min(getattr(fitted, name) for name in NAMES) >= 0


@pytest.mark.parametrize("model", MODELS)
def test_fit_predicts_every_shape_despite_noise(model: chronica.CostModel) -> None:
    noisy = records(model, count=200)
    noisy["elapsed_ns"] = noisy["elapsed_ns"] * np.random.default_rng(3).normal(1.0, 0.02, 200)
    fitted, fresh = chronica.CostModel.fit(noisy), records(model, seed=4)
    predicted = fitted.predict(fresh["samples"], fresh["size"], fresh["size2"])
    np.testing.assert_allclose(predicted, fresh["elapsed_ns"], rtol=0.05)


def test_fit_of_few_records() -> None:
    one = records(MODELS[0], count=1)
    fitted = chronica.CostModel.fit(one)
    assert fitted.predict(one["samples"], one["size"], one["size2"])[0] == pytest.approx(one["elapsed_ns"][0])
    alike = np.repeat(one, 5)
    alike["elapsed_ns"] = [100, 100, 100, 100, 100]
    assert chronica.CostModel.fit(alike).predict(alike["samples"], alike["size"], alike["size2"])[0] == pytest.approx(
        100
    )
    alike["samples"] = alike["size"] = alike["size2"] = 0
    fitted = chronica.CostModel.fit(alike)
    assert [getattr(fitted, name) for name in NAMES] == [pytest.approx(100.0), 0.0, 0.0, 0.0]


def test_few_records_leave_the_shape_of_the_start() -> None:
    one = records(MODELS[0], count=1)
    start = chronica.CostModel(1.0, 0.0, 2.0, 3.0)
    fitted = chronica.CostModel.fit(one, start=start)
    ratios = [getattr(fitted, name) / getattr(start, name) for name in ("fixed", "per_size", "per_size2")]
    assert ratios == [pytest.approx(ratios[0])] * 3
    assert fitted.per_sample == 0.0
    assert chronica.CostModel.fit(one).per_size2 == 0.0  # by size


def test_the_unit_and_the_scales_of_the_start_do_not_matter() -> None:
    made = records(MODELS[0], count=200)
    start = chronica.CostModel(7.0, 5.0, 3.0, 2.0, rank_scale=[1, 2, 3])
    other = chronica.CostModel(7e9, 5e9, 3e9, 2e9)
    for name in NAMES:
        of_both = [getattr(chronica.CostModel.fit(made, start=one), name) for one in (start, other)]
        assert of_both[0] == pytest.approx(of_both[1], rel=1e-6)


def test_fit_of_several_ranks() -> None:
    ranks = [records(MODELS[0], count=150, seed=seed) for seed in range(3)]
    ranks[1]["elapsed_ns"] *= 2
    fitted = chronica.CostModel.fit(ranks)
    assert fitted.rank_scale == pytest.approx([1.0, 2.0, 1.0], rel=1e-4)
    for name in NAMES:
        assert getattr(fitted, name) == pytest.approx(getattr(MODELS[0], name), rel=1e-3), name
    assert (fitted.form, fitted.records) == ("additive", 450)
    assert chronica.CostModel.fit(ranks[0]).rank_scale is None


def test_fit_says_how_well_it_predicts() -> None:
    noisy = records(MODELS[0], count=400)
    noisy["elapsed_ns"] = noisy["elapsed_ns"] * np.random.default_rng(3).normal(1.0, 0.1, 400)
    fitted = chronica.CostModel.fit(noisy)
    assert 0.02 < fitted.median_error < 0.15  # of a tenth of noise the median is 0.067; it stands on few records
    assert 390 <= fitted.records <= 400
    assert chronica.CostModel.fit(records(MODELS[0], count=400)).median_error < 0.01


def test_of_a_record_that_is_alone_the_error_is_that_of_the_fit_to_it() -> None:
    for count in (1, 2, 3, 5):
        assert chronica.CostModel.fit(records(MODELS[0], count=count), start=MODELS[0]).median_error < 1e-6, count
    assert chronica.CostModel.fit([records(MODELS[0], count=1, seed=seed) for seed in range(3)]).median_error < 1e-6


def test_a_fitted_cost_reads_well() -> None:
    cost = chronica.FittedCost(1e6, 0.0, 250.0, rank_scale=[1, 2], floor=3e6, records=12, median_error=0.0312, comm=5e5)
    assert repr(cost) == (
        "FittedCost(max(3e+06, 1e+06 + 250 · S1) ns, floor, from 12 records, median error 3.1%, scales 1, 2, "
        "allreduce 5e+05 ns)"
    )
    assert repr(chronica.FittedCost(0.0, 0.0, 0.0)) == "FittedCost(0 ns, additive, from 0 records, median error 0.0%)"
    assert pickle.loads(pickle.dumps(cost)) == cost


def small_steps(
    micro_batches: int, padded: bool, speeds: bool, comm: float
) -> Iterator[tuple[SmallStep, chronica.Plan]]:
    """Yield random steps under a floor, and their plans."""
    for seed in range(25):
        engine = np.random.default_rng(seed)
        ranks = int(engine.integers(2, 4))
        sizes = tuple(int(size) for size in engine.integers(1, 30, max(ranks, int(engine.integers(4, 8)))))
        cost = chronica.CostModel(
            fixed=float(engine.integers(0, 3)),
            per_size2=float(engine.choice([0, 0.05])),
            floor=float(engine.integers(1, 60)),
        )
        of_ranks = tuple(map(float, engine.choice([1.0, 0.5], ranks))) if speeds else (1.0,) * ranks
        step = SmallStep(sizes, of_ranks, cost, padded, micro_batches=micro_batches, comm=comm)
        plan = chronica.plan(
            sizes,
            of_ranks,
            -(-len(sizes) // ranks),
            cost=cost,
            padding="max" if padded else "none",
            micro_batches=micro_batches,
            shuffle=False,
            max_size=1e9,
            comm=comm,
        )
        yield step, plan


@pytest.mark.parametrize(
    ("micro_batches", "padded", "speeds", "comm", "mean", "worst"),
    [
        (1, True, True, 0.0, 1.0, 1.0),  # the best there is
        (1, True, False, 10.0, 1.0, 1.0),
        (1, False, True, 0.0, 1.01, 1.15),
        (2, True, True, 0.0, 1.1, 1.4),
        (3, True, True, 0.0, 1.1, 1.5),
        (2, False, True, 0.0, 1.06, 1.3),
        (2, True, False, 10.0, 1.1, 1.4),
    ],
)
def test_plans_under_a_floor(
    micro_batches: int, padded: bool, speeds: bool, comm: float, mean: float, worst: float
) -> None:
    gaps = []
    for step, plan in small_steps(micro_batches, padded, speeds, comm):
        sizes = np.asarray(step.sizes, dtype=np.float64)
        for rank, speed in enumerate(step.speeds):
            of_rank = []
            for batch in plan.batches(0, rank):
                entered = np.full(len(batch), sizes[batch].max()) if padded else sizes[batch]
                of_rank.append(step.cost.predict(len(batch), entered.sum(), (entered**2).sum()))
            assert plan.loads[0, rank] == pytest.approx(sum(of_rank) / speed)
            assert plan.tails[0, rank] == pytest.approx(max(of_rank) / speed * 2 / 3)
        best = step.best()
        assert plan.lower_bounds[0] <= best * (1 + 1e-9)
        gaps.append(plan.step_times(comm)[0] / best)
    assert np.mean(gaps) <= mean + 1e-6
    assert max(gaps) <= worst + 1e-6


def test_a_floor_is_in_every_step_of_a_plan() -> None:
    sizes = np.random.default_rng(0).integers(1, 100, 4 * 70 * 3 + 2)
    for micro_batches in (1, 3):
        plan = chronica.plan(sizes, [1, 0.5, 1], 4, cost=chronica.CostModel(floor=1e4), micro_batches=micro_batches)
        parts = np.diff(plan.parts).reshape(plan.steps, 3)
        np.testing.assert_allclose(plan.loads, 1e4 * parts * [1, 2, 1])
        np.testing.assert_allclose(plan.lower_bounds, 2e4)
        assert plan.optimality < 1.5


def test_plans_use_the_allreduce_of_a_fitted_cost() -> None:
    sizes = np.random.default_rng(0).integers(1, 1000, 64)
    options = {"micro_batches": "auto", "shuffle": False}
    fitted = chronica.FittedCost(fixed=100.0, comm=9e4)
    plain = chronica.CostModel(fixed=100.0)
    by_hand = chronica.plan(sizes, 2, 8, cost=plain, comm=9e4, **options)
    assert chronica.plan(sizes, 2, 8, cost=fitted, **options) == by_hand
    assert chronica.plan(sizes, 2, 8, cost=plain, **options) != by_hand
    other = chronica.plan(sizes, 2, 8, cost=fitted, comm=10.0, **options)
    assert other == chronica.plan(sizes, 2, 8, cost=plain, comm=10.0, **options)


@pytest.mark.parametrize("empty", ["samples", "size", "size2"])
def test_fit_with_an_empty_column(empty: str) -> None:
    made = records(MODELS[0])
    made[empty] = 0
    made["elapsed_ns"] = MODELS[0].predict(made["samples"], made["size"], made["size2"])
    fitted = chronica.CostModel.fit(made)
    assert getattr(fitted, f"per_{empty.removesuffix('s')}") == 0.0
    np.testing.assert_allclose(fitted.predict(made["samples"], made["size"], made["size2"]), made["elapsed_ns"])


def test_fit_takes_what_a_timer_measured() -> None:
    timer = chronica.StepTimer()
    for samples in range(1, 6):
        timer.start(step=samples, samples=samples, size=10 * samples, size2=100 * samples)
        sum(range(1000 * samples))
        timer.stop()
    measured = timer.drain()
    fitted = chronica.CostModel.fit(measured)
    predicted = fitted.predict(measured["samples"], measured["size"], measured["size2"])
    assert (predicted > 0).all()
    assert predicted.min() < measured["elapsed_ns"].max()
    assert predicted.max() > measured["elapsed_ns"].min()


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (np.zeros(3), TypeError, r"structured array as StepTimer.drain\(\) returns; it lacks \['samples'"),
        ([1, 2], TypeError, "structured array"),
        (None, TypeError, "structured array"),
        (np.zeros(0, DTYPE), ValueError, "empty; at least one"),
        (np.zeros(2, DTYPE), ValueError, "elapsed_ns of the records must be positive; position . holds 0"),
        (changed("elapsed_ns", 0), ValueError, "elapsed_ns of the records must be positive; position . holds 0"),
        (changed("elapsed_ns", -5), ValueError, "elapsed_ns of the records must not be negative; position 1 holds -5"),
        (changed("elapsed_ns", float("nan"), float), (TypeError, ValueError), "elapsed_ns .*(nan|float)"),
        (changed("elapsed_ns", float("inf"), float), (TypeError, ValueError), "elapsed_ns .*(inf|float)"),
        (changed("samples", -1), ValueError, "samples .*-1"),
        (changed("size", -2), ValueError, "size .*-2"),
        (changed("size2", -3), ValueError, "size2 .*-3"),
        (changed("size", float("nan"), float), (TypeError, ValueError), "size .*(nan|float)"),
        (changed("step", 0).reshape(3, 1), ValueError, r"records must be one-dimensional, not of shape \(3, 1\)"),
        (changed("step", "a", "U9"), TypeError, "must hold integers or floats, not <U9"),
        (np.zeros(2, [("samples", int), ("elapsed_ns", int)]), TypeError, r"lacks \['size', 'size2'\]"),
    ],
)
def test_fit_of_nothing_useful(bad: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        chronica.CostModel.fit(bad)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fixed": -1}, ValueError, "fixed must be at least 0, not -1"),
        ({"per_size": float("nan")}, ValueError, "per_size must be finite, not nan"),
        ({"per_size2": float("inf")}, ValueError, "per_size2 must be finite, not inf"),
        ({"per_sample": "1"}, TypeError, "per_sample must be a number, not '1'"),
        ({"per_sample": None}, TypeError, "per_sample must be a number, not None"),
        ({"fixed": True}, TypeError, "fixed must be a number, not True"),
        ({"fixed": 10**400}, ValueError, "fixed must be finite, not inf"),
        ({"fixed": 1j}, TypeError, "fixed must be a number, not 1j"),
        ({"per_size": [1.0]}, TypeError, r"per_size must be a number, not \[1.0\]"),
        ({"floor": -1}, ValueError, "floor must be at least 0, not -1"),
        ({"floor": "1"}, TypeError, "floor must be a number, not '1'"),
        ({"slope": 1}, TypeError, "unexpected keyword argument 'slope'"),
        ({"rank_scale": [1, float("nan")]}, ValueError, "rank_scale must be finite; position 1 holds nan"),
        ({"rank_scale": [True]}, TypeError, "rank_scale must hold integers or floats, not bool"),
        ({"rank_scale": "ab"}, ValueError, r"rank_scale must be one-dimensional, not of shape \(\)"),
        ({"rank_scale": [[1], [1, 2]]}, TypeError, "rank_scale must be a one-dimensional array of numbers"),
        ({"rank_scale": [1, 0]}, ValueError, r"rank_scale must be positive on every rank, not \[1, 0\]"),
        ({"rank_scale": [1, -1]}, ValueError, "rank_scale must not be negative; position 1 holds -1"),
        ({"rank_scale": []}, ValueError, "rank_scale is empty"),
        ({"rank_scale": 2.0}, ValueError, "rank_scale must be one-dimensional"),
    ],
)
def test_bad_coefficients(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        chronica.CostModel(**options)


@pytest.mark.parametrize(
    ("speeds", "scale", "shown"),
    [([1e308, 1e308], [1e-10, 1e-10], "inf"), ([1e-308, 1e-308], [1e18, 1e18], r"\b0(\.0)?\b")],
)
@pytest.mark.parametrize("sizes", [[3, 1, 2], [0, 0, 0]])
def test_scaled_speeds_stay_positive_and_finite(
    sizes: list[int], speeds: list[float], scale: list[float], shown: str
) -> None:
    with pytest.raises(ValueError, match=rf"speed.*{shown}"):
        chronica.plan(sizes, speeds, 1, cost=chronica.CostModel(rank_scale=scale))


def test_the_largest_ratio_of_speeds_is_allowed() -> None:
    assert chronica.plan([1, 2], [1, 2.0**-20], 1) == chronica.plan(
        [1, 2], 2, 1, cost=chronica.CostModel(rank_scale=[1, 2**20])
    )


def test_it_is_a_value() -> None:
    model = chronica.CostModel(np.float32(1), 2, 3, 4, rank_scale=np.array([1, 2]))
    assert model == chronica.CostModel(1.0, 2.0, 3.0, 4.0, rank_scale=(1.0, 2.0))
    assert pickle.loads(pickle.dumps(model)) == model
    assert hash(model) == hash(pickle.loads(pickle.dumps(model)))
    for name in (*NAMES, "rank_scale", "floor"):
        assert model != dataclasses.replace(model, **{name: None if name == "rank_scale" else 9.0}), name
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.fixed = 2.0  # type: ignore[misc]
