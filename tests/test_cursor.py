"""What an optimizer's cursor makes of a loop: true amounts, repeated and accumulated steps, and steps left out."""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import chronica_hvd as chronica
from chronica_hvd.blocks import BLOCK_STEPS
from chronica_hvd.cursor import Cursor
from chronica_hvd.progress import Progress
from chronica_hvd.tickets import StepTicket
from chronica_hvd.timing import Timing, Work


class Owner:
    """Stands for an optimizer."""


OWNER = Owner()
WORK = Work(1, 1, 1, 0)


def ticket(step: int, *weights: float, unit: float = 1.0, is_filler: bool = False) -> StepTicket:
    return StepTicket(0, step, weights, "", (WORK,) * len(weights), unit, is_filler)


SINGLE = [ticket(step, 1.0 + step) for step in range(6)]
SEVERAL = [ticket(step, 1.0 + step, 0.5, 0.25) for step in range(4)]


class Loop:
    """A loop over a loader, and an optimizer's cursor."""

    def __init__(self, lookahead: int = 0, passes: int = 1, timing: Timing | None = None) -> None:
        self.progress = Progress()
        self.cursor: Cursor = self.progress.attach(OWNER, lookahead, timing, passes)
        self.iteration = self.progress.begin()
        self.backward_passes = 0

    def take(self, one: StepTicket, micro_batches: int | None = None) -> None:
        for _ in range(len(one.weights) if micro_batches is None else micro_batches):
            self.progress.hand_out(self.iteration, one)

    def backward(self) -> float:
        self.backward_passes += 1
        return self.cursor.work(self.backward_passes)[0]

    def update(self) -> None:
        self.cursor.refuse_incomplete()
        self.cursor.finish()

    def end(self) -> None:
        self.progress.end(self.iteration, epoch=0)


# Steps left out where a lookahead is declared. ------------------------------------------------------------------------


def test_a_lookahead_that_is_not_made_use_of_does_not_hide_a_step_left_out() -> None:
    loop = Loop(lookahead=1)
    loop.take(SINGLE[0])
    assert loop.backward() == 1.0
    loop.update()
    loop.take(SINGLE[1])  # and the loop goes on to the next
    loop.take(SINGLE[2])
    loop.backward()
    with pytest.raises(RuntimeError, match=r"was 0 steps ahead .* now is 1: .*optimizer\.skip_step\(\)"):
        loop.update()


def test_a_step_left_out_while_reading_ahead_is_noticed() -> None:
    loop = Loop(lookahead=1)
    loop.take(SINGLE[0])
    loop.take(SINGLE[1])
    loop.backward()
    loop.update()
    loop.take(SINGLE[2])  # the loop has got the second, and leaves it out
    loop.take(SINGLE[3])
    with pytest.raises(RuntimeError, match="3 steps were taken"):
        loop.backward()


def test_a_step_left_out_at_the_end_of_the_epoch_is_noticed() -> None:
    loop = Loop(lookahead=1)
    loop.take(SINGLE[0])
    loop.take(SINGLE[1])
    with pytest.raises(RuntimeError, match=r"ended with 2 steps that had no backward pass, .*lookahead=1"):
        loop.end()


@pytest.mark.parametrize("ahead", [1, 2])
def test_what_a_wrapper_holds_at_the_end_is_worked_on(ahead: int) -> None:
    loop = Loop(lookahead=ahead)
    waiting = iter(SINGLE)
    for _, one in zip(range(ahead), waiting, strict=False):
        loop.take(one)
    for one in SINGLE:
        if following := next(waiting, None):
            loop.take(following)
        elif one is SINGLE[-ahead]:
            loop.end()
        assert loop.backward() == one.weights[0]
        loop.update()


def test_a_thread_of_its_own_may_read_as_far_as_it_comes() -> None:
    loop = Loop(lookahead=2)

    def read(*tickets: StepTicket) -> None:
        thread = threading.Thread(target=lambda: [loop.take(one) for one in tickets])
        thread.start()
        thread.join()

    for tickets, weight in (((SINGLE[0],), 1.0), (SINGLE[1:4], 2.0), ((), 3.0), ((), 4.0), ((SINGLE[4],), 5.0)):
        read(*tickets)
        assert loop.backward() == weight
        loop.update()


def test_steps_given_up_shift_nothing() -> None:
    loop = Loop(lookahead=1)
    loop.take(SINGLE[0])
    for one, following in itertools.pairwise(SINGLE):
        loop.take(following)
        if one.step % 2:
            loop.cursor.finish(is_given_up=True)
        else:
            assert loop.backward() == one.weights[0]
            loop.update()
    assert (loop.cursor.finished_steps, loop.cursor.left_out) == (5, 2)


def test_optimizers_that_share_a_sampler_read_ahead_alike() -> None:
    progress = Progress()
    first, second = (progress.attach(OWNER, 1) for _ in range(2))
    take = functools.partial(progress.hand_out, progress.begin())
    take(SINGLE[0])
    for one, following in itertools.pairwise(SINGLE[:5]):
        take(following)
        for cursor in (first, second):
            assert cursor.work(one.step)[0] == one.weights[0]
            cursor.refuse_incomplete()
            cursor.finish()
    take(SINGLE[5])
    first.work(10)
    first.finish()
    with pytest.raises(RuntimeError, match=r"ended with 2 steps that had no backward pass"):
        progress.end(1, epoch=0)  # as the second has left one out


def test_a_loop_left_early_leaves_nothing_behind() -> None:
    loop = Loop(lookahead=1)
    loop.take(SEVERAL[0])
    loop.take(SEVERAL[1])
    loop.cursor.repeat()
    loop.backward()
    loop.iteration = loop.progress.begin()
    with pytest.raises(RuntimeError, match="no step is at work"):
        loop.progress.latest()
    loop.take(SINGLE[2])
    loop.take(SINGLE[3])
    assert loop.progress.latest().ticket is SINGLE[2]
    assert loop.backward() == loop.progress.weight == 3.0


# Counts that the ranks compare. ---------------------------------------------------------------------------------------


def test_steps_without_a_backward_pass_are_counted() -> None:
    loop = Loop()
    for one in (SINGLE[0], ticket(1, 0.0, is_filler=True), SINGLE[2], ticket(3, 0.0)):
        loop.take(one)
        if one is SINGLE[0]:
            loop.backward()
        loop.update()
    assert (loop.cursor.finished_steps, loop.cursor.left_out, loop.cursor.idle) == (4, 1, 2)


def test_steps_that_a_new_iteration_forgets_are_counted() -> None:
    loop = Loop()
    loop.take(SINGLE[0])
    loop.progress.begin()
    assert (loop.cursor.finished_steps, loop.cursor.left_out) == (0, 1)


def test_the_first_step_of_every_iteration_and_block_is_compared() -> None:
    loop = Loop()
    compared = []
    for start in (0, 70):  # an iteration of a resumed epoch begins anywhere
        loop.iteration = loop.progress.begin()
        for step in range(start, 2 * BLOCK_STEPS + 3):
            loop.take(ticket(step, 1.0))
            loop.backward()
            if loop.cursor.must_compare():
                compared.append(step)
                loop.cursor.note_compared()
                assert not loop.cursor.must_compare()
            loop.update()
    assert compared == [0, 64, 128, 70, 128]


# True amounts. --------------------------------------------------------------------------------------------------------


def test_true_amounts_replace_the_planned_ones() -> None:
    loop = Loop()
    one = ticket(0, 0.5, 0.25, 1.25, unit=0.125)
    for amount in (3.0, 0.0, None):
        loop.take(one, micro_batches=1)
        if amount is not None:
            loop.cursor.set_amount(amount)
        expected = 1.25 if amount is None else amount * 0.125
        assert loop.backward() == loop.cursor.weight == loop.progress.weight == expected
    assert loop.cursor.closing_weights == (0.375, 0.0, 1.25)
    loop.update()
    assert loop.progress.latest().weights == (0.375, 0.0, 1.25)
    assert one.weights == (0.5, 0.25, 1.25)


def test_amounts_of_micro_batches_read_ahead_belong_to_the_next_backward_pass() -> None:
    loop = Loop(lookahead=1)
    loop.take(SEVERAL[0])
    loop.take(SEVERAL[1])
    for amount in (5.0, 7.0, 9.0):
        loop.cursor.set_amount(amount)
        assert loop.backward() == amount
    loop.update()
    loop.cursor.set_amount(2.0)
    assert loop.backward() == 2.0


def test_an_amount_after_the_backward_pass_comes_too_late() -> None:
    for loop in (Loop(), Loop(lookahead=1)):
        loop.take(SINGLE[0])
        loop.take(SINGLE[1]) if loop.cursor.lookahead else None
        loop.backward()
        with pytest.raises(RuntimeError, match=r"after the backward pass of micro-batch 0 of step 0"):
            loop.cursor.set_amount(1.0)


def test_a_filler_counts_nothing_whatever_is_said() -> None:
    loop = Loop()
    loop.take(ticket(0, 0.0, is_filler=True))
    loop.cursor.set_amount(5.0)
    assert loop.backward() == 0.0


# Closures, and several steps in an update. ----------------------------------------------------------------------------


def test_a_closure_works_on_its_micro_batches_in_order_as_often_as_it_is_called() -> None:
    loop = Loop()
    loop.take(SEVERAL[0])
    for _ in range(3):
        loop.cursor.repeat()
        assert [loop.backward() for _ in range(3)] == [1.0, 0.5, 0.25]
        loop.cursor.refuse_incomplete()
    with pytest.raises(RuntimeError, match=r"once more than micro-batches .* lookahead or a closure"):
        loop.backward()
    loop.cursor.finish()
    assert loop.cursor.finished_steps == 1
    loop.take(SEVERAL[1])
    with pytest.raises(RuntimeError, match="3 micro-batches of step 1 were taken without"):
        loop.backward()  # no closure any more


def test_only_the_first_call_of_a_closure_is_timed() -> None:
    timing = Timing()
    loop = Loop(timing=timing)
    loop.take(SEVERAL[0])
    for _ in range(2):
        loop.cursor.repeat()
        for _ in range(3):
            loop.backward()
            loop.cursor.end_compute(loop.cursor.latest().place)
    loop.cursor.finish()
    assert timing.micro_batches()["step"].tolist() == [0, 0, 0]


def test_an_update_of_several_steps_finishes_them_all() -> None:
    loop = Loop(passes=2)
    for pair in (SINGLE[:2], [SINGLE[2], ticket(3, 0.0, is_filler=True)], [ticket(4, 0.0, is_filler=True), SINGLE[5]]):
        for one in pair:
            loop.take(one)
            if not one.is_filler:
                assert loop.backward() == one.weights[0]
        loop.update()
        assert not loop.cursor.open
    assert (loop.cursor.finished_steps, loop.cursor.idle) == (6, 2)


def test_of_an_update_of_several_steps_none_is_left_out_silently() -> None:
    loop = Loop(passes=2)
    loop.take(SINGLE[0])
    loop.take(SINGLE[1])  # read ahead, or the first left out
    with pytest.raises(RuntimeError, match=r"step 0 was taken from the loader, but 1 of its 1 micro-batches had no"):
        loop.backward()
    loop.take(SINGLE[2])
    with pytest.raises(RuntimeError, match=r"3 steps were taken .*backward_passes_per_step=2, lookahead=0 allows 2"):
        loop.backward()


def test_the_step_at_work_of_several_read_ahead_is_that_of_the_last_backward_pass() -> None:
    loop = Loop(lookahead=1, passes=2)
    loop.take(SINGLE[0])
    for one, following in itertools.pairwise(SINGLE[:5]):
        loop.take(following)
        assert loop.backward() == loop.progress.weight == one.weights[0]
        assert loop.progress.latest().ticket is one
        if one.step % 2:
            loop.update()
    assert loop.cursor.finished_steps == 4


# What the loader notices. ---------------------------------------------------------------------------------------------


@pytest.fixture
def training() -> Iterator[Callable[..., chronica.DataLoader]]:
    """Make loaders whose samplers have an optimizer."""
    owners = []

    def make(**options: object) -> chronica.DataLoader:
        sampler = chronica.BatchSampler([1, 2, 3, 4], 1, num_replicas=2, rank=0, **options)
        owners.append(Owner())
        sampler.progress.attach(owners[-1], 0)
        return chronica.DataLoader(range(4), batch_sampler=sampler, collate_fn=list)

    yield make
    owners.clear()


def trained(loader: chronica.DataLoader, steps: int = 2) -> None:
    for step, _ in enumerate(loader):
        for _, cursor in loader.batch_sampler.progress._cursors:
            cursor.finish()
        if step + 1 == steps:
            break


def test_an_epoch_that_is_never_advanced_is_warned_of(training: Callable[..., chronica.DataLoader]) -> None:
    loader = training()
    list(loader)
    with pytest.warns(UserWarning, match=r"epoch 0 is trained on once more, .*sampler\.set_epoch\(epoch\)"):
        iter(loader)
    loader.batch_sampler.set_epoch(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)


@pytest.mark.parametrize("why", ["no shuffle", "indices", "left early", "evaluation", "no optimizer"])
def test_an_epoch_may_repeat_where_that_is_no_mistake(training: Callable[..., chronica.DataLoader], why: str) -> None:
    options: dict[str, dict[str, object]] = {
        "no shuffle": {"shuffle": False},
        "indices": {"indices": [3, 1, 0, 2]},
        "evaluation": {"evaluation": True},
    }
    loader = training(**options.get(why, {}))
    if why == "no optimizer":
        loader.batch_sampler.progress._cursors.clear()
    if why == "left early":
        trained(loader, steps=1)
    else:
        list(loader)
    iter(loader)


def test_parts_of_a_data_set_are_told_apart() -> None:
    sampler = chronica.BatchSampler([1, 1], 1, num_replicas=2, rank=0)
    identities = set()
    for dataset in ([0, 1], torch.utils.data.Subset(range(4), [0, 2]), torch.utils.data.Subset(range(4), [1, 3])):
        chronica.DataLoader(dataset, batch_sampler=sampler)
        identities.add(sampler.progress.data)
    assert len(identities) == 3
    assert 0 in identities
