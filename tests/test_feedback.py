"""The loop is closed: what ranks tell one another becomes new plans, the same on all of them, and a report.

What is measured is told by a script here, so that it can be known what must follow.
"""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from inprocess import run_ranks

import chronica_hvd as chronica
from chronica_hvd.blocks import BLOCK_STEPS
from chronica_hvd.cost import CostModel
from chronica_hvd.planner import Planner
from chronica_hvd.rows import Row, summarize
from chronica_hvd.telemetry import host_number

BATCH_SIZE = 2
SIZES = np.minimum(np.random.default_rng(5).lognormal(3, 1, 2000), 200).astype(int)


class Scripted(chronica.Measured):
    """Another cost each time that anything was told, whatever it was: a rank is slow by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []
        self._models: list[CostModel] = []

    def follow(self, rows: Any, places: Any, waits: Any, tails: Any) -> CostModel:
        self.told.append((np.array(rows), list(places), list(waits), list(tails)))
        number = sum(bool(waits) for _, _, waits, _ in self.told)
        if waits:
            scale = [3.0 if rank == number % len(rows) else 1.0 for rank in range(len(rows))]
            self._models.append(CostModel(per_sample=float(number), rank_scale=scale))
        return self._models[-1] if self._models else CostModel()

    def model(self, default: CostModel, places: Any, ranks: int, speeds: Any = None) -> CostModel:
        return self._models[-1] if self._models else default


class Training:
    """A rank's job: a linear model whose gradient is known, and a loop that may read ahead."""

    def __init__(self, samples: int, *, ahead: int = 0, **options: Any) -> None:
        self.features = torch.from_numpy(np.random.default_rng(1).normal(size=(samples, 3)))
        options = {"cost": Scripted(), "refresh": 1, **options}
        self.sampler = chronica.BatchSampler(SIZES[:samples], BATCH_SIZE, **options)
        self.loader = chronica.DataLoader(range(samples), batch_sampler=self.sampler, collate_fn=list)
        self.model = torch.nn.Linear(3, 1, dtype=torch.float64)
        self.ahead = ahead
        self.optimizer = self.wrap()
        self.taken: list[list[int]] = []
        self.gradients: list[torch.Tensor] = []
        self.plans: list[str] = []

    def wrap(self) -> Any:
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.0)
        named = self.model.named_parameters()
        return chronica.DistributedOptimizer(sgd, named, sampler=self.sampler, lookahead=self.ahead)

    def batches(self) -> Iterator[list[int]]:
        """Yield batches as a wrapper does that reads so many ahead."""
        read: deque[list[int]] = deque()
        for batch in self.loader:
            read.append(batch)
            if len(read) > self.ahead:
                yield read.popleft()
        yield from read

    def epoch(self, epoch: int = 0, steps: int | None = None) -> None:
        self.sampler.set_epoch(epoch)
        for batch in itertools.islice(self.batches(), steps):
            self.optimizer.zero_grad()
            self.model(self.features[batch]).mean().backward()
            is_filler, plan = self.sampler.is_filler, self.sampler.progress.latest().ticket.fingerprint
            self.optimizer.synchronize()
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
            self.taken.append([] if is_filler else batch)
            self.plans.append(plan)
            self.gradients.append(self.model.weight.grad.clone())


def drawn(samples: int, epoch: int, ranks: int) -> list[list[int]]:
    generator = torch.Generator()
    generator.manual_seed(epoch)
    order = torch.randperm(samples, generator=generator).tolist()
    return [order[first : first + ranks * BATCH_SIZE] for first in range(0, samples, ranks * BATCH_SIZE)]


@pytest.mark.parametrize("depths", [(0, 0, 0), (0, 1, 5), (70, 0, 3)])
def test_a_refresh_within_an_epoch_keeps_every_step_and_its_gradient(depths: tuple[int, ...]) -> None:
    samples = 3 * BATCH_SIZE * 5 * BLOCK_STEPS + 2  # the last step has a filler

    def train(rank: int) -> Training:
        training = Training(samples, ahead=depths[rank])
        training.epoch()
        return training

    ranks = run_ranks(3, train)
    steps = drawn(samples, 0, 3)
    for step, expected in enumerate(steps):
        assert Counter(itertools.chain(*(rank.taken[step] for rank in ranks))) == Counter(expected)
        wanted = ranks[0].features[expected].mean(dim=0)
        for rank in ranks:
            torch.testing.assert_close(rank.gradients[step][0], wanted, rtol=1e-12, atol=1e-14)
    assert ranks[0].plans == ranks[1].plans == ranks[2].plans
    changes = [step for step, (one, other) in enumerate(itertools.pairwise(ranks[0].plans), 1) if one != other]
    assert changes
    # What block i tells, in the first step of block i + 1, is planned with from block i + 2 on, or when all can.
    assert changes[0] == (2 + max(depths) // BLOCK_STEPS) * BLOCK_STEPS
    assert all(change % BLOCK_STEPS == 0 for change in changes)


def test_by_blocks_of_any_number() -> None:
    def train(_: int) -> Training:
        training = Training(2 * BATCH_SIZE * 6 * BLOCK_STEPS, refresh=2)
        training.epoch()
        return training

    plans = run_ranks(2, train)[0].plans
    changes = [step for step, (one, other) in enumerate(itertools.pairwise(plans), 1) if one != other]
    assert changes == [3 * BLOCK_STEPS, 5 * BLOCK_STEPS]


@pytest.mark.parametrize("steps", [1, 2, 65, 64])
def test_by_epochs_the_next_one_is_planned_with_what_this_one_told(steps: int) -> None:
    samples = 2 * BATCH_SIZE * steps

    def train(_: int) -> list[Any]:
        training = Training(samples, refresh="epoch")
        kept = []
        for epoch in range(3):
            training.epoch(epoch)
            sampler = training.sampler
            same = chronica.plan(SIZES[:samples], sampler.speeds, BATCH_SIZE, cost=sampler.cost, epoch=epoch)
            assert sampler.plan == same
            kept.append((sampler.cost, sampler.plan.fingerprint, set(training.plans[-steps:])))
        return kept

    one, other = run_ranks(2, train)
    assert one == other
    assert one[0][0] == CostModel()
    assert [plans for _, _, plans in one] == [{fingerprint} for _, fingerprint, _ in one]
    assert len({cost.per_sample for cost, _, _ in one}) == 3


def test_never_without_refresh_nor_with_a_given_cost() -> None:
    for options in (
        {"refresh": None},
        {"cost": CostModel(per_sample=2.0), "refresh": "epoch"},
        {"cost": None, "refresh": None},
    ):

        def train(_: int, options: dict[str, Any] = options) -> Any:
            training = Training(2 * BATCH_SIZE * 3, **options)
            first = training.sampler.cost
            training.epoch(0)
            training.epoch(1)
            return first, training.sampler.cost, training.sampler.progress.feedback.is_agreed

        for first, last, is_agreed in run_ranks(2, train):
            assert first is last
            assert not is_agreed


@pytest.mark.parametrize("depths", [(0, 0), (0, 70)])
def test_a_cost_without_a_plan_is_passed_over_by_all_ranks_alike(
    depths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Planner.plan

    def fails_at_times(self: Planner, *arguments: Any) -> chronica.Plan:
        if isinstance(self.workload.cost, CostModel) and self.workload.cost.per_sample % 2 == 1:
            raise ValueError("max_size could not be kept")
        return make(self, *arguments)

    monkeypatch.setattr(Planner, "plan", fails_at_times)

    def train(rank: int) -> Training:
        training = Training(2 * BATCH_SIZE * 5 * BLOCK_STEPS, ahead=depths[rank])
        for epoch in range(2):  # its cost is chosen by set_epoch()
            training.epoch(epoch)
        return training

    with pytest.warns(UserWarning, match="the measured cost is not used in epoch ., but the one given: max_size"):
        one, other = run_ranks(2, train)
    assert one.plans == other.plans
    assert len(set(one.plans)) > 3


def test_what_is_told() -> None:
    def train(rank: int) -> Scripted:
        measured = Scripted()
        Training(2 * BATCH_SIZE * (BLOCK_STEPS + 6), refresh="epoch", cost=measured).epoch()
        return measured

    one, other = run_ranks(2, train)
    for (rows, *rest), (other_rows, *other_rest) in zip(one.told, other.told, strict=True):
        np.testing.assert_array_equal(rows, other_rows)
        np.testing.assert_array_equal(rest[1:], other_rest[1:])
    # In the first step nothing but places; then in the last step of all of them.
    assert [len(waits) for _, _, waits, _ in one.told] == [0, BLOCK_STEPS + 6]
    rows, places, waits, tails = one.told[1]
    assert len(set(places)) == 2
    assert [local_rank for _, local_rank in places] == [0, 1]
    assert np.isnan(waits[-1])  # of the step at work nobody knows yet
    assert np.isfinite(waits[:-1]).all()
    assert (np.array(waits[:-1]) > 0).all()
    assert (np.array(tails) > 0).all()
    assert all(Row.unpack(row).records == BLOCK_STEPS + 6 for row in rows)


def test_what_a_loop_left_early_has_measured_is_told_in_the_next_one() -> None:
    def train(_: int) -> list[list[float]]:
        measured = Scripted()
        training = Training(2 * BATCH_SIZE * 9, refresh="epoch", cost=measured)
        training.epoch(0, steps=5)
        training.epoch(1, steps=1)
        return [[row[0] for row in rows] for rows, *_ in measured.told]

    one, other = run_ranks(2, train)
    # The sixth batch was taken, and had no backward pass, when the loop was left.
    assert one == other == [[0.0, 0.0], [5.0, 5.0]]


def test_a_report_of_each_epoch_on_every_rank() -> None:
    def train(rank: int) -> Any:
        reports: list[chronica.EpochReport] = []
        training = Training(2 * BATCH_SIZE * (BLOCK_STEPS + 6), on_report=reports.append, cost=None)
        training.epoch(0)
        assert len(reports) == 1
        training.epoch(1, steps=9)  # left early
        training.epoch(2)
        return training, reports

    (training, one), (_, other) = run_ranks(2, train)
    assert [report.epoch for report in one] == [0, 2]
    assert [report.as_dict() for report in one] == [report.as_dict() for report in other]
    report = one[0]
    assert (report.steps, report.ranks) == (BLOCK_STEPS + 6, 2)
    assert (report.compute > 0).all()
    times = [training.optimizer.timing.micro_batches(), training.optimizer.timing.steps()]
    of_first = times[1]["epoch"] == 0
    assert of_first.sum() == BLOCK_STEPS + 6
    assert report.data_wait[0] <= times[1]["data_wait_ns"][of_first].sum() / 1e9 * 1.0001
    json.dumps(report.as_dict())


def test_a_report_comes_when_the_last_update_is_made() -> None:
    class Stop(Exception):  # noqa: N818
        pass

    def train(rank: int) -> Any:
        weights: list[Any] = []

        def note(report: chronica.EpochReport) -> None:
            weights.append(training.model.weight.detach().clone())
            if rank == 1:
                raise Stop

        training = Training(24, on_report=note)
        optimizer = training.optimizer
        optimizer.param_groups[0]["lr"] = 0.1
        try:
            for batch in training.loader:
                optimizer.zero_grad()
                training.model(training.features[batch]).mean().backward()
                optimizer.step()
        except Stop:
            assert rank == 1
        else:
            assert rank == 0
        return weights, training.model.weight.detach()

    for (reported,), last in run_ranks(2, train):
        assert torch.equal(reported, last)


def test_a_report_with_a_given_cost_and_without_a_refresh() -> None:
    def train(_: int) -> Any:
        reports: list[chronica.EpochReport] = []
        costs = SIZES[:24].astype(float) ** 2
        training = Training(24, on_report=reports.append, cost=costs, padding="none", refresh=None)
        training.epoch(0)
        return reports

    for reports in run_ranks(2, train):
        assert len(reports) == 1


def test_a_report_that_one_rank_alone_asks_for() -> None:
    def train(rank: int) -> Any:
        reports: list[chronica.EpochReport] = []
        training = Training(24, cost=CostModel(), refresh="epoch", on_report=reports.append if rank == 1 else None)
        training.epoch(0)
        training.epoch(1)
        return [(report.epoch, report.complete) for report in reports]

    assert run_ranks(3, train) == [[], [(0, 3), (1, 3)], []]


@pytest.mark.parametrize("passes", [2, 3])
def test_an_update_of_several_steps(passes: int) -> None:
    """They share its time; of what they overlap with the allreduce nothing is known."""
    steps = BLOCK_STEPS + 6

    def train(_: int) -> Any:
        reports: list[chronica.EpochReport] = []
        measured = Scripted()
        training = Training(2 * BATCH_SIZE * steps, cost=measured, on_report=reports.append, refresh=1)
        training.model = torch.nn.Linear(3, 1, dtype=torch.float64)
        sgd = torch.optim.SGD(training.model.parameters(), lr=0.0)
        named = training.model.named_parameters()
        optimizer = chronica.DistributedOptimizer(sgd, named, sampler=training.sampler, backward_passes_per_step=passes)
        begin = time.perf_counter()
        for number, batch in enumerate(training.loader, 1):
            training.model(training.features[batch]).mean().backward()
            if number % passes == 0 or number == steps:
                optimizer.step()
                optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        return reports[0], measured, optimizer.timing.steps(), seconds

    for report, measured, records, seconds in run_ranks(2, train):
        assert report.complete >= steps - passes
        assert report.elapsed <= seconds
        waited = records["synchronize_ns"][::passes].sum() / 1e9
        assert (report.peer_wait + report.wire <= waited).any()
        told = [waits for _, _, waits, _ in measured.told if waits]
        assert np.isnan(np.concatenate(told)).all()


def test_the_optimizer_wrapped_last_tells() -> None:
    def train(_: int) -> Any:
        training = Training(2 * BATCH_SIZE * 3, refresh="epoch")
        measured = training.sampler._measured
        training.epoch(0)
        first = len(measured.told)
        training.model = torch.nn.Linear(3, 1, dtype=torch.float64)
        training.optimizer = training.wrap()
        training.epoch(1)
        return first, len(measured.told)

    for first, both in run_ranks(2, train):
        assert 0 < first < both


def test_steps_given_up_and_loops_left_early() -> None:
    def train(_: int) -> Any:
        reports: list[chronica.EpochReport] = []
        training = Training(2 * BATCH_SIZE * 4, on_report=reports.append)
        sampler, optimizer = training.sampler, training.optimizer
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for number, batch in enumerate(training.loader):
                optimizer.zero_grad()
                training.model(training.features[batch]).mean().backward()
                if number in (0, 3):  # the first one and the last
                    optimizer.skip_step()
                    continue
                optimizer.step()
                if epoch == 1:
                    break
        return [(report.epoch, report.steps) for report in reports], sampler.plan.fingerprint

    one, other = run_ranks(2, train)
    assert one == other
    assert one[0] == [(0, 4), (2, 4)]


def test_a_copy_has_a_loop_of_its_own() -> None:
    def train(_: int) -> None:
        training = Training(2 * BATCH_SIZE * 3, refresh="epoch")
        training.epoch(0)
        for copied in (copy.deepcopy(training.sampler), pickle.loads(pickle.dumps(training.sampler))):
            assert copied.plan == training.sampler.plan
            copied.set_epoch(1)
            fresh = chronica.plan(
                SIZES[:12], 2, BATCH_SIZE, cost=training.sampler._measured.model(None, None, 2), epoch=1
            )
            assert copied.plan == fresh
            assert copied.progress.feedback is not training.sampler.progress.feedback

    run_ranks(2, train)


def taught(ranks: int) -> chronica.Measured:
    """Return a cost that knows this host's ranks, the second of which is half as fast."""
    measured = chronica.Measured()
    places = [(host_number(), rank) for rank in range(ranks)]
    measured.model(CostModel(), places, ranks)
    random = np.random.default_rng(0)
    rows = []
    for rank in range(ranks):
        records = np.zeros(200, [(name, "<i8") for name in ("step", "samples", "size", "size2", "elapsed_ns")])
        records["samples"] = random.integers(1, 30, 200)
        records["size"] = records["samples"] * random.integers(10, 500, 200)
        records["elapsed_ns"] = (1000 * records["size"] + 50_000) * (1 + (rank == 1))
        rows.append(summarize(records, CostModel()))
    measured.follow(np.array(rows), places, [], [])
    return measured


def test_what_was_measured_goes_on_with_a_state() -> None:
    def stop(_: int) -> dict[str, Any]:
        training = Training(2 * BATCH_SIZE * 12, refresh="epoch", cost=taught(2))
        assert training.sampler.cost.rank_scale == pytest.approx([1.0, 2.0], rel=1e-3)
        training.epoch(0, steps=5)
        return training.sampler.state_dict()

    state, other = run_ranks(2, stop)
    assert json.loads(json.dumps(state)) == state == other

    def resume(_: int) -> Any:
        training = Training(2 * BATCH_SIZE * 12, refresh="epoch", cost=None)
        sampler = training.sampler
        sampler.load_state_dict(state)
        at_once = sampler.cost.rank_scale
        assert sampler.state_dict() == state or len(sampler.speeds) != 2
        assert sampler.plan.loads.shape[1] == len(sampler.speeds)
        training.epoch(0, steps=1)  # in which the ranks tell where they are
        sampler.set_epoch(1)
        return at_once, sampler.cost.rank_scale

    for at_once, told in run_ranks(2, resume):
        assert at_once == told == pytest.approx([1.0, 2.0], rel=1e-3)
    for at_once, told in run_ranks(3, resume):  # who is who is not known before it is told
        assert at_once is None
        assert told == pytest.approx([1.0, 2.0, 1.0], rel=1e-3)
