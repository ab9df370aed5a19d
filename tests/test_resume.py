"""A state tells where in an epoch training is, and any world goes on from there: no sample is lost or counts twice."""

from __future__ import annotations

import copy
import io
import itertools
import json
import pickle
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lognormal, step_samples

import chronica_hvd as chronica
from chronica_hvd.planner import Planner
from chronica_hvd.position import Segment, entry_places
from chronica_hvd.progress import Progress
from chronica_hvd.tickets import StepTicket

SAMPLES = 331  # no multiple of any global batch below
SIZES = lognormal(SAMPLES, largest=4000)
LOSS_WEIGHTS = np.random.default_rng(1).choice([0.0, 0.5, 2.0], SAMPLES)
REPEATED = np.random.default_rng(2).integers(0, 40, SAMPLES)  # every sample several times, most not at all
SPEEDS = (1.0, 0.5, 2.0)
EPOCH = 3

#: A world: ranks or speeds, and samples per rank and step.
World = tuple[Any, int]
WORLDS: list[World] = [(2, 4), (3, 3), (SPEEDS, 5), (1, 7), (5, 2), ((1.0, 0.5), 4)]

MODES: dict[str, dict[str, Any]] = {
    "batch": {},
    "unshuffled": {"shuffle": False},
    "seed": {"seed": -5},
    "micro-batches": {"micro_batches": "auto", "loss_weight": "sizes"},
    "weights-of-the-epoch": {"loss_weight": LOSS_WEIGHTS, "normalize": "epoch"},
    "summed": {"loss_weight": "sum"},
    "equal": {"local_batch": "equal", "padding": "none"},
    "fillers": {"min_local_batch": 2},
    "drop-last": {"drop_last": True},
    "window": {"reorder": "window", "window": 5},
    "window-epoch": {
        "reorder": "window",
        "window": 1000,
        "max_moved": 1.0,
        "loss_weight": "sizes",
        "normalize": "epoch",
    },
    "window-drop-last": {"reorder": "window", "window": 4, "drop_last": True, "micro_batches": 3},
    "first": {"first": "largest"},
    "window-first": {"reorder": "window", "window": 7, "first": "largest", "drop_last": True},
    "plain": {"policy": "plain", "local_batch": "equal"},
    "static": {"policy": "static", "local_batch": "equal"},
    "dynamic-window": {"policy": "dynamic", "local_batch": "equal", "reorder": "window", "window": 6},
    "guided-epoch": {"policy": "guided", "local_batch": "equal", "reorder": "window", "window": 1000},
    "repeats": {"indices": REPEATED},
    "repeats-window": {"indices": REPEATED, "reorder": "window", "window": 5, "first": "largest"},
    "repeats-drop-last": {"indices": REPEATED, "drop_last": True, "first": "largest", "min_local_batch": 2},
}
every_mode = pytest.mark.parametrize("mode", MODES)
#: Modes in which the consumed samples are no prefix of the drawn order.
OUT_OF_ORDER = [name for name, options in MODES.items() if "reorder" in options or "first" in options]


def sampler(world: World = (2, 4), rank: int = 0, **options: Any) -> chronica.BatchSampler:
    ranks, batch_size = world
    options = {"sizes": SIZES, "epoch": EPOCH, **options}
    return chronica.BatchSampler(batch_size=batch_size, num_replicas=ranks, rank=rank, **options)


def loader(sampler: chronica.BatchSampler, **options: Any) -> chronica.DataLoader:
    return chronica.DataLoader(range(sampler.samples), batch_sampler=sampler, collate_fn=list, **options)


def train(sampler: chronica.BatchSampler, steps: int | None = None, **options: Any) -> list[list[list[int]]]:
    """Take so many steps (by default all) from a new loader; return their micro-batches."""
    return [list(step) for step in itertools.islice(loader(sampler, **options).steps(), steps)]


def resumed(state: dict[str, Any], world: World = (2, 4), rank: int = 0, **options: Any) -> chronica.BatchSampler:
    """Return a new sampler that has loaded the state."""
    # From another epoch and seed of position, so that nothing is right by chance.
    other = sampler(world, rank, **{**options, "epoch": 0})
    other.load_state_dict(state)
    return other


def tickets(sampler: chronica.BatchSampler) -> list[str]:
    return [repr(ticket) for ticket in sampler.tickets()]  # NaN is not equal to itself


def remaining(sampler: chronica.BatchSampler) -> list[list[int]]:
    """Return the samples that count in each step which the next iteration goes through."""
    plan = sampler.plan
    return [step_samples(plan, step) for step in range(plan.steps - len(sampler), plan.steps)]


def drawn(options: dict[str, Any]) -> list[int]:
    """Return the epoch's samples in the order in which they are drawn, before any is dropped."""
    if "indices" in options:
        return options["indices"].tolist()
    if not options.get("shuffle", True):
        return list(range(SAMPLES))
    generator = torch.Generator()
    generator.manual_seed((options.get("seed", 0) + EPOCH) % 2**64)
    return torch.randperm(SAMPLES, generator=generator).tolist()


def without(order: list[int], consumed: Counter[int]) -> list[int]:
    """Return what is left in drawn order: of a sample that was drawn several times the later ones."""
    consumed = consumed.copy()
    left = []
    for sample in order:
        if consumed[sample]:
            consumed[sample] -= 1
        else:
            left.append(sample)
    return left


def total(steps: list[list[int]]) -> Counter[int]:
    return Counter(itertools.chain.from_iterable(steps))


# The same world -------------------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("world", WORLDS[1:3])
def test_the_same_world_goes_on_bit_for_bit(mode: str, world: World) -> None:
    for rank in range(3):
        whole = sampler(world, rank, **MODES[mode])
        every, steps = tickets(whole), list(whole.steps())
        for taken in (0, 1, 2, 7, len(whole) // 2, len(whole) - 1, len(whole)):
            stopped = sampler(world, rank, **MODES[mode])
            assert train(stopped, taken) == steps[:taken]
            again = resumed(stopped.state_dict(), world, rank, **MODES[mode])
            assert again.epoch == EPOCH
            assert again.plan == whole.plan
            assert tickets(again) == every[taken:]
            assert train(again) == steps[taken:]
            assert len(again) == len(loader(again)) == len(list(again)) == len(every) - taken


@every_mode
def test_a_state_after_resuming_is_that_of_not_having_stopped(mode: str) -> None:
    whole, stopped = sampler(**MODES[mode]), sampler(**MODES[mode])
    train(stopped, 5)
    again = resumed(stopped.state_dict(), **MODES[mode])
    assert again.state_dict() == stopped.state_dict()
    for taken in (1, 3):
        train(again, taken)
        train(whole, 5 + taken)
        assert again.state_dict() == whole.state_dict()


def test_an_option_that_leaves_the_consumed_samples_alone_goes_on_in_the_same_steps() -> None:
    stopped = sampler()
    train(stopped, 5)
    changes: list[dict[str, Any]] = [{"micro_batches": "auto"}, {"local_batch": "equal"}, {"loss_weight": "sizes"}]
    for change in changes:
        again = resumed(stopped.state_dict(), **change)
        assert again.plan == sampler(**change).plan
        assert tickets(again) == tickets(sampler(**change))[5:]


@pytest.mark.parametrize(
    ("mode", "change"),
    [
        ("window", {"max_moved": 1.0, "policy": "guided", "local_batch": "equal"}),
        ("window", {"first": "largest"}),
        ("first", {"first": None}),
        ("batch", {"first": "largest"}),
    ],
)
def test_an_option_that_changes_the_consumed_samples_plans_anew(mode: str, change: dict[str, Any]) -> None:
    stopped = sampler(**MODES[mode])
    before = remaining(stopped)[:3]
    train(stopped, 3)
    changed = {**MODES[mode], **change}
    assert total(remaining(sampler(**changed))[:3]) != total(before)
    again = resumed(stopped.state_dict(), **changed)
    assert again.plan.steps == len(again)
    assert total(remaining(again)) + total(before) == Counter(range(SAMPLES))


# Other worlds ---------------------------------------------------------------------------------------------------------


def assert_same_plan(now: chronica.BatchSampler, of_the_rest: chronica.Plan, options: dict[str, Any]) -> None:
    """Hold what is left of an epoch against a plan of just these samples."""
    plan = now.plan
    if options.get("normalize") != "epoch":
        assert plan == of_the_rest
        return
    # A unit of loss weight counts alike in the whole epoch, not as the mean of what is left would have it.
    for name in ("indices", "offsets", "parts", "counts"):
        np.testing.assert_array_equal(getattr(plan, name), getattr(of_the_rest, name))
    weights = SIZES if isinstance(options["loss_weight"], str) else options["loss_weight"]
    steps = -(-SAMPLES // (now.batch_size * len(now.speeds)))
    np.testing.assert_allclose(plan.divisors, weights.sum() / steps, rtol=1e-12)
    amounts = of_the_rest.weights * of_the_rest.divisors[:, None]
    np.testing.assert_allclose(plan.weights * plan.divisors[:, None], amounts, rtol=1e-12)


@every_mode
@pytest.mark.parametrize("seed", range(4))
def test_each_sample_counts_once_whatever_worlds_follow(mode: str, seed: int) -> None:
    options = MODES[mode]
    random = np.random.default_rng(seed)
    order, consumed = drawn(options), Counter[int]()
    now = sampler(WORLDS[random.integers(len(WORLDS))], **options)
    for resumption in itertools.count():
        every = remaining(now)
        taken = int(random.integers(0, min(len(every), 9) + 1)) if resumption < 5 else len(every)
        train(now, taken)
        consumed += total(every[:taken])
        if resumption == 5 or taken == len(every):
            break
        world = WORLDS[random.integers(len(WORLDS))]
        left = without(order, consumed)
        goes_on = (now.speeds, now.batch_size) == (sampler(world).speeds, world[1])
        rest = every[taken:]
        now = resumed(json.loads(json.dumps(now.state_dict())), world, **options)
        if goes_on:
            assert remaining(now) == rest
            continue
        plan_options = {**options, "indices": left, "cost": now.cost, "epoch": EPOCH}
        if options.get("drop_last") and len(left) < now.batch_size * len(now.speeds):
            assert now.plan.steps == 0
            continue
        assert_same_plan(now, chronica.plan(SIZES, now.speeds, world[1], **plan_options), options)
    dropped = Counter(order) - consumed
    assert consumed + dropped == Counter(order)
    if options.get("drop_last"):
        assert dropped.total() < now.batch_size * len(now.speeds)
    else:
        assert not dropped
    assert resumed(now.state_dict(), (4, 2), **options).plan.steps == 0


def test_the_modes_hold_what_they_are_meant_to() -> None:
    """Samples that move, several intervals, fillers: else the tests above prove less."""
    for mode in OUT_OF_ORDER:
        stopped = sampler(**MODES[mode])
        assert stopped.plan.moved > 0, mode
        train(stopped, 3)
        assert stopped.state_dict()["consumed"] != [0, 24], mode
    for mode in set(MODES) - set(OUT_OF_ORDER):
        stopped = sampler(**MODES[mode])
        train(stopped, 3)
        assert stopped.state_dict()["consumed"] == [0, 24], mode
    assert (sampler((5, 2), **MODES["fillers"]).plan.counts == 0).any()
    assert Counter(REPEATED.tolist()).most_common(1)[0][1] > 5


@pytest.mark.parametrize("mode", ["batch", "micro-batches", "window"])
def test_all_ranks_together_take_what_the_plan_says(mode: str) -> None:
    stopped = sampler((2, 4), **MODES[mode])
    train(stopped, 4)
    consumed = total([step_samples(stopped.plan, step) for step in range(4)])
    ranks = [resumed(stopped.state_dict(), (3, 5), rank, **MODES[mode]) for rank in range(3)]
    taken = [train(each) for each in ranks]
    states = [each.state_dict() for each in ranks]
    assert states[0] == states[1] == states[2]
    plan = ranks[0].plan
    for step in range(plan.steps):
        real = [taken[rank][step] for rank in range(3) if plan.counts[step, rank]]
        consumed += Counter(sample for batches in real for batch in batches for sample in batch)
    assert consumed == Counter(range(SAMPLES))


def test_two_states_of_one_epoch_can_be_loaded_by_one_sampler() -> None:
    one = sampler()
    train(one, 3)
    early = one.state_dict()
    train(one, 8)
    late = one.state_dict()
    other = sampler((3, 3))
    for state, consumed in ((late, 64), (early, 24), (late, 64)):
        other.load_state_dict(state)
        assert total(remaining(other)) == Counter(drawn({})[consumed:])
        assert other.state_dict()["consumed"] == [0, consumed]


# The end of an epoch --------------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("world", [(2, 4), (1, 2), (3, 40)])
def test_a_finished_epoch_has_nothing_left_and_the_next_one_follows(mode: str, world: World) -> None:
    finished = sampler(**MODES[mode])
    train(finished)
    again = resumed(finished.state_dict(), world, **MODES[mode])
    assert len(again) == len(loader(again)) == 0
    assert list(again) == list(again.tickets()) == train(again) == train(again, num_workers=1) == []
    assert again.state_dict()["consumed"] == [0, SAMPLES]
    again.set_epoch(EPOCH)
    assert len(again) == 0
    again.set_epoch(EPOCH + 1)
    following = sampler(world, **{**MODES[mode], "epoch": EPOCH + 1})
    assert again.plan == following.plan
    assert tickets(again) == tickets(following)


def test_drop_last_with_less_left_than_a_global_batch() -> None:
    stopped = sampler((2, 4), drop_last=True)
    train(stopped, 40)  # 320 of 331
    again = resumed(stopped.state_dict(), (3, 4), drop_last=True)
    assert again.plan.steps == len(again) == 0
    assert train(again) == []
    assert again.plan.shapes() == {}
    assert "0 steps on 3 ranks" in repr(again.plan)
    assert again.plan.imbalance == again.plan.optimality == again.plan.weight_spread == 1.0
    # Its epoch is over, whoever goes on from there.
    assert len(resumed(again.state_dict(), (1, 1), drop_last=True)) == 0
    assert len(resumed(stopped.state_dict(), (1, 1), drop_last=True)) == 11


def test_one_short_step() -> None:
    stopped = sampler((2, 300))
    assert len(stopped) == 1
    fresh = stopped.state_dict()
    train(stopped)
    assert len(resumed(fresh, (2, 300))) == 1
    assert len(resumed(stopped.state_dict(), (2, 300))) == 0


def test_a_filler_that_repeats_the_last_sample_is_not_consumed() -> None:
    sizes = [5] * 9 + [1]
    options = {"sizes": sizes, "indices": range(10), "first": "largest", "min_local_batch": 2}
    stopped = sampler((2, 2), **options)
    assert (stopped.plan.counts[-1] == 0).any()
    assert (np.sort(stopped.plan.indices)[-2:] == 9).all()
    train(stopped, 2)
    assert stopped.state_dict()["consumed"] == [0, 8]
    assert remaining(resumed(stopped.state_dict(), (1, 2), **options)) == [[8, 9]]


def test_samples_that_weigh_nothing_may_be_left() -> None:
    weights = np.ones(SAMPLES)
    weights[drawn({})[160:]] = 0.0
    stopped = sampler(loss_weight=weights)
    train(stopped, 20)
    again = resumed(stopped.state_dict(), (3, 3), loss_weight=weights)
    assert not again.plan.weights.any()
    assert total(remaining(again)) == Counter(drawn({})[160:])


# Where the position is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["batch", "micro-batches"])
def test_what_workers_have_fetched_ahead_is_not_consumed(mode: str) -> None:
    for taken in (0, 1, 2, 5, 17, 41, 42):
        stopped = sampler(**MODES[mode])
        steps = loader(stopped, num_workers=2, prefetch_factor=4).steps()
        for _ in range(taken):
            list(next(steps))
        state = stopped.state_dict()
        assert state["steps"] == taken
        assert state["consumed"] == ([0, min(8 * taken, SAMPLES)] if taken else [])
        again = resumed(state, **MODES[mode])
        rest = train(again, num_workers=2, prefetch_factor=4, persistent_workers=True)
        assert rest == list(sampler(**MODES[mode]).steps())[taken:]


def test_workers_that_persist_begin_where_the_sampler_is() -> None:
    one = sampler()
    persistent = loader(one, num_workers=2, persistent_workers=True)
    every = list(one)
    assert list(persistent) == every
    other = sampler()
    train(other, 30)
    one.load_state_dict(other.state_dict())
    for _ in range(2):
        assert list(persistent) == every[30:]


def test_a_step_is_consumed_with_its_first_micro_batch() -> None:
    stopped = sampler((2, 40), **MODES["micro-batches"])
    steps = loader(stopped).steps()
    list(next(steps))
    step = next(steps)
    assert len(step) > 1
    assert stopped.state_dict()["steps"] == 1
    batches = iter(step)
    for _ in range(2):
        next(batches)
        assert stopped.state_dict()["steps"] == 2


def test_iterating_the_sampler_consumes_nothing() -> None:
    one = sampler()
    train(one, 3)
    state = one.state_dict()
    for _ in range(2):
        assert len(list(one)) == len(list(one.tickets())) == len(one) == 42
    next(iter(one))
    assert one.state_dict() == state
    again = resumed(state)
    for _ in range(2):
        assert len(list(again)) == len(again) == 39
    assert again.state_dict() == state


def test_every_iteration_begins_at_the_loaded_position() -> None:
    one = sampler()
    train(one, 3)
    again = resumed(one.state_dict())
    for taken in (2, 5, 0, None):
        assert train(again, taken) == list(one.steps())[3:][:taken]
    assert again.state_dict()["consumed"] == [0, SAMPLES]
    iterator = loader(again).steps()
    list(next(iterator))
    assert again.state_dict()["steps"] == 4


def test_set_epoch_keeps_the_position_only_of_the_loaded_epoch() -> None:
    one = sampler()
    train(one, 3)
    again = resumed(one.state_dict())
    again.set_epoch(EPOCH)
    assert len(again) == 39
    again.set_epoch(EPOCH + 1)
    assert len(again) == 42
    assert again.state_dict()["consumed"] == []
    again.set_epoch(EPOCH)
    assert len(again) == 42
    assert tickets(again) == tickets(one)


def test_another_epoch_begins_at_0_though_the_loop_of_the_last_one_is_not_forgotten() -> None:
    one = sampler()
    train(one, 3)
    for epoch in (EPOCH + 1, EPOCH):
        one.set_epoch(epoch)
        state = one.state_dict()
        assert (state["epoch"], state["steps"], state["consumed"]) == (epoch, 0, [])


def test_a_loop_under_way_says_nothing_of_a_position_that_was_loaded_meanwhile() -> None:
    one = sampler()
    train(one, 10)
    state = one.state_dict()
    other = sampler((3, 3))
    steps = loader(other).steps()
    list(next(steps))
    other.load_state_dict(state)
    assert other.state_dict()["consumed"] == [0, 80]
    list(next(steps))  # of the plan before
    assert other.state_dict()["consumed"] == [0, 80]
    train(other, 1)
    assert other.state_dict()["consumed"] == [0, 89]


def test_a_loop_under_way_says_nothing_of_an_epoch_that_was_chosen_meanwhile() -> None:
    one = sampler(shuffle=False)  # all epochs have the same plan
    steps = loader(one).steps()
    list(next(steps))
    one.set_epoch(EPOCH + 1)
    list(next(steps))
    assert one.state_dict()["consumed"] == []
    assert len(one) == 42


def test_going_back_in_the_same_plan() -> None:
    one = sampler()
    train(one, 3)
    state = one.state_dict()
    train(one, 9)
    one.load_state_dict(state)
    assert one.state_dict() == state
    assert len(one) == 39


# Progress.last_begun --------------------------------------------------------------------------------------------------

TICKETS = [StepTicket(0, step, (1.0, 0.5), "") for step in range(4)]


class Owner:
    """Stands for an optimizer."""


@pytest.mark.parametrize("lookahead", [None, 0])
def test_the_step_begun_last_is_the_one_taken_last(lookahead: int | None) -> None:
    progress, owner = Progress(), Owner()
    cursor = None if lookahead is None else progress.attach(owner, lookahead)
    assert progress.last_begun() is None
    iteration = progress.begin()
    assert progress.last_begun() is None
    for ticket in TICKETS:
        for number in range(2):
            progress.hand_out(iteration, ticket)
            assert progress.last_begun() is ticket
            if cursor is not None:
                cursor.work(2 * ticket.step + number)
        if cursor is not None:
            cursor.finish()
        assert progress.last_begun() is ticket
    progress.end(iteration, epoch=0)
    assert progress.last_begun() is TICKETS[-1]
    iteration = progress.begin()
    assert progress.last_begun() is None
    progress.end(iteration, epoch=0)
    assert progress.last_begun() is None


@pytest.mark.parametrize("lookahead", [1, 2])
def test_what_a_wrapper_has_read_ahead_is_not_begun(lookahead: int) -> None:
    progress, owner = Progress(), Owner()
    cursor = progress.attach(owner, lookahead)
    iteration = progress.begin()
    ahead = iter(TICKETS)

    def read() -> None:
        for ticket in itertools.islice(ahead, 1):
            for _ in range(2):
                progress.hand_out(iteration, ticket)

    for _ in range(lookahead):
        read()
    for ticket, before in zip(TICKETS, [None, *TICKETS], strict=False):
        read()
        assert progress.last_begun() is before
        for number in range(2):
            cursor.work(2 * ticket.step + number)
            assert progress.last_begun() is ticket
        cursor.finish()
        assert progress.last_begun() is ticket
    progress.end(iteration, epoch=0)
    assert progress.last_begun() is TICKETS[-1]
    iteration = progress.begin()
    assert progress.last_begun() is None
    progress.hand_out(iteration, TICKETS[0])
    assert progress.last_begun() is None


# States ---------------------------------------------------------------------------------------------------------------


def round_trips(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the state as other ways of keeping it give it back."""
    file = io.BytesIO()
    torch.save({"sampler": state}, file)
    file.seek(0)
    return [
        torch.load(file, weights_only=True)["sampler"],
        json.loads(json.dumps(state)),
        pickle.loads(pickle.dumps(state)),
    ]


@every_mode
def test_a_state_can_be_kept_in_every_usual_way(mode: str) -> None:
    options = {**MODES[mode], **({} if "seed" in MODES[mode] else {"seed": 2**64 - 1})}
    stopped = sampler((SPEEDS, 3), **options)
    train(stopped, 4)
    state = stopped.state_dict()
    for kept in round_trips(state):
        assert kept == state
        again = resumed(kept, (SPEEDS, 3), **options)
        assert tickets(again) == tickets(stopped)[4:]
    values = [value for entry in state.values() for value in (entry if isinstance(entry, list) else [entry])]
    assert {type(value) for value in values} <= {int, float, str, bool, type(None)}


@every_mode
def test_a_state_is_equal_on_all_ranks(mode: str) -> None:
    states = []
    for rank in range(3):
        each = sampler((3, 4), rank, **MODES[mode])
        train(each, 6)
        if rank == 0:
            assert each.plan.steps  # asking for it on one rank changes nothing
        states += [each.state_dict(), resumed(each.state_dict(), (3, 4), rank, **MODES[mode]).state_dict()]
    assert all(state == states[0] for state in states)


def test_a_state_of_a_million_samples_is_small_and_quick() -> None:
    sizes = lognormal(1_000_000, mean=6.0)
    for options, most in (({}, 420), ({"reorder": "window"}, 60_000), ({"first": "largest"}, 420)):
        one = sampler((32, 4), sizes=sizes, **options)
        steps = loader(one).steps()
        for _ in range(40):  # in the middle of a window
            list(next(steps))
        one.state_dict()
        best = min(_seconds(one.state_dict) for _ in range(3))
        assert best < 0.05, "milliseconds"
        state = one.state_dict()
        assert len(json.dumps(state)) <= most
        other = sampler((8, 32), sizes=sizes, **options)
        assert _seconds(lambda other=other, state=state: other.load_state_dict(state)) < 0.2, "nothing is planned"
        assert other.plan.counts.sum() == 1_000_000 - 40 * 128


def _seconds(function: Any) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin


def test_loading_plans_nothing_where_the_drawn_order_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = sampler()
    train(stopped, 5)
    state = stopped.state_dict()
    samplers = [sampler(), sampler((3, 3))]
    monkeypatch.setattr(Planner, "plan", None)
    for other in samplers:
        other.load_state_dict(state)
        assert other.state_dict()["consumed"] == [0, 40]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other sizes": ({"sizes": np.where(np.arange(SAMPLES) == 7, 3, SIZES)}, "a data set of other sizes"),
    "fewer sizes": ({"sizes": SIZES[:-1]}, "a data set of other sizes"),
    "indices": ({"indices": np.arange(SAMPLES)}, "other indices"),
    "other indices": ({"indices": np.arange(SAMPLES)[::-1]}, "other indices"),
    "seed": ({"seed": 1}, "seed=0, while this sampler has seed=1"),
    "shuffle": ({"shuffle": False}, "shuffle=True, while this sampler has shuffle=False"),
    "drop_last": ({"drop_last": True}, "drop_last=False, while this sampler has drop_last=True"),
    "reorder": ({"reorder": "window"}, "reorder='batch', while this sampler has reorder='window'"),
    "window": ({"window": 65}, "window=64, while this sampler has window=65"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_of_something_else_is_refused(name: str) -> None:
    changes, message = REFUSED[name]
    stopped = sampler(**({"indices": np.arange(SAMPLES)} if name == "other indices" else {}))
    train(stopped, 5)
    other = sampler((3, 3), **changes)
    train(other, 2)
    unchanged = other.state_dict(), tickets(other)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(stopped.state_dict())
    assert (other.state_dict(), tickets(other)) == unchanged


@pytest.mark.parametrize("kind", [np.int32, np.float64, list, np.uint64])
def test_the_type_of_the_sizes_is_no_difference(kind: Any) -> None:
    stopped = sampler(indices=REPEATED)
    train(stopped, 5)
    sizes = SIZES.tolist() if kind is list else SIZES.astype(kind)
    assert len(resumed(stopped.state_dict(), sizes=sizes, indices=REPEATED.tolist())) == 42 - 5


def malformed() -> list[tuple[str, dict[str, Any] | Any]]:
    """Return states that no sampler has written, named by what is wrong with them."""
    stopped = sampler(reorder="window", window=5)
    train(stopped, 3)
    first = stopped.state_dict()
    stopped = resumed(first, (3, 3), reorder="window", window=5)
    train(stopped, 3)
    good = stopped.state_dict()
    assert len(good["before"]) > 2
    assert len(good["consumed"]) > 2
    wrong: list[tuple[str, Any]] = [("not a dict", given) for given in (None, [good], "state", 5, good.items())]
    wrong += [(f"without {name}", {key: good[key] for key in good if key != name}) for name in good]
    wrong += [("empty", {}), ("unknown", {**good, "more": 1}), ("unknown", {**good, 5: 1})]
    types: dict[str, list[Any]] = {
        "str": ["a", ""],
        "none": [None],
        "float": [0.5, 1.0, float("nan")],
        "bool": [True, False],
        "list": [[], [1]],
        "dict": [{}],
        "int": [-1, 2**70],
        "tensor": [torch.ones(3)],
    }
    allowed = {
        "sizes": "str",
        "indices": "str",
        "reorder": "str",
        "shuffle": "bool",
        "drop_last": "bool",
        "measured": "none",
    }
    lists = {"speeds", "before", "consumed"}
    for name, (kind, values) in itertools.product(good, types.items()):
        if kind != allowed.get(name, "list" if name in lists else "none of these"):
            wrong += [(f"{name}={value!r}", {**good, name: value}) for value in values]
    wrong += [(f"version {version}", {**good, "version": version}) for version in (1, 3)]
    for name, values in {
        "speeds": [[], [0.0] * 3, [1.0, -1.0, 1.0], [float("inf")] * 3, ["1"] * 3, [True] * 3, [None], [1.0] * 2**20],
        "batch_size": [0, 2**41, 4],
        "epoch": [2**63],
        "steps": [0, 2, 4, 1000, 2**62],
    }.items():
        wrong += [(f"{name}={value!r:.40}", {**good, name: value}) for value in values]
    for name in ("before", "consumed"):
        flat = good[name]
        bad: list[list[Any]] = [
            flat[:-1],
            flat[1:],
            flat[::-1],
            flat[2:4] + flat[:2] + flat[4:],
            [*flat, flat[-1], flat[-1] + 1],  # touches
            [*flat, SAMPLES, SAMPLES],  # empty
            [*flat[:-1], flat[-2]],
            [*flat[:-1], SAMPLES + 1],
            [-1, *flat[1:]],
            [*flat[:-1], flat[-1] + 1],  # one more sample than the steps hold
            [float(place) for place in flat],
            [str(place) for place in flat],
            [flat[:2], flat[2:]],
            [*flat[:-1], None],
            [False, *flat[1:]],
            [-1, flat[1] - 1, *flat[2:]],
            [*flat[:-2], SAMPLES + 1 - (flat[-1] - flat[-2]), SAMPLES + 1],
            flat[2:],
            [],
            [0, SAMPLES],
        ]
        wrong += [(f"{name}={value!r:.40}", {**good, name: value}) for value in bad]
    wrong += [("a place before the first", {**good, "before": [], "steps": 1, "consumed": [-1, 8]})]
    first, *others = good["before"]
    return [*wrong, ("consumed lacks some of before", {**good, "before": [first + 1, *others, SAMPLES - 1, SAMPLES]})]


MALFORMED = malformed()


@pytest.mark.parametrize("state", [state for _, state in MALFORMED], ids=[what for what, _ in MALFORMED])
def test_a_malformed_state_is_refused_and_changes_nothing(state: Any) -> None:
    other = sampler((3, 3), reorder="window", window=5)
    train(other, 2)
    unchanged = other.state_dict(), tickets(other)
    with pytest.raises((TypeError, ValueError), match="state"):
        other.load_state_dict(state)
    assert (other.state_dict(), tickets(other)) == unchanged


# Copies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))],
    ids=["copy", "deep", "pickle"],
)
def test_a_copy_has_a_progress_of_its_own(copied: Any) -> None:
    one = sampler()
    train(one, 3)
    one.load_state_dict(one.state_dict())
    owner = Owner()
    one.progress.attach(owner, 0)
    train_one = loader(one).steps()
    list(next(train_one))
    other = copied(one)
    assert other.progress is not one.progress
    assert other.progress.last_begun() is None
    assert (other.epoch, other.plan, tickets(other)) == (EPOCH, one.plan, tickets(one))
    assert other.state_dict()["steps"] == 3
    assert one.state_dict()["steps"] == 4
    other.progress.attach(Owner(), 0)  # no optimizer yet
    train(other, 2)
    assert other.state_dict()["steps"] == 5
    other.set_epoch(0)
    assert (one.epoch, one.state_dict()["steps"]) == (EPOCH, 4)


# Parts ----------------------------------------------------------------------------------------------------------------


def test_positions_need_neither_torch_nor_horovod() -> None:
    program = 'import sys; sys.modules["torch"] = sys.modules["horovod"] = None; import chronica_hvd.position'
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_consumed_places_against_brute_force() -> None:
    random = np.random.default_rng(0)
    for _ in range(2000):
        samples = int(random.integers(1, 30))
        before = np.sort(random.choice(samples, int(random.integers(0, samples + 1)), replace=False))
        segment = Segment(samples, int(random.integers(1, 9)), bool(random.integers(2)), as_intervals(before.tolist()))
        left = [place for place in range(samples) if place not in set(before.tolist())]
        found = segment.left()
        assert (list(range(samples)) if found is None else found.tolist()) == left
        full, rest = divmod(len(left), segment.global_batch)
        assert segment.steps == full + (rest > 0 and not segment.drop_last)
        for steps in range(segment.steps + 1):
            order = random.permutation(left).astype(np.int64)
            for places, consumed in (
                (left, segment.consumed_in_order(steps)),
                (order.tolist(), segment.consumed_with(order, steps)),
            ):
                taken = {*before.tolist(), *places[: steps * segment.global_batch]}
                expected = taken if steps < segment.steps else set(range(samples))
                assert consumed == as_intervals(sorted(expected))


def as_intervals(places: list[int]) -> tuple[int, ...]:
    joined: list[int] = []
    for place in places:
        if joined and joined[-1] == place:
            joined[-1] += 1
        else:
            joined += [place, place + 1]
    return tuple(joined)


@pytest.mark.parametrize("may_repeat", [False, True])
def test_places_of_entries(may_repeat: bool) -> None:
    random = np.random.default_rng(1)
    for _ in range(200):
        count = int(random.integers(1, 40))
        samples = random.integers(0, 9, count) if may_repeat else random.permutation(count)
        entries = random.permutation(samples)[: random.integers(0, count + 1)]
        left = np.sort(random.choice(100, count, replace=False))
        places = entry_places(entries, samples, left, may_repeat)
        whole = entry_places(entries, samples, None, may_repeat)
        assert left[whole].tolist() == places.tolist()
        assert samples[whole].tolist() == entries.tolist()
        assert len(set(whole.tolist())) == len(entries)
        for sample in set(entries.tolist()):
            first = np.flatnonzero(samples == sample)[: (entries == sample).sum()]
            assert whole[entries == sample].tolist() == first.tolist()


def test_an_iterator_that_is_not_begun_changes_no_state() -> None:
    stopped = sampler()
    steps = loader(stopped).steps()
    for _ in range(3):
        list(next(steps))
    state = stopped.state_dict()
    assert state["steps"] == 3
    begun_never = loader(stopped).steps()
    assert stopped.state_dict() == state
    list(next(steps))
    assert stopped.state_dict()["steps"] == 4
    del begun_never
