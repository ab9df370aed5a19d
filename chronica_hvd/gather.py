"""Gather: what ranks ask of one another, by collectives that each have a name and a fixed shape."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import numbers
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from chronica_hvd.progress import Progress
from chronica_hvd.tickets import OpenStep, StepTicket
from chronica_hvd.waiting import waits_for
from chronica_hvd.world import World, horovod

#: Of a tensor of torch's.
MOST_DIMENSIONS = 64

_NOTHING = np.empty(0)


class _Sampler(Protocol):
    """What :func:`average` needs to know of a sampler."""

    world: World
    progress: Progress


class Standing(NamedTuple):
    """Where a rank stands, as the others must too.

    ``data`` tells data sets apart; ``finished``, ``left_out`` and ``idle`` are those of :class:`Cursor`.
    """

    ticket: StepTicket
    data: int = 0
    finished: int = 0
    left_out: int = 0
    idle: int = 0


def compare_plans(
    world: World,
    name: str,
    standing: Standing,
    notes: Sequence[int] = (),
    telemetry: NDArray[np.float64] = _NOTHING,
) -> tuple[list[int], NDArray[np.float64]]:
    """Compare what all ranks are at.

    Returns
    -------
    The largest of all ranks of each of the ``notes``, and (ranks, values) the ``telemetry`` of each, of one length on
    all.

    Raises
    ------
    RuntimeError
        They are at another plan, epoch, step or number of finished steps, load other data, or some ranks have left a
        step out that others trained on. On every rank alike; the message names the ranks and what they hold.
    """
    if world.size == 1:
        return list(notes), telemetry[None]
    ticket = standing.ticket
    # The upper half would not fit int64; 63 bits of a hash are as good as 64.
    held = (int(ticket.fingerprint, 16) >> 1, ticket.epoch, ticket.step, standing.finished, standing.data)
    with talking(f"the comparison of plans of step {ticket.step} of epoch {ticket.epoch}"):
        numbers = np.array([*held, standing.left_out, standing.idle, *notes], dtype=np.int64)
        own = torch.from_numpy(np.concatenate([numbers, telemetry.view(np.int64)])[None])  # bits travel as they are
        gathered = horovod().allgather(own, name=f"chronica.plan.{name}", process_set=world.process_set).numpy()
    every = gathered[:, : numbers.size].tolist()
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, row in enumerate(every):
        holders.setdefault(tuple(row[: len(held)]), []).append(rank)
    if len(holders) > 1:
        raise RuntimeError(_difference(holders))
    # An idle rank, whose samples did not count, may have left out as many steps as the others.
    left_out, idle = ([row[len(held) + place] for row in every] for place in (0, 1))
    if max(left_out) > min(map(sum, zip(left_out, idle, strict=True))):
        raise RuntimeError(
            f"some ranks have left out steps that others trained on, whose gradients so lack their samples: {left_out} "
            "steps had no backward pass, by rank. Leave a step out on every rank, by optimizer.skip_step(); or leave "
            "out one rank's samples by optimizer.set_weight(0), called on it in place of backward(), after "
            "set_weight(amount) was called for every other batch"
        )
    largest = [max(column) for column in list(zip(*every, strict=True))[len(held) + 2 :]]
    return largest, np.ascontiguousarray(gathered[:, numbers.size :]).view(np.float64)


def _difference(holders: dict[tuple[int, ...], list[int]]) -> str:
    """Return what to say where ranks hold different plans or data."""
    if len({row[:-1] for row in holders}) == 1:
        parts = "; ".join(f"ranks {', '.join(map(str, ranks))}: data {row[-1]:016x}" for row, ranks in holders.items())
        return (
            f"the ranks load different data sets ({parts}), as after splitting the data by rank: give every rank the "
            "whole data set, for the sampler deals it out itself"
        )
    lines = [
        f"ranks {', '.join(map(str, ranks))}: plan {2 * plan:016x}, epoch {epoch}, step {step}, {made} steps made"
        for (plan, epoch, step, made, _), ranks in holders.items()
    ]
    return (
        "the ranks do not hold the same plan or are not at the same step, so their weights would be wrong. "
        + "; ".join(lines)
        + ". Give BatchSampler the same sizes (of the whole data set), batch size, cost, seed, epoch and options on "
        "every rank (the ranks' own fits of a cost differ: gather the records first), and leave a loop early on all "
        "ranks or on none."
    )


def add_up(
    world: World,
    number: int,
    plan: str | None,
    kind: bool | None,
    shape: torch.Size | None,
    sums: torch.Tensor | None,
) -> tuple[torch.Size | None, torch.Tensor | None]:
    """Return the shape of the values that the ranks hold, and their sums over all ranks.

    A rank that holds none, ``None``, takes part all the same; where no rank holds any, all get ``None``.

    Parameters
    ----------
    world
        The ranks.
    number
        Which :class:`chronica_hvd.Mean` asks.
    plan
        Fingerprint of the plan that the values belong to; ``None``: not known, and not compared.
    kind
        Whether the values' amounts were given with them, rather than planned; ``None``: no value yet.
    shape
        Of a value.
    sums
        (numbers of a value + 1,) float64.

    Raises
    ------
    RuntimeError, ValueError
        On every rank alike: another number, plan, kind or shape than on other ranks.
    """
    if world.size == 1:
        return shape, sums
    hvd = horovod()
    unknown = -1
    header = [number, unknown if plan is None else int(plan, 16) >> 1, unknown if kind is None else int(kind)]
    of_shape = [unknown] if shape is None else [len(shape), *shape]
    of_shape += [unknown] * (1 + MOST_DIMENSIONS - len(of_shape))
    with talking("Mean.result()"):
        own = torch.tensor([header + of_shape], dtype=torch.int64)
        every = hvd.allgather(own, name="chronica.mean.header", process_set=world.process_set).tolist()
    means = {rank: row[0] for rank, row in enumerate(every)}
    plans = {rank: f"{2 * row[1]:016x}" for rank, row in enumerate(every) if row[1] >= 0}
    kinds = {rank: ("planned", "given")[row[2]] for rank, row in enumerate(every) if row[2] >= 0}
    shapes = {rank: tuple(row[4 : 4 + row[3]]) for rank, row in enumerate(every) if row[3] >= 0}
    if len(set(means.values())) > 1:
        raise RuntimeError(
            "the ranks ask for the results of different Means; create them, and ask for their results, in the same "
            f"order on every rank. Number of the Mean {_by_rank(means)}"
        )
    if len(set(plans.values())) > 1:
        raise RuntimeError(
            "the values that the ranks have added belong to different plans; give BatchSampler the same sizes, batch "
            f"size, cost, seed, epoch and options on every rank. Plan {_by_rank(plans)}"
        )
    if len(set(kinds.values())) > 1:
        raise ValueError(
            f"all ranks must give an amount with every value, or none; amounts are {_by_rank(kinds)}, and would be "
            "added up in different units"
        )
    if len(set(shapes.values())) > 1:
        raise ValueError(f"the values must have one shape on all ranks, not {_by_rank(shapes)}")
    if not shapes:
        return None, None
    shape = torch.Size(next(iter(shapes.values())))
    with talking("Mean.result()"):
        summed = torch.zeros(shape.numel() + 1, dtype=torch.float64) if sums is None else sums.clone()
        return shape, hvd.allreduce(summed, op=hvd.Sum, name="chronica.mean", process_set=world.process_set)


@contextlib.contextmanager
def talking(what: str) -> Iterator[None]:
    """Do what collectives need: say when they wait long, and use tensors that Horovod may write to at any time."""
    with waits_for(what), torch.inference_mode(False), torch.no_grad():
        yield


def _by_rank(held: dict[int, Any]) -> str:
    return ", ".join(f"{what} on rank {rank}" for rank, what in held.items())


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
    values = _as_tensors(value)
    if not isinstance(getattr(sampler, "progress", None), Progress):
        raise TypeError(
            "average needs the sampler whose batch the value belongs to, a chronica_hvd.BatchSampler, "
            f"not {sampler!r} of type {type(sampler).__name__}"
        )
    step = sampler.progress.latest()
    step.refuse_untaken("average() was called")
    _refuse_other_number(values, step)
    world = horovods_world(sampler.world)
    if world.size > 1 and sampler.progress.must_compare():
        compare_plans(world, "average", Standing(step.ticket, sampler.progress.data))
    return _as_given(value, _weighted_mean(values, step, world, "chronica.average"))


def average_of_step(value: Any, step: OpenStep, world: World, name: str) -> Any:
    """Return what :func:`average` does, of a step at hand and under a name of its own."""
    values = _as_tensors(value)
    _refuse_other_number(values, step)
    return _as_given(value, _weighted_mean(values, step, world, name))


def _weighted_mean(values: list[torch.Tensor], step: OpenStep, world: World, name: str) -> torch.Tensor:
    """Return the mean over the ranks' micro-batches, by the weights of their gradients."""
    with talking(f"{name} of step {step.ticket.step} of epoch {step.ticket.epoch}"):
        result_dtype = functools.reduce(torch.promote_types, [single.dtype for single in values])
        # Horovod cannot send bfloat16, and half precision would lose what averaging gains.
        dtype = torch.promote_types(result_dtype, torch.float32)
        own = torch.zeros(values[0].numel(), dtype=dtype, device=values[0].device)
        for single, weight in zip(values, step.weights, strict=True):
            if weight != 0.0:
                own = own + single.to(own).reshape(-1) * weight
        # Weights that were set in place of the planned ones add up to something else than these.
        sums = torch.tensor([sum(step.weights), sum(step.ticket.weights)], dtype=dtype, device=own.device)
        own = torch.cat([own, sums])
        if world.size > 1:
            hvd = horovod()
            own = hvd.allreduce(own, op=hvd.Average, name=name, process_set=world.process_set)
        mean, of_set, of_planned = own[:-2], own[-2], own[-1]
        if step.ticket.divides_by_own:
            mean = mean * torch.where((of_set == of_planned) | (of_set == 0.0), 1.0, 1.0 / of_set)
        return mean.reshape(values[0].shape).to(result_dtype)


def _refuse_other_number(values: list[torch.Tensor], step: OpenStep) -> None:
    if len(values) != step.micro_batches:
        raise ValueError(
            f"step {step.ticket.step} has {step.micro_batches} micro-batches on this rank, but {len(values)} "
            f"{'value was' if len(values) == 1 else 'values were'} given; give a list of one value for each micro-batch"
        )
    if any(single.shape != values[0].shape for single in values):
        raise ValueError(f"the values must have one shape, not {', '.join(str(tuple(one.shape)) for one in values)}")


def _as_given(value: Any, mean: torch.Tensor) -> Any:
    """Return a mean as a tensor, or as a float where numbers were given."""
    values = value if isinstance(value, list | tuple) else [value]
    return mean if any(isinstance(single, torch.Tensor) for single in values) else mean.item()


def _as_tensors(value: Any) -> list[torch.Tensor]:
    return [as_tensor(single) for single in (value if isinstance(value, list | tuple) else [value])]


def as_tensor(value: Any) -> torch.Tensor:
    """Return a number or tensor as a tensor of a floating dtype, without gradient."""
    if isinstance(value, torch.Tensor) and _holds_real_numbers(value):
        return value.detach() if value.is_floating_point() else value.detach().double()
    if isinstance(value, numbers.Real) and not isinstance(value, np.timedelta64):
        try:
            return torch.tensor(float(value), dtype=torch.float64)
        except OverflowError:
            raise ValueError(f"value must be a number that float64 can hold, not {value!r}") from None
    raise TypeError(f"value must be a real number or tensor, not {value!r} of type {type(value).__name__}")


def _holds_real_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary one: not complex, sparse, nested, quantized, nor on the meta device."""
    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    return is_dense and not (tensor.is_complex() or tensor.is_quantized or tensor.is_meta)


def horovods_world(world: World) -> World:
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
