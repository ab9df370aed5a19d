"""Wiring: between the loader, which hands steps out, and the optimizers that work on them."""

from __future__ import annotations

import itertools
import weakref

from chronica_hvd.course import Course
from chronica_hvd.cursor import Cursor
from chronica_hvd.feedback import Feedback
from chronica_hvd.tickets import OpenStep, StepTicket
from chronica_hvd.timing import Timing

#: Those whose last batch was taken as for training, should be weighed, and was not so far.
_unweighed: weakref.WeakSet[Progress] = weakref.WeakSet()


def is_unweighed() -> bool:
    """Whether a batch was taken as for training that nobody has weighed."""
    return bool(_unweighed)


class Progress:
    """What the loop over a sampler's loader has taken; the sampler's link to its optimizers.

    The loader hands micro-batches out, each optimizer finishes their steps in the same order; neither knows the other.

    Attributes
    ----------
    data
        Tells data sets apart, as far as the loader can.
    feedback
        What the times of an optimizer are given to; ``None``: nobody wants them.
    """

    def __init__(self, feedback: Feedback | None = None) -> None:
        self.data = 0
        self.feedback = feedback
        self._iteration = 0
        self._numbers = itertools.count()
        self._number = 0  # of the step handed out last
        self._alone = Cursor(None)  # of a loop without an optimizer
        self._has_had_optimizer = False  # which, unlike whether one lives still, all ranks agree on
        self._cursors: list[tuple[weakref.ref[object], Cursor]] = []
        self._compared = 0  # the iteration whose plan was compared over the ranks last, without an optimizer
        self._handed_out: StepTicket | None = None
        self._given_up: StepTicket | None = None
        self._ended_epoch: int | None = None

    def attach(self, owner: object, lookahead: int, timing: Timing | None = None, passes: int = 1) -> Cursor:
        """Give an optimizer its cursor, which is told of the steps as long as the owner lives."""

        def finished(ticket: StepTicket, is_given_up: bool) -> None:
            self._finished(cursor, ticket, is_given_up)

        cursor = Cursor(lookahead, passes, timing, finished)
        cursor.begin(self._iteration)
        if not self._followers():  # what was taken already is the optimizer's
            cursor.open, self._alone.open = self._alone.open, cursor.open
        self._cursors.append((weakref.ref(owner), cursor))
        self._has_had_optimizer = True
        return cursor

    # Told by the loader. ----------------------------------------------------------------------------------------------

    def begin(self, course: Course | None = None) -> int:
        """Start an iteration over the loader and forget what an earlier one left; returns its number."""
        self._iteration += 1
        self._handed_out = self._given_up = None
        for cursor in self._all():
            cursor.begin(self._iteration)
        if self.feedback is not None and course is not None:
            self.feedback.begin(course)
        return self._iteration

    def hand_out(self, iteration: int, ticket: StepTicket, data_wait_ns: int = 0, *, is_training: bool = False) -> None:
        """Note that the loop takes a step's next micro-batch, for which it waited so long.

        ``is_training``: gradients may follow, as far as that can be told.

        Raises
        ------
        RuntimeError
            A newer iteration has begun: with two at once nobody could say which batch a gradient belongs to. Or the
            step was given up.
        """
        if iteration != self._iteration:
            raise RuntimeError(
                "a newer iteration over this sampler's loader has begun, so this one cannot go on: whose batch a "
                "gradient belongs to would be unknown. For a look at some batches give a second sampler and loader"
            )
        if ticket is self._given_up:
            raise RuntimeError(
                f"optimizer.skip_step() gave step {ticket.step} up, so no more of its micro-batches can be taken: "
                "leave the loop over them (break)"
            )
        if ticket is not self._handed_out:
            self._handed_out, self._number = ticket, next(self._numbers)
            if not self._has_had_optimizer and is_training and any(weight != 1.0 for weight in ticket.weights):
                _unweighed.add(self)
        for cursor in self._all():
            cursor.take(ticket, self._number, data_wait_ns)

    def end(self, iteration: int, epoch: int) -> None:
        """Note that the loader has no further step of this epoch."""
        if iteration == self._iteration:
            self._ended_epoch = epoch
            for cursor in self._all():
                cursor.end()

    def is_given_up(self, ticket: StepTicket) -> bool:
        """Whether the rest of a step is not wanted any more."""
        return ticket is self._given_up

    def would_repeat(self, epoch: int) -> bool:
        """Whether an optimizer was given this epoch to its end the last time."""
        return epoch == self._ended_epoch and bool(self._followers())

    # Asked by the sampler and by ``average``. -------------------------------------------------------------------------

    def latest(self) -> OpenStep:
        """Return the step that what is computed now belongs to: the one at work, or the one just finished.

        Raises
        ------
        RuntimeError
            There is none, or (after reading ahead) more than one step comes into question.
        """
        return self._latest().latest()

    def micro_batch(self) -> tuple[OpenStep, int]:
        """Return the step of the micro-batch at work, and its place there; a RuntimeError as :meth:`latest`."""
        return self._latest().micro_batch()

    @property
    def weight(self) -> float:
        """The factor of the micro-batch at work; a RuntimeError as :meth:`latest`."""
        _unweighed.discard(self)
        return self._latest().weight

    def last_begun(self) -> StepTicket | None:
        """Return the step that the loop has got last in this iteration; it stays after the loop's end."""
        ahead = [cursor for cursor in self._followers() if cursor.lookahead]
        return ahead[0].begun if ahead else self._handed_out

    def must_compare(self) -> bool:
        """Whether nobody has compared the plan of this iteration over the ranks yet; the same on every rank.

        With an optimizer it does so; without one, say yes once per iteration.
        """
        if self._has_had_optimizer or self._compared == self._iteration:
            return False
        self._compared = self._iteration
        return True

    # ------------------------------------------------------------------------------------------------------------------

    def _followers(self) -> list[Cursor]:
        """Return the cursors whose optimizers live."""
        if any(owner() is None for owner, _ in self._cursors):
            self._cursors = [(owner, cursor) for owner, cursor in self._cursors if owner() is not None]
        return [cursor for _, cursor in self._cursors]

    def _all(self) -> list[Cursor]:
        return self._followers() or [self._alone]

    def _latest(self) -> Cursor:
        """Return the cursor of the optimizer that has got furthest; of several on one step, the first."""
        cursors = self._all()
        if len(cursors) == 1:
            return cursors[0]
        return max(cursors, key=lambda cursor: cursor.furthest)

    def _finished(self, finisher: Cursor, ticket: StepTicket, is_given_up: bool) -> None:
        if is_given_up:
            self._given_up = ticket
        for cursor in self._followers():
            if cursor is not finisher:
                cursor.leave_to_others(ticket)
