"""What the timing of micro-batches and steps holds, by the order of events on one clock: no test waits to be fast."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

import chronica_hvd as chronica
from chronica_hvd.timing import STEP_FIELDS, Timing, Work
from chronica_hvd.weigh import Weigher

SIZES = [40, 3, 17, 8, 25, 9, 31, 2]
PAUSE_S = 0.02


class Training:
    """A sampler, a loader and an optimizer reduced to what timing sees of it: one rank, no Horovod."""

    def __init__(self, lookahead: int = 0, batch_size: int = 4, **options: Any) -> None:
        self.sampler = chronica.BatchSampler(SIZES, batch_size, num_replicas=1, rank=0, **options)
        self.loader = chronica.DataLoader(SIZES, batch_sampler=self.sampler, collate_fn=sum)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(3)))
        self.timing = Timing()
        self.weigher = Weigher(self.sampler.progress, self.sampler.world, "test", lookahead, timing=self.timing)
        self.weigher.watch(self.model.parameters())

    def loss(self) -> torch.Tensor:
        return self.model(torch.ones(1, 1)).sum()

    def synchronize(self, pause_s: float = 0.0) -> None:
        """Do as the optimizer does."""
        self.weigher.begin_synchronize(self.model.parameters())
        begin = time.monotonic_ns()
        time.sleep(pause_s)
        end = time.monotonic_ns()
        self.weigher.finish_step(end - begin, end)

    def ahead(self) -> Iterator[bool]:
        """Yield for each micro-batch, when the next one has been read, whether it is the last of its step."""
        waiting: list[bool] = []
        for step in self.loader.steps():
            for number, _ in enumerate(step, 1):
                yield from waiting
                waiting = [number == len(step)]
        yield from waiting


def ends(records: np.ndarray) -> np.ndarray:
    return records["start_ns"] + records["elapsed_ns"]


def test_a_record_lasts_from_taking_the_batch_until_the_backward_pass_is_through() -> None:
    training = Training()
    taken, through = [], []
    for _ in training.loader:
        taken.append(time.monotonic_ns())
        loss = training.loss()
        time.sleep(PAUSE_S)
        loss.backward()
        through.append(time.monotonic_ns())
        time.sleep(PAUSE_S)
        training.synchronize()
    records = training.timing.micro_batches()
    assert records["step"].tolist() == [0, 1]
    assert (records["start_ns"] <= taken).all()
    assert (ends(records) <= through).all()  # the pause before the update is not in it
    assert (records["elapsed_ns"] >= PAUSE_S * 1e9).all()
    assert len(training.timing.micro_batches()) == 0
    assert training.timing.overwritten == 0


def test_the_times_of_steps() -> None:
    training = Training(seed=3)
    training.loader.collate_fn = lambda items: time.sleep(PAUSE_S)
    for epoch in (4, 5):
        training.sampler.set_epoch(epoch)
        for _ in training.loader:
            training.loss().backward()
            training.synchronize(2 * PAUSE_S)
    now = time.monotonic_ns()
    steps = training.timing.steps()
    assert steps.dtype.names == STEP_FIELDS
    assert steps["epoch"].tolist() == [4, 4, 5, 5]
    assert steps["step"].tolist() == [0, 1, 0, 1]
    assert (steps["data_wait_ns"] >= PAUSE_S * 1e9).all()
    assert (steps["synchronize_ns"] >= 2 * PAUSE_S * 1e9).all()
    assert (np.diff(steps["finished_ns"]) >= steps["data_wait_ns"][1:] + steps["synchronize_ns"][1:]).all()
    assert steps["finished_ns"][-1] <= now
    records = training.timing.micro_batches()
    assert (ends(records) <= steps["finished_ns"] - steps["synchronize_ns"]).all()  # neither is in the compute time
    assert (records["start_ns"][1:] >= steps["finished_ns"][:-1] + steps["data_wait_ns"][1:]).all()
    assert len(training.timing.steps()) == 0


@pytest.mark.parametrize(
    ("options", "unit"),
    [
        ({"padding": "none", "loss_weight": "sizes"}, 1),
        ({"micro_batches": "auto", "cost": chronica.CostModel(fixed=5)}, 1),
        ({"micro_batches": 2, "pad_to": 16}, 16),
    ],
)
def test_records_say_what_was_computed(options: dict[str, Any], unit: int) -> None:
    training = Training(**options)
    plan = training.sampler.plan
    expected = []
    for number, step in enumerate(training.loader.steps()):
        for _ in step:
            training.loss().backward()
        training.synchronize()
        for batch in plan.batches(number, 0):
            sizes = -(-np.array(SIZES)[batch] // unit) * unit
            if plan.padding == "max":
                sizes = np.full(len(sizes), sizes.max())
            expected.append((number, len(sizes), sizes.sum(), (sizes**2).sum(), 0))
    records = training.timing.micro_batches()
    assert [tuple(record)[:5] for record in records.tolist()] == expected
    assert len(expected) > 2 or plan.padding == "none"


def test_works_beyond_int64_are_cut_off() -> None:
    sampler = chronica.BatchSampler([2**62, 2**40], 2, num_replicas=1, rank=0, shuffle=False)
    (ticket,) = sampler.tickets()
    assert ticket.work == (Work(2, 2**63 - 1, 2**63 - 1, 0),)


def test_the_last_of_several_backward_passes_ends_a_micro_batch() -> None:
    training = Training(micro_batches=2)
    through = []
    for step in training.loader.steps():
        for _ in step:
            first, second = training.loss(), training.loss()
            first.backward()
            begin = time.monotonic_ns()
            time.sleep(PAUSE_S)
            second.backward()
            through.append((begin, time.monotonic_ns()))
        training.synchronize()
    records = training.timing.micro_batches()
    assert len(records) == len(through) == 4
    assert (ends(records) >= [begin + PAUSE_S * 1e9 for begin, _ in through]).all()
    assert (ends(records) <= [end for _, end in through]).all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_passes_within_a_backward_pass_do_not_end_it(reentrant: bool) -> None:
    training = Training()

    def slow(_: torch.Tensor) -> None:
        time.sleep(PAUSE_S)

    for _ in training.loader:
        inputs = torch.ones(1, 1, requires_grad=True)
        value = training.model[0](inputs)
        value.register_hook(slow)  # after the checkpointed layer's own backward pass
        value = torch.utils.checkpoint.checkpoint(training.model[1], value, use_reentrant=reentrant)
        begin = time.monotonic_ns()
        training.model[2](value).sum().backward()
        end = time.monotonic_ns()
        training.synchronize()
        (record,) = training.timing.micro_batches()
        assert begin + PAUSE_S * 1e9 <= record["start_ns"] + record["elapsed_ns"] <= end


def test_where_autograd_cannot_say_that_it_is_through_synchronize_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf:
        run_backward = torch.autograd.Variable._execution_engine.run_backward

        def queue_callback(self, callback: Callable[[], None]) -> None:
            raise RuntimeError("Final callbacks can only be installed during backward pass.")

    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", Deaf())
    training = Training()
    for _ in training.loader:
        training.loss().backward()
        begin = time.monotonic_ns()
        training.synchronize()
        (record,) = training.timing.micro_batches()
        assert record["start_ns"] + record["elapsed_ns"] >= begin


def test_a_skipped_step_has_no_compute() -> None:
    training = Training()
    for number, _ in enumerate(training.loader):
        if number == 1:
            training.loss().backward()
            training.synchronize()
        else:
            with pytest.warns(UserWarning, match="samples are left out"):
                training.synchronize()
    assert training.timing.micro_batches()["step"].tolist() == [1]
    assert training.timing.steps()["step"].tolist() == [0, 1]


def test_what_is_given_up_leaves_nothing_behind() -> None:
    training = Training()
    for _ in training.loader:
        break
    for _ in training.loader:
        training.loss().backward()
        training.synchronize()
    assert training.timing.micro_batches()["step"].tolist() == [0, 1]


def test_a_failed_backward_pass_is_not_recorded() -> None:
    training = Training()

    def fail(_: torch.Tensor) -> None:
        raise MemoryError

    handle = training.model[0].weight.register_hook(fail)
    for number, _ in enumerate(training.loader):
        loss = training.loss()
        if number == 0:
            with pytest.raises(MemoryError):
                loss.backward()
            handle.remove()
            training.model.zero_grad()
        training.loss().backward()  # tried again
        training.synchronize()
    assert training.timing.micro_batches()["step"].tolist() == [0, 1]


@pytest.mark.parametrize(("micro_batches", "passes"), [(1, 1), (1, 2), (2, 1)])
def test_where_a_wrapper_reads_ahead_each_batch_has_its_own_time(micro_batches: int, passes: int) -> None:
    training = Training(lookahead=1, batch_size=2, micro_batches=micro_batches, cost=chronica.CostModel())
    got, through = [], []
    for is_last in training.ahead():
        got.append(time.monotonic_ns())
        time.sleep(PAUSE_S)
        for _ in range(passes):
            training.loss().backward()
        through.append(time.monotonic_ns())
        if is_last:
            training.synchronize()
    records = training.timing.micro_batches()
    assert records["step"].tolist() == [step for step in range(4) for _ in range(micro_batches)]
    assert (records["start_ns"] <= got).all()
    assert (records["elapsed_ns"] >= PAUSE_S * 1e9).all()
    assert (ends(records) <= through).all()
    assert (records["start_ns"][1:] >= ends(records)[:-1]).all()  # none is in another's


def test_records_that_nobody_asks_for_are_overwritten_and_counted() -> None:
    timing = Timing(capacity=3)
    for step in range(5):
        timing.begin((step, 0), step, Work(1, 2, 3, 4))
        timing.end((step, 0))
        timing.finish(0, step, 1, 0, 0, 0)
    assert timing.overwritten == 4
    assert timing.micro_batches()["step"].tolist() == timing.steps()["step"].tolist() == [2, 3, 4]


def test_records_are_asked_for_while_others_come() -> None:
    timing, asked = Timing(capacity=100_000), []

    def ask() -> None:
        while not asked or asked[-1] != 20_000 - 1:
            asked.extend(timing.steps()["step"].tolist())

    thread = threading.Thread(target=ask)
    thread.start()
    for step in range(20_000):
        timing.finish(0, step, 1, 0, 0, 0)
    thread.join()
    assert asked == list(range(20_000))
    assert timing.overwritten == 0


def test_a_failing_device_is_told_once() -> None:
    timing = Timing()

    class Failing:
        failure = None
        skipped = 7

    timing.timer = Failing()  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timing.finish(0, 0, 1, 0, 0, 0)
    timing.timer.failure = "cuEventRecord: CUDA_ERROR_INVALID_HANDLE (400)"  # type: ignore[misc]
    with pytest.warns(RuntimeWarning, match=r"cuEventRecord.*7 records are missing"):
        timing.finish(0, 1, 1, 0, 0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timing.finish(0, 2, 1, 0, 0, 0)
    assert timing.steps()["step"].tolist() == [0, 1, 2]


def test_flops_are_the_estimate_of_the_cost() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    cost = chronica.flops.estimate(model, lambda size: torch.ones(size, 64), [2, 5, 9])
    training = Training(cost=cost, micro_batches="auto")
    for step in training.loader.steps():
        for _ in step:
            training.loss().backward()
        training.synchronize()
    records = training.timing.micro_batches()
    # Per position: the products of both layers forward and for their weights, and those for the hidden values.
    assert records["flops"].tolist() == (records["size"] * 2 * 64 * 64 * 5).tolist()
    assert (records["flops"] > 0).all()
