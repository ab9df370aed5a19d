"""What a loop goes through when its plan is replaced on the way: every sample once, whatever was granted to whom."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import chronica_hvd as chronica
from chronica_hvd.blocks import BLOCK_STEPS
from chronica_hvd.cost import CostModel
from chronica_hvd.course import Course

RANKS, BATCH_SIZE = 3, 2
SAMPLES = RANKS * BATCH_SIZE * 5 * BLOCK_STEPS + 4  # a short step behind five blocks
SIZES = np.minimum(np.random.default_rng(5).lognormal(4, 1, SAMPLES), 900).astype(int)

MODES: dict[str, dict[str, Any]] = {
    "batch": {},
    "micro-batches": {"micro_batches": "auto", "loss_weight": "sizes"},
    "weights-of-the-epoch": {"loss_weight": "sizes", "normalize": "epoch"},
    "first": {"first": "largest"},
    "drop-last": {"drop_last": True},
    "window": {"reorder": "window", "window": 64},
    "odd-window": {"reorder": "window", "window": 50, "max_moved": 1.0},
    "dynamic": {"policy": "dynamic", "local_batch": "equal", "reorder": "window", "window": 7},
    "indices": {"indices": np.random.default_rng(6).integers(0, SAMPLES, SAMPLES)},
}
every_mode = pytest.mark.parametrize("mode", MODES)

#: As measured costs might become: another shape, and ranks that are slow by turns.
COSTS = [
    CostModel(per_size=1.0, per_size2=0.01, rank_scale=[1, 2, 1]),
    CostModel(per_sample=50.0, rank_scale=[1, 1, 3]),
    CostModel(fixed=400.0, rank_scale=[1.5, 1, 1]),
]


def samplers(mode: str, **options: Any) -> list[chronica.BatchSampler]:
    return [
        chronica.BatchSampler(SIZES, BATCH_SIZE, num_replicas=RANKS, rank=rank, **{**MODES[mode], **options})
        for rank in range(RANKS)
    ]


class Loop:
    """A rank's loop over a course: what its loader has fetched ahead, and what was handed out."""

    def __init__(self, sampler: chronica.BatchSampler, ahead: int) -> None:
        self.course = sampler.begin()
        rank = sampler.world.rank
        self._indices, self._tickets = self.course.batches(rank), self.course.tickets(rank)
        self._ahead = ahead
        self._fetched: list[list[list[int]]] = []

    def step(self) -> tuple[list[list[int]], Any]:
        for _ in range(self._ahead + 1 - len(self._fetched)):
            self._fetched.extend([batch] if (batch := next(self._indices, None)) is not None else [])
        return self._fetched.pop(0), next(self._tickets)


def renew(loops: list[Loop], cost: CostModel) -> None:
    """Do what the ranks do when they have told one another how far they are."""
    granted = max(loop.course.granted for loop in loops)
    for loop in loops:
        with loop.course.holding():
            loop.course.renew(loop.course.planner.with_cost(cost), granted)


def run(mode: str, renewals: dict[int, CostModel], ahead: tuple[int, ...] = (0, 9, 70)) -> list[list[Any]]:
    """Return what all ranks got in each step."""
    loops = [Loop(sampler, depth) for sampler, depth in zip(samplers(mode), ahead, strict=True)]
    taken = []
    for step in range(loops[0].course.end):
        if step in renewals:
            renew(loops, renewals[step])
        taken.append([loop.step() for loop in loops])
    return taken


def real(step: list[Any]) -> Counter[int]:
    return Counter(i for batches, ticket in step if not ticket.is_filler for batch in batches for i in batch)


@every_mode
def test_every_sample_once_and_the_same_plan_on_all_ranks(mode: str) -> None:
    steps = run(mode, {70: COSTS[0], 128: COSTS[1], 130: COSTS[2], 256: COSTS[0]})
    every, epoch = sum(map(real, steps), Counter()), samplers(mode)[0].plan
    assert every == Counter(epoch.indices[: SAMPLES if epoch.steps > 5 * BLOCK_STEPS else None].tolist())
    assert len(steps) == epoch.steps
    for number, step in enumerate(steps):
        assert len({ticket.fingerprint for _, ticket in step}) == 1
        assert [ticket.step for _, ticket in step] == [number] * RANKS
        assert [ticket.is_last for _, ticket in step] == [number == epoch.steps - 1] * RANKS
        for batches, ticket in step:
            assert len(batches) == len(ticket.weights) == len(ticket.work)
    plans = [step[0][1].fingerprint for step in steps]
    assert len(set(plans)) > 1
    if MODES[mode].get("normalize") == "epoch":  # every unit of loss weight counts alike, whenever it was planned
        units = {ticket.unit for step in steps for _, ticket in step}
        assert max(units) - min(units) <= 1e-12 * max(units)


@pytest.mark.parametrize("mode", [name for name in MODES if name != "first"])  # which moves a step by its plan
def test_steps_keep_their_samples(mode: str) -> None:
    options = MODES[mode]
    steps = run(mode, {70: COSTS[0], 130: COSTS[1], 200: COSTS[2]})
    alone = run(mode, {})
    window = options["window"] if options.get("reorder") == "window" else 1
    for first in range(0, len(steps), window):
        together = [sum(map(real, run_[first : first + window]), Counter()) for run_ in (steps, alone)]
        assert together[0] == together[1]


def test_what_was_granted_stays() -> None:
    before, after = run("batch", {}), run("batch", {70: COSTS[0]})
    changed = [i for i, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    # 70 steps ahead of step 70 the third rank's loader has been granted three blocks.
    assert changed[0] >= 3 * BLOCK_STEPS
    assert before[: 3 * BLOCK_STEPS] == after[: 3 * BLOCK_STEPS]
    assert before[3 * BLOCK_STEPS][0][1].fingerprint != after[3 * BLOCK_STEPS][0][1].fingerprint


def test_the_plan_of_what_is_left_is_that_of_the_sampler() -> None:
    every = samplers("batch")
    loops = [Loop(sampler, 0) for sampler in every]
    for _ in range(70):
        for loop in loops:
            loop.step()
    renew(loops, COSTS[0])
    sampler = every[0]
    whole = chronica.plan(SIZES, RANKS, BATCH_SIZE).indices
    order = np.concatenate([np.sort(whole[i : i + 6]) for i in range(0, len(whole), 6)])
    assert sampler.cost == COSTS[0]
    assert sampler.plan.steps == sampler.course.end - 2 * BLOCK_STEPS
    in_steps = [
        np.sort(np.concatenate([b for r in range(RANKS) for b in sampler.plan.batches(s, r)])) for s in range(9)
    ]
    np.testing.assert_array_equal(np.concatenate(in_steps), order[2 * BLOCK_STEPS * 6 :][: 9 * 6])


def test_a_renewal_without_steps_left_changes_nothing() -> None:
    course = Course(0, samplers("batch")[0]._planned)
    plan = course.plan
    course.renew(course.planner.with_cost(COSTS[0]), course.end)
    assert course.plan is plan


def test_a_cost_without_a_plan_leaves_the_one_before() -> None:
    sampler = chronica.BatchSampler(SIZES, BATCH_SIZE, num_replicas=RANKS, rank=0)
    course = sampler.begin()
    planner = course.planner.with_cost(COSTS[0])

    def fails(*_: Any) -> None:
        raise ValueError("no plan")

    planner.plan = fails  # type: ignore[method-assign, assignment]
    course.renew(planner, 64, course.planner)
    with pytest.warns(UserWarning, match="the measured cost is not used in epoch 0, but the one given: no plan"):
        plan = course.plan
    assert plan.steps == course.end - 64
    assert course.cost == CostModel()
