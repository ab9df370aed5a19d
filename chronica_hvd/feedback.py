"""Wiring: closes the loop. What the ranks have measured becomes the cost of what is planned next, and a report."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from chronica_hvd.blocks import BLOCK_STEPS
from chronica_hvd.cost import CostModel
from chronica_hvd.course import Course
from chronica_hvd.measured import Measured, Place
from chronica_hvd.planner import Planner
from chronica_hvd.report import EpochReport
from chronica_hvd.telemetry import StepTimes, Telemetry, gathered
from chronica_hvd.tickets import OpenStep
from chronica_hvd.timing import Timing
from chronica_hvd.user_warning import warn
from chronica_hvd.world import World


class Feedback:
    """Between an optimizer's times and the sampler's plans.

    All ranks call it with the same rows at the same steps, and so come to the same cost and the same plans.

    Parameters
    ----------
    given
        Who plans with the cost that was given: where the measured one begins, and what remains if it has no plan.
    measured
        The cost that follows what was measured; ``None``: plans do not follow.
    blocks
        So many blocks of steps make a refresh within an epoch; ``None``: none is made there.
    on_report
        Is given each epoch's :class:`EpochReport`.

    Attributes
    ----------
    is_wanted
        Whether this rank has a use for what is told.
    is_agreed
        Whether any rank has, as far as the ranks have told one another.
    """

    def __init__(
        self,
        given: Planner,
        measured: Measured | None,
        blocks: int | None = None,
        on_report: Callable[[EpochReport], object] | None = None,
    ) -> None:
        cost = given.workload.cost
        self._default = cost if isinstance(cost, CostModel) else CostModel()
        self._given = given
        self._measured = measured or Measured(self._default)
        self._plans = measured is not None
        self._blocks = blocks
        self._on_report = on_report
        self.is_wanted = self._plans or on_report is not None
        self.is_agreed = self.is_wanted
        self._leader: Timing | None = None
        self._telemetry: Telemetry | None = None
        self._places: tuple[Place, ...] | None = None
        self._course: Course | None = None
        self._window = range(0)  # the steps that were told of last
        self._is_due = False  # a fit
        self._steps_at_once = 1  # that an update finishes
        self._waits: list[float] = []  # the smallest of each step since the last fit, in ns
        self._last_backwards: list[float] = []  # how long the allreduce could overlap with the last backward pass there
        self._times: list[StepTimes] = []  # of the epoch so far
        self._report: EpochReport | None = None

    # Told by the sampler and by optimizers. ---------------------------------------------------------------------------

    def lead(self, timing: Timing, world: World) -> None:
        """Have the times of an optimizer count: the one wrapped last. Of several, each has a part of the compute."""
        self._leader = timing
        self._telemetry = Telemetry(timing, world)

    def is_led_by(self, timing: Timing | None) -> bool:
        """Whether these are the times that count; the same on every rank."""
        return timing is not None and timing is self._leader

    def begin(self, course: Course) -> None:
        """Follow a loop over the loader from its begin."""
        self.report()  # of an epoch whose last step was synchronized, and not made by the optimizer
        self._course = course
        self._window = range(course.start, course.start)
        self._times.clear()
        if self._telemetry is not None:
            self._telemetry.begin()

    def planner(self, planner: Planner) -> Planner:
        """Return who plans from now on: this ``planner``, unless what was measured has changed the cost."""
        model = self._model(planner)
        if not self._plans or model is planner.workload.cost:
            return planner
        try:
            return planner.with_cost(model)
        except ValueError as error:
            warn(f"the measured cost is not used, but the one before it: {error}")
            return planner

    # Told by the leading optimizer, in synchronize(). -----------------------------------------------------------------

    @contextlib.contextmanager
    def telling(self, closing: list[OpenStep]) -> Iterator[NDArray[np.float64]]:
        """Yield what this rank has to tell the others when it finishes these steps; its loader waits meanwhile.

        It tells of all steps before these, and of the epoch's last one as well.
        """
        assert self._course is not None
        assert self._telemetry is not None
        last = closing[-1]
        end = last.ticket.step + 1 if last.ticket.is_last else closing[0].ticket.step
        self._window = range(self._window.stop, max(self._window.stop, end))
        self._steps_at_once = max(self._steps_at_once, len(closing))
        # Fits take tens of milliseconds, so only where they are used; and at a loop's begin, of what others have left.
        is_due = not self._window or last.ticket.is_last
        if self._blocks is not None:
            is_due |= self._window.stop // BLOCK_STEPS % self._blocks == 0
        self._is_due = is_due and self.is_agreed
        with self._course.holding():
            model = self._model(self._course.planner) if self._is_due else None
            yield self._telemetry.row(self._window, last.micro_batches, self._course.granted, model)

    def follow(self, rows: NDArray[np.float64], closing: list[OpenStep]) -> None:
        """Take in what all ranks have told, (ranks, telemetry.ROW), while :meth:`telling`."""
        assert self._course is not None
        told = gathered(rows, len(self._window))
        self._places = told.places
        if not self.is_agreed:
            return
        if self._on_report is not None:
            self._times.append(told.times)
        waits = np.fmin.reduce(told.times.wait, axis=1)
        # Of an update of several steps nobody knows which of them the allreduce overlaps with.
        self._waits += (waits if self._steps_at_once == 1 else waits * np.nan).tolist()
        self._last_backwards += self._planned_overlaps(told.times)
        if self._is_due:
            self._measured.follow(told.summaries, told.places, self._waits, self._last_backwards)
            self._waits, self._last_backwards = [], []
            if self._blocks is not None:
                self._refresh(told.granted)
        ticket = closing[-1].ticket
        if ticket.is_last and self._on_report is not None:
            self._report = self._make_report(ticket.epoch)

    def report(self) -> None:
        """Hand the report over, if the epoch's last step is made."""
        report, self._report = self._report, None
        if report is not None and self._on_report is not None:
            self._on_report(report)

    # ------------------------------------------------------------------------------------------------------------------

    def _model(self, planner: Planner) -> CostModel:
        """Return what was measured as a cost, the same on every rank."""
        speeds = planner.workload.speeds
        return self._measured.model(self._default, self._places, len(speeds), speeds)

    def _refresh(self, granted: int) -> None:
        """Plan what no rank has been granted anew, if what was measured has changed the cost."""
        assert self._course is not None
        planner = self.planner(self._course.planner)
        if planner is not self._course.planner:
            self._course.renew(planner, granted, self._given)

    def _make_report(self, epoch: int) -> EpochReport:
        assert self._course is not None
        steps = range(self._course.start, self._window.stop)
        stretches = list(self._course.stretches(steps))
        loads = [leg.planned.plan.loads[of_leg.start - leg.first :][: len(of_leg)] for leg, of_leg in stretches]
        # A plan deals samples to ranks by their sizes: by its own model's errors a rank would look slow or fast.
        model = self._model(self._course.planner)
        times = StepTimes(*map(np.concatenate, zip(*self._times, strict=True)))
        expected = self._course.expected(steps, model)
        return EpochReport.from_times(epoch, *times, np.concatenate(loads), expected=expected)

    def _planned_overlaps(self, times: StepTimes) -> list[float]:
        """Return how long the allreduce could overlap with the last backward pass in each step, as planned, in ns."""
        assert self._course is not None
        overlaps: list[float] = []
        for leg, of_leg in self._course.stretches(self._window):
            rows = slice(of_leg.start - leg.first, of_leg.stop - leg.first)
            loads, tails = leg.planned.plan.loads[rows], leg.planned.plan.tails[rows]
            overlap = loads.max(axis=1) - (loads - tails).max(axis=1)
            first = of_leg.start - self._window.start
            overlaps += (overlap * _ratio(times.compute[first : first + len(of_leg)], loads)).tolist()
        return overlaps


def _ratio(measured: NDArray[np.float64], planned: NDArray[np.float64]) -> float:
    """Return nanoseconds per unit of a plan, taken to be right on the whole; NaN: unknown. The same bits everywhere."""
    is_known = ~np.isnan(measured)
    total = math.fsum(planned[is_known].tolist())
    return math.fsum(measured[is_known].tolist()) / total if total > 0.0 else math.nan
