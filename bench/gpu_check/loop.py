"""A training loop reduced to what weigher and timing see of it; no Horovod is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from chronica_hvd.progress import Progress
from chronica_hvd.tickets import StepTicket
from chronica_hvd.timing import Timing, Work
from chronica_hvd.weigh import Weigher
from chronica_hvd.world import World


class Loop:
    """Loader and optimizer in one.

    Parameters
    ----------
    parameters
        Those that are trained; their gradients are weighed.
    timing
        Who times the steps; ``None``: nobody.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], timing: Timing | None) -> None:
        self.parameters = list(parameters)
        self._progress = Progress()
        self._weigher = Weigher(self._progress, World(0, 1), "gpu_check", timing=timing)
        self._weigher.watch(self.parameters)
        self._iteration = self._progress.begin()

    def step(self, number: int, work: tuple[Work, ...], micro_batch: Callable[[Callable[[], None]], None]) -> None:
        """Train a step: ``micro_batch(take)`` is called for each, and calls ``take`` when the loop takes it."""
        ticket = StepTicket(0, number, tuple(1.0 / len(work) for _ in work), "", work)
        for _ in work:
            micro_batch(lambda: self._progress.hand_out(self._iteration, ticket))
        self._weigher.begin_synchronize(self.parameters)
        self._weigher.finish_step()
        for parameter in self.parameters:
            parameter.grad = None
