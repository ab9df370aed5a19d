"""Gather: every collective of ours, each with a name and a fixed shape."""

from __future__ import annotations

import numbers
from typing import Any, Protocol

import torch

from chronica_hvd.world import World, horovod


class _Weighted(Protocol):
    """What :func:`average` needs to know of a sampler."""

    @property
    def weight(self) -> float: ...

    @property
    def world(self) -> World: ...


def compare_plans(world: World, name: str, fingerprint: str, epoch: int, step: int) -> None:
    """Compare the plans of all ranks; ranks with another plan, epoch or step are an error on every rank.

    Raises
    ------
    RuntimeError
        On every rank alike; the message names the ranks and what they hold.
    """
    if world.size == 1:
        return
    # The upper half would not fit int64; 63 bits of a hash are as good as 64.
    own = torch.tensor([[int(fingerprint, 16) >> 1, epoch, step]], dtype=torch.int64)
    every = horovod().allgather(own, name=f"chronica.plan.{name}", process_set=world.process_set)
    held: dict[tuple[int, ...], list[int]] = {}
    for rank, row in enumerate(every.tolist()):
        held.setdefault(tuple(row), []).append(rank)
    if len(held) > 1:
        lines = [
            f"ranks {', '.join(map(str, ranks))}: plan {2 * plan:016x}, epoch {epoch}, step {step}"
            for (plan, epoch, step), ranks in held.items()
        ]
        raise RuntimeError(
            "the ranks do not hold the same plan, so their weights would be wrong. "
            + "; ".join(lines)
            + ". Give BatchSampler the same sizes, batch size, seed, epoch and options on every rank."
        )


def average(value: Any, sampler: _Weighted) -> Any:
    """Return the mean over the global batch of what each rank logs as the mean over its own batch.

    A collective: every rank calls it, once per step it wants logged, after taking the batch and before taking the next
    (where a wrapper reads ahead: between ``backward()`` and ``step()``). Without an optimizer it serves evaluation.
    The ranks' values count by the weights of the step (``sampler.weight``), as their gradients do; the value of a rank
    of weight 0 is ignored, be it NaN. With ``loss_weight="sum"`` it is the plain mean over the ranks.

    Parameters
    ----------
    value
        This rank's number or tensor (any shape, the same on all ranks).
    sampler
        The :class:`BatchSampler` whose batch it belongs to.

    Returns
    -------
    A float for a number; for a tensor one of its shape and floating dtype (float64 for integers), without gradient.

    Raises
    ------
    TypeError
        ``value`` is neither a number nor a tensor.
    RuntimeError
        No batch was taken yet, or more than the optimizer was told of; or the sampler's ranks were given by hand
        and are not those that Horovod runs, so that there is nobody to average with.
    """
    if isinstance(value, torch.Tensor) and not value.is_complex():
        given = value.detach()
    elif isinstance(value, numbers.Real):
        given = torch.tensor(float(value), dtype=torch.float64)
    else:
        raise TypeError(f"value must be a real number or tensor, not {value!r} of type {type(value).__name__}")
    result_dtype = given.dtype if given.is_floating_point() else torch.float64
    # Horovod cannot send bfloat16, and half precision would lose what averaging gains.
    own = given.to(torch.promote_types(result_dtype, torch.float32)).reshape(-1)
    own = own * sampler.weight if sampler.weight != 0.0 else torch.zeros_like(own)
    world = sampler.world
    if world.size > 1:
        hvd = horovod()
        process_set = world.process_set
        if process_set is None:  # given by hand
            if not hvd.is_initialized() or (hvd.rank(), hvd.size()) != (world.rank, world.size):
                raise RuntimeError(
                    f"this sampler was told by hand to be rank {world.rank} of {world.size}, which is not how Horovod "
                    "runs: there is nobody to average with"
                )
            process_set = hvd.global_process_set
        own = hvd.allreduce(own, op=hvd.Average, name="chronica.average", process_set=process_set)
    return own.reshape(given.shape).to(result_dtype) if isinstance(value, torch.Tensor) else own.item()
