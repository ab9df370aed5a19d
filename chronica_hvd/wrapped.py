"""Weigh: what our optimizer does in place of Horovod's own methods."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from chronica_hvd import checks
from chronica_hvd.gather import average_of_step
from chronica_hvd.passes import complete_groups, fill_other_layouts
from chronica_hvd.tickets import OpenStep, StepTicket
from chronica_hvd.timing import Timing
from chronica_hvd.weigh import Weigher
from chronica_hvd.world import World

#: What is at work without a sampler: every rank counts the same.
_UNWEIGHED = OpenStep(StepTicket(0, 0, (1.0,), ""))


def replace_methods(optimizer: Any, weigher: Weigher | None, timing: Timing | None, name: str) -> None:
    """Give Horovod's optimizer our methods; ``name`` is part of its collectives' names.

    Horovod makes a class for each object; subclassing that recurses for ever (it calls super(self.__class__, self)), so
    the class itself gets what is ours.
    """
    horovods = type(optimizer)
    inner: Any = horovods.__mro__[1]  # the class of the torch optimizer
    horovods_synchronize, horovods_step = horovods.synchronize, horovods.step

    def combine(self: Any, is_given_up: bool = False) -> None:
        """Combine the gradients over the ranks; the step remains open."""
        if weigher is not None:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            weigher.begin_synchronize(parameters, is_given_up=is_given_up)
        fill_other_layouts(self)
        complete_groups(self)
        horovods_synchronize(self)
        if weigher is not None:
            weigher.end_synchronize()

    def finish(self: Any, is_given_up: bool = False) -> None:
        begin = time.monotonic_ns()
        combine(self, is_given_up)
        if weigher is not None:
            end = time.monotonic_ns()
            weigher.finish_step(end - begin, end, is_given_up=is_given_up)

    def synchronize(self: Any) -> None:
        """Wait for the gradients of all ranks; once per step the step counts as finished."""
        # After a step that was synchronized and not made _synchronized is still set: hence both questions.
        if not self._synchronized or (weigher is not None and weigher.is_step_open):
            finish(self)
        else:
            horovods_synchronize(self)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Combine the gradients and make the update.

        A closure computes the loss and its gradients: zero_grad(), backward() for each micro-batch of the step in order
        (taken before), and returns the loss, or with micro-batches a list of one for each. It is called as often as
        the optimizer asks, on every rank alike, and the optimizer gets the mean loss of the global batch. So
        optimizers that decide by the loss, like LBFGS, decide alike on all ranks.
        """
        if closure is None:
            return horovods_step(self)
        if not callable(closure):
            raise TypeError(f"closure must be a function that returns the loss, or None, not {closure!r}")
        if not self._should_synchronize:
            raise RuntimeError(
                "step(closure) cannot be made under skip_synchronize(): the closure's gradients are combined each time "
                "it has been called. To change them before the update, make the step without a closure"
            )

        def evaluate() -> Any:
            if weigher is not None:
                weigher.begin_closure()
            loss = closure()
            combine(self)
            if loss is None:
                return None
            at_work = _UNWEIGHED if weigher is None else weigher.latest()
            return average_of_step(loss, at_work, World.from_horovod(self.process_set), f"chronica.closure.{name}")

        loss = inner.step(self, evaluate)
        self._synchronized = False
        if weigher is not None:
            weigher.finish_step()
        return loss

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Forget the gradients: as ``torch.optim.Optimizer.zero_grad``."""
        checks.boolean("set_to_none", set_to_none)
        if self._handles:
            raise RuntimeError(
                "zero_grad() was called after backward() but before step() or synchronize(), while gradients are on "
                "their way. Make the step first; or give it up, on every rank, by optimizer.skip_step()"
            )
        inner.zero_grad(self, set_to_none)

    def skip_step(self: Any) -> None:
        """Give the step at work up: its gradients are dropped, and no update is made. On every rank, or on none."""
        finish(self, is_given_up=True)
        self._synchronized = False
        inner.zero_grad(self)

    def set_weight(self: Any, amount: float) -> None:
        """Say the true loss weight of the micro-batch at work: see :func:`DistributedOptimizer`."""
        if weigher is None:
            raise RuntimeError("set_weight() needs a sampler: DistributedOptimizer(..., sampler=sampler)")
        weigher.set_weight(amount)

    def supports_amp_scaling(self: Any) -> bool:
        """Answer what ``GradScaler.step`` asks before it unscales gradients; the only place where we hear of it."""
        if self._handles:
            raise RuntimeError(
                "GradScaler.step() was called while gradients are on their way, so that ranks would unscale other "
                "values and might skip alone. Call optimizer.synchronize() first, then scaler.step(optimizer) within "
                "optimizer.skip_synchronize()"
            )
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    for method in (synchronize, step, zero_grad, skip_step, set_weight):
        setattr(horovods, method.__name__, method)
    horovods.weight = property(lambda _: 1.0 if weigher is None else weigher.weight)
    horovods._step_supports_amp_scaling = property(supports_amp_scaling)
    horovods.timing = property(lambda _: timing)
