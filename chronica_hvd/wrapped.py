"""Weigh: what our optimizer does in place of Horovod's own methods."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from chronica_hvd import checks
from chronica_hvd.compression import Carrier
from chronica_hvd.gather import average_of_step
from chronica_hvd.passes import complete_groups, fill_other_layouts
from chronica_hvd.progress import is_unweighed
from chronica_hvd.tickets import OpenStep, StepTicket
from chronica_hvd.timing import Timing
from chronica_hvd.user_warning import warn
from chronica_hvd.waiting import waits_for
from chronica_hvd.weigh import Weigher
from chronica_hvd.world import World

#: What is at work without a sampler: every rank counts the same.
_UNWEIGHED = OpenStep(StepTicket(0, 0, (1.0,), ""))


def replace_methods(
    optimizer: Any, weigher: Weigher | None, timing: Timing | None, carrier: Carrier, name: str
) -> None:
    """Give Horovod's optimizer our methods; ``name`` is part of its collectives' names.

    Horovod makes a class for each object; subclassing that recurses for ever (it calls super(self.__class__, self)), so
    the class itself gets what is ours.
    """
    horovods = type(optimizer)
    inner: Any = horovods.__mro__[1]  # the class of the torch optimizer
    horovods_synchronize, horovods_step = horovods.synchronize, horovods.step
    horovods_load_state_dict = horovods.load_state_dict

    def at_work() -> str:
        ticket = None if weigher is None else weigher.oldest
        return "" if ticket is None else f" of step {ticket.step} of epoch {ticket.epoch}"

    def combine(self: Any, is_given_up: bool = False) -> None:
        """Combine the gradients over the ranks; the step remains open."""
        if not is_given_up:
            carrier.refuse_changed()
        _find_forgotten(self, is_given_up)
        if weigher is not None:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            weigher.begin_synchronize(parameters, is_given_up=is_given_up)
        elif is_unweighed():
            warn(
                "batches of a chronica_hvd.BatchSampler are trained on by an optimizer that does not know it, so their "
                "gradients are not weighed: DistributedOptimizer(..., sampler=sampler). If the loss is weighed by "
                "hand, ask for sampler.weight in every step; if the loop evaluates, put it under torch.no_grad()"
            )
        fill_other_layouts(self)
        complete_groups(self)
        wait(self)

    def wait(self: Any) -> None:
        with waits_for(f"synchronize() or step(){at_work()}"):
            try:
                horovods_synchronize(self)
            finally:
                carrier.forget()
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
            wait(self)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Combine the gradients, make the update, and at an epoch's end report.

        A closure computes the loss and its gradients: zero_grad(), backward() for each micro-batch of the step in order
        (taken before), and returns the loss, or with micro-batches a list of one for each. It is called as often as
        the optimizer asks, on every rank alike, and the optimizer gets the mean loss of the global batch. So
        optimizers that decide by the loss, like LBFGS, decide alike on all ranks.
        """
        if closure is None:
            if weigher is not None and weigher.oldest is None and self._should_synchronize and not self._synchronized:
                raise RuntimeError(
                    "optimizer.step() was called, but no step has been taken from this sampler's loader since the last "
                    "update or skip_step(): it would make that update again, or go on by momentum alone"
                )
            result = horovods_step(self)
            if weigher is not None:
                weigher.report()
            return result
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
            open_step = _UNWEIGHED if weigher is None else weigher.latest()
            return average_of_step(loss, open_step, World.from_horovod(self.process_set), f"chronica.closure.{name}")

        loss = inner.step(self, evaluate)
        self._synchronized = False
        if weigher is not None:
            weigher.finish_step()
            weigher.report()
        return loss

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Forget the gradients: as ``torch.optim.Optimizer.zero_grad``."""
        checks.boolean("set_to_none", set_to_none)
        _refuse_on_their_way(self, "zero_grad()")
        inner.zero_grad(self, set_to_none)

    def load_state_dict(self: Any, *arguments: Any, **named: Any) -> None:
        """Load a state: as ``torch.optim.Optimizer.load_state_dict``."""
        _refuse_on_their_way(self, "load_state_dict()")
        horovods_load_state_dict(self, *arguments, **named)

    def skip_step(self: Any) -> None:
        """Give the step at work up: its gradients are dropped, and no update is made. On every rank, or on none."""
        finish(self, is_given_up=True)
        self._synchronized = False
        inner.zero_grad(self)
        if weigher is not None:
            weigher.report()

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

    for method in (synchronize, step, zero_grad, load_state_dict, skip_step, set_weight):
        setattr(horovods, method.__name__, method)
    horovods.weight = property(lambda _: 1.0 if weigher is None else weigher.weight)
    horovods._step_supports_amp_scaling = property(supports_amp_scaling)
    horovods.timing = property(lambda _: timing)


def _find_forgotten(optimizer: Any, is_given_up: bool) -> None:
    """Raise a RuntimeError if a gradient that is on its way was forgotten; of a step that is given up, make it anew."""
    for key in optimizer._handles:
        for parameter in key if isinstance(key, tuple) else (key,):
            if parameter.grad is None:
                if not is_given_up:
                    raise RuntimeError(
                        "gradients were set to None after backward() and before step() or synchronize(), while they "
                        "were on their way, by model.zero_grad() say: call zero_grad() before the step's first "
                        "backward(); to give the step up, on every rank, call optimizer.skip_step()"
                    )
                parameter.grad = torch.zeros_like(parameter)


def _refuse_on_their_way(optimizer: Any, what: str) -> None:
    if optimizer._handles:
        raise RuntimeError(
            f"{what} was called after backward() but before step() or synchronize(), while gradients are on their way. "
            "Make the step first; or give it up, on every rank, by optimizer.skip_step()"
        )
