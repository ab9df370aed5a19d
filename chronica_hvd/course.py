"""Sample: the way of one loop through an epoch, by a plan that measured costs may replace on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chronica_hvd.blocks import BLOCK_STEPS
from chronica_hvd.cost import CostModel, cost_of_work
from chronica_hvd.planned import Planned
from chronica_hvd.planner import Planner
from chronica_hvd.plans import Plan
from chronica_hvd.tickets import StepTicket


class Leg(NamedTuple):
    """A stretch of a course that one plan covers, until the next leg begins.

    ``first`` is the step of the course that is step 0 of the plan.
    """

    first: int
    planned: Planned


class Course:
    """The steps of one loop over the loader, numbered through however often they are planned anew.

    Loaders fetch ahead, each rank's by another amount. So steps are granted in blocks, and only what no rank has been
    granted may be planned anew.

    Parameters
    ----------
    epoch
        The epoch it goes through.
    planned
        What is left of the epoch, with its plan.
    start
        The step of that plan to begin with.

    Attributes
    ----------
    granted
        The step that nobody has asked for so far, nor any behind it.
    """

    def __init__(self, epoch: int, planned: Planned, start: int = 0) -> None:
        self.epoch = epoch
        self.start = self.granted = start
        self._legs = [Leg(0, planned)]
        self._granting = threading.Lock()

    @property
    def end(self) -> int:
        """The step behind the last one, the same on every rank and for every plan."""
        return self._legs[0].planned.segment.steps

    @property
    def planner(self) -> Planner:
        """Who was to make the newest plan."""
        return self._legs[-1].planned.planner

    @property
    def plan(self) -> Plan:
        """The newest plan: of what was left when it was made."""
        return self._legs[-1].planned.plan

    @property
    def cost(self) -> CostModel | NDArray[np.float64]:
        """What a sample costs, as the newest plan believes."""
        return self._legs[-1].planned.maker.workload.cost

    def leg_at(self, step: int) -> Leg:
        """Return the leg that a step belongs to."""
        return next(leg for leg in reversed(self._legs) if leg.first <= step)

    def stretches(self, steps: range) -> Iterator[tuple[Leg, range]]:
        """Yield consecutive steps leg by leg."""
        for leg, following in zip(self._legs, [*self._legs[1:], None], strict=True):
            end = self.end if following is None else following.first
            of_leg = range(max(steps.start, leg.first), min(steps.stop, end))
            if of_leg:
                yield leg, of_leg

    def expected(self, steps: range, model: CostModel) -> NDArray[np.float64]:
        """Return (steps, ranks) what a model expects, on ranks that are as fast as the plan was told."""
        expected = [np.empty((0, self.plan.ranks))]
        for leg, of_leg in self.stretches(steps):
            plan, work = leg.planned.plan, leg.planned.maker.workload
            first = (of_leg.start - leg.first) * plan.ranks
            parts = plan.parts[first : first + len(of_leg) * plan.ranks + 1]
            offsets = plan.offsets[parts[0] : parts[-1] + 1]
            amounts = work.works(
                plan.indices[offsets[0] : offsets[-1]], offsets - offsets[0], plan.lengths[parts[0] : parts[-1]]
            )
            costs = np.add.reduceat(cost_of_work(model, *amounts), parts[:-1] - parts[0])
            expected.append(costs.reshape(-1, plan.ranks) / np.asarray(work.speeds))
        return np.concatenate(expected)

    def holds(self, ticket: StepTicket) -> bool:
        """Whether a step that was handed out is one of this course."""
        return ticket.epoch == self.epoch and self.leg_at(ticket.step).planned.plan.fingerprint == ticket.fingerprint

    def batches(self, rank: int) -> Iterator[list[list[int]]]:
        """Yield a rank's micro-batches of each step, as dataset indices."""
        for leg, steps in self._blocks():
            plan = leg.planned.plan
            of_steps = (plan.batches(step - leg.first, rank) for step in steps)
            yield from [[batch.tolist() for batch in of_step] for of_step in of_steps]

    def tickets(self, rank: int) -> Iterator[StepTicket]:
        """Yield what a rank's optimizer will need to know of each step.

        They are made, as batches are, so many as are granted at once: one by one, between a model's computations, each
        would find nothing of its own in the processor's caches, and take several times as long.
        """
        for leg, steps in self._blocks():
            yield from [self._ticket(leg, step, rank) for step in steps]

    def _ticket(self, leg: Leg, step: int, rank: int) -> StepTicket:
        planner, plan, own = leg.planned.maker, leg.planned.plan, step - leg.first
        part = plan.part(own, rank)
        divisor = float(plan.divisors[own])
        divides_by_own = planner.options.normalize != "epoch"
        return StepTicket(
            self.epoch,
            step,
            weights=tuple(plan.factors[part].tolist()),
            fingerprint=plan.fingerprint,
            work=tuple(map(planner.workload.work, plan.batches(own, rank), plan.lengths[part].tolist())),
            unit=plan.ranks / divisor if divisor else float(divides_by_own),
            is_filler=bool(plan.counts[own, rank] == 0),
            divides_by_own=divides_by_own,
            is_last=step == self.end - 1,
        )

    def _blocks(self) -> Iterator[tuple[Leg, range]]:
        """Yield the steps from the start on, so many as are granted at once, each time with their leg."""
        step = self.start
        while step < self.end:
            with self._granting:
                leg = self.leg_at(step)
                later = [other.first for other in self._legs if other.first > step]
                end = min((step // BLOCK_STEPS + 1) * BLOCK_STEPS, self.end, *later)
                self.granted = max(self.granted, end)
            yield leg, range(step, end)
            step = end

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Grant nothing more for a while, so that ``granted`` stays true while the ranks tell it one another."""
        with self._granting:
            yield

    def renew(self, planner: Planner, granted: int, fallback: Planner | None = None) -> None:
        """Plan what no rank has been ``granted`` anew, by another planner; to be called within :meth:`holding`.

        With ``reorder="window"`` from the next window on: samples have been moved between the steps of this one.
        """
        legs = [leg for leg in self._legs if leg.first < granted] or self._legs[:1]
        last = legs[-1]
        stride = planner.options.window if planner.options.reorder == "window" else 1
        first = last.first + -(-(granted - last.first) // stride) * stride
        if first < self.end:
            left = dataclasses.replace(last.planned.segment, before=last.planned.consumed(first - last.first))
            planned = Planned(planner, last.planned.epoch, left, fallback)
            self._legs = [*legs, Leg(first, planned)]
