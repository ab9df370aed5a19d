"""Report: why a model's planned step is not exact, from what it does with a few samples alone and in pairs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator

import torch

from chronica_hvd.denominator import Denominator, LossWeights
from chronica_hvd.finding import Finding
from chronica_hvd.probe import Output, Probe, gradients_of, is_synchronized, takes_batch_statistics

#: An error this many times the limit can be rounding, if nothing else is found.
LARGEST_ROUNDING = 100.0


def find_cause(
    probe: Probe, samples: list[int], told: LossWeights, error: float, limit: float, may_differ_in_calls: bool
) -> Finding:
    """Find out why the gradients of a step differ.

    Parameters
    ----------
    probe
        Calls the step function.
    samples
        Those of the step.
    told
        The sampler's loss weights.
    error, limit
        The largest relative error of a gradient, and the largest that rounding explains.
    may_differ_in_calls
        Whether ranks may have different numbers of micro-batches in a step.
    """
    counting = [sample for sample in dict.fromkeys(samples) if told.weights[sample] > 0.0] or samples
    counting.sort(key=lambda sample: told.sizes[sample], reverse=True)
    try:
        finding = (
            _random(probe, counting, limit)
            or _module(probe, counting, limit)
            or Denominator(probe, told, counting, limit).finding()
            or _rounding(error, limit)
        )
    except Exception as raised:
        if raised is not probe.failure:
            raise
        # The proof stands, whatever a single sample does to the model.
        finding = _batch_statistics(probe) or Finding(
            advice="To find the cause, step_fn was called on one and on two samples, where it raised "
            f"{type(raised).__name__}: {(str(raised).strip().splitlines() or [''])[-1]}"
        )
    synchronized = [module for module in probe.modules.values() if is_synchronized(module) and module.training]
    if synchronized:
        return _with_synchronized(finding, probe.module_name(synchronized[0]), may_differ_in_calls)
    return finding


def _rounding(error: float, limit: float) -> Finding:
    if error <= LARGEST_ROUNDING * limit:
        return Finding(
            "rounding",
            advice="The difference is small, no module depends on padding or batch mates, and the loss weights are "
            "right: it is probably rounding. Verify in double precision (model.double() and data to match) to be sure.",
        )
    return Finding(
        advice="No module's output depends on padding or batch mates, and the losses of single samples and of pairs "
        "agree with the loss weights. What is left: a gradient that does not follow from the loss (detach(), hooks, "
        "functions with a backward pass of their own), or something that depends on more than two samples."
    )


def _with_synchronized(finding: Finding, name: str, may_differ_in_calls: bool) -> Finding:
    advice = (
        f"{finding.advice} {name} takes its statistics over all ranks in training, but over one batch at a time here, "
        "since verify talks to no other rank: what it does in training is not verified."
    )
    if may_differ_in_calls:
        advice += (
            " It must be called equally often on every rank, or training hangs: use micro_batches=1 (without it ranks "
            "may have different numbers of micro-batches)."
        )
    return Finding(finding.cause, finding.module, advice.strip())


def _random(probe: Probe, samples: list[int], limit: float) -> Finding | None:
    """Compute the same batch with other random numbers."""
    batch = samples[:4]
    first, again, other = (_number(probe, batch, seed) for seed in (0, 0, 1))
    if _is_close(first, again, limit) and _is_close(first, other, limit):
        return None
    return Finding(
        "random",
        advice=f"The same batch gives the loss {first:.6g}, and {again if again != first else other:.6g} when computed "
        "again with other random numbers. Dropout was off; switch off whatever else is drawn at random (augmentation, "
        "masking, noise, dropped layers) while you verify. In training it only changes which numbers are drawn.",
    )


def _batch_statistics(probe: Probe) -> Finding | None:
    """Name the first module that normalises by the batch, if there is one."""
    for module in probe.modules.values():
        if takes_batch_statistics(module):
            return _of_module("batch mates", probe, module)
    return None


def _module(probe: Probe, samples: list[int], limit: float) -> Finding | None:
    """Name the first module, in the order in which they are through, that gives a sample another output in a pair.

    In the pair of the longest and the shortest sample the longest has no padding: what changes it are batch mates.
    """
    pair = [samples[0], samples[-1]]
    if pair[0] == pair[1]:
        return None
    alone = []
    for sample in pair:
        outputs = probe.record([sample])[1]
        alone.append(dict(zip(_keys(outputs), outputs, strict=True)))
    loss, together = probe.record(pair)
    causes = [
        _dependence(output, [outputs.get(key) for outputs in alone], limit)
        for key, output in zip(_keys(together), _used(loss, together), strict=True)
    ]
    for place, cause in enumerate(causes):
        # What differs within a module whose own output does not is of no consequence.
        if cause in ("batch mates", "padding") and "nothing" not in _of_callers(causes, together, place):
            return _of_module(cause, probe, together[place].module)
    return None


def _of_callers(causes: list[str], outputs: list[Output], place: int) -> Iterator[str]:
    """Yield the causes of those modules that the one at a place ran within."""
    depth = outputs[place].depth
    for cause, output in zip(causes[place:], outputs[place:], strict=True):
        if output.depth < depth:
            depth = output.depth
            yield cause


def _dependence(output: Output, alone: list[Output | None], limit: float) -> str:
    """Return what an output of a pair's depends on: ``"batch mates"``, ``"padding"``, ``"nothing"``; "" if unknown."""
    if not any(value.numel() for value in output.values):
        return ""
    if takes_batch_statistics(output.module):
        return "batch mates"
    differences = [_difference(alone[place], output, place) for place in range(2)]
    for difference, cause in zip(differences, ("batch mates", "padding"), strict=True):
        if difference is not None and difference > limit:
            return cause
    return "" if None in differences else "nothing"


def _of_module(cause: str, probe: Probe, module: torch.nn.Module) -> Finding:
    name = probe.module_name(module)
    if takes_batch_statistics(module):
        advice = (
            "It normalises by the mean and variance of the batch, padding included, so each split of the global batch "
            "gives another result. Use GroupNorm or LayerNorm, or call its eval() so that it takes its running "
            "statistics; or accept batch statistics over other batches, as with any change of the batch size."
        )
    elif cause == "padding":
        advice = (
            "It gives a sample another output beside a longer one, so what stands in the padding reaches real "
            "positions. Mask it: key_padding_mask in attention, zeros in the padding before each convolution, packed "
            "sequences in recurrent layers, sums over real positions divided by the true sizes in pooling."
        )
    else:
        advice = (
            "It gives a sample another output beside another one, without any padding. Have it compute each sample by "
            "itself, or gather what it needs of the others from all ranks; local_batch='equal' at least keeps the "
            "number of batch mates the same."
        )
    return Finding(cause, name, advice)


def _keys(outputs: list[Output]) -> list[tuple[int, int, int]]:
    """Return which module each output is of, which of its calls, and of how many: more for a pair are not the same."""
    calls = Counter(id(output.module) for output in outputs)
    return [(id(output.module), output.call, calls[id(output.module)]) for output in outputs]


def _used(loss: torch.Tensor, outputs: list[Output]) -> Iterator[Output]:
    """Yield the outputs with only those tensors that the loss depends on; of those without a graph nothing is known."""
    tensors = [tensor for output in outputs for tensor in output.tensors if tensor.requires_grad]
    gradients = gradients_of(loss, tensors)
    unused = {id(t) for t, gradient in zip(tensors, gradients, strict=True) if gradient is None or not gradient.any()}
    for output in outputs:
        # The place of a tensor says which it is of those that the module returned alone.
        kept = [
            torch.empty(0) if id(tensor) in unused else value
            for tensor, value in zip(output.tensors, output.values, strict=True)
        ]
        yield dataclasses.replace(output, values=kept)


def _difference(alone: Output | None, pair: Output, place: int) -> float | None:
    """Return by how much an output differs for a sample alone and as the first or second of a pair; None if unknown."""
    if alone is None or len(alone.values) != len(pair.values):
        return None
    each = [_least_difference(a, b, place) for a, b in zip(alone.values, pair.values, strict=True) if b.numel() > 0]
    known = [difference for difference in each if difference is not None]
    return max(known) if known and (len(known) == len(each) or max(known) > 0.0) else None


def _least_difference(alone: torch.Tensor, pair: torch.Tensor, place: int) -> float | None:
    """Return the relative L2 difference of a sample alone and the part of a pair that fits best; None if none can fit.

    A dimension that is larger in the pair counts samples, positions, or both. Where the sample lies in it is tried: at
    the head or the tail of all, or of the half that is the sample's, or in every second place.
    """
    if alone.dim() != pair.dim() or alone.shape == pair.shape:
        return None
    places: list[list[slice]] = []
    for few, many in zip(alone.shape, pair.shape, strict=True):
        if many < few:
            return None
        half = many // 2
        starts = {0, many - few}
        if many % 2 == 0 and few <= half:
            starts |= {place * half, place * half + half - few}
        parts = [slice(start, start + few) for start in sorted(starts)]
        if many == 2 * few:
            parts.append(slice(place, None, 2))
        places.append(parts)
    norm = float(torch.linalg.vector_norm(alone[alone.isfinite()].double()))
    best = min(_distance(alone, pair[part]) for part in itertools.product(*places))
    return best / norm if norm > 0.0 else best


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return ‖a − b‖, where equal infinities (of masks) and NaN at the same places are no difference."""
    same = (a == b) | (a.isnan() & b.isnan())
    norm = float(torch.linalg.vector_norm((a.double() - b.double()).masked_fill(same, 0.0)))
    return math.inf if math.isnan(norm) else norm


def _number(probe: Probe, samples: list[int], seed: int = 0) -> float:
    return probe.loss(samples, seed).item()


def _is_close(a: float, b: float, limit: float) -> bool:
    return abs(a - b) <= limit * max(abs(a), abs(b))
