"""Epoch reports of simulated epochs: who is named, for what, and whether the amounts add up."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from helpers import lognormal
from numpy.typing import NDArray

import chronica_hvd as chronica
from chronica_hvd import EpochReport
from chronica_hvd.attribution import OF_A_RANK, Straggler

MS = 1e6
WORK, DATA_WAIT, OTHER, WIRE = 100 * MS, 2 * MS, 1 * MS, 3 * MS


def on(rank: int, value: float, ranks: int, otherwise: float = 0.0) -> NDArray[np.float64]:
    """Return (ranks,) a value of one rank, and another one of the rest."""
    values = np.full(ranks, otherwise)
    values[rank] = value
    return values


class Epoch:
    """An epoch as ranks go through it: they begin a step together, and all wait for the slowest of them."""

    def __init__(self, steps: int, ranks: int, noise: float = 0.0, seed: int = 0) -> None:
        self.shape = steps, ranks
        self._noise, self._random = noise, np.random.default_rng(seed)
        self.scale: Any = 1.0  # what the plan believes of the ranks
        self.work: Any = None  # relative; by default as a plan deals it
        self.factor: Any = 1.0  # of the device
        self.data_wait: Any = 0.0  # beyond what every rank has
        self.other: Any = 0.0

    def _noisy(self, values: Any) -> NDArray[np.float64]:
        return values * np.maximum(1.0 + self._noise * self._random.standard_normal(self.shape), 0.1)

    def times(self) -> dict[str, Any]:
        scale = np.broadcast_to(self.scale, self.shape)
        dealt = self.shape[1] / scale / (1.0 / scale).sum(axis=1, keepdims=True)
        work = WORK * np.broadcast_to(dealt if self.work is None else self.work, self.shape)
        compute = self._noisy(work * self.factor)
        data_wait = self._noisy(DATA_WAIT + self.data_wait)
        other = self._noisy(OTHER + self.other)
        arrival = compute + data_wait + other
        wait = arrival.max(axis=1, keepdims=True) - arrival + WIRE
        period = arrival + wait
        period[0] = np.nan
        return {
            "compute": compute,
            "data_wait": data_wait,
            "wait": wait,
            "period": period,
            "loads": work * scale * 1e-3,
            "expected": work,
        }

    def report(self) -> EpochReport:
        report = EpochReport.from_times(3, **self.times())
        check(report)
        return report


def check(report: EpochReport) -> None:
    """Everything that holds for every report."""
    waited = np.nansum(report.peer_wait)
    assert sum(report.waiting_by_cause.values()) == pytest.approx(waited, rel=1e-9)
    parts = report.compute + report.data_wait + report.other + report.peer_wait + report.wire
    np.testing.assert_allclose(parts[~np.isnan(parts)].mean() if report.complete else 0.0, report.elapsed, rtol=1e-9)
    assert min(report.waiting_by_cause.values()) >= 0.0
    for cause in OF_A_RANK:
        named = sum(straggler.waiting for straggler in report.stragglers if straggler.cause == cause)
        assert named <= report.waiting_by_cause[cause] * (1 + 1e-9)
    waiting = [straggler.waiting for straggler in report.stragglers]
    assert waiting == sorted(waiting, reverse=True)
    json.dumps(report.as_dict(), allow_nan=False)
    assert str(report).startswith(f"Epoch {report.epoch}")


def named(report: EpochReport) -> list[tuple[int, str]]:
    return [(straggler.rank, straggler.cause) for straggler in report.stragglers]


def share(report: EpochReport, cause: str) -> float:
    """Return the share of the waiting that has this cause."""
    return report.waiting_by_cause[cause] / sum(report.waiting_by_cause.values())


RANKS = pytest.mark.parametrize("ranks", [2, 4, 9])
NOISE = pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])


@RANKS
@NOISE
@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        ("data", {"work": (1.6, 1.0)}),
        ("device", {"factor": (2.0, 1.0)}),
        ("input", {"data_wait": (60 * MS, 0.0)}),
        ("loop", {"other": (60 * MS, 0.0)}),
    ],
)
def test_each_cause(cause: str, changes: dict[str, tuple[float, float]], ranks: int, noise: float) -> None:
    epoch = Epoch(64, ranks, noise)
    for name, (value, otherwise) in changes.items():
        setattr(epoch, name, on(1, value, ranks, otherwise))
    report = epoch.report()
    assert named(report) == [(1, cause)]
    # With noise another rank is the last one now and then, or the same one for it.
    assert share(report, cause) > (0.96 if noise == 0.0 else 0.9 if noise < 0.1 else 0.6)
    (straggler,) = report.stragglers
    assert straggler.factor == pytest.approx(2.0 if cause == "device" else 1.0, rel=0.01 + noise / 2)
    assert straggler.share == pytest.approx(straggler.waiting / (report.elapsed * ranks))
    assert f"{cause}: " in str(report)
    assert "rank 1 (" in str(report)


def test_the_amounts_of_one_cause_without_noise() -> None:
    epoch = Epoch(11, 3)
    epoch.factor = on(2, 2.0, 3, 1.0)
    report = epoch.report()
    np.testing.assert_allclose(report.compute, [1.1, 1.1, 2.2])
    np.testing.assert_allclose(report.data_wait, 0.022)
    np.testing.assert_allclose(report.other, 0.010)  # of the first step it is not known
    np.testing.assert_allclose(report.peer_wait, [1.1, 1.1, 0.0], atol=1e-12)
    np.testing.assert_allclose(report.slowdown, [1.0, 1.0, 2.0])
    assert report.wire == pytest.approx(0.033)
    assert report.elapsed == pytest.approx(2.2 + 0.022 + 0.010 + 0.033)
    assert report.idle_share == pytest.approx(1 - 4 / 6)
    assert report.predicted_idle_share == pytest.approx(0.0)
    assert report.waiting_by_cause["device"] == pytest.approx(2.2)
    assert report.stragglers == (Straggler(2, "device", *map(pytest.approx, (2.2, 2.2 / 3 / report.elapsed, 2.0))),)


@RANKS
@NOISE
def test_a_slow_rank_that_the_plan_relieves_is_listed(ranks: int, noise: float) -> None:
    epoch = Epoch(64, ranks, noise)
    epoch.factor = epoch.scale = on(1, 2.0, ranks, 1.0)
    report = epoch.report()
    assert named(report) == [(1, "device")]
    assert report.stragglers[0].factor == pytest.approx(2.0, rel=0.01 + noise / 2)
    assert report.stragglers[0].share < 0.02
    assert report.predicted_idle_share < 1e-9


@RANKS
@NOISE
def test_a_rank_that_has_recovered_is_not(ranks: int, noise: float) -> None:
    epoch = Epoch(64, ranks, noise)
    epoch.scale = on(1, 2.0, ranks, 1.0)
    report = epoch.report()
    assert named(report) == []
    assert report.waiting_by_cause["plan"] > report.waiting_by_cause["data"]
    assert noise > 0.0 or share(report, "plan") > 0.98


def test_a_rank_becomes_slow_and_is_relieved() -> None:
    epoch = Epoch(64, 2, noise=0.05)
    epoch.factor, epoch.scale = np.ones((64, 2)), np.ones((64, 2))
    epoch.factor[20:, 0] = 2.0
    epoch.scale[40:, 0] = 2.0
    report = epoch.report()
    assert named(report) == [(0, "device")]
    assert report.stragglers[0].factor == pytest.approx(2.0, rel=0.05)
    assert report.waiting_by_cause["device"] == pytest.approx(20 * 0.1, rel=0.15)


def test_a_rank_was_slow_at_first_relieved_and_recovers_in_the_end() -> None:
    epoch = Epoch(96, 2, noise=0.02)
    epoch.factor = np.ones((96, 2))
    epoch.factor[:48, 0] = 2.0
    epoch.scale = epoch.factor
    assert named(epoch.report()) == []


def test_pauses_that_come_again_and_again_are_the_device() -> None:
    epoch = Epoch(64, 2, noise=0.05)
    epoch.factor = np.ones((64, 2))
    epoch.factor[::3, 1] = 4.0
    report = epoch.report()
    assert named(report) == [(1, "device")]
    assert share(report, "device") > 0.9


def test_a_single_pause_is_nobodys_fault() -> None:
    epoch = Epoch(64, 2, noise=0.05)
    epoch.factor = np.ones((64, 2))
    epoch.factor[7, 1] = 30.0
    report = epoch.report()
    assert named(report) == []
    assert share(report, "noise") > 0.9
    assert report.slowdown == pytest.approx([1.0, 1.0], abs=0.05)


def test_a_single_checkpoint_is_the_loops() -> None:
    epoch = Epoch(64, 2, noise=0.05)
    epoch.other = np.zeros((64, 2))
    epoch.other[40, 0] = 3000 * MS
    report = epoch.report()
    assert named(report) == [(0, "loop")]
    assert report.waiting_by_cause["loop"] == pytest.approx(3.0, rel=0.2)


@pytest.mark.parametrize("every", [2, 4])
def test_a_loader_that_gives_batches_in_bursts(every: int) -> None:
    epoch = Epoch(64, 4, noise=0.05)
    epoch.data_wait = np.zeros((64, 4))
    epoch.data_wait[::every, 2] = 300 * MS
    report = epoch.report()
    assert named(report) == [(2, "input")]
    assert share(report, "input") > 0.85


def test_two_causes_on_one_rank_share_the_waiting() -> None:
    epoch = Epoch(64, 4, noise=0.05)
    epoch.factor = on(1, 1.5, 4, 1.0)
    epoch.data_wait = on(1, 50 * MS, 4)
    report = epoch.report()
    assert sorted(named(report)) == [(1, "device"), (1, "input")]
    assert share(report, "device") == pytest.approx(0.5, abs=0.05)
    assert share(report, "input") == pytest.approx(0.5, abs=0.05)


def test_two_ranks_of_which_only_the_last_is_waited_for() -> None:
    epoch = Epoch(64, 4, noise=0.05)
    epoch.factor = on(1, 1.5, 4, 1.0)
    epoch.data_wait = on(2, 150 * MS, 4)
    report = epoch.report()
    assert named(report) == [(2, "input"), (1, "device")]
    assert report.stragglers[1].share < 0.02


def test_a_slow_rank_with_long_samples_that_cannot_be_shared_out() -> None:
    epoch = Epoch(64, 4)
    epoch.factor = epoch.scale = on(0, 2.0, 4, 1.0)
    epoch.work = on(0, 1.5, 4, 1.0)
    report = epoch.report()
    # Work 1.5 at half speed takes 2.0 longer than 1.0 elsewhere: 1.5 for the device, 0.5 for the samples.
    assert share(report, "device") == pytest.approx(0.75)
    assert share(report, "data") == pytest.approx(0.25)


def test_long_samples_in_turn() -> None:
    epoch = Epoch(64, 4, noise=0.05)
    epoch.work = np.random.default_rng(1).lognormal(0, 0.4, (64, 4))
    report = epoch.report()
    assert {cause for _, cause in named(report)} == {"data"}
    assert share(report, "data") > 0.9
    assert report.idle_share == pytest.approx(report.predicted_idle_share, abs=0.05)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_the_cost_model_has_wrong_is_no_slow_rank(ranks: int) -> None:
    """The plan deals by size what costs more than in proportion: rank 0, with the longest samples, takes longer."""
    sizes = lognormal(2000, 5.5)
    plan = chronica.plan(sizes, ranks, 16)
    cost = chronica.CostModel(per_size2=2.0**-10)
    work = np.zeros((plan.steps, ranks))
    for step, rank in np.ndindex(work.shape):
        for batch in plan.batches(step, rank):
            n, longest = len(batch), sizes[batch].max()
            work[step, rank] += cost.predict(n, n * longest, n * longest**2)
    compute = work * np.random.default_rng(0).normal(1000, 50, work.shape)
    wait = compute.max(axis=1, keepdims=True) - compute + WIRE
    times = {"compute": compute, "data_wait": 0.0 * work, "wait": wait, "period": compute + wait, "loads": plan.loads}
    report = EpochReport.from_times(0, **times, expected=work)
    check(report)
    assert (0, "device") not in named(report)
    assert share(report, "plan") > 0.75
    # Without it nobody can tell.
    assert named(EpochReport.from_times(0, **times))[0] == (0, "device")


def test_noise_names_nobody() -> None:
    """Epochs of at least 16 steps; in shorter ones noise is known less well."""
    random = np.random.default_rng(0)
    alarms = []
    for seed in range(300):
        steps, ranks = (int(random.choice(values)) for values in ([16, 33, 64, 200], [2, 3, 4, 8, 32]))
        epoch = Epoch(steps, ranks, random.uniform(0, 0.2), seed)
        epoch.data_wait = random.choice([0.0, 50 * MS])
        epoch.other = random.choice([0.0, 30 * MS])
        report = epoch.report()
        alarms += [(seed, steps, ranks, *one) for one in named(report)]
        causes = report.waiting_by_cause
        assert causes["noise"] + causes["start"] > 0.9 * sum(causes.values())
    assert len(alarms) <= 1, alarms


def test_a_cause_below_the_thresholds_names_nobody() -> None:
    epoch = Epoch(64, 4, noise=0.001)
    epoch.factor = on(0, 1.015, 4, 1.0)
    epoch.other = on(1, 1 * MS, 4)
    assert named(epoch.report()) == []
    epoch.factor = on(0, 1.07, 4, 1.0)
    assert named(epoch.report()) == [(0, "device")]


def test_the_first_step_names_nobody_for_its_loader() -> None:
    epoch = Epoch(16, 2, noise=0.02)
    epoch.data_wait = np.zeros((16, 2))
    epoch.data_wait[0, 1] = 2000 * MS
    report = epoch.report()
    assert named(report) == []
    assert share(report, "start") > 0.9
    assert "persistent_workers" in str(report)


def test_a_loader_that_overlaps_with_compute_is_not_waited_for() -> None:
    """As on a CUDA device: 30 ms of the loader's 40 are hidden, and the wait is what is left of the period."""
    epoch = Epoch(32, 2, noise=0.02)
    times = epoch.times()
    hidden = times["data_wait"] + on(0, 40 * MS, 2)
    period = times["period"] + 10 * MS
    times |= {"data_wait": hidden, "period": period}
    times["wait"] = np.fmin(times["wait"], period - times["compute"] - hidden)
    assert (times["wait"] < 0.0).any()
    report = EpochReport.from_times(0, **times)
    check(report)
    assert report.data_wait[0] / 31 < 0.02
    assert report.other.min() >= 0.0


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e12])
def test_the_loads_unit_may_change(unit: float) -> None:
    epoch = Epoch(64, 4, noise=0.05)
    epoch.factor = on(3, 1.5, 4, 1.0)
    times = epoch.times()
    report = EpochReport.from_times(0, **times)
    times["loads"][32:] *= unit
    assert EpochReport.from_times(0, **times).stragglers[0].factor == pytest.approx(report.stragglers[0].factor)


def test_steps_of_which_something_is_lost_are_left_out() -> None:
    epoch = Epoch(64, 4, noise=0.05)
    epoch.factor = on(1, 2.0, 4, 1.0)
    times = epoch.times()
    whole = EpochReport.from_times(0, **times)
    times["compute"][5:9, 2] = np.nan
    times["wait"][20, 0] = np.inf
    times["data_wait"][30, 3] = -1.0
    times["loads"][40:44] = np.nan
    times["period"][50] = np.nan
    report = EpochReport.from_times(0, **times)
    check(report)
    assert (report.steps, report.complete) == (64, 58)
    assert named(report) == [(1, "device")]
    assert report.stragglers[0].factor == pytest.approx(whole.stragglers[0].factor, rel=0.03)


def test_a_rank_of_which_nothing_is_known() -> None:
    epoch = Epoch(32, 4, noise=0.05)
    epoch.factor = on(1, 2.0, 4, 1.0)
    times = epoch.times()
    times["compute"][:, 0] = np.nan
    report = EpochReport.from_times(0, **times)
    check(report)
    assert np.isnan(report.compute).tolist() == [True, False, False, False]
    assert report.as_dict()["compute"][0] is None
    assert named(report) == [(1, "device")]


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("ranks", [1, 2, 40])
@pytest.mark.parametrize("value", [None, np.nan, 0.0, -1.0, 1e300])
def test_nothing_to_tell_from(steps: int, ranks: int, value: float | None) -> None:
    times = Epoch(steps, ranks).times() if steps else dict.fromkeys(Epoch(1, 1).times(), np.empty((0, ranks)))
    if value is not None:
        times = {name: np.full((steps, ranks), value) for name in times}
    report = EpochReport.from_times(0, **times)
    check(report)
    assert named(report) == []
    assert (report.steps, report.ranks) == (steps, ranks)


@pytest.mark.parametrize("name", ["compute", "data_wait", "wait", "period", "loads"])
@pytest.mark.parametrize("value", [0.0, np.nan, 1e15])
def test_any_of_it_may_be_odd(name: str, value: float) -> None:
    for place in (np.s_[:], np.s_[:, 1], np.s_[3], np.s_[3, 1]):
        times = Epoch(16, 3, noise=0.1).times()
        times[name][place] = value
        check(EpochReport.from_times(0, **times))


def test_many_ranks_are_printed_in_few_lines() -> None:
    epoch = Epoch(64, 200, noise=0.05)
    epoch.factor = on(150, 1.5, 200, 1.0)
    text = str(epoch.report())
    assert text.count("\n") < 22
    assert "\n   150 " in text
    assert "and 184 more" in text


def test_the_text() -> None:
    epoch = Epoch(11, 2)
    epoch.factor = on(1, 2.0, 2, 1.0)
    assert str(epoch.report()).splitlines()[:5] == [
        "Epoch 3: 11 of 11 steps on 2 ranks in 2.27 s, 0.033 s of it for the allreduce.",
        "Idle for 25.0% of the compute time, as planned 0.0%; a rank's load is off by 33.3%.",
        "  rank    compute  data wait      other  for peers  slowdown",
        "     0      1.1 s    0.022 s     0.01 s      1.1 s      1.00",
        "     1      2.2 s    0.022 s     0.01 s        0 s      2.00",
    ]


def test_it_is_frozen() -> None:
    report = Epoch(4, 2).report()
    with pytest.raises(AttributeError):
        report.epoch = 1  # type: ignore[misc]
    for name in ("compute", "data_wait", "other", "peer_wait", "slowdown"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(report, name)[0] = 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wait": np.ones((4, 3))}, r"wait must be of the shape of compute, \(4, 2\), not of shape \(4, 3\)"),
        ({"compute": np.ones(4)}, r"compute must be an array \(steps, ranks\), not of shape \(4,\)"),
        ({"compute": np.ones((4, 0))}, r"compute must be an array \(steps, ranks\), not of shape \(4, 0\)"),
        ({"expected": np.ones((2, 2))}, r"expected must be of the shape of compute"),
    ],
)
def test_wrong_shapes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EpochReport.from_times(0, **(Epoch(4, 2).times() | changes))
