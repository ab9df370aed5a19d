"""Sample: what is left of an epoch, with its plan."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chronica_hvd.planner import Planner
from chronica_hvd.plans import Plan
from chronica_hvd.position import Intervals, Segment, entry_places
from chronica_hvd.user_warning import warn


class Planned:
    """A segment of an epoch and its plan, which is made when first asked for.

    Parameters
    ----------
    planner
        Who is to plan.
    epoch, segment
        What.
    fallback
        Who plans if ``planner``, which goes by a measured cost, finds no plan; on every rank alike.
    """

    def __init__(self, planner: Planner, epoch: int, segment: Segment, fallback: Planner | None = None) -> None:
        self.planner = planner
        self.epoch = epoch
        self.segment = segment
        self._fallback = fallback
        self._planning = threading.Lock()  # a wrapper may read ahead in a thread of its own
        self._made: tuple[Plan, Planner] | None = None

    @property
    def plan(self) -> Plan:
        """The plan of what is left."""
        return self._plan_and_maker()[0]

    @property
    def maker(self) -> Planner:
        """Who has made the plan: the planner, or its fallback."""
        return self._plan_and_maker()[1]

    def _plan_and_maker(self) -> tuple[Plan, Planner]:
        with self._planning:
            if self._made is None:
                self._made = self._make()
        return self._made

    def _make(self) -> tuple[Plan, Planner]:
        left = self.segment.left()
        try:
            return self.planner.plan(self.epoch, left), self.planner
        except ValueError as error:
            if self._fallback is None or self._fallback is self.planner:
                raise
            warn(f"the measured cost is not used in epoch {self.epoch}, but the one given: {error}")
            return self._fallback.plan(self.epoch, left), self._fallback

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_planning"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._planning = threading.Lock()

    @functools.cached_property
    def _places(self) -> NDArray[np.int64]:
        """(entries,) the place of each entry of the plan in the epoch's drawn order, but for the last step.

        After that one all is consumed; and only the last one may have fillers, which repeat samples.
        """
        planner, left = self.planner, self.segment.left()
        entries = self.plan.indices[: (self.segment.steps - 1) * planner.global_batch]
        may_repeat = planner.workload.indices is not None
        return entry_places(entries, planner.order(self.epoch, left), left, may_repeat)

    def consumed(self, steps: int) -> Intervals:
        """Return which places of the epoch's drawn order are consumed after so many steps, in all."""
        if self.planner.keeps_order or steps in (0, self.segment.steps):
            return self.segment.consumed_in_order(steps)
        return self.segment.consumed_with(self._places, steps)
