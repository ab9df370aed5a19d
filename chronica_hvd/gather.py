"""Gather: every collective of ours, each with a name and a fixed shape."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from typing import Any, Protocol

import torch

from chronica_hvd.progress import Progress, StepTicket
from chronica_hvd.world import World, horovod


class _Sampler(Protocol):
    """What :func:`average` needs to know of a sampler."""

    world: World
    progress: Progress


def compare_plans(world: World, name: str, ticket: StepTicket, finished: int) -> None:
    """Compare what all ranks are at; another plan, epoch, step or number of finished steps is an error on every rank.

    Raises
    ------
    RuntimeError
        On every rank alike; the message names the ranks and what they hold.
    """
    if world.size == 1:
        return
    # The upper half would not fit int64; 63 bits of a hash are as good as 64.
    own = torch.tensor([[int(ticket.fingerprint, 16) >> 1, ticket.epoch, ticket.step, finished]], dtype=torch.int64)
    every = horovod().allgather(own, name=f"chronica.plan.{name}", process_set=world.process_set)
    held: dict[tuple[int, ...], list[int]] = {}
    for rank, row in enumerate(every.tolist()):
        held.setdefault(tuple(row), []).append(rank)
    if len(held) > 1:
        lines = [
            f"ranks {', '.join(map(str, ranks))}: plan {2 * plan:016x}, epoch {epoch}, step {step}, {made} steps made"
            for (plan, epoch, step, made), ranks in held.items()
        ]
        raise RuntimeError(
            "the ranks do not hold the same plan or are not at the same step, so their weights would be wrong. "
            + "; ".join(lines)
            + ". Give BatchSampler the same sizes, batch size, cost, seed, epoch and options on every rank (the ranks' "
            "own fits of a cost differ: gather the records first), and leave a loop early on all ranks or on none."
        )


def average(value: Any, sampler: _Sampler) -> Any:
    """Return the mean over the global batch of what each rank logs as the mean over its own batch.

    A collective: every rank calls it, once per step it wants logged, after taking the batch and before taking the next
    (where a wrapper reads ahead: between ``backward()`` and ``step()``). Without an optimizer it serves evaluation;
    then the ranks' plans are compared in the first call of each loop over the loader.

    With micro-batches it is called after the last one of the step, with a list of one value for each::

        losses = []
        for batch in step:
            loss = loss_fn(model(batch))
            loss.backward()
            losses.append(loss.detach())
        mean = average(losses, sampler)

    The values count by the weights of their micro-batches, as the gradients do; one of weight 0 is ignored, be it NaN.
    With ``loss_weight="sum"`` it is the mean over the ranks of each one's sum.

    Parameters
    ----------
    value
        This rank's number or tensor (any shape, the same on all ranks), or a list or tuple of such, one per
        micro-batch.
    sampler
        The :class:`BatchSampler` whose batch it belongs to.

    Returns
    -------
    A float for numbers; for tensors one of their shape and floating dtype (float64 for integers), without gradient.

    Raises
    ------
    TypeError
        ``value`` is neither a number nor a tensor nor a list of them; ``sampler`` is not a BatchSampler.
    ValueError
        There are more or fewer values than micro-batches, or they differ in shape.
    RuntimeError
        No batch was taken yet, or more than the optimizer was told of, or not all of the step; the ranks' plans
        differ; or the sampler's ranks were given by hand and are not those that Horovod runs, so that there is nobody
        to average with.
    """
    values = list(value) if isinstance(value, list | tuple) else [value]
    given = [_as_tensor(single) for single in values]
    if not isinstance(getattr(sampler, "progress", None), Progress):
        raise TypeError(
            "average needs the sampler whose batch the value belongs to, a chronica_hvd.BatchSampler, "
            f"not {sampler!r} of type {type(sampler).__name__}"
        )
    step = sampler.progress.latest()
    step.refuse_untaken("average() was called")
    weights = step.ticket.weights
    if len(given) != len(weights):
        raise ValueError(
            f"step {step.ticket.step} has {len(weights)} micro-batches on this rank, but {len(given)} "
            f"{'value was' if len(given) == 1 else 'values were'} given; give a list of one value for each micro-batch"
        )
    if any(single.shape != given[0].shape for single in given):
        raise ValueError(f"the values must have one shape, not {', '.join(str(tuple(one.shape)) for one in given)}")
    world = _horovods(sampler.world)
    result_dtype = functools.reduce(torch.promote_types, [single.dtype for single in given])
    # Horovod cannot send bfloat16, and half precision would lose what averaging gains.
    own = torch.zeros_like(given[0], dtype=torch.promote_types(result_dtype, torch.float32)).reshape(-1)
    for single, weight in zip(given, weights, strict=True):
        if weight != 0.0:
            own = own + single.to(own).reshape(-1) * weight
    if world.size > 1:
        if sampler.progress.must_compare():
            compare_plans(world, "average", step.ticket, sampler.progress.finished)
        hvd = horovod()
        own = hvd.allreduce(own, op=hvd.Average, name="chronica.average", process_set=world.process_set)
    if not any(isinstance(single, torch.Tensor) for single in values):
        return own.item()
    return own.reshape(given[0].shape).to(result_dtype)


def _as_tensor(value: Any) -> torch.Tensor:
    """Return a number or tensor as a tensor of a floating dtype, without gradient."""
    if isinstance(value, torch.Tensor) and not value.is_complex():
        return value.detach() if value.is_floating_point() else value.detach().double()
    if isinstance(value, numbers.Real):
        return torch.tensor(float(value), dtype=torch.float64)
    raise TypeError(f"value must be a real number or tensor, not {value!r} of type {type(value).__name__}")


def _horovods(world: World) -> World:
    """Return the world with Horovod's process set, which a world given by hand lacks."""
    if world.size == 1 or world.process_set is not None:
        return world
    hvd = horovod()
    if not hvd.is_initialized() or (hvd.rank(), hvd.size()) != (world.rank, world.size):
        raise RuntimeError(
            f"this sampler was told by hand to be rank {world.rank} of {world.size}, which is not how Horovod "
            "runs: there is nobody to average with"
        )
    return dataclasses.replace(world, process_set=hvd.global_process_set)
