"""Sample: what is left of an epoch, with its plan."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from chronica_hvd.planner import Planner
from chronica_hvd.plans import Plan
from chronica_hvd.position import Intervals, Segment, entry_places
from chronica_hvd.user_warning import warn


class Planned:
    """A segment of an epoch and its plan, which is made when first asked for.

    Where ``planner`` goes by a measured cost and finds no plan, ``fallback`` makes it, on every rank alike.
    """

    def __init__(self, planner: Planner, epoch: int, segment: Segment, fallback: Planner | None = None) -> None:
        self.planner = planner
        self.epoch = epoch
        self.segment = segment
        self._fallback = fallback

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of what is left."""
        left = self.segment.left()
        try:
            return self.planner.plan(self.epoch, left)
        except ValueError as error:
            if self._fallback is None or self._fallback is self.planner:
                raise
            warn(f"the measured cost is not used in epoch {self.epoch}, but the one before it: {error}")
            self.planner = self._fallback
            return self.planner.plan(self.epoch, left)

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
