"""Wiring: which steps the loop has taken from the loader and the optimizer has not finished yet."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTicket:
    """A step handed to the loop: what the optimizer needs to weigh its gradient."""

    epoch: int
    step: int
    weight: float
    fingerprint: str


class Progress:
    """The steps between loader and optimizer, oldest first.

    The loader hands steps out, the optimizer finishes them in the same order; neither knows the other. A weight travels
    with its step, so it stays right whatever is planned meanwhile. Without an optimizer (evaluation) only the step
    taken last is kept.
    """

    def __init__(self) -> None:
        self._open: deque[StepTicket] = deque()
        self._finished: StepTicket | None = None  # the last one, until the loop turns to another
        self._iteration = 0
        self._owner: weakref.ref[object] | None = None  # of an optimizer
        self._lookahead: int | None = None  # None without an optimizer

    def attach(self, owner: object, lookahead: int) -> None:
        """Note who finishes the steps, and how many further ones a wrapper may have taken ahead.

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

    def begin(self) -> int:
        """Start an iteration over the loader and forget what an earlier one left; returns its number."""
        self._open.clear()
        self._iteration += 1
        return self._iteration

    def hand_out(self, iteration: int, ticket: StepTicket) -> None:
        """Note that the loop takes a step.

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
        if self._lookahead is None:
            self._open.clear()
        self._open.append(ticket)
        self._finished = None

    def end(self, iteration: int) -> None:
        """Note that the loader has no further step; what was read ahead remains to be worked on.

        What was finished is forgotten: a value asked about after the loop may belong to any of its steps.
        """
        if iteration == self._iteration:
            self._finished = None
            if self._lookahead is None:
                self._open.clear()

    def work(self) -> StepTicket:
        """Return the step that a gradient arriving now belongs to: the oldest that is not finished.

        Raises
        ------
        RuntimeError
            No step is open, or more than ``1 + lookahead`` are.
        """
        if not self._open:
            raise RuntimeError(
                "backward() was called, but no step has been taken from this sampler's loader since the last "
                "optimizer.step(): take one batch per optimizer step from a chronica_hvd.DataLoader with "
                "batch_sampler=sampler, the sampler that was given to DistributedOptimizer"
            )
        self._finished = None
        return self._oldest_unless_too_many()

    def finish(self) -> None:
        """Note that the optimizer has finished the oldest open step, if there is one."""
        if self._open:
            self._finished = self._open.popleft()

    @property
    def oldest(self) -> StepTicket | None:
        """The oldest open step."""
        return self._open[0] if self._open else None

    def latest(self) -> StepTicket:
        """Return the step that what is computed now belongs to: the one at work, or the one just finished.

        Raises
        ------
        RuntimeError
            There is none, or (after reading ahead) more than one step comes into question.
        """
        if self._finished is not None and self._open:
            raise RuntimeError(
                "after optimizer.step() a loop that reads ahead has its next step open already, so which of the two is "
                "meant is unknown: ask between backward() and optimizer.step()"
            )
        if self._open:
            return self._oldest_unless_too_many()
        if self._finished is None:
            raise RuntimeError(
                "no step is at work: none has been taken from this sampler's chronica_hvd.DataLoader yet, or the loop "
                "over it has ended. Ask for weight or average inside the loop, once per step"
            )
        return self._finished

    def _oldest_unless_too_many(self) -> StepTicket:
        lookahead = self._lookahead or 0
        if len(self._open) > 1 + lookahead:
            raise RuntimeError(
                f"{len(self._open)} steps were taken from the loader since the last optimizer.step(), so the weight of "
                f"this gradient or value is unknown (lookahead={lookahead} allows {1 + lookahead}). Train on every "
                "batch taken, or skip one by optimizer.synchronize() on every rank; to evaluate, use another sampler "
                "and loader; if a wrapper reads ahead, say by how much: DistributedOptimizer(..., lookahead=1)"
            )
        return self._open[0]
