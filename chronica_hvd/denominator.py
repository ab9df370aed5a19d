"""Report: what a loss divides by, from the losses of single samples and of pairs."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from chronica_hvd.finding import Finding
from chronica_hvd.probe import Probe
from chronica_hvd.sampler import BatchSampler

#: So many samples are computed alone and in pairs.
MOST_SAMPLES = 6
#: Ratios computed from losses carry their rounding this many times over.
ROUNDING_OF_RATIOS = 100.0

#: By sample, or by pair of samples.
Losses = dict[int, float]
PairLosses = dict[tuple[int, int], float]


@dataclass(frozen=True)
class LossWeights:
    """What the sampler was told that a loss divides by.

    Parameters
    ----------
    option
        The sampler's ``loss_weight`` in words.
    sizes
        (samples,) of the data set.
    weights
        (samples,) the loss weights; 1 each where the loss is summed.
    """

    option: str
    sizes: NDArray[np.float64]
    weights: NDArray[np.float64]

    @classmethod
    def of(cls, sampler: BatchSampler) -> LossWeights:
        """Return what a sampler was told."""
        sizes, given = sampler.sizes.astype(np.float64), sampler.loss_weight
        if not isinstance(given, str):
            return cls("the array that was given", sizes, given)
        return cls(repr(given), sizes, sizes if given == "sizes" else np.ones_like(sizes))

    @property
    def is_sum(self) -> bool:
        """Whether losses are summed."""
        return self.option == repr("sum")

    def hypotheses(self) -> dict[str, NDArray[np.float64]]:
        """Return the loss weights that losses commonly have, by what is to be given for them; the told ones first."""
        told = {} if self.is_sum else {self.option: self.weights}
        return told | {
            repr("samples"): np.ones_like(self.sizes),
            repr("sizes"): self.sizes,
            "sizes - 1": self.sizes - 1.0,
            "sizes + 1": self.sizes + 1.0,
        }


class Denominator:
    """What a loss divides by, from the losses of single samples and of pairs.

    With L = (D_i l_i + D_j l_j) ÷ (D_i + D_j), D_i ÷ D_j = (l_j − L) ÷ (L − l_i).
    """

    def __init__(self, probe: Probe, told: LossWeights, samples: list[int], limit: float) -> None:
        self._probe, self._told, self._limit = probe, told, limit
        self._alone: Losses = {}
        spread = np.unique(np.linspace(0, len(samples) - 1, min(MOST_SAMPLES, len(samples))).round().astype(int))
        for sample in (samples[place] for place in spread):
            try:
                self._alone[sample] = probe.loss([sample]).item()
            except ValueError:  # a sample without a term in the loss
                continue
        eps = max((torch.finfo(dtype).eps for dtype in probe.dtypes), default=torch.finfo(torch.float64).eps)
        self._noise = eps * max(map(abs, self._alone.values()), default=0.0)

    def finding(self) -> Finding | None:
        """Return what is wrong with the loss, ``None`` if nothing is."""
        twice = {sample: self._probe.loss([sample, sample]).item() for sample in self._alone}
        is_sum = all(self._is_same(twice[sample], 2.0 * loss) for sample, loss in self._alone.items())
        is_mean = all(self._is_same(twice[sample], loss) for sample, loss in self._alone.items())
        if is_sum and is_mean:
            return Finding(
                advice="The losses of single samples are all 0 or not finite, so what the loss divides by could not be "
                "found out from them. No module's output depends on padding or batch mates."
            )
        if is_sum:
            return self._of_sum()
        if not is_mean:
            sample = max(twice, key=lambda sample: abs(twice[sample] - self._alone[sample]))
            return Finding(
                "batch mates",
                advice=f"Sample {sample} has the loss {self._alone[sample]:.6g} alone and {twice[sample]:.6g} twice in "
                "one batch, though no module depends on batch mates: the loss itself does (in-batch negatives, a "
                "balance loss, statistics of the batch), and so on how the global batch is split.",
            )
        pairs = {pair: self._probe.loss(list(pair)).item() for pair in itertools.combinations(self._alone, 2)}
        return self._of_mean(pairs)

    def _of_sum(self) -> Finding | None:
        if self._told.is_sum:
            return None
        return Finding(
            "loss weight",
            advice=f"The loss is a sum: two samples together have the sum of their losses. The sampler was given "
            f"loss_weight={self._told.option}; give loss_weight='sum', or have the loss divide by what is given.",
        )

    def _of_mean(self, pairs: PairLosses) -> Finding | None:
        misses = {name: self._miss(weights, pairs) for name, weights in self._told.hypotheses().items()}
        best = min(misses, key=misses.__getitem__, default="")
        told = misses.get(self._told.option, math.inf)
        if told <= max(3.0 * misses[best], self._noise):
            best = self._told.option
        if misses[best] <= self._limit * max(map(abs, self._alone.values())):
            return None if best == self._told.option else self._of_weights(best)
        ratios = self._ratios(pairs)
        if ratios is not None:
            return self._of_ratios(ratios)
        return self._of_no_mean(pairs)

    def _miss(self, weights: NDArray[np.float64], pairs: PairLosses) -> float:
        """Return by how much the pairs' losses differ at most from means with these weights."""
        misses = [0.0]
        for (i, j), loss in pairs.items():
            total = weights[i] + weights[j]
            mean = (weights[i] * self._alone[i] + weights[j] * self._alone[j]) / total if total > 0.0 else math.inf
            misses.append(abs(mean - loss))
        return max(misses)

    def _of_weights(self, name: str) -> Finding:
        of_what = {
            repr("samples"): "the number of samples",
            repr("sizes"): "the sum of the sizes",
            "sizes - 1": "the sum of size − 1 (as a causal model's does)",
            "sizes + 1": "the sum of size + 1 (as with an end mark for each sample)",
        }[name]
        array = "" if name[0] == "'" else " (an array)"
        return Finding(
            "loss weight",
            advice=f"The loss divides by {of_what}, but the sampler was given loss_weight={self._told.option}; give "
            f"loss_weight={name}{array}.",
        )

    def _ratios(self, pairs: PairLosses) -> Losses | None:
        """Return what each sample counts beside the first; ``None`` if the pairs contradict one another."""
        first, *others = self._alone
        ratios = np.ones_like(self._told.sizes)
        for sample in others:
            loss = pairs[first, sample]
            there, back = self._alone[first] - loss, loss - self._alone[sample]
            ratios[sample] = there / back if back != 0.0 else math.inf
            if not 0.0 < ratios[sample] < math.inf:
                return None
        tolerance = max(ROUNDING_OF_RATIOS * self._noise, self._limit * max(map(abs, self._alone.values())))
        is_consistent = self._miss(ratios, pairs) <= tolerance
        return {sample: float(ratios[sample]) for sample in self._alone} if is_consistent else None

    def _of_ratios(self, ratios: Losses) -> Finding:
        smallest = min(ratios, key=lambda sample: self._told.sizes[sample])
        shown = ", ".join(
            f"{ratio / ratios[smallest]:.4g} (sample {sample}, size {self._told.sizes[sample]:g})"
            for sample, ratio in sorted(ratios.items(), key=lambda item: self._told.sizes[item[0]])
        )
        return Finding(
            "loss weight",
            advice=f"The loss is a weighted mean, but its weights are not loss_weight={self._told.option}. Measured, "
            f"beside one another: {shown}. Give the number of terms that each sample has in the loss's denominator as "
            "an array, loss_weight=terms.",
        )

    def _of_no_mean(self, pairs: PairLosses) -> Finding:
        sizes = self._told.sizes
        equal = {pair: loss for pair, loss in pairs.items() if sizes[pair[0]] == sizes[pair[1]]}
        padded = max(
            abs((sizes[i] * self._alone[i] + sizes[j] * self._alone[j]) / (2.0 * max(sizes[i], sizes[j])) - loss)
            for (i, j), loss in pairs.items()
        )
        largest = max(map(abs, self._alone.values()))
        if padded <= self._limit * largest:
            found = "it divides by the padded length, the number of samples times the longest"
        elif equal and self._miss(np.ones_like(sizes), equal) <= self._limit * largest:
            found = "that of two samples of the same size is their mean, that of different sizes is not"
        else:
            return Finding(
                "not a mean",
                advice="The loss of two samples is no weighted mean of their losses alone, though no module depends on "
                "padding or batch mates: the loss itself does. Have it average over real positions only, and each "
                "sample by itself.",
            )
        return Finding(
            "padding",
            advice=f"The loss itself depends on padding: {found}. Mask the padding in the loss (ignore_index, a mask), "
            "divide by the number of real terms, and give that as loss_weight.",
        )

    def _is_same(self, a: float, b: float) -> bool:
        return abs(a - b) <= self._limit * max(abs(a), abs(b)) + self._noise
