from __future__ import annotations

import pytest

import chronica_hvd as chronica
from chronica_hvd.progress import Progress, StepTicket

TICKETS = [StepTicket(0, step, weight, "") for step, weight in enumerate([0.5, 1.5, 1.0, 2.0])]


class Owner:
    """Stands for an optimizer."""


OWNER = Owner()


def taken(lookahead: int | None, steps: int) -> Progress:
    """Return the progress of a loop that has taken so many steps and finished none."""
    progress = Progress()
    if lookahead is not None:
        progress.attach(OWNER, lookahead)
    iteration = progress.begin()
    for ticket in TICKETS[:steps]:
        progress.hand_out(iteration, ticket)
    return progress


def test_steps_are_finished_in_order() -> None:
    progress = Progress()
    progress.attach(OWNER, 0)
    iteration = progress.begin()
    for ticket in TICKETS:
        progress.hand_out(iteration, ticket)
        assert progress.latest() is progress.work() is progress.oldest is ticket
        progress.finish()
        assert progress.oldest is None
        assert progress.latest() is ticket
    progress.end(iteration)
    with pytest.raises(RuntimeError, match="the loop over it has ended"):
        progress.latest()


def test_reading_ahead_must_be_declared() -> None:
    for lookahead in range(3):
        assert taken(lookahead, 1 + lookahead).work() is TICKETS[0]
        too_far = taken(lookahead, 2 + lookahead)
        for ask in (too_far.work, too_far.latest):
            with pytest.raises(RuntimeError, match=rf"{2 + lookahead} steps were taken .* allows {1 + lookahead}"):
                ask()


def test_after_a_step_of_a_loop_that_reads_ahead_two_steps_come_into_question() -> None:
    progress = taken(1, 2)
    assert progress.work() is progress.latest() is TICKETS[0]
    progress.finish()
    with pytest.raises(RuntimeError, match=r"between backward\(\) and optimizer\.step\(\)"):
        progress.latest()
    assert progress.work() is progress.latest() is TICKETS[1]


def test_what_was_read_ahead_is_worked_on_when_the_loader_has_ended() -> None:
    progress = taken(1, 2)
    progress.work()
    progress.finish()
    progress.end(iteration=1)
    assert progress.latest() is TICKETS[1]


def test_nothing_taken() -> None:
    progress = taken(0, 0)
    with pytest.raises(RuntimeError, match=r"no step has been taken .*chronica_hvd\.DataLoader"):
        progress.work()
    with pytest.raises(RuntimeError, match="no step is at work"):
        progress.latest()
    progress.finish()
    assert progress.oldest is None


def test_a_new_iteration_forgets_the_old_one() -> None:
    progress = taken(0, 1)
    iteration = progress.begin()
    with pytest.raises(RuntimeError, match="a newer iteration"):
        progress.hand_out(iteration - 1, TICKETS[1])
    progress.hand_out(iteration, TICKETS[0])
    assert progress.work() is TICKETS[0]


def test_two_optimizers_cannot_share_a_sampler() -> None:
    progress = taken(0, 1)
    progress.attach(OWNER, 1)
    with pytest.raises(NotImplementedError, match="already serves another optimizer"):
        progress.attach(Owner(), 0)
    other = Progress()
    other.attach(Owner(), 0)  # gone at once
    other.attach(OWNER, 0)


def test_without_an_optimizer_the_step_taken_last_counts() -> None:
    progress = taken(None, 4)
    assert progress.latest() is TICKETS[3]
    progress.end(iteration=1)
    with pytest.raises(RuntimeError, match="no step is at work"):
        progress.latest()


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
