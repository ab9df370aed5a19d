"""Weigh: true loss weights, known only when a batch was read, in place of the planned ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from chronica_hvd.world import World, horovod


class TrueAmounts:
    """Sends a step's true loss weight with its gradients, and divides these by it in place of the planned one.

    With the planned factors of a step adding up to ``ranks``, gradients are sums of w · g, w = ranks · W ÷ ΣW planned.
    With true amounts in the place of W the factors add up to another number; dividing the averaged gradient by their
    mean over the ranks makes it Σ W · g ÷ ΣW of the true ones.

    Parameters
    ----------
    world
        The ranks that combine their gradients.
    name
        Of the collective.
    optimizer
        Horovod's: the sum is reduced in the same way as its gradients, so that Horovod sends them together.
    parameters
        Whose gradients they are; the sum is of the widest of their types.

    Attributes
    ----------
    is_used
        Whether ``set_weight`` was called on this rank.
    is_agreed
        Whether all ranks know that it is used, and so send theirs in every step.
    """

    def __init__(self, world: World, name: str, optimizer: Any, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._world = world
        self._name = f"chronica.amount.{name}"
        self._optimizer = optimizer
        self._parameters = parameters
        dtypes = [parameter.dtype for parameter in parameters]
        self._dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        self._handle: Any = None
        self.is_used = False
        self.is_agreed = False

    def send(self, weights: Sequence[float]) -> None:
        """Send the sum of this rank's factors in the step at work, if all ranks do and it was not sent before."""
        if not self.is_agreed or self._handle is not None:
            return
        hvd = horovod()
        own = torch.full((1,), sum(weights), dtype=self._dtype, device=self._parameters[0].device)
        optimizer = self._optimizer
        divide = optimizer.gradient_predivide_factor if optimizer.op == hvd.Average else 1.0
        self._handle = hvd.allreduce_async(
            own,
            name=self._name,
            op=optimizer.op,
            prescale_factor=1.0 / divide,
            postscale_factor=divide,
            process_set=self._world.process_set,
        )

    def forget(self) -> None:
        """Take no notice of a sum that was sent for a step that has been given up."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            horovod().synchronize(handle)

    def correct(self) -> None:
        """Divide the combined gradients by the true loss weight, if it was sent."""
        if self._handle is None:
            return
        hvd = horovod()
        handle, self._handle = self._handle, None
        mean = hvd.synchronize(handle)[0]
        if self._optimizer.op == hvd.Sum:
            mean = mean / self._world.size
        # Where nothing counts all gradients are 0, and stay so.
        factor = torch.where(mean > 0.0, 1.0 / mean, 0.0)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))
