"""Weigh: how many backward passes Horovod is to await before it sends a gradient."""

from __future__ import annotations

from typing import Any

import torch

from chronica_hvd.tickets import OpenStep


class PassCount:
    """Has Horovod send each gradient in its last backward pass of an update, and not before.

    Parameters
    ----------
    optimizer
        Horovod's.
    per_update
        ``backward_passes_per_step``: so many steps, or so many losses of each micro-batch, make one update.
    """

    def __init__(self, optimizer: Any, per_update: int) -> None:
        self._optimizer = optimizer
        self._per_update = per_update
        self._steps = 0  # begun in this update
        self._of_each = 1  # passes of each micro-batch

    def begin(self, step: OpenStep, *, is_first: bool, is_anew: bool) -> None:
        """Note that a micro-batch's first backward pass begins, before any gradient of it is accumulated.

        ``is_first``: in its update; ``is_anew``: the update before was given up half way.
        """
        optimizer = self._optimizer
        optimizer._synchronized = False  # as an update leaves it that was synchronized and not made, by GradScaler say
        place = step.reached - 1
        if is_first:
            self._steps, self._of_each = 1, 1
            # Further steps, or losses, have at least one pass each; that of which there are more adds them itself.
            expected = step.micro_batches + self._per_update - 1
        else:
            done = optimizer.backward_passes_per_step - min(optimizer._allreduce_delay.values())
            self._of_each = max(1, done)
            self._steps += place == 0
            later = max(0, self._per_update - self._steps * self._of_each)
            expected = (step.micro_batches - place) * self._of_each + later
        if is_anew or self._per_update > 1 or optimizer.backward_passes_per_step != expected:
            optimizer.set_backward_passes_per_step(expected)


def fill_other_layouts(optimizer: Any) -> None:
    """Give parameters that had no gradient on this rank zeros of their own layout, as gradients of others have it.

    Horovod would give them contiguous ones, and torch warns when a gradient of another layout is added to those.
    """
    for parameter in optimizer._requires_update:
        if parameter.grad is None and not parameter.is_contiguous():
            parameter.grad = torch.zeros_like(parameter)


def complete_groups(optimizer: Any) -> None:
    """Have Horovod send the groups in which a parameter had no gradient on this rank, with zeros for that.

    Horovod would send their other gradients one by one, while ranks where all had gradients send the whole group: none
    would ever end.
    """
    if not optimizer._p_to_group:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer._requires_update and optimizer._allreduce_delay[parameter] > 0:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                optimizer._allreduce_delay[parameter] = 1
                optimizer._make_hook(parameter)()
