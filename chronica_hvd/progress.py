"""Wiring: which micro-batches the loop has taken from the loader and the optimizer has not finished yet."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from dataclasses import dataclass

from chronica_hvd.timing import Place, Timing, Work


@dataclass(frozen=True)
class StepTicket:
    """A step as the loader hands it out: what the optimizer needs to weigh its gradients and to time it.

    Attributes
    ----------
    weights, work
        This rank's gradient factors, and what is computed; one each per micro-batch.
    unit
        The factor of one unit of loss weight, ranks ÷ divisor (1 where the divisor is 0); NaN where losses are summed.
    is_filler
        Whether the samples count elsewhere, and here only keep the rank in step.
    """

    epoch: int
    step: int
    weights: tuple[float, ...]
    fingerprint: str
    work: tuple[Work, ...] = ()
    unit: float = 1.0
    is_filler: bool = False


@dataclass
class OpenStep:
    """How far the loop has come with a step: micro-batches taken, and those that a backward pass has reached."""

    ticket: StepTicket
    number: int = 0  # of the steps taken since training began
    taken: int = 0
    reached: int = 0
    data_wait_ns: int = 0
    backward_pass: int = -1  # the one that reached the last of them

    @property
    def place(self) -> Place:
        """Which micro-batch a backward pass has reached last."""
        return self.number, self.reached - 1

    @property
    def micro_batches(self) -> int:
        """How many there are on this rank in this step."""
        return len(self.ticket.weights)

    def refuse_untaken(self, what: str) -> None:
        """Raise a RuntimeError if some micro-batches were not taken yet."""
        if self.taken < self.micro_batches:
            raise RuntimeError(
                f"{what} after {self.taken} of the {self.micro_batches} micro-batches of step {self.ticket.step}: "
                "first take every one: for batch in step: ..."
            )


class Progress:
    """The steps between loader and optimizer, oldest first.

    The loader hands micro-batches out, the optimizer finishes their steps in the same order; neither knows the other.
    The weights travel with their step, so they stay right whatever is planned meanwhile. Without an optimizer
    (evaluation) only the step taken last is kept.

    Attributes
    ----------
    finished
        How many steps the optimizer has finished so far.
    """

    def __init__(self) -> None:
        self._open: deque[OpenStep] = deque()
        self.finished = 0
        self._last: OpenStep | None = None  # the last finished one, until the loop turns to another
        self._newest: StepTicket | None = None  # taken last in the newest iteration
        self._before_open: StepTicket | None = None  # finished last in the newest iteration
        self._iteration = 0
        self._compared = 0  # the iteration whose plan was compared over the ranks last
        self._owner: weakref.ref[object] | None = None  # of an optimizer
        self._lookahead: int | None = None  # None without an optimizer
        self._timing: Timing | None = None
        self._numbers = itertools.count()

    def attach(self, owner: object, lookahead: int, timing: Timing | None = None) -> None:
        """Note who finishes the steps, how many further ones a wrapper may have taken ahead, and who times them.

        Raises
        ------
        NotImplementedError
            An earlier owner is still alive: each step would be finished twice.
        """
        if self._owner is not None and self._owner() not in (None, owner):
            raise NotImplementedError(
                "this sampler already serves another optimizer, and two that share one are not built yet "
                "(to wrap anew, delete that optimizer and call gc.collect())"
            )
        self._owner = weakref.ref(owner)
        self._lookahead = lookahead
        self._timing = timing

    def begin(self) -> int:
        """Start an iteration over the loader and forget what an earlier one left; returns its number."""
        self._open.clear()
        self._newest = self._before_open = None
        self._iteration += 1
        return self._iteration

    def hand_out(self, iteration: int, ticket: StepTicket, data_wait_ns: int = 0) -> None:
        """Note that the loop takes a step's next micro-batch, for which it waited so long.

        Raises
        ------
        RuntimeError
            A newer iteration has begun: with two at once nobody could say which batch a gradient belongs to.
        """
        if iteration != self._iteration:
            raise RuntimeError(
                "a newer iteration over this sampler's loader has begun, so this one cannot go on: whose batch a "
                "gradient belongs to would be unknown. For a look at some batches give a second sampler and loader"
            )
        if not self._open or self._open[-1].ticket is not ticket:
            if self._lookahead is None:
                self._open.clear()
            self._open.append(OpenStep(ticket, next(self._numbers)))
            self._newest = ticket
        self._open[-1].taken += 1
        self._open[-1].data_wait_ns += data_wait_ns
        self._last = None
        self._time_next()

    def end(self, iteration: int) -> None:
        """Note that the loader has no further step; what was read ahead remains to be worked on.

        What was finished is forgotten: a value asked about after the loop may belong to any of its steps.
        """
        if iteration == self._iteration:
            self._last = None
            if self._lookahead is None:
                self._open.clear()

    def last_begun(self) -> StepTicket | None:
        """Return the step that the loop has got last in the newest iteration, also after its end; ``None``: none yet.

        A wrapper that reads ahead has taken steps that the loop has not got. Of these the loop has surely got the
        oldest open one if a backward pass has reached it, else the one before.
        """
        if not self._lookahead or not self._open:
            return self._newest
        return self._open[0].ticket if self._open[0].reached else self._before_open

    def work(self, backward_pass: int) -> tuple[float, StepTicket, Place]:
        """Return what a gradient that arrives now, in a backward pass of this number, belongs to, and its factor first.

        That is the oldest step that is not finished. In it, to the micro-batch taken last; where a wrapper reads
        ahead, the n-th backward pass belongs to the n-th micro-batch.

        Raises
        ------
        RuntimeError
            No step is open, or more than ``1 + lookahead`` are; or its micro-batches and the backward passes do not go
            by turns.
        """
        if not self._open:
            raise RuntimeError(
                "backward() was called, but no step has been taken from this sampler's loader since the last "
                "optimizer.step(): take one batch per optimizer step from a chronica_hvd.DataLoader with "
                "batch_sampler=sampler, the sampler that was given to DistributedOptimizer"
            )
        self._last = None
        step = self._oldest_unless_too_many()
        if not self._lookahead or step.micro_batches == 1:
            if step.taken - step.reached > 1:
                raise RuntimeError(
                    f"{step.taken - step.reached} micro-batches of step {step.ticket.step} were taken without a "
                    "backward pass in between, so the weight of this gradient is unknown. Call backward() for every "
                    "micro-batch before taking the next; if a wrapper reads ahead, say so: "
                    "DistributedOptimizer(..., lookahead=1)"
                )
            step.reached = step.taken
        elif backward_pass != step.backward_pass:
            if step.reached == step.taken:
                raise RuntimeError(
                    f"backward() was called once more than micro-batches of step {step.ticket.step} were taken, "
                    f"{step.taken}. With a lookahead and micro-batches, the n-th backward() must be that of the n-th "
                    "micro-batch: call it once for each (checkpointing must have use_reentrant=False), or do without "
                    "the lookahead"
                )
            step.backward_pass = backward_pass
            step.reached += 1
        return step.ticket.weights[step.reached - 1], step.ticket, step.place

    def refuse_incomplete(self) -> None:
        """Raise a RuntimeError if only a part of the oldest step has been worked on, or taken.

        A step may be skipped as a whole, without any backward pass.
        """
        if not self._open:
            return
        step = self._open[0]
        step.refuse_untaken("optimizer.step() or synchronize() was called")
        if 0 < step.reached < step.micro_batches:
            raise RuntimeError(
                f"optimizer.step() or synchronize() was called, but only {step.reached} of the {step.micro_batches} "
                f"micro-batches of step {step.ticket.step} had a backward pass: call backward() for each, where it "
                "is taken (or for none of the step's, on every rank, to skip the step)"
            )

    def finish(self, synchronize_ns: int = 0, finished_ns: int = 0) -> None:
        """Note that the optimizer has finished the oldest open step, if there is one, and how long it waited for it."""
        if not self._open:
            return
        self.finished += 1
        step = self._last = self._open.popleft()
        self._before_open = step.ticket
        if self._timing is not None:
            ticket = step.ticket
            self._timing.finish(ticket.epoch, ticket.step, step.data_wait_ns, synchronize_ns, finished_ns)
        self._time_next()

    def end_compute(self, place: Place) -> None:
        """Note that a backward pass of a micro-batch is through."""
        if self._timing is not None:
            self._timing.end(place)
            if self._lookahead:
                self._time_next()

    def end_unended_compute(self) -> None:
        """Note that the backward pass of the micro-batch at work is through, if it had one and nobody has said so."""
        if self._timing is None or not self._open or self._open[0].reached == 0:
            return
        if self._timing.is_open(self._open[0].place):
            self.end_compute(self._open[0].place)

    def _time_next(self) -> None:
        """Have the time of the micro-batch begin that is the next to be computed, if it is taken already.

        Usually it is the one just taken. Where a wrapper reads ahead it was taken before, and the loop gets it when the
        wrapper has taken another one or, if there is none, when the one before it is through.
        """
        if self._timing is None:
            return
        for step in self._open:
            if step.reached < step.taken:
                self._timing.begin((step.number, step.reached), step.ticket.step, step.ticket.work[step.reached])
                return

    @property
    def is_surely_begun(self) -> bool:
        """Whether a step is open that the loop has turned to; where a wrapper reads ahead that cannot be told."""
        return bool(self._open) and not self._lookahead

    @property
    def is_untouched(self) -> bool:
        """Whether the oldest open step has seen no backward pass."""
        return bool(self._open) and self._open[0].reached == 0

    @property
    def oldest(self) -> StepTicket | None:
        """The oldest open step."""
        return self._open[0].ticket if self._open else None

    def latest(self) -> OpenStep:
        """Return the step that what is computed now belongs to: the one at work, or the one just finished.

        Raises
        ------
        RuntimeError
            There is none, or (after reading ahead) more than one step comes into question.
        """
        if self._last is not None and self._open:
            raise RuntimeError(
                "after optimizer.step() a loop that reads ahead has its next step open already, so which of the two is "
                "meant is unknown: ask between backward() and optimizer.step()"
            )
        if self._open:
            return self._oldest_unless_too_many()
        if self._last is None:
            raise RuntimeError(
                "no step is at work: none has been taken from this sampler's chronica_hvd.DataLoader yet, or the loop "
                "over it has ended. Ask for weight or average inside the loop, once per step"
            )
        return self._last

    @property
    def weight(self) -> float:
        """The factor of the micro-batch at work; a RuntimeError as :meth:`latest`."""
        return self._weight(self.latest())

    def must_compare(self) -> bool:
        """Whether nobody has compared the plan of this iteration over the ranks yet; the same on every rank.

        With an optimizer it does so; without one, say yes once per iteration.
        """
        if self._lookahead is not None or self._compared == self._iteration:
            return False
        self._compared = self._iteration
        return True

    def _weight(self, step: OpenStep) -> float:
        """Return the factor of the micro-batch at work: taken last or, where a wrapper reads ahead, reached last."""
        return step.ticket.weights[(max(step.reached, 1) if self._lookahead else step.taken) - 1]

    def _oldest_unless_too_many(self) -> OpenStep:
        lookahead = self._lookahead or 0
        if len(self._open) > 1 + lookahead:
            raise RuntimeError(
                f"{len(self._open)} steps were taken from the loader since the last optimizer.step(), so the weight of "
                f"this gradient or value is unknown (lookahead={lookahead} allows {1 + lookahead}). Train on every "
                "batch taken, or skip one by optimizer.synchronize() on every rank; to evaluate, use another sampler "
                "and loader; if a wrapper reads ahead, say by how much: DistributedOptimizer(..., lookahead=1)"
            )
        return self._open[0]
