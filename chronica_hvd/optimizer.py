"""Weigh: Horovod's optimizer, with the weights of a sampler's plan inside."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import itertools
from collections.abc import Iterable
from typing import Any

import torch

from chronica_hvd import checks
from chronica_hvd.compression import Carrier
from chronica_hvd.sampler import BatchSampler
from chronica_hvd.timing import Timing
from chronica_hvd.weigh import Weigher, refuse_weighed
from chronica_hvd.world import check_process_set, horovod
from chronica_hvd.wrapped import replace_methods

#: Optimizers are made in the same order on every rank, so their number names their collectives.
_numbers = itertools.count()


def DistributedOptimizer(  # noqa: N802 (it takes the place of hvd.DistributedOptimizer)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    *,
    sampler: BatchSampler | None = None,
    lookahead: int = 0,
    **options: Any,
) -> Any:
    """Wrap an optimizer as ``hvd.DistributedOptimizer`` does, and weigh every gradient as the sampler's plan says.

    After the allreduce each rank holds the gradient of the mean loss over the global batch, however it was split. Use
    it exactly as Horovod's, ``synchronize()`` and ``skip_synchronize()`` included. The ranks' plans are compared in the
    first step of every loop over the loader, and of every 64.

    Hooks on parameters (``register_hook``, ``register_post_accumulate_grad_hook``, multi-gradient hooks) are called as
    ever. Hooks that others put on the very nodes that accumulate gradients see ``None`` from a step's second
    micro-batch on, where the weighed gradient has been added already.

    Parameters
    ----------
    optimizer
        The optimizer to wrap, before its first step.
    named_parameters
        ``model.named_parameters()``.
    sampler
        The :class:`BatchSampler` whose batches are trained on; ``None``: every weight is 1. Several optimizers may
        share one (two networks trained on the same batches); without a ``lookahead`` one may, on all ranks alike,
        leave steps out that another trains on.
    lookahead
        How many steps beyond the one trained on a wrapper has taken from the loader. Then ``backward()`` must be called
        for every step, with micro-batches exactly once for each, in order.
    options
        Horovod's: ``compression``, ``op`` (Average or Sum), ``gradient_predivide_factor``, ``groups``,
        ``sparse_as_dense``, ``process_set``, and ``backward_passes_per_step``: so many steps of the sampler make one
        update, to which their gradients add up, as in Horovod; or so many losses of each micro-batch have a
        ``backward()`` of their own. bfloat16 gradients travel as float32.

    Returns
    -------
    Horovod's optimizer, an instance of the given optimizer's class, with more attributes:

    ``weight``
        The gradient factor of the micro-batch at work.
    ``set_weight(amount)``
        Before ``backward()``: what the micro-batch at work really counts in the denominator of the loss, where that is
        known only after reading it (say, its number of valid tokens); not negative. The gradient is then that of
        the mean over the true amounts of the global batch; with ``normalize="epoch"`` it is divided as planned. To be
        called for every batch, from the first one of an epoch on, in about the unit of the sampler's ``loss_weight``
        (in half precision a much larger one may overflow); micro-batches it is not called for count as planned,
        fillers 0. On a rank whose amount is 0, ``backward()`` may be left out.
    ``step(closure)``
        As torch's: the closure is called as often as the optimizer asks, each time its gradients are combined, and the
        optimizer gets the mean loss of the global batch. With micro-batches it returns a list of one for each.
    ``skip_step()``
        Give the step at work up, on every rank alike, be some gradients of it computed or not. In the middle of a step
        leave the loop over its micro-batches afterwards.
    ``timing``
        What steps and micro-batches took (a :class:`chronica_hvd.timing.Timing`; ``None`` without a sampler).

    Raises
    ------
    TypeError, ValueError
        An argument is not allowed; ``op=hvd.Adasum`` among them, which reduces parameter differences, not gradients.
    RuntimeError
        Horovod is missing or not initialised. From ``backward()``: no step was taken from the sampler's loader, or too
        many, so that the weight would be a guess. From ``synchronize()`` or ``step()``: the ranks' plans differ, or not
        all micro-batches of the step were taken and had their backward pass.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, not {optimizer!r}")
    if sampler is not None and not isinstance(sampler, BatchSampler):
        raise TypeError(f"sampler must be a chronica_hvd.BatchSampler or None, not {sampler!r}")
    checks.integer("lookahead", lookahead, least=0)
    hvd = horovod()
    if type(optimizer).__module__ == "horovod.torch.optimizer":
        raise TypeError("optimizer is already wrapped by Horovod; give the torch optimizer itself")
    known = list(inspect.signature(hvd.DistributedOptimizer).parameters)[2:]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; Horovod's options are {', '.join(known)}")
    _check_reduction(options, hvd)
    passes = checks.integer("backward_passes_per_step", options.get("backward_passes_per_step", 1), least=1)
    checks.boolean("sparse_as_dense", options.get("sparse_as_dense", False))
    checks.integer("num_groups", options.get("num_groups", 0), least=0)
    check_process_set(options.get("process_set"))
    options = {name: value for name, value in options.items() if name != "process_set" or value is not None}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _check_groups(options.get("groups"), parameters)
    names = _names(optimizer, named_parameters)
    if not hvd.is_initialized():
        raise RuntimeError("Horovod is not initialised: call hvd.init() first")
    if sampler is not None:
        options["process_set"] = _shared_process_set(sampler, options.get("process_set"), hvd)
        refuse_weighed(parameters)
    number = next(_numbers)
    # Two optimizers' parameters may have the same names, which Horovod would take for the same tensors.
    named = [(f"{number}.{name}" if number else name, parameter) for name, parameter in names]
    carrier = options["compression"] = Carrier(options.get("compression", hvd.Compression.none))
    wrapped = hvd.DistributedOptimizer(optimizer, named, **options)
    if sampler is None:
        replace_methods(wrapped, None, None, carrier, str(number))
        return wrapped
    # The sampler may have been told its rank by hand; the plans are compared over the ranks that combine gradients.
    world = dataclasses.replace(sampler.world, process_set=options["process_set"], local_rank=hvd.local_rank())
    timing = Timing(_device(parameters))
    weigher = Weigher(sampler.progress, world, str(number), lookahead, passes, timing)
    weigher.watch(parameters, wrapped)
    replace_methods(wrapped, weigher, timing, carrier, str(number))
    return wrapped


def _names(optimizer: torch.optim.Optimizer, named_parameters: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Return (name, parameter) of each parameter, checked as far as Horovod would not say clearly what is wrong."""
    if named_parameters is None:
        return [
            (f"parameter.{i}.{j}", parameter)
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        ]
    what = "named_parameters must be model.named_parameters(), pairs of a name and a parameter"
    try:
        names = list(named_parameters)
    except TypeError:
        raise TypeError(f"{what}, not {named_parameters!r}") from None
    for pair in names:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"{what}; {pair!r} is among them")
        if not isinstance(pair[1], torch.Tensor):
            raise TypeError(f"{what}; the one named {pair[0]!r} is {pair[1]!r}")
    times = collections.Counter(name for name, _ in names)
    if twice := [name for name, number in times.items() if number > 1]:
        raise ValueError(f"named_parameters must have unique names; {twice[0]!r} is given twice")
    named = {id(parameter) for _, parameter in names}
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            if id(parameter) not in named:
                raise ValueError(
                    "named_parameters must name every parameter of the optimizer; the one of shape "
                    f"{tuple(parameter.shape)} in place {j} of group {i} is not among the {len(names)} given"
                )
    return names


def _check_reduction(options: dict[str, Any], hvd: Any) -> None:
    """Refuse now what Horovod would refuse in the first backward pass, and what takes no weights."""
    op = options.get("op")
    if op is not None and (type(op) is not int or op not in (hvd.Average, hvd.Sum, hvd.Adasum)):
        raise ValueError(f"op must be hvd.Average or hvd.Sum, not {op!r}")
    if op == hvd.Adasum:
        raise ValueError(
            "op=hvd.Adasum reduces parameter differences, to which no gradient weight applies; use Average or Sum"
        )
    compression = options.get("compression", hvd.Compression.none)
    if not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise TypeError(
            "compression must be hvd.Compression.none, hvd.Compression.fp16 or an object with the methods compress and "
            f"decompress, not {compression!r}"
        )
    factor = checks.real("gradient_predivide_factor", options.get("gradient_predivide_factor", 1.0))
    if factor <= 0.0:
        raise ValueError(f"gradient_predivide_factor must be positive, not {factor:g}")
    if factor != 1.0 and options.get("groups") is not None:
        raise ValueError(
            f"gradient_predivide_factor={factor:g} cannot be used with groups, in which Horovod passes it over"
        )
    if factor != 1.0 and op == hvd.Sum:
        raise ValueError(
            f"gradient_predivide_factor={factor:g} needs op=hvd.Average: it splits the division by the number of ranks"
        )


def _check_groups(groups: Any, parameters: list[torch.nn.Parameter]) -> None:
    """Refuse what is neither a number of groups nor groups of the optimizer's parameters."""
    if groups is None:
        return
    if not isinstance(groups, list | tuple):
        checks.integer("groups", groups, least=1)
        return
    own = {id(parameter) for parameter in parameters}
    for group in groups:
        if not isinstance(group, list | tuple):
            raise TypeError(f"groups must be a positive integer or lists of parameters, not {groups!r}")
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise TypeError(f"groups must hold the optimizer's parameters; {parameter!r} is among them")
            if id(parameter) not in own:
                what = "one in two places" if any(parameter is one for one in parameters) else "another tensor"
                raise ValueError(f"groups must hold the optimizer's parameters, each once, not {what}: {parameter!r}")
            own.remove(id(parameter))


def _shared_process_set(sampler: BatchSampler, given: Any, hvd: Any) -> Any:
    """Return the process set of sampler and optimizer, which must be one."""
    world = sampler.world
    process_set = given or world.process_set or hvd.global_process_set
    planned_for = world.process_set or process_set
    if planned_for.process_set_id != process_set.process_set_id:  # of a copied sampler it is a copy
        raise ValueError(
            f"the sampler plans for the process set {world.process_set}, but the optimizer was given {given}"
        )
    if (world.rank, world.size) != (process_set.rank(), process_set.size()):
        raise ValueError(
            f"the sampler plans for rank {world.rank} of {world.size}, "
            f"but Horovod runs this as rank {process_set.rank()} of {process_set.size()}"
        )
    return process_set


def _device(parameters: Iterable[torch.nn.Parameter]) -> torch.device | None:
    """Return the CUDA device that the model's compute begins and its backward pass ends on, if it has one."""
    return next((parameter.device for parameter in parameters if parameter.is_cuda), None)
