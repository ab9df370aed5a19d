"""Wiring: which steps the loop has taken from the loader and the optimizer has not finished yet."""

from __future__ import annotations

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
    with its step, so it stays right whatever is planned meanwhile.
    """

    def __init__(self) -> None:
        self._open: deque[StepTicket] = deque()
        self._iteration = 0
        self._finished: StepTicket | None = None

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
        self._open.append(ticket)

    def current(self, lookahead: int) -> StepTicket:
        """Return the step that a backward pass now belongs to: the oldest that is not finished.

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
        if len(self._open) > 1 + lookahead:
            raise RuntimeError(
                f"{len(self._open)} steps were taken from the loader since the last optimizer.step(), so the weight of "
                f"this gradient is unknown (lookahead={lookahead} allows {1 + lookahead}). Train on every batch taken; "
                "if a wrapper reads ahead, say by how much: DistributedOptimizer(..., lookahead=1)"
            )
        return self._open[0]

    def finish(self) -> None:
        """Note that the optimizer has finished the oldest open step, if there is one."""
        if self._open:
            self._finished = self._open.popleft()

    @property
    def oldest(self) -> StepTicket | None:
        """The oldest open step."""
        return self._open[0] if self._open else None

    @property
    def latest(self) -> StepTicket | None:
        """The step at work: the oldest open one, or the one finished last."""
        return self.oldest or self._finished
