"""Weigh: Horovod's optimizer, with the weights of a sampler's plan inside."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import time
from collections.abc import Iterable
from typing import Any

import torch

from chronica_hvd import checks
from chronica_hvd.sampler import BatchSampler
from chronica_hvd.timing import Timing
from chronica_hvd.weigh import Weigher, refuse_weighed
from chronica_hvd.world import horovod

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
    first step of every 64.

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
        The :class:`BatchSampler` whose batches are trained on; ``None``: every weight is 1.
    lookahead
        How many steps beyond the one trained on may have been taken from the loader, for wrappers that read ahead.
        With micro-batches ``backward()`` must then be called exactly once for each, in order.
    options
        Horovod's: ``compression``, ``op`` (Average or Sum), ``gradient_predivide_factor``, ``groups``,
        ``sparse_as_dense``, ``process_set``. ``backward_passes_per_step`` above 1 with a sampler is not built yet.

    Returns
    -------
    Horovod's optimizer, an instance of the given optimizer's class, with two more attributes: ``weight``, the gradient
    factor of the micro-batch at work, and ``timing``, what steps and micro-batches took (a
    :class:`chronica_hvd.timing.Timing`; ``None`` without a sampler).

    Raises
    ------
    TypeError, ValueError
        An argument is not allowed; ``op=hvd.Adasum`` among them, which reduces parameter differences, not gradients.
    NotImplementedError
        ``backward_passes_per_step`` above 1 with a sampler; a second optimizer for the same sampler.
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
    if not hvd.is_initialized():
        raise RuntimeError("Horovod is not initialised: call hvd.init() first")
    if sampler is None:
        return _with_figures(hvd.DistributedOptimizer(optimizer, named_parameters, **options), None, None)

    options["process_set"] = _shared_process_set(sampler, options.get("process_set"), hvd)
    if passes > 1:
        raise NotImplementedError("backward_passes_per_step above 1 with a sampler is not built yet")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    refuse_weighed(parameters)
    # The sampler may have been told its rank by hand; the plans are compared over the ranks that combine gradients.
    world = dataclasses.replace(sampler.world, process_set=options["process_set"])
    weigher = Weigher(sampler.progress, world, name=str(next(_numbers)))
    timing = Timing(_device(parameters))
    sampler.progress.attach(weigher, lookahead, timing)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters, **options)
    weigher.watch(parameters, functools.partial(_expect_passes, wrapped))
    return _with_weigher(_with_figures(wrapped, sampler, timing), weigher)


def _check_reduction(options: dict[str, Any], hvd: Any) -> None:
    """Refuse now what Horovod would refuse in the first backward pass, and what takes no weights."""
    op = options.get("op")
    known = (None, hvd.Average, hvd.Sum, hvd.Adasum)
    if isinstance(op, bool) or not any(op is allowed or op == allowed for allowed in known):
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
    if factor != 1.0 and op == hvd.Sum:
        raise ValueError(
            f"gradient_predivide_factor={factor:g} needs op=hvd.Average: it splits the division by the number of ranks"
        )


def _shared_process_set(sampler: BatchSampler, given: Any, hvd: Any) -> Any:
    """Return the process set of sampler and optimizer, which must be one."""
    world = sampler.world
    process_set = world.process_set or given or hvd.global_process_set
    if given is not None and given != process_set:
        raise ValueError(f"the sampler plans for the process set {process_set}, but the optimizer was given {given}")
    if (world.rank, world.size) != (process_set.rank(), process_set.size()):
        raise ValueError(
            f"the sampler plans for rank {world.rank} of {world.size}, "
            f"but Horovod runs this as rank {process_set.rank()} of {process_set.size()}"
        )
    return process_set


def _expect_passes(wrapped: Any, passes: int, anew: bool) -> None:
    """Have Horovod send each gradient after its last backward pass of the step that begins, and not before.

    ``anew``: an earlier step was given up half way, so that Horovod has counted some of its passes.
    """
    wrapped._synchronized = False  # as a step leaves it that was synchronized and then not made, by GradScaler say
    if anew or wrapped.backward_passes_per_step != passes:
        wrapped.set_backward_passes_per_step(passes)


def _device(parameters: Iterable[torch.nn.Parameter]) -> torch.device | None:
    """Return the CUDA device that the model's compute begins and its backward pass ends on, if it has one."""
    return next((parameter.device for parameter in parameters if parameter.is_cuda), None)


def _with_figures(wrapped: Any, sampler: BatchSampler | None, timing: Timing | None) -> Any:
    # Horovod makes a class for each object; subclassing that recurses for ever (it calls super(self.__class__, self)),
    # so the class itself gets what is ours.
    type(wrapped).weight = property(lambda _: 1.0 if sampler is None else sampler.weight)
    type(wrapped).timing = property(lambda _: timing)
    return wrapped


def _with_weigher(wrapped: Any, weigher: Weigher) -> Any:
    horovods_synchronize = type(wrapped).synchronize

    def synchronize(self: Any) -> None:
        """Wait for the gradients of all ranks; once per step the step counts as finished."""
        # After a step that was synchronized and not made _synchronized is still set: hence both questions.
        is_first = weigher.is_step_open or not self._synchronized
        if is_first:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            weigher.refuse_unwatched(parameters)
            weigher.refuse_incomplete(parameters)
            weigher.end_compute()
            begin = time.monotonic_ns()
            weigher.compare_plans()
        horovods_synchronize(self)
        if is_first:
            end = time.monotonic_ns()
            weigher.finish_step(end - begin, end)

    type(wrapped).synchronize = synchronize
    return wrapped
