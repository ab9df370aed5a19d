"""Wiring: the steps that an optimizer has been handed and not finished, and which of them a gradient belongs to."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

from chronica_hvd.blocks import BLOCK_STEPS
from chronica_hvd.tickets import OpenStep, StepTicket
from chronica_hvd.timing import Place, Timing

#: The number of a step that is worked on once more.
UNTIMED = -1


class Cursor:
    """How far one optimizer has come with the steps that the loader hands out, oldest first.

    The weights travel with their step, so they stay right whatever is planned meanwhile. Without an optimizer
    (evaluation) only the step taken last is kept.

    Parameters
    ----------
    lookahead
        How many further steps a wrapper takes ahead of the loop; ``None`` without an optimizer.
    passes
        So many steps may be open at once for one update (``backward_passes_per_step``).
    timing
        Who times the micro-batches.
    finished
        Told of each step that is finished, and whether it was given up.

    Attributes
    ----------
    finished_steps
        How many steps have been finished so far.
    left_out, idle
        How many of them passed without a backward pass on this rank: with samples that count, and without.
    begun
        The last step of this iteration that the loop has surely got: one that was reached or finished.
    """

    def __init__(
        self,
        lookahead: int | None,
        passes: int = 1,
        timing: Timing | None = None,
        finished: Callable[[StepTicket, bool], None] | None = None,
    ) -> None:
        self.lookahead = lookahead
        self._passes = passes
        self._timing = timing
        self._tell_finished = finished
        self.open: deque[OpenStep] = deque()
        self._last: OpenStep | None = None  # the last finished one, until the loop turns to another
        self._current: OpenStep | None = None  # that of the backward pass below
        self._backward_pass = -1
        self._is_repeating = False
        self._has_ended = False
        self._ahead: int | None = None  # the fewest steps that the loop was ahead of the one finished
        self._taker = 0  # the thread that takes from the loader
        self._iteration = 0
        self._compared: tuple[int, int] | None = None
        self.finished_steps = 0
        self.left_out = 0
        self.idle = 0
        self.begun: StepTicket | None = None

    # Told by the loader. ----------------------------------------------------------------------------------------------

    def begin(self, iteration: int) -> None:
        """Start an iteration over the loader, and forget what an earlier one left."""
        for step in self.open:
            self._count(step)
        self.open.clear()
        self._current, self._last, self._is_repeating = None, None, False
        self._iteration = iteration
        self._has_ended = False
        self.begun = None

    def take(self, ticket: StepTicket, number: int, data_wait_ns: int) -> None:
        """Note that the loop takes the next micro-batch of a step, which is number ``number`` since training began."""
        if not self.open or self.open[-1].ticket is not ticket:
            if self.lookahead is None:
                self.open.clear()
            while self.open and self.open[0].is_left_to_others and not self.open[0].reached:
                self.open.popleft()
            self.open.append(OpenStep(ticket, number))
        step = self.open[-1]
        step.taken += 1
        step.data_wait_ns += data_wait_ns
        self._last = None
        self._taker = threading.get_ident()
        self.time_next()

    def end(self) -> None:
        """Note that the loader has no further step; what was read ahead remains to be worked on.

        What was finished is forgotten: a value asked about after the loop may belong to any of its steps.
        """
        self._last = None
        self._has_ended = True
        if self.lookahead is None:
            self.open.clear()
        elif self.lookahead:
            waiting = [step for step in self.open if not step.reached]
            if len(waiting) > self.lookahead:
                raise RuntimeError(
                    f"the loader has ended with {len(waiting)} steps that had no backward pass, more than "
                    f"lookahead={self.lookahead} explains. If a batch was left out, those after it were weighed with "
                    "another's weight: call optimizer.skip_step() on every rank instead. If the wrapper reads further "
                    "ahead, give a larger lookahead"
                )

    def leave_to_others(self, ticket: StepTicket) -> None:
        """Note that another optimizer has finished a step, so that this one may leave it out.

        Not where a wrapper reads ahead: nobody could say then which of the steps the loop has got is at work here.
        """
        if self.lookahead:
            return
        for step in self.open:
            if step.ticket is ticket:
                step.is_left_to_others = True
        self.time_next()  # what the other one has taken is not this one's compute

    # Told by the optimizer. -------------------------------------------------------------------------------------------

    def work(self, backward_pass: int) -> tuple[float, OpenStep]:
        """Return the factor of a gradient that arrives now, in a backward pass of this number, and its step.

        The gradient belongs to the step taken last, there to the micro-batch taken last. Where a wrapper reads ahead it
        belongs to the oldest step; there, the n-th backward pass belongs to the n-th micro-batch.

        Raises
        ------
        RuntimeError
            No step is open, or more than may be; or its micro-batches and the backward passes do not go by turns.
        """
        if not self.open:
            raise RuntimeError(
                "backward() was called, but no step has been taken from this sampler's loader since the last "
                "optimizer.step(): take one batch per optimizer step from a chronica_hvd.DataLoader with "
                "batch_sampler=sampler, the sampler that was given to DistributedOptimizer. (If the loss is another "
                "optimizer's and has reached this one's parameters, freeze these meanwhile: requires_grad_(False))"
            )
        self._last = None
        current = self._current
        if current is None or backward_pass != self._backward_pass or not self._is_by_number(current):
            current = self.at_work()
            if self._is_by_number(current):
                self._reach_next(current)
            else:
                self._reach_taken(current)
            self._current, self._backward_pass, self.begun = current, backward_pass, current.ticket
        return current.weights[current.reached - 1], current

    def at_work(self) -> OpenStep:
        """Return the step that the next backward pass belongs to; a RuntimeError as :meth:`work`."""
        self.refuse_none()
        if len(self.open) == 1:
            return self.open[0]
        lookahead = self.lookahead or 0
        if len(self.open) > self._passes + lookahead:
            raise RuntimeError(
                f"{len(self.open)} steps were taken from the loader since the last optimizer.step(), so the weight of "
                f"this gradient or value is unknown ({self._allowed()}). Train on every "
                "batch taken, or leave one out by optimizer.skip_step() on every rank; to evaluate, use another "
                "sampler and loader; if a wrapper reads ahead, say by how much: DistributedOptimizer(..., lookahead=1)"
            )
        if lookahead:
            awaited = (step for step in itertools.islice(self.open, self._passes) if not step.is_complete)
            return next(awaited, self.open[min(self._passes, len(self.open)) - 1])
        for step in itertools.islice(self.open, len(self.open) - 1):
            if not (step.is_complete or (step.reached == 0 and step.is_idle)):
                raise RuntimeError(
                    f"step {step.ticket.step} was taken from the loader, but {step.micro_batches - step.reached} of "
                    f"its {step.micro_batches} micro-batches had no backward pass before the next step was taken. Call "
                    "backward() for each before taking the next; if a wrapper reads ahead, say by how much: "
                    "DistributedOptimizer(..., lookahead=1)"
                )
        return self.open[-1]

    def refuse_none(self) -> None:
        """Raise a RuntimeError if no step is open."""
        if not self.open:
            raise RuntimeError(
                "no step is at work: none has been taken from this sampler's chronica_hvd.DataLoader since the last "
                "optimizer.step()"
            )

    def refuse_incomplete(self) -> None:
        """Raise a RuntimeError if only a part of a step to be finished has been worked on, or taken.

        A step may be left out as a whole, without any backward pass.
        """
        closing = self.closing
        for step in closing:
            step.refuse_untaken("optimizer.step() or synchronize() was called")
            step.refuse_unreached()
        if closing and self.lookahead:
            self._refuse_shift(len(closing))

    def finish(self, synchronize_ns: int = 0, finished_ns: int = 0, *, is_given_up: bool = False) -> None:
        """Note that the steps at work are finished, if there are any, and how long the optimizer waited for them."""
        for step in self.closing:
            self.open.popleft()
            self.finished_steps += 1
            self._count(step, is_given_up)
            self._last, self.begun = step, step.ticket
            if self._timing is not None:
                ticket = step.ticket
                times = step.data_wait_ns, synchronize_ns, finished_ns
                self._timing.finish(ticket.epoch, ticket.step, step.micro_batches, *times)
            if self._tell_finished is not None:
                self._tell_finished(step.ticket, is_given_up)
        self._current, self._is_repeating = None, False
        self.time_next()

    def repeat(self) -> None:
        """Have the steps at work worked on by a closure, maybe once more.

        The n-th backward pass then belongs to the n-th micro-batch.
        """
        self._current, self._is_repeating = None, True
        for step in self.closing:
            if step.reached:
                step.reached, step.number = 0, UNTIMED

    def must_compare(self, *, at_end: bool = False) -> bool:
        """Whether the step at work is the first of its iteration or its block that this optimizer works on.

        ``at_end``: or the last of its epoch. The same on every rank; once asked after :meth:`note_compared` it is not.
        """
        if not self.open:
            return False
        return self._compared != self._block() or (at_end and self.closing[-1].ticket.is_last)

    def note_compared(self) -> None:
        """Note that the plan was compared over the ranks in the step at work."""
        self._compared = self._block()

    def set_amount(self, amount: float) -> None:
        """Weigh the micro-batch at work by its true loss weight; a RuntimeError if it had its backward pass."""
        step = self.at_work()
        place = step.reached if self._is_by_number(step) or self.lookahead else step.taken - 1
        if place < step.reached or place >= step.taken:
            raise RuntimeError(
                f"set_weight() was called after the backward pass of micro-batch {step.reached - 1} of step "
                f"{step.ticket.step}, when its gradient was weighed already: call it before backward()"
            )
        step.set_weight(place, 0.0 if step.ticket.is_filler else amount * step.ticket.unit)

    # Times. -----------------------------------------------------------------------------------------------------------

    def end_compute(self, place: Place) -> None:
        """Note that a backward pass of a micro-batch is through."""
        if self._timing is not None:
            self._timing.end(place)
            if self.lookahead or self._is_repeating:
                self.time_next()

    def end_unended_compute(self) -> None:
        """Note that the backward pass of the micro-batch at work is through, if it had one and nobody has said so."""
        for step in self.closing:
            if self._timing is not None and step.reached and self._timing.is_open(step.place):
                self.end_compute(step.place)

    def time_next(self) -> None:
        """Have the time of the micro-batch begin that is the next to be computed, if it is taken already.

        Usually it is the one just taken. Where a wrapper reads ahead it was taken before, and the loop gets it when the
        wrapper has taken another one or, if there is none, when the one before it is through.
        """
        if self._timing is None:
            return
        for step in self.open:
            if step.reached < step.taken and step.number != UNTIMED:
                self._timing.begin((step.number, step.reached), step.ticket.step, step.ticket.work[step.reached])
                return

    # Asked by others. -------------------------------------------------------------------------------------------------

    @property
    def is_surely_begun(self) -> bool:
        """Whether a step is open that the loop has turned to since the last one was finished."""
        return bool(self.open) and (not self.lookahead or self._last is None)

    @property
    def closing_weights(self) -> tuple[float, ...] | None:
        """The factors of all micro-batches of the steps at work; ``None`` where none is at work."""
        closing = self.closing
        return tuple(itertools.chain.from_iterable(step.weights for step in closing)) if closing else None

    @property
    def is_untouched(self) -> bool:
        """Whether a step is open and none has seen a backward pass."""
        return bool(self.open) and not any(step.reached for step in self.open)

    @property
    def leaves_out(self) -> bool:
        """Whether an update now would finish a step of which this rank's samples count, but were not worked on."""
        return any(step.reached == 0 and not step.is_idle for step in self.closing)

    @property
    def oldest(self) -> StepTicket | None:
        """The oldest open step."""
        return self.open[0].ticket if self.open else None

    @property
    def furthest(self) -> int:
        """The number of the newest step here; -1 where there is none."""
        newest = self.open[-1] if self.open else self._last
        return -1 if newest is None else newest.number

    def latest(self) -> OpenStep:
        """Return the step that what is computed now belongs to: the one at work, or the one just finished.

        Raises
        ------
        RuntimeError
            There is none, or (after reading ahead) more than one step comes into question.
        """
        if self._last is not None and self.open:
            raise RuntimeError(
                "after optimizer.step() a loop that reads ahead has its next step open already, so which of the two is "
                "meant is unknown: ask between backward() and optimizer.step()"
            )
        if self.open:
            next_one = self.at_work()
            return self._current if self.lookahead and self._current is not None else next_one
        if self._last is None:
            raise RuntimeError(
                "no step is at work: none has been taken from this sampler's chronica_hvd.DataLoader yet, or the loop "
                "over it has ended. Ask for weight or average inside the loop, once per step"
            )
        return self._last

    def micro_batch(self) -> tuple[OpenStep, int]:
        """Return the step of the micro-batch at work, and its place there; a RuntimeError as :meth:`latest`.

        It is the one taken last or, where a wrapper reads ahead, reached last.
        """
        step = self.latest()
        return step, (max(step.reached, 1) if self.lookahead or self._is_repeating else step.taken) - 1

    @property
    def weight(self) -> float:
        """The factor of the micro-batch at work."""
        step, place = self.micro_batch()
        return step.weights[place]

    # ------------------------------------------------------------------------------------------------------------------

    def _is_by_number(self, step: OpenStep) -> bool:
        """Whether the n-th backward pass is that of the n-th micro-batch, whichever was taken last."""
        if self._is_repeating:
            return step.micro_batches > 1
        return bool(self.lookahead) and (step.micro_batches > 1 or self._passes > 1)

    def _reach_taken(self, step: OpenStep) -> None:
        if step.taken - step.reached > 1:
            raise RuntimeError(
                f"{step.taken - step.reached} micro-batches of step {step.ticket.step} were taken without a "
                "backward pass in between, so the weight of this gradient is unknown. Call backward() for every "
                "micro-batch before taking the next; if a wrapper reads ahead, say so: "
                "DistributedOptimizer(..., lookahead=1)"
            )
        step.reached = step.taken

    def _reach_next(self, step: OpenStep) -> None:
        if step.reached == step.taken:
            raise RuntimeError(
                f"backward() was called once more than micro-batches of step {step.ticket.step} were taken, "
                f"{step.taken}. With a lookahead or a closure and micro-batches, the n-th backward() must be that of "
                "the n-th micro-batch: call it once for each (checkpointing must have use_reentrant=False), or do "
                "without the lookahead"
            )
        step.reached += 1

    @property
    def closing(self) -> list[OpenStep]:
        """The steps that an update now would finish: those worked on, or the oldest, left out as a whole."""
        if len(self.open) <= 1 or (self._passes > 1 and not self.lookahead):
            return list(self.open)
        worked_on = list(itertools.takewhile(lambda step: step.reached > 0, self.open))
        return worked_on or list(itertools.islice(self.open, 1))

    def _refuse_shift(self, closing: int) -> None:
        """Refuse to go on where more steps are ahead than ever: one was left out, and all after it are weighed wrongly.

        A thread of its own reads as far as it comes; how many steps some micro-batches are depends on the step.
        """
        ahead = len(self.open) - closing
        if self._has_ended or self._taker != threading.get_ident():
            return
        if self._ahead is not None and ahead > self._ahead and (self._ahead == 0 or self._is_single):
            raise RuntimeError(
                f"the loop was {self._ahead} steps ahead of the one trained on, and now is {ahead}: a step that was "
                "taken had no backward pass, so that those after it get another's weight. To leave a step out, call "
                "optimizer.skip_step() on every rank; if the wrapper reads ahead unevenly, have it read evenly"
            )
        self._ahead = ahead if self._ahead is None else min(ahead, self._ahead)

    @property
    def _is_single(self) -> bool:
        return all(step.micro_batches == 1 for step in self.open)

    def _block(self) -> tuple[int, int]:
        return self._iteration, self.open[0].ticket.step // BLOCK_STEPS

    def _count(self, step: OpenStep, is_given_up: bool = False) -> None:
        """Count a step that passes without a backward pass on this rank."""
        if step.is_left_to_others or (step.reached and not is_given_up):
            return
        if step.is_idle:
            self.idle += 1
        else:
            self.left_out += 1

    def _allowed(self) -> str:
        passes = f"backward_passes_per_step={self._passes}, " if self._passes > 1 else ""
        return f"{passes}lookahead={self.lookahead or 0} allows {self._passes + (self.lookahead or 0)}"
