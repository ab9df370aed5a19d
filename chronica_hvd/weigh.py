"""Weigh: multiply a rank's gradient by its weight before it is accumulated and sent."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from chronica_hvd import _core
from chronica_hvd.blocks import BLOCK_STEPS
from chronica_hvd.gather import compare_plans
from chronica_hvd.progress import Progress, StepTicket
from chronica_hvd.world import World

#: Marks a parameter's gradient accumulator as weighed; it lives as long as the optimizer that marked it.
_MARK = "chronica_hvd.weighed"


class Weigher:
    """Applies the weight of the micro-batch at work to every gradient that reaches a parameter.

    The hooks sit before the accumulation (so gradients of several batches may have different weights) and before
    Horovod's own hooks, which send what has been accumulated. ``torch.autograd.grad`` does not pass them.

    Parameters
    ----------
    progress
        Which micro-batch is at work.
    world
        The ranks whose plans must agree.
    name
        Tells this optimizer's collectives from those of others; the same on every rank.
    """

    def __init__(self, progress: Progress, world: World, name: str) -> None:
        self._progress = progress
        self._world = world
        self._name = name
        self._at_work: StepTicket | None = None
        self._pass_weight = _core.PassWeight(self)
        self._followed: set[int] = set()  # backward passes of this step whose end will be told
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._expect_passes: Callable[[int, bool], None] = lambda passes, anew: None
        self._accumulators: list[Any] = []  # hooks live as long as these nodes are held

    def watch(
        self, parameters: Iterable[torch.nn.Parameter], expect_passes: Callable[[int, bool], None] | None = None
    ) -> None:
        """Weigh the gradients of these parameters from now on.

        ``expect_passes`` is told before a step's first gradient is accumulated how many backward passes there will be,
        and whether the step before it was given up.
        """
        self._expect_passes = expect_passes or self._expect_passes
        for parameter in parameters:
            if parameter.requires_grad:
                node = _accumulator(parameter)
                node.metadata[_MARK] = True
                node.register_prehook(functools.partial(self._pass_weight.apply, parameter))
                self._accumulators.append(node)

    def begin_pass(self, backward_pass: int) -> float:
        """Return the weight of a backward pass, from within it; passes within one come back to the outer one."""
        with self._lock:
            weight, step, place = self._progress.work(backward_pass)
            if step is not self._at_work:
                self._expect_passes(len(step.weights), self._at_work is not None)
                self._at_work = step
            if backward_pass not in self._followed:
                self._followed.add(backward_pass)
                try:  # have autograd say when the pass is through
                    ended = functools.partial(self._progress.end_compute, place)
                    torch.autograd.Variable._execution_engine.queue_callback(ended)
                except RuntimeError:
                    pass  # where it cannot, synchronize() is taken for the end
        return weight

    def refuse_unwatched(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Raise a RuntimeError if a trainable parameter is not weighed; on all ranks alike, and before any collective.

        A cast or a move replaces a parameter's gradient accumulator, and with it our hook and Horovod's.
        """
        # Looking at an accumulator takes longer than all the rest; a gradient that came through our hook says as much.
        unsure = self._pass_weight.unreached(parameters)
        if any(_MARK not in _accumulator(parameter).metadata for parameter in unsure if parameter.requires_grad):
            raise RuntimeError(
                "a trainable parameter is not weighed: it was cast, moved, unfrozen or added after "
                "chronica_hvd.DistributedOptimizer wrapped the optimizer. Do that before wrapping (parameters that are "
                "trainable when wrapped may be frozen and unfrozen later)"
            )

    def refuse_incomplete(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Raise a RuntimeError if micro-batches of the step at work were not taken or had no backward pass.

        Or if gradients are there that no backward pass of it has brought: they were never weighed.
        """
        self._progress.refuse_incomplete()
        if self._progress.is_untouched and any(_has_gradient(parameter) for parameter in parameters):
            raise RuntimeError(
                "there are gradients, but none came through backward() in this step, so they are not weighed: use "
                "loss.backward() rather than to set .grad, and to skip a step call zero_grad() before"
            )

    @property
    def is_step_open(self) -> bool:
        """Whether a step has begun that is not finished, by a backward pass or by taking its first micro-batch."""
        return self._at_work is not None or self._progress.is_surely_begun

    def end_compute(self) -> None:
        """Note that the step's compute is over, if autograd has not said so."""
        self._progress.end_unended_compute()

    def compare_plans(self) -> None:
        """In the first step of every block, make sure that all ranks hold the same plan.

        Raises
        ------
        RuntimeError
            They do not; on every rank.
        """
        ticket = self._progress.oldest
        if ticket is not None and ticket.step % BLOCK_STEPS == 0:
            compare_plans(self._world, self._name, ticket, self._progress.finished)

    def finish_step(self, synchronize_ns: int = 0, finished_ns: int = 0) -> None:
        """Note that the gradients of the step at work have been combined, how long that took and when it was."""
        self._at_work = None
        self._followed.clear()
        self._pass_weight.forget()
        self._progress.finish(synchronize_ns, finished_ns)


def refuse_weighed(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise a ValueError if a parameter is weighed already: its gradient would be weighed twice."""
    if any(_MARK in _accumulator(parameter).metadata for parameter in parameters if parameter.requires_grad):
        raise ValueError(
            "a parameter already belongs to another chronica_hvd.DistributedOptimizer, so its gradient would be "
            "weighed twice; wrap each parameter once (to wrap anew, delete that optimizer and call gc.collect())"
        )


def _accumulator(parameter: torch.nn.Parameter) -> Any:
    """Return the node that adds to ``parameter.grad``, the same one as long as somebody holds it."""
    view: Any = parameter.expand_as(parameter).grad_fn
    return view.next_functions[0][0]


def _has_gradient(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter has a gradient other than 0."""
    gradient = parameter.grad
    if gradient is None:
        return False
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())
