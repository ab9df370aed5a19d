from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import chronica_hvd as chronica
from chronica_hvd import cells
from chronica_hvd.cost import non_negative_least_squares
from chronica_hvd.fit import fitted_cost
from chronica_hvd.least_squares import solve, sums_of
from chronica_hvd.refit import Outcome, refit
from chronica_hvd.rows import ROW, Row, summarize
from chronica_hvd.shape import fit_shape

DTYPE = chronica.StepTimer().drain().dtype
BY_SIZE = chronica.CostModel()
TRUTH = chronica.CostModel(4e6, 3e5, 2e3, 0.5)
LAUNCH = chronica.CostModel(0.0, 0.0, 3e3, 1.0, floor=2e7)
LARGEST = 2**63 - 1


def records(truth: chronica.CostModel, count: int, seed: int = 0, noise: float = 0.0) -> NDArray[Any]:
    """Return records of padded batches of varied shapes."""
    engine = np.random.default_rng(seed)
    made = np.zeros(count, DTYPE)
    made["step"] = np.arange(count)
    made["samples"] = engine.integers(1, 32, count)
    length = np.clip(engine.lognormal(5.5, 0.8, count), 8, 4096).astype(np.int64)
    made["size"] = made["samples"] * length
    made["size2"] = made["size"] * length
    exact = truth.predict(made["samples"], made["size"], made["size2"])
    made["elapsed_ns"] = np.round(exact * np.exp(engine.normal(0.0, noise, count)))
    return made


def changed(made: NDArray[Any], **fields: Any) -> NDArray[Any]:
    made = made.copy()
    for name, value in fields.items():
        made[name] = value
    return made


def unpacked(made: NDArray[Any], model: chronica.CostModel = BY_SIZE) -> Row:
    row = Row.unpack(summarize(made, model))
    assert row is not None
    return row


def level(row: Row, truth: chronica.CostModel) -> float:
    """Return how many times longer than true a row says that its rank takes."""
    count, samples, size, size2, time = np.vstack(row.halves).T
    return float((count * time).sum() / (count * truth.predict(samples, size, size2)).sum())


def refitted(rows: list[Row | None], current: chronica.CostModel = BY_SIZE, **options: Any) -> Outcome:
    ranks = len(rows)
    outcome = refit(rows, current, [1.0] * ranks, [0.0] * ranks, cells.NONE, BY_SIZE, **options)
    assert outcome is not None
    return outcome


# Least squares. -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_least_squares_are_the_best_that_are_not_negative(seed: int) -> None:
    engine = np.random.default_rng(seed)
    columns = engine.random((4, 12)) * np.array([[1.0], [30.0], [1e4], [1e7]])
    target, weight = engine.normal(1.0, 3.0, 12), engine.random(12)
    found = solve(sums_of(columns, target, weight))
    assert min(found) >= 0.0
    root = np.sqrt(weight)

    def error(solution: Any) -> float:
        return float((weight * (np.asarray(solution) @ columns - target) ** 2).sum())

    assert error(found) == pytest.approx(error(non_negative_least_squares((columns * root).T, target * root)), rel=1e-6)
    for chosen in (list(subset) for count in (1, 2, 3, 4) for subset in combinations(range(4), count)):
        best = np.linalg.lstsq((columns[chosen] * root).T, target * root, rcond=None)[0]
        if (best >= 0).all():
            solution = np.zeros(4)
            solution[chosen] = best
            assert error(found) <= error(solution) * (1 + 1e-6)


def test_least_squares_of_columns_that_say_the_same() -> None:
    column = np.arange(1.0, 9.0)
    for columns in (np.stack([column, 3 * column]), np.stack([column, 0 * column]), np.stack([0 * column, column])):
        found = solve(sums_of(columns, 6 * column, np.ones(8)))
        np.testing.assert_allclose(np.asarray(found) @ columns, 6 * column)
    assert solve(sums_of(np.zeros((2, 3)), np.ones(3), np.ones(3))) == [0.0, 0.0]
    assert solve(sums_of(column[None], -column, np.ones(8))) == [0.0]


# Cells. ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 16, 100])
def test_cells_hold_what_they_were_made_of(most: int) -> None:
    made = records(TRUTH, 77)
    single = np.stack([np.ones(77), *(made[name] for name in ("samples", "size", "size2", "elapsed_ns"))], axis=1)
    merged = cells.merge(single, most)
    assert len(merged) == 77 if most == 100 else most / 2 < len(merged) <= most
    assert merged[:, 0].sum() == 77
    np.testing.assert_allclose(merged[:, :1].T @ merged[:, 1:], single[:, 1:].sum(axis=0, keepdims=True))
    # A linear model says of the means what it says of the records.
    np.testing.assert_allclose(TRUTH.predict(*merged[:, 1:4].T), merged[:, 4], rtol=1e-6)
    again = cells.merge(np.vstack([merged, np.zeros((3, 5))]), 1)
    np.testing.assert_allclose(again, cells.merge(single, 1))


def test_alike_records_are_one_cell() -> None:
    assert len(cells.merge(np.tile([1.0, 2.0, 3.0, 4.0, 5.0], (50, 1)), 16)) == 1
    assert cells.merge(cells.NONE, 16).shape == (0, 5)


# Rows. ----------------------------------------------------------------------------------------------------------------

ODD: dict[str, NDArray[Any]] = {
    "none": np.zeros(0, DTYPE),
    "zeros": np.zeros(9, DTYPE),
    "one": records(TRUTH, 1),
    "two": records(TRUTH, 2),
    "three": records(TRUTH, 3),
    "alike": np.repeat(records(TRUTH, 1), 70),
    "many": records(TRUTH, 100_000, noise=0.1),
    "negative": changed(records(TRUTH, 50), elapsed_ns=-5),
    "some negative": changed(records(TRUTH, 50), elapsed_ns=np.where(np.arange(50) % 3, 10**7, -(2**63))),
    "no samples": changed(records(TRUTH, 50), samples=0),
    "negative samples": changed(records(TRUTH, 50), samples=-1),
    "no work": changed(records(TRUTH, 50), samples=0, size=0, size2=0),
    "one nanosecond": changed(records(TRUTH, 50), elapsed_ns=1),
    "the largest": changed(records(TRUTH, 50), samples=LARGEST, size=LARGEST, size2=LARGEST, elapsed_ns=LARGEST),
    "hours": changed(records(TRUTH, 50), elapsed_ns=np.where(np.arange(50) == 7, 2 * 3600 * 10**9, 10**7)),
    "half hours": changed(records(TRUTH, 50), elapsed_ns=np.where(np.arange(50) % 2, 2 * 3600 * 10**9, 10**7)),
    "one step": changed(records(TRUTH, 50), step=3),
    "less work takes longer": changed(records(TRUTH, 50), elapsed_ns=10**18 // records(TRUTH, 50)["elapsed_ns"]),
}


@pytest.mark.parametrize("model", [BY_SIZE, TRUTH, LAUNCH, chronica.CostModel(0, 0, 0, 0)])
@pytest.mark.parametrize("odd", ODD)
def test_rows_of_odd_records(odd: str, model: chronica.CostModel) -> None:
    row = summarize(ODD[odd], model)
    assert row.shape == (ROW,)
    assert row.dtype == np.float64
    assert np.isfinite(row).all()
    says_nothing = odd in ("none", "zeros", "negative", "negative samples")
    assert (Row.unpack(row) is None) == says_nothing
    rows = [Row.unpack(one) for one in (row, summarize(records(TRUTH, 64, noise=0.05), model))]
    for current in (model, BY_SIZE, LAUNCH):
        outcome = refit(rows, current, [1.0, 2.0], [0.0, 0.0], cells.NONE, BY_SIZE)
        assert outcome is not None
        assert all(math.isfinite(number) and number > 0.0 for number in (outcome.unit, *outcome.scales))
        assert np.isfinite(outcome.memory).all()
    if says_nothing:
        assert outcome.scales[0] == 1.0


@pytest.mark.parametrize("seed", range(30))
def test_rows_of_random_records(seed: int) -> None:
    engine = np.random.default_rng(seed)
    made = np.zeros(int(engine.integers(0, 200)), DTYPE)
    for name in ("samples", "size", "size2", "elapsed_ns", "step"):
        made[name] = engine.integers(
            -(2**63) if engine.random() < 0.2 else 0, 2 ** int(engine.integers(1, 63)), made.size
        )
    row = summarize(made, BY_SIZE)
    assert np.isfinite(row).all()
    outcome = refit([Row.unpack(row)] * 2, BY_SIZE, [1.0, 1.0], [0.0, 0.0], cells.NONE, BY_SIZE)
    if outcome is not None:
        fitted_cost(outcome)


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(ROW),
        np.full(ROW, np.nan),
        np.full(ROW, -1.0),
        np.ones(ROW - 1),
        np.full(ROW, np.inf),
    ],
)
def test_what_is_no_row_says_nothing(wrong: NDArray[Any]) -> None:
    assert Row.unpack(wrong) is None
    assert refit([None, None], BY_SIZE, [1.0, 1.0], [0.0, 0.0], cells.NONE, BY_SIZE) is None


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_pause_that_returns_is_slowness_and_one_that_does_not_is_none(noise: float) -> None:
    made = records(TRUTH, 64, noise=noise)
    plain = level(unpacked(made), TRUTH)
    third = made.copy()
    third["elapsed_ns"][::3] *= 4  # 22 of 64
    assert level(unpacked(third), TRUTH) / plain == pytest.approx(1 + 3 * 22 / 64, rel=0.06)
    for factor in (3, 50, 10_000):
        once = made.copy()
        once["elapsed_ns"][20] *= factor
        assert level(unpacked(once), TRUTH) / plain == pytest.approx(1.0, abs=0.01 + noise / 2), factor
    first = made.copy()
    first["elapsed_ns"][:3] *= 100
    assert level(unpacked(first), TRUTH) / plain == pytest.approx(1.0, abs=0.01 + noise / 2)


def test_the_error_of_a_speed_is_what_it_scatters_by() -> None:
    for noise in (0.05, 0.2):
        rows = [unpacked(records(TRUTH, 64, seed, noise)) for seed in range(200)]
        levels = [level(row, TRUTH) / math.exp(noise**2 / 2) for row in rows]
        assert np.std(levels) < 1.5 * np.mean([row.error for row in rows])
        assert np.std(levels) > 0.6 * np.mean([row.error for row in rows])
        beyond = np.mean([abs(one - 1.0) > 3 * row.error for one, row in zip(levels, rows, strict=True)])
        assert beyond < 0.05


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("above", [0.1, 0.4, 0.9])
def test_where_most_are_at_the_floor_those_above_are_no_outliers(above: float, noise: float) -> None:
    made = records(LAUNCH, 200, noise=noise)
    exact = LAUNCH.predict(made["samples"], made["size"], made["size2"])
    few, many = np.flatnonzero(exact > LAUNCH.floor), np.flatnonzero(exact == LAUNCH.floor)
    count = int(100 * above)
    made = made[np.sort([*np.resize(few, count), *np.resize(many, 100 - count)])]
    row = unpacked(made)
    assert sum(float(half[:, 0].sum()) for half in row.halves) >= 97
    assert level(row, LAUNCH) == pytest.approx(1.0, abs=0.01 + noise)


def test_a_slow_rank_with_pauses_keeps_its_shape() -> None:
    made = records(TRUTH, 300, noise=0.03)
    made["elapsed_ns"][::3] *= 4
    _, samples, size, size2, time = np.vstack(unpacked(made).halves).T
    ratio = time / TRUTH.predict(samples, size, size2)
    assert np.std(ratio / ratio.mean()) < 0.05


def test_steps_of_loops_that_number_them_alike_are_counted_one_by_one() -> None:
    made = records(TRUTH, 60)
    mean = made["elapsed_ns"].sum() / 30
    for steps in (np.arange(60) // 2, np.tile(np.arange(10) // 2, 6)):
        assert unpacked(changed(made, step=steps)).step_time == pytest.approx(mean, rel=0.01)


def test_rows_do_not_depend_on_the_unit_of_the_model() -> None:
    made = records(TRUTH, 100, noise=0.1)
    np.testing.assert_allclose(summarize(made, BY_SIZE), summarize(made, chronica.CostModel(per_size=7e9)), rtol=1e-9)


# The fit. -------------------------------------------------------------------------------------------------------------


def held_out_error(model: chronica.CostModel, truth: chronica.CostModel) -> float:
    fresh = records(truth, 400, seed=99)
    predicted = model.predict(fresh["samples"], fresh["size"], fresh["size2"])
    return float(np.median(np.abs(predicted / fresh["elapsed_ns"] - 1.0)))


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("noise", [0.02, 0.2])
@pytest.mark.parametrize(
    "truth", [TRUTH, LAUNCH, chronica.CostModel(0, 0, 3e3, 0), chronica.CostModel(2e5, 0, 1e3, 4.0)]
)
def test_fit_predicts_fresh_records(truth: chronica.CostModel, noise: float, ranks: int) -> None:
    fitted = chronica.CostModel.fit([records(truth, 400, seed, noise) for seed in range(ranks)])
    assert held_out_error(fitted, truth) < 0.02 + noise / 5
    assert fitted.form == ("floor" if truth is LAUNCH else "additive")


def test_outliers_do_not_bend_the_shape() -> None:
    made = records(TRUTH, 400, noise=0.02)
    made["elapsed_ns"][:4] *= 30  # the first steps
    made["elapsed_ns"][np.argsort(made["size"])[-12:]] *= 5  # page faults where most is allocated
    assert held_out_error(chronica.CostModel.fit(made), TRUTH) < 0.02


def test_the_rank_with_the_long_samples_is_not_mistaken_for_a_slow_one() -> None:
    """A plan may give the long samples to the same rank in every step."""
    truth = chronica.CostModel(0.0, 0.0, 1e3, 4.0)
    made = records(truth, 400, noise=0.05)
    length = made["size"] // made["samples"]
    long, short = made[length > np.median(length)], made[length <= np.median(length)]
    fitted = chronica.CostModel.fit([long, short])
    assert fitted.rank_scale == (1.0, 1.0)
    assert held_out_error(fitted, truth) < 0.05
    slow = changed(long, elapsed_ns=2 * long["elapsed_ns"])
    fitted = chronica.CostModel.fit([slow, short, short, long])
    assert fitted.rank_scale == pytest.approx([2.0, 1.0, 1.0, 1.0], rel=0.1)


def test_where_all_take_the_same_time_larger_ones_are_not_taken_to_be_free() -> None:
    made = changed(records(TRUTH, 100), elapsed_ns=10**7)
    fitted = chronica.CostModel.fit(made)
    assert fitted.form == "floor"
    largest = made["size"].max()
    assert fitted.predict(1, 1, 1) == fitted.predict(32, largest // 2, largest * 50) == pytest.approx(1e7)
    assert 5e7 < fitted.predict(32, 15 * largest, 15 * largest * 100) < 3e8


def test_what_is_not_measured_is_as_at_the_start() -> None:
    made = records(TRUTH, 200, noise=0.1)
    made["samples"], made["size"], made["size2"] = 4, 400, 40_000
    made["elapsed_ns"] = np.round(1e7 * np.exp(np.random.default_rng(0).normal(0.0, 0.1, 200)))
    for start in (BY_SIZE, chronica.CostModel(per_size=0.0, per_size2=1.0), chronica.CostModel(100.0, 5.0, 1.0, 0.01)):
        fitted = chronica.CostModel.fit(made, start=start)
        for work in ((4, 400, 40_000), (1, 400, 160_000), (8, 800, 80_000)):
            ratio = fitted.predict(*work) / fitted.predict(4, 400, 40_000)
            assert ratio == pytest.approx(start.predict(*work) / start.predict(4, 400, 40_000), rel=0.02)
    merged = np.vstack(unpacked(made).halves)
    shape = fit_shape([merged], chronica.CostModel(per_size=2.5e4), [1.0], [])
    assert shape.fixed + 4 * shape.per_sample < 0.05 * shape.predict(4, 400, 40_000)


def test_a_factor_that_is_known_stays() -> None:
    fast, slow = (np.vstack(unpacked(records(TRUTH, 200, seed)).halves) for seed in (1, 2))
    slow[:, 4] *= 2.0
    start = chronica.CostModel(per_size=8e3)
    known = fit_shape([fast, slow], start, [1.0, 1.0], [])
    free = fit_shape([fast, slow], start, [1.0, 1.0], [1])
    assert free.predict(4, 400, 40_000) == pytest.approx(TRUTH.predict(4, 400, 40_000), rel=1e-3)
    assert known.predict(4, 400, 40_000) > 1.3 * TRUTH.predict(4, 400, 40_000)


def test_a_floor_that_is_not_seen_any_more_is_not_forgotten() -> None:
    made = records(LAUNCH, 200)
    rows: list[Row | None] = [unpacked(made[made["elapsed_ns"] > 2.5e7])]
    current = chronica.CostModel(0.0, 0.0, 2.5e3, 1.2, floor=2e7)
    outcome = refitted(rows, current, certainty=0.0)
    assert outcome.is_new
    assert outcome.shape.floor * outcome.unit == pytest.approx(2e7, rel=0.2)
    below: list[Row | None] = [unpacked(records(TRUTH, 200, noise=0.02))]
    outcome = refitted(below, current)
    assert outcome.is_new
    assert outcome.shape.floor * outcome.unit < 1.2e7  # TRUTH has none


def test_a_memory_that_does_not_hold_any_more_does_not_hinder() -> None:
    before = chronica.CostModel(1e5, 1e6, 100.0, 0.0)
    rows: list[Row | None] = [unpacked(records(before, 200, seed, 0.1)) for seed in range(4)]
    memory = refitted(rows, before).memory
    rows = [unpacked(records(chronica.CostModel(per_size=3e3), 60, seed, 0.1)) for seed in range(4)]
    outcome = refit(rows, before, [1.0] * 4, [0.0] * 4, memory, BY_SIZE)
    assert outcome is not None
    assert outcome.scales == [1.0] * 4
    assert outcome.shape.predict(1, 800, 640_000) > 0.95 * outcome.shape.predict(32, 800, 20_000)


def test_the_same_rows_give_the_same_bits() -> None:
    rows = [unpacked(records(LAUNCH, 100, seed, 0.1)) for seed in range(3)]
    one, other = (refitted([*rows]) for _ in range(2))
    assert (one.shape, one.unit, one.scales) == (other.shape, other.unit, other.scales)
    assert one.memory.tobytes() == other.memory.tobytes()
    packed = [summarize(records(LAUNCH, 100, seed, 0.1), BY_SIZE) for seed in range(3)]
    read_back = [Row.unpack(np.frombuffer(row.tobytes())) for row in packed]
    assert refitted(read_back).shape == one.shape


def test_what_is_within_the_noise_stays() -> None:
    for noise in (0.0, 0.02, 0.1, 0.2):
        kept = 0
        for seed in range(30):
            rows: list[Row | None] = [unpacked(records(TRUTH, 64, 4 * seed + rank, noise)) for rank in range(4)]
            outcome = refitted(rows, TRUTH)
            kept += not outcome.is_new and outcome.scales == [1.0] * 4
        assert kept >= 26, noise


def test_where_nothing_has_changed_no_half_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(*args: Any, **options: Any) -> chronica.CostModel:
        calls.append(args)
        return fit_shape(*args, **options)

    monkeypatch.setattr("chronica_hvd.refit.fit_shape", counted)
    rows: list[Row | None] = [unpacked(records(TRUTH, 200, rank, 0.02)) for rank in range(4)]
    assert not refitted(rows, TRUTH).is_new
    assert len(calls) == 2  # with a floor and without


def test_where_the_start_is_right_again_what_led_away_from_it_is_forgotten() -> None:
    before: list[Row | None] = [unpacked(records(TRUTH, 200, rank, 0.05)) for rank in range(3)]
    current = refitted(before)
    rows: list[Row | None] = [unpacked(records(chronica.CostModel(per_size=3e3), 60, rank, 0.05)) for rank in range(3)]
    outcome = refit(rows, current.shape, [1.0] * 3, [0.0] * 3, current.memory, BY_SIZE)
    assert outcome is not None
    assert outcome.shape == BY_SIZE
    assert outcome.records <= 180


def test_a_small_change_that_stays_is_seen_in_time() -> None:
    scales, drifts, refreshes = [1.0, 1.0], [0.0, 0.0], 0
    while scales == [1.0, 1.0]:
        rows: list[Row | None] = [unpacked(records(TRUTH, 64, 2 * refreshes + rank, 0.15)) for rank in range(2)]
        assert rows[0] is not None
        slow = records(TRUTH, 64, 2 * refreshes, 0.15)
        rows[0] = unpacked(changed(slow, elapsed_ns=slow["elapsed_ns"] * 1.05))
        outcome = refit(rows, TRUTH, scales, drifts, cells.NONE, BY_SIZE)
        assert outcome is not None
        scales, drifts, refreshes = outcome.scales, outcome.drifts, refreshes + 1
        assert refreshes < 9
    assert scales[0] > scales[1]
