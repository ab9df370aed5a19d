from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import recut_sampler

import chronica_hvd as chronica
from chronica_hvd.cursor import Cursor
from chronica_hvd.progress import Progress
from chronica_hvd.tickets import StepTicket

TICKETS = [StepTicket(0, step, (weight,), "") for step, weight in enumerate([0.5, 1.5, 1.0, 2.0])]


class Owner:
    """Stands for an optimizer."""


OWNER = Owner()


def loop(lookahead: int, passes: int = 1) -> tuple[Progress, Cursor, Callable[[StepTicket], None]]:
    """Return the progress of a loop that has taken nothing yet, its optimizer's cursor, and how it takes."""
    progress = Progress()
    cursor = progress.attach(OWNER, lookahead, passes=passes)
    return progress, cursor, functools.partial(progress.hand_out, progress.begin())


def taken(lookahead: int, steps: int) -> tuple[Progress, Cursor]:
    """Return the progress of a loop that has taken so many steps and finished none."""
    progress, cursor, take = loop(lookahead)
    for ticket in TICKETS[:steps]:
        take(ticket)
    return progress, cursor


def test_steps_are_finished_in_order() -> None:
    progress = Progress()
    cursor = progress.attach(OWNER, 0)
    iteration = progress.begin()
    for ticket in TICKETS:
        progress.hand_out(iteration, ticket)
        assert progress.latest().ticket is cursor.oldest is ticket
        assert cursor.work(0)[0] == progress.weight == ticket.weights[0]
        cursor.finish()
        assert cursor.oldest is None
        assert progress.latest().ticket is ticket
    progress.end(iteration, epoch=0)
    with pytest.raises(RuntimeError, match="the loop over it has ended"):
        progress.latest()


def test_reading_ahead_must_be_declared() -> None:
    for lookahead in range(3):
        assert taken(lookahead, 1 + lookahead)[1].work(0)[0] == 0.5
        progress, cursor = taken(lookahead, 2 + lookahead)
        for ask in (functools.partial(cursor.work, 0), progress.latest):
            with pytest.raises(RuntimeError, match=rf"{2 + lookahead} steps were taken .* allows {1 + lookahead}"):
                ask()


def test_after_a_step_of_a_loop_that_reads_ahead_two_steps_come_into_question() -> None:
    progress, cursor = taken(1, 2)
    assert cursor.work(0)[0] == progress.weight == 0.5
    cursor.finish()
    with pytest.raises(RuntimeError, match=r"between backward\(\) and optimizer\.step\(\)"):
        progress.latest()
    assert cursor.work(1)[0] == progress.weight == 1.5


def test_what_was_read_ahead_is_worked_on_when_the_loader_has_ended() -> None:
    progress, cursor = taken(1, 2)
    cursor.work(0)
    cursor.finish()
    progress.end(iteration=1, epoch=0)
    assert progress.latest().ticket is TICKETS[1]


def test_nothing_taken() -> None:
    progress, cursor = taken(0, 0)
    with pytest.raises(RuntimeError, match=r"no step has been taken .*chronica_hvd\.DataLoader"):
        cursor.work(0)
    with pytest.raises(RuntimeError, match="no step is at work"):
        progress.latest()
    cursor.refuse_incomplete()
    cursor.finish()
    assert cursor.oldest is None


def test_a_new_iteration_forgets_the_old_one() -> None:
    progress, cursor = taken(0, 1)
    iteration = progress.begin()
    with pytest.raises(RuntimeError, match="a newer iteration"):
        progress.hand_out(iteration - 1, TICKETS[1])
    progress.hand_out(iteration, TICKETS[0])
    assert cursor.work(0)[0] == 0.5


def test_optimizers_that_share_a_sampler_each_finish_every_step() -> None:
    progress, first, take = loop(0)
    second = progress.attach(OWNER, 0)
    for ticket in TICKETS:
        take(ticket)
        for cursor in (first, second):
            assert cursor.work(ticket.step)[0] == progress.weight == ticket.weights[0]
            cursor.finish()
            assert progress.latest().ticket is ticket
    assert (first.finished_steps, second.finished_steps) == (4, 4)
    assert (first.left_out, second.left_out) == (0, 0)


def test_an_optimizer_may_leave_steps_out_that_another_trains_on() -> None:
    progress, often, take = loop(0)
    seldom = progress.attach(OWNER, 0)
    for ticket in TICKETS:
        take(ticket)
        often.work(ticket.step)
        often.finish()
        if ticket.step % 2:
            assert seldom.work(ticket.step)[0] == ticket.weights[0]
            seldom.finish()
    assert (often.finished_steps, seldom.finished_steps) == (4, 2)
    assert (often.left_out, seldom.left_out) == (0, 0)


def test_a_step_that_no_optimizer_has_trained_on_is_not_left_out_silently() -> None:
    progress, first, take = loop(0)
    second = progress.attach(OWNER, 0)
    take(TICKETS[0])
    take(TICKETS[1])
    for cursor in (first, second):
        with pytest.raises(RuntimeError, match="2 steps were taken"):
            cursor.work(0)


def test_an_optimizer_that_is_gone_is_not_waited_for() -> None:
    progress, cursor, take = loop(0)
    progress.attach(Owner(), 0)  # gone at once
    for ticket in TICKETS:
        take(ticket)
        assert progress.latest().ticket is ticket
        cursor.work(ticket.step)
        cursor.finish()


def alone() -> tuple[Progress, Callable[[StepTicket], None]]:
    """Return the progress of a loop without an optimizer, and how it takes."""
    progress = Progress()
    return progress, functools.partial(progress.hand_out, progress.begin())


def test_without_an_optimizer_the_step_taken_last_counts() -> None:
    progress, take = alone()
    for ticket in TICKETS:
        take(ticket)
    assert progress.latest().ticket is TICKETS[3]
    progress.end(iteration=1, epoch=0)
    with pytest.raises(RuntimeError, match="no step is at work"):
        progress.latest()


# Micro-batches --------------------------------------------------------------------------------------------------------

MICRO = StepTicket(0, 5, (0.5, 0.25, 1.25), "")


@pytest.mark.parametrize("lookahead", [0, 1])
def test_each_micro_batch_has_its_weight(lookahead: int) -> None:
    progress, cursor, take = loop(lookahead)
    for step, ticket in enumerate([MICRO, TICKETS[0], dataclasses.replace(MICRO, step=7)]):
        for number, weight in enumerate(ticket.weights):
            take(ticket)
            for _ in range(3):  # parameters
                assert cursor.work(10 * step + number)[0] == weight
            assert progress.weight == weight
        cursor.refuse_incomplete()
        cursor.finish()
        assert progress.weight == ticket.weights[-1]
        assert cursor.oldest is None


def test_a_loss_may_take_several_backward_passes() -> None:
    """As with checkpointing, whose backward passes are nested."""
    _, cursor, take = loop(0)
    for weight in MICRO.weights:
        take(MICRO)
        for backward_pass in (1, 2, 1, 3, 1):
            assert cursor.work(backward_pass)[0] == weight
    cursor.refuse_incomplete()


@pytest.mark.parametrize("ahead", [1, 2, 3, 4])
def test_micro_batches_read_ahead_are_worked_on_in_order(ahead: int) -> None:
    steps = [MICRO, TICKETS[0], dataclasses.replace(MICRO, step=7, weights=(2.0, 0.5))]
    progress, cursor, take = loop(2)
    to_take = [ticket for ticket in steps for _ in ticket.weights]
    worked = []
    for ticket in steps:
        for _ in ticket.weights:
            while to_take and len(steps) * 2 - len(to_take) < len(worked) + 1 + ahead:
                take(to_take.pop(0))
            worked.append(cursor.work(len(worked))[0])
            assert progress.weight == worked[-1]
        cursor.refuse_incomplete()
        cursor.finish()
    assert worked == [0.5, 0.25, 1.25, 0.5, 2.0, 0.5]


@pytest.mark.parametrize("worked_on", [0, 1])
def test_two_micro_batches_without_a_backward_pass_between(worked_on: int) -> None:
    """Skipped, read ahead or out of order."""
    _, cursor, take = loop(0)
    take(MICRO)
    if worked_on:
        cursor.work(0)
        take(MICRO)
    take(MICRO)
    with pytest.raises(RuntimeError, match=r"2 micro-batches of step 5 .* before taking the next; .*lookahead=1"):
        cursor.work(1)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("worked_on", [0, 1])
def test_a_step_ends_after_all_its_micro_batches(lookahead: int, worked_on: int) -> None:
    _, cursor, take = loop(lookahead)
    for taken_so_far in (1, 2):
        take(MICRO)
        if worked_on:
            cursor.work(taken_so_far)[0]
        with pytest.raises(RuntimeError, match=rf"after {taken_so_far} of the 3 micro-batches of step 5: first take"):
            cursor.refuse_incomplete()
    take(MICRO)
    if worked_on:
        with pytest.raises(RuntimeError, match=r"only 2 of the 3 micro-batches of step 5 had a backward pass"):
            cursor.refuse_incomplete()
        cursor.work(3)
    cursor.refuse_incomplete()  # all, or none: skipped


def test_more_backward_passes_than_micro_batches_read_ahead() -> None:
    _, cursor, take = loop(1)
    take(MICRO)
    cursor.work(1)
    with pytest.raises(
        RuntimeError, match=r"once more than micro-batches of step 5 were taken, 1\..*use_reentrant=False"
    ):
        cursor.work(2)


def test_the_next_step_is_begun_too_early() -> None:
    _, cursor, take = loop(0)
    for _ in MICRO.weights:
        take(MICRO)
        cursor.work(0)
    take(TICKETS[0])
    with pytest.raises(RuntimeError, match="2 steps were taken"):
        cursor.work(1)


def test_plans_are_to_be_compared_once_per_iteration_without_an_optimizer() -> None:
    progress, take = alone()
    for _ in range(2):
        take(MICRO)
        assert [progress.must_compare() for _ in range(3)] == [True, False, False]
        take = functools.partial(progress.hand_out, progress.begin())
    progress, _, take = loop(0)
    take(MICRO)
    assert not progress.must_compare()


# Loaders --------------------------------------------------------------------------------------------------------------


def test_the_loader_says_what_the_plan_says() -> None:
    sizes = [5, 1, 9, 2, 2, 7, 1]
    sampler = chronica.BatchSampler(sizes, 2, num_replicas=2, rank=1)
    loader = chronica.DataLoader(sizes, batch_sampler=sampler)
    for epoch in (0, 1, 1):
        sampler.set_epoch(epoch)
        plan = sampler.plan
        for step, batch in enumerate(loader):
            assert batch.tolist() == [sizes[i] for i in plan.batches(step, 1)[0]]
            assert sampler.weight == plan.weights[step, 1]


def test_an_iteration_under_way_keeps_its_plan() -> None:
    sizes = list(range(1, 41))
    sampler = chronica.BatchSampler(sizes, 2, num_replicas=2, rank=0)
    loader = chronica.DataLoader(sizes, batch_sampler=sampler)
    plan = sampler.plan
    for step, batch in enumerate(loader):
        sampler.set_epoch(step)
        assert batch.tolist() == [sizes[i] for i in plan.batches(step, 0)[0]]
        assert sampler.weight == plan.weights[step, 0]
    assert sampler.plan != plan


def test_iterating_the_sampler_changes_nothing() -> None:
    sampler = chronica.BatchSampler([3, 1, 2, 5], 1, num_replicas=2, rank=0)
    batches = [sampler.plan.batches(step, 0)[0].tolist() for step in range(sampler.plan.steps)]
    assert list(sampler) == list(sampler) == batches
    assert len(sampler) == 2
    with pytest.raises(RuntimeError, match="no step is at work"):
        _ = sampler.weight


def micro_batched(rank: int, workers: int = 0, seed: int = 0) -> tuple[chronica.BatchSampler, chronica.DataLoader]:
    """Return a sampler of many micro-batches, and its loader."""
    sizes = list(range(1, 60))
    sampler = recut_sampler(
        chronica.BatchSampler(sizes, 8, num_replicas=2, rank=rank, loss_weight="sizes", micro_batches="auto"), seed
    )
    persistent = {"num_workers": workers, "persistent_workers": True} if workers else {}
    return sampler, chronica.DataLoader(sizes, batch_sampler=sampler, collate_fn=list, **persistent)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_steps_yield_the_plans_micro_batches(rank: int, workers: int) -> None:
    sampler, loader = micro_batched(rank, workers)
    several = 0
    for epoch in (0, 1, 1):
        sampler.set_epoch(epoch)
        plan = sampler.plan
        assert len(loader) == len(sampler) == plan.steps
        assert list(sampler) == [[batch.tolist() for batch in plan.batches(step, rank)] for step in range(plan.steps)]
        steps = 0
        for step, micro_batches in enumerate(loader.steps()):
            seen = []
            for batch in micro_batches:
                seen.append(batch)
                assert sampler.weight == plan.micro_weights(step, rank)[len(seen) - 1]
            assert seen == [(batch + 1).tolist() for batch in plan.batches(step, rank)]
            several += len(seen) > 1
            steps += 1
        assert steps == plan.steps
    assert several > 2


def test_a_micro_batch_is_a_task_of_its_own() -> None:
    sampler, loader = micro_batched(0)
    assert [len(batch) for step in loader.steps() for batch in step] == [
        len(batch) for step in sampler.steps() for batch in step
    ]
    assert len(loader._index_sampler) == sum(map(len, sampler.steps())) > len(loader)


def test_micro_batches_need_the_loop_over_steps() -> None:
    _, loader = micro_batched(0)
    with pytest.raises(RuntimeError, match=r"with micro_batches='auto' .* for step in loader\.steps\(\)"):
        iter(loader)


def test_steps_may_be_taken_ahead_and_are_worked_on_in_order() -> None:
    sampler, loader = micro_batched(0)
    batches = [list(step) for step in list(loader.steps())]
    assert batches == [[[i + 1 for i in batch] for batch in step] for step in sampler.steps()]


def test_a_step_is_gone_through_once() -> None:
    sampler, loader = micro_batched(0)
    for step, planned in zip(loader.steps(), sampler.steps(), strict=True):
        assert len(step) == len(planned) == len(list(step))
        with pytest.raises(RuntimeError, match=r"of this step were taken before, .* once: .*len\(step\)"):
            iter(step)


@pytest.mark.parametrize("left_out", ["a step", "a micro-batch"])
def test_a_step_must_be_gone_through_to_its_end(left_out: str) -> None:
    sampler, loader = micro_batched(0)
    several = next(number for number, step in enumerate(sampler.steps()) if len(step) > 1)
    steps = loader.steps()
    for _ in range(several):
        list(next(steps))
    step = iter(next(steps))
    if left_out == "a micro-batch":
        next(step)
    with pytest.raises(RuntimeError, match=f"of step {several + 1} was asked for, but those before it were not all"):
        list(next(steps))


def test_averages_of_micro_batches() -> None:
    sizes = list(range(1, 60))
    sampler = recut_sampler(chronica.BatchSampler(sizes, 8, num_replicas=1, rank=0, micro_batches="auto"), seed=1)
    loader = chronica.DataLoader(sizes, batch_sampler=sampler, collate_fn=list)
    for step, micro_batches in enumerate(loader.steps()):
        values: list[float] = []
        for batch in micro_batches:
            values.append(sum(batch) / len(batch))
            if len(values) < len(sampler.plan.batches(step, 0)):
                with pytest.raises(RuntimeError, match=rf"after {len(values)} of the \d micro-batches of step {step}"):
                    chronica.average(values, sampler)
        whole = [sizes[i] for batch in sampler.plan.batches(step, 0) for i in batch]
        assert chronica.average(values, sampler) == pytest.approx(sum(whole) / len(whole), rel=1e-14)
        mean = chronica.average([torch.tensor([value, 1.0], requires_grad=True) for value in values], sampler)
        assert mean.tolist() == pytest.approx([sum(whole) / len(whole), 1.0], rel=1e-6)
        for wrong in ([*values, 1.0], [], *([values[0], values[1:]] if len(values) > 1 else [])):
            with pytest.raises(ValueError, match=rf"step {step} has {len(values)} micro-batches .* one value for each"):
                chronica.average(wrong, sampler)
        if len(values) > 1:
            with pytest.raises(ValueError, match=r"the values must have one shape, not \(1,\), \(2,\)"):
                chronica.average([torch.ones(1 + (number > 0)) for number in range(len(values))], sampler)


def test_a_sampler_keeps_its_own_sizes() -> None:
    sizes = np.arange(1, 101)
    sampler = chronica.BatchSampler(sizes, 4, num_replicas=2, rank=0, loss_weight="sizes")
    sizes[:] = 7
    assert sampler.plan == chronica.plan(np.arange(1, 101), 2, 4, loss_weight="sizes")
