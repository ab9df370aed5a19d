"""Report: the proof, on the user's own model, that a planned step gives the gradient of the same global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chronica_hvd.cause import find_cause
from chronica_hvd.denominator import LossWeights
from chronica_hvd.finding import Finding
from chronica_hvd.plans import Plan
from chronica_hvd.probe import Probe, gradients_of, probing
from chronica_hvd.sampler import BatchSampler

#: Largest relative error that another order of summation explains; of shorter types ten units of their rounding, since
#: there every operation rounds by as much.
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}

#: Gradients by the id of their tensor.
Gradients = dict[int, torch.Tensor]


@dataclass(frozen=True)
class Verification:
    """What :func:`verify` found; printed, it says so in words.

    Attributes
    ----------
    errors
        By the tensor's name, ‖planned − single‖ ÷ ‖single‖ (L2) of its gradient. A norm below the rounding of the whole
        gradient counts as that: a gradient that is 0 but for rounding is not judged by its own noise.
    limit
        The largest error that another order of summation explains: 1e-12 in float64, 1e-5 in float32, 1e-2 in float16,
        8e-2 in bfloat16, by the shortest type that computed anything.
    step
        The step of the plan that was computed.
    micro_batches
        How many micro-batches, over all ranks, had a weight in it.
    cause
        Why it is not exact: ``"loss weight"`` (the sampler's ``loss_weight`` is not what the loss divides by),
        ``"padding"`` or ``"batch mates"`` (a sample's output or loss depends on them), ``"random"`` (``step_fn`` draws
        random numbers), ``"not a mean"`` (the loss of a batch is no weighted mean of its samples' losses),
        ``"rounding"`` (the error is small and nothing else was found); ``None`` where it is exact, or not known.
    module
        The first module that depends on padding or batch mates: its dotted name and its class.
    advice
        What was found and what to do, in words.
    """

    errors: dict[str, float]
    limit: float
    step: int
    micro_batches: int
    cause: str | None = None
    module: str | None = None
    advice: str = ""

    @property
    def largest_error(self) -> float:
        """The largest of ``errors``."""
        return max(self.errors.values())

    @property
    def is_exact(self) -> bool:
        """Whether no error is above the limit."""
        return self.largest_error <= self.limit

    def __str__(self) -> str:
        worst = max(self.errors, key=self.errors.__getitem__)
        compared = (
            f"step {self.step} was computed as planned ({self.micro_batches} micro-batches over all ranks) and in one "
            f"batch; the gradients of {len(self.errors)} tensors differ by at most {self.largest_error:.1e} of their "
            f"norm ({worst}), and {self.limit:.0e} is what another order of summation explains."
        )
        if self.is_exact:
            return f"Exact: {compared}{' ' if self.advice else ''}{self.advice}"
        place = f", in {self.module}" if self.module else ""
        return f"Not exact: {compared}\nCause: {self.cause or 'unknown'}{place}. {self.advice}".rstrip()


def verify(step_fn: Callable[[list[int]], torch.Tensor], sampler: BatchSampler) -> Verification:
    """Compute one planned step both ways on your own model, and compare the gradients.

    As planned: each micro-batch of each rank by itself, its gradient multiplied by its factor, summed, and averaged
    over the ranks. And as a single process would: all samples of the step in one batch. This process computes all of it
    alone, without Horovod or any collective. If the two differ, ``step_fn`` is called on a few samples more, alone and
    in pairs, to find out why.

    The step is a full one whose micro-batches differ in their numbers of samples and in length, if there is one; of
    those the one with the smallest global batch, which must fit into memory at once. Where it does not, verify with a
    sampler of few ranks: ``BatchSampler(sizes, batch_size, num_replicas=2, rank=0, loss_weight=...)``.

    Meanwhile nothing is dropped out (modules stay in training mode), compiled models run uncompiled, float32 is not
    rounded to TF32, and random numbers are the same in each call. Buffers (running statistics), ``.grad`` and the
    states of the random number generators are left as they were, also when ``step_fn`` raises; what a model keeps in
    other attributes is not. Nothing of the sampler's progress changes.

    Parameters
    ----------
    step_fn
        Gets a list of dataset indices, loads and collates these samples, runs the model and returns the loss as in
        training, a scalar; no ``backward()``. For instance
        ``lambda indices: loss_fn(model(collate([dataset[i] for i in indices])))``.
    sampler
        The sampler of the training, or another one of the same options; its plan of the current epoch is used.

    Returns
    -------
    Verification
        Print it.

    Raises
    ------
    TypeError
        ``step_fn`` cannot be called, or returns no tensor; ``sampler`` is no :class:`chronica_hvd.BatchSampler`.
    ValueError
        The loss is no floating-point scalar with a graph, or not finite; a gradient is not finite; the loss depends on
        no tensor that requires a gradient in every call; no sample counts in any step; a lazy module has not run yet.
    RuntimeError
        ``step_fn`` calls ``backward()``.
    Exception
        What ``step_fn`` raises.

    Examples
    --------
    >>> import torch
    >>> from chronica_hvd import BatchSampler, verify
    >>> lengths = [9, 2, 7, 4, 3, 8, 5, 1]
    >>> model = torch.nn.Linear(3, 1).double()
    >>> texts = [torch.ones(length, 3).double() * length for length in lengths]
    >>> def mean_over_tokens(indices):
    ...     return model(torch.cat([texts[i] for i in indices])).square().mean()
    >>> verify(mean_over_tokens, BatchSampler(lengths, 2, num_replicas=2, rank=0, loss_weight="sizes")).is_exact
    True
    >>> verify(mean_over_tokens, BatchSampler(lengths, 2, num_replicas=2, rank=0)).cause
    'loss weight'
    """
    if not isinstance(sampler, BatchSampler):
        raise TypeError(
            f"sampler must be a chronica_hvd.BatchSampler, not {type(sampler).__name__}; give the one that the loader "
            "was given"
        )
    if not callable(step_fn):
        raise TypeError(
            f"step_fn must be a function from a list of dataset indices to the loss, not {step_fn!r}, for instance "
            "lambda indices: loss_fn(model(collate([dataset[i] for i in indices])))"
        )
    plan = sampler.plan
    step = _step_to_verify(plan)
    ranks = [rank for rank in range(plan.ranks) if plan.counts[step, rank] > 0]
    batches = [batch.tolist() for rank in ranks for batch in plan.batches(step, rank)]
    factors = [factor for rank in ranks for factor in plan.micro_weights(step, rank).tolist()]
    samples = [sample for batch in batches for sample in batch]
    told = LossWeights.of(sampler)
    # The factors of a step add up to the number of ranks, unless it is to count more or less than others.
    share = 1.0 / plan.ranks if told.is_sum else sum(factors) / plan.ranks

    with probing(step_fn) as probe:
        ways = _BothWays(probe)
        for batch, factor in zip(batches, factors, strict=True):
            if factor != 0.0:  # weight 0 replaces: what is not finite would stay so if multiplied
                ways.add(ways.planned, batch, factor / plan.ranks)
        ways.add(ways.single, samples, share)
        errors, limit = ways.errors()
        finding = Finding()
        if not max(errors.values()) <= limit:
            finding = find_cause(probe, samples, told, max(errors.values()), limit, sampler.micro_batches != 1)
    micro_batches = sum(factor != 0.0 for factor in factors)
    if max(errors.values()) <= limit and micro_batches == 1:
        finding = Finding(advice="But one micro-batch holds all that counts, so that nothing was put to the test.")
    return Verification(errors, limit, step, micro_batches, finding.cause, finding.module, finding.advice)


def _step_to_verify(plan: Plan) -> int:
    """Return the step with the smallest padded global batch among those that test most."""
    if plan.steps == 0:
        raise ValueError("the sampler's plan has no step, so there is nothing to verify; it needs samples")
    first = plan.parts[: -1 : plan.ranks]  # (steps,) the first micro-batch of each step
    held = np.diff(plan.offsets)
    does_count = plan.factors != 0.0

    def largest(values: NDArray[Any]) -> NDArray[np.float64]:
        return np.maximum.reduceat(np.where(does_count, values, -np.inf), first)

    counting = np.add.reduceat(does_count.astype(np.int64), first)
    if not counting.any():
        raise ValueError("no sample of the epoch has a loss weight above 0, so there is nothing to verify")
    samples = plan.counts.sum(axis=1)
    # What a step tests, the most important first.
    tests = (
        counting > 0,
        counting > 1,
        samples == samples.max(),
        largest(held) > -largest(-held),
        largest(plan.lengths) > -largest(-plan.lengths),
    )
    merit = sum(tested.astype(np.int64) << place for place, tested in enumerate(reversed(tests)))
    if plan.padding == "max":
        padded = samples * largest(plan.lengths)
    else:
        padded = np.add.reduceat(plan.lengths * does_count, first)
    return int(np.argmin(np.where(merit == merit.max(), padded, np.inf)))


class _BothWays:
    """The gradients of a planned step and of a single process, with respect to every leaf of the losses."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        #: Every leaf with the number of calls that it was met in; held, so that no id is used again.
        self._leaves: dict[int, tuple[torch.Tensor, int]] = {}
        self.planned: Gradients = {}
        self.single: Gradients = {}

    def add(self, gradients: Gradients, batch: list[int], factor: float) -> None:
        """Add a batch's gradient times a factor."""
        loss = self._probe.loss(batch)
        leaves = _leaves(loss)
        if not leaves:
            raise ValueError("the loss depends on no tensor that requires a gradient; unfreeze what is to be trained")
        for leaf, gradient in zip(leaves, gradients_of(loss, leaves), strict=True):
            self._leaves[id(leaf)] = leaf, self._leaves.get(id(leaf), (leaf, 0))[1] + 1
            if gradient is not None:
                gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
                # Sums of many shorter numbers would round more than the two ways differ.
                gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
                total = gradients.setdefault(id(leaf), torch.zeros_like(gradient))
                total.add_(gradient, alpha=factor)

    def errors(self) -> tuple[dict[str, float], float]:
        """Return the relative error by name, and the limit of what rounding explains."""
        names = self._probe.parameter_names()
        # An input that requires a gradient is another tensor in each call, and nothing to compare.
        unnamed = [key for key, (_, calls) in self._leaves.items() if key not in names and calls > 1]
        leaves = {key: self._leaves[key][0] for key in (*filter(self._leaves.__contains__, names), *unnamed)}
        if not leaves:
            raise ValueError(
                "no tensor that requires a gradient is used in more than one call of step_fn: it must use the same "
                "model in each call, not a new one"
            )
        # Of several types the one that rounds most decides, be it only that of an activation under autocast.
        dtypes = self._probe.dtypes | {leaf.dtype for leaf in leaves.values()}
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        limit = next((LIMITS[dtype] for dtype in LIMITS if torch.finfo(dtype).eps >= eps), LIMITS[torch.bfloat16])
        single = {key: self._norm(key, self.single.get(key)) for key in leaves}
        noise = eps * sum(norm**2 for norm in single.values()) ** 0.5
        errors = {}
        for key, leaf in leaves.items():
            name = names[key][0] if key in names else f"unnamed {unnamed.index(key)} of shape {tuple(leaf.shape)}"
            difference = self._norm(key, _minus(self.planned.get(key), self.single.get(key)))
            scale = max(single[key], noise / limit)
            errors[name] = difference / scale if scale > 0.0 else float(difference > 0.0)
        return errors, limit

    def _norm(self, key: int, tensor: torch.Tensor | None) -> float:
        """Return the L2 norm of a gradient, or of a difference of two; one that is not finite is a ValueError."""
        norm = 0.0 if tensor is None else float(torch.linalg.vector_norm(tensor))
        if not np.isfinite(norm):
            name = self._probe.parameter_names().get(key, ("an unnamed tensor",))[0]
            raise ValueError(
                f"the gradient of {name} is not finite, so nothing can be compared; torch.autograd.detect_anomaly says "
                "which operation made it so"
            )
        return norm


def _minus(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """Return a − b, where none is 0."""
    if a is None or b is None:
        return b if a is None else a
    return a - b


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a loss's ``backward()`` would accumulate gradients in."""
    leaves: list[torch.Tensor] = []
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
        waiting.extend(following for following, _ in node.next_functions)
    return leaves
