"""Gather: the mean over a whole evaluation of what each rank logs."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from chronica_hvd import checks
from chronica_hvd.gather import add_up, as_tensor, horovods_world
from chronica_hvd.sampler import BatchSampler
from chronica_hvd.tickets import OpenStep, StepTicket

#: Process set → numbers of its means, which are made in the same order on every rank of it.
_numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)


class Mean:
    """The exact mean of what all ranks log, over an evaluation or any number of steps.

    Each value counts by what its micro-batch counts in the loss (``loss_weight``), however the samples are spread over
    steps, ranks and micro-batches; the mean of each step's :func:`average` would count the short last step too much::

        mean = Mean(sampler)  # once; reset() before the next evaluation
        for step in loader.steps():
            for batch in step:
                mean.add(loss_fn(model(batch)))
        print(mean.result())

    Sums are kept in float64, where the values are, without waiting for a device.

    Parameters
    ----------
    sampler
        The :class:`BatchSampler` whose batches the values belong to. Every rank makes its means in the same order.

    Raises
    ------
    TypeError
        ``sampler`` is not a BatchSampler.
    """

    def __init__(self, sampler: BatchSampler) -> None:
        if not isinstance(sampler, BatchSampler):
            raise TypeError(
                "Mean needs the sampler whose batches the values belong to, a chronica_hvd.BatchSampler, "
                f"not {sampler!r} of type {type(sampler).__name__}"
            )
        self._sampler = sampler
        self._number = next(_numbers[getattr(sampler.world.process_set, "process_set_id", 0)])
        self.reset()

    def reset(self) -> None:
        """Forget all values, to begin the next evaluation."""
        self._sum: torch.Tensor | None = None  # of value · amount; None: no value yet
        self._amount = 0.0
        self._last: tuple[StepTicket, int] | None = None  # the micro-batch of the last value
        self._plan: str | None = None  # of the values; of several epochs, and so plans, the last value's
        self._has_several_plans = False
        self._are_amounts_given: bool | None = None

    def add(self, value: Any, amount: Any = None) -> None:
        """Add a value of the micro-batch at work. Nothing is communicated: ranks may differ in how often they add.

        Call it after taking the micro-batch and before taking the next; where a wrapper reads ahead after
        ``backward()`` and before ``step()``. The value of a filler, or of a micro-batch that counts 0, is ignored, be
        it NaN.

        Parameters
        ----------
        value
            The mean over the micro-batch: a number, or a tensor of any shape, the same in all calls on all ranks.
        amount
            What the value counts, a number of at least 0, where neither the sampler's ``loss_weight`` nor
            ``optimizer.set_weight`` has said it: for instance the number of valid tokens that the value is the mean of.
            All ranks give amounts, or none.

        Raises
        ------
        TypeError
            ``value`` is neither a number nor a tensor, or ``amount`` is no number.
        ValueError
            The shape is not that of the values before; ``amount`` is negative, missing with ``loss_weight="sum"``, or
            given where it was not before, or the other way round.
        RuntimeError
            No micro-batch is at work, or it has a value already.
        """
        single = as_tensor(value)
        step, place = self._sampler.progress.micro_batch()
        if self._last is not None and self._last[0] is step.ticket and self._last[1] == place:
            raise RuntimeError(
                f"this Mean has a value of micro-batch {place} of step {step.ticket.step} already: add one value "
                "for each, between taking it and taking the next, and give every metric a Mean of its own"
            )
        if self._sum is not None and single.shape != self._sum.shape:
            raise ValueError(
                f"the values must have one shape: {tuple(self._sum.shape)} before, now {tuple(single.shape)}"
            )
        counted = _amount(step, place, amount)
        is_given = self._are_amounts_given if step.ticket.is_filler else amount is not None
        if self._are_amounts_given not in (None, is_given):
            raise ValueError(
                "all values of a Mean must be added with an amount, or none; this one is "
                f"{'with' if is_given else 'without'} one, those before were not, and would count in other units"
            )
        total = torch.zeros_like(single, dtype=torch.float64) if self._sum is None else self._sum
        # Never in place: values of torch.inference_mode() and others may follow one another.
        self._sum = total + single.to(total) * counted if counted > 0.0 else total
        self._amount += counted
        self._last = step.ticket, place
        self._are_amounts_given = is_given
        self._has_several_plans |= self._plan not in (None, step.ticket.fingerprint)
        self._plan = step.ticket.fingerprint

    def result(self) -> Any:
        """Return the mean of all values that any rank has added so far; NaN where nothing counted.

        A collective: every rank calls it, also one that has added nothing. More values may be added afterwards.

        Returns
        -------
        A float for numbers and for tensors of one number without dimensions; else a tensor of the values' shape,
        float64, on the CPU.

        Raises
        ------
        ValueError
            On every rank alike: the values' shapes differ between ranks, or some have given amounts.
        RuntimeError
            On every rank alike: the ranks' plans differ, or they have not made their means in the same order. On this
            one: the sampler's ranks were given by hand and are not those that Horovod runs.
        """
        world = horovods_world(self._sampler.world)
        shape = sums = None
        if self._sum is not None:
            shape = self._sum.shape
            sums = torch.cat([self._sum.reshape(-1).cpu(), torch.tensor([self._amount], dtype=torch.float64)])
        # Of several plans the ranks may have added to different ones.
        plan = None if self._has_several_plans else self._plan
        shape, sums = add_up(world, self._number, plan, self._are_amounts_given, shape, sums)
        if shape is None or sums is None:
            return math.nan
        # 0 ÷ 0 is NaN.
        return (sums[:-1] / sums[-1]).reshape(shape) if shape else (sums[0] / sums[1]).item()


def _amount(step: OpenStep, micro_batch: int, given: Any) -> float:
    """Return what a value of a micro-batch counts: as given, or as its samples do in the loss."""
    ticket = step.ticket
    amount = None if given is None else checks.real("amount", given, least=0.0)
    if ticket.is_filler:
        return 0.0
    if amount is not None:
        return amount
    if math.isnan(ticket.unit):
        raise ValueError(
            'with loss_weight="sum" nothing says what a value counts: give the mean over the micro-batch and how much '
            "it is the mean of, mean.add(total / number, amount=number)"
        )
    return step.weights[micro_batch] / ticket.unit if ticket.unit else 0.0
