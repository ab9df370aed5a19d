"""A random job's data and model, and how a rank trains on them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from helpers import distributed_sampler_steps, step_samples
from numpy.typing import NDArray
from random_jobs import LONGEST, Job
from torch import nn

import chronica_hvd as chronica

FEATURES, WIDTH, VOCABULARY = 4, 5, 11
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Batch:
    indices: torch.Tensor
    features: torch.Tensor  # (samples, FEATURES)
    tokens: torch.Tensor  # (samples, longest), padded with a token that would be felt
    is_token: torch.Tensor  # (samples, longest)
    targets: torch.Tensor


class Data(torch.utils.data.Dataset[int]):
    """What a job trains on; an item is its index."""

    def __init__(self, job: Job) -> None:
        random = np.random.default_rng(job.seed)
        self.job = job
        self.dtype = DTYPES[job.dtype]
        self.sizes = np.array(job.sizes)
        self.features = torch.from_numpy(random.normal(size=(len(self.sizes), FEATURES))).to(self.dtype)
        # So far off that the errors have one sign: gradients that cancel out would have no digits left to compare.
        self.targets = torch.from_numpy(random.normal(8.0, size=len(self.sizes))).to(self.dtype)
        self.tokens = torch.from_numpy(random.integers(0, VOCABULARY, (len(self.sizes), LONGEST)))
        self.planned_weights = torch.from_numpy(self._planned_weights()).to(self.dtype)
        true_weights = self.planned_weights if job.amounts is None else torch.tensor(job.amounts)
        self.loss_weights = true_weights.to(self.dtype)

    def _planned_weights(self) -> NDArray[np.float64]:
        if isinstance(self.job.loss_weight, list):
            return np.array(self.job.loss_weight)
        return self.sizes.astype(np.float64) if self.job.loss_weight == "sizes" else np.ones(len(self.sizes))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, indices: list[int]) -> Batch:
        longest = int(self.sizes[indices].max())
        tokens = self.tokens[indices, :longest].clone()
        is_token = torch.arange(longest) < torch.from_numpy(self.sizes[indices])[:, None]
        tokens[~is_token] = 0
        return Batch(torch.tensor(indices), self.features[indices], tokens, is_token, self.targets[indices])

    @property
    def plan_options(self) -> dict[str, Any]:
        options = {**self.job.plan, "loss_weight": self.job.loss_weight}
        if isinstance(options["cost"], dict):
            options["cost"] = chronica.CostModel(**options["cost"])
        return options

    def plan(self, epoch: int) -> chronica.Plan:
        ranks = self.job.speeds or self.job.ranks
        return chronica.plan(self.sizes, ranks, self.job.batch_size, epoch=epoch, **self.plan_options)

    def drawn_steps(self, epoch: int) -> list[list[int]]:
        """Return the samples of each global batch as they are drawn, sorted."""
        job, options = self.job, self.job.plan
        size = job.batch_size * job.ranks
        if "indices" in options:
            order = options["indices"]
            steps = [sorted(order[first : first + size]) for first in range(0, len(order), size)]
        else:
            drawing = {name: options[name] for name in ("shuffle", "seed")}
            steps = distributed_sampler_steps(len(self), job.ranks, job.batch_size, **drawing, epoch=epoch)
        return [step for step in steps if len(step) == size or not options["drop_last"]]

    def steps(self, epoch: int) -> list[list[int]]:
        """Return the samples of each global batch as they are trained on, sorted: each drawn one counts once."""
        drawn = self.drawn_steps(epoch)
        if not self.job.moves_samples:
            return drawn
        plan = self.plan(epoch)
        steps = [step_samples(plan, step) for step in range(plan.steps)]
        assert sorted(itertools.chain(*steps)) == sorted(itertools.chain(*drawn))
        assert [len(step) for step in steps] == [len(step) for step in drawn]
        if self.job.plan["reorder"] == "batch":
            assert sorted(steps) == sorted(drawn), "whole steps change their place"
        return steps


class Model(nn.Module):
    """A sample's loss is the squared error of a small network over its features or the mean of its tokens' vectors.

    The gated one sends a sample through one of two layers, so that a batch may leave the other without a gradient.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.tokens = None
        if job.model in ("bag", "sparse"):
            self.tokens = nn.Embedding(VOCABULARY, FEATURES, sparse=job.model == "sparse")
        self.hidden, self.out = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.other = nn.Linear(FEATURES, WIDTH) if job.model == "gated" else None
        self.to(DTYPES[job.dtype])
        random = np.random.default_rng(job.seed + 1)
        with torch.no_grad():
            for parameter in self.parameters():
                values = random.uniform(0.3, 1.0, parameter.shape) * random.choice([-1.0, 1.0], parameter.shape)
                parameter.copy_(torch.from_numpy(values))

    def losses(self, batch: Batch) -> torch.Tensor:
        inputs = batch.features
        if self.tokens is not None:
            vectors = self.tokens(batch.tokens) * batch.is_token[:, :, None]
            inputs = vectors.sum(dim=1) / batch.is_token.sum(dim=1, keepdim=True).clamp(min=1)
        return (self.out(torch.tanh(self._hidden(inputs)))[:, 0] - batch.targets).square()

    def _hidden(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.other is None:
            return self.hidden(inputs)  # type: ignore[no-any-return]
        hidden = inputs.new_zeros(len(inputs), WIDTH)
        for layer, is_chosen in ((self.hidden, inputs[:, 0] > 0.0), (self.other, inputs[:, 0] <= 0.0)):
            if is_chosen.any():
                hidden = hidden.index_put((is_chosen.nonzero()[:, 0],), layer(inputs[is_chosen]))
        return hidden

    def gradients(self) -> dict[str, NDArray[Any]]:
        return {name: _dense_gradient(parameter) for name, parameter in self.named_parameters()}


def _dense_gradient(parameter: nn.Parameter) -> NDArray[Any]:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return (gradient.to_dense() if gradient.is_sparse else gradient).clone().numpy()


def sgd(job: Job, model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=job.learning_rate, momentum=0.9)


@dataclass
class Trained:
    """What became of a job.

    Attributes
    ----------
    taken, losses
        Of each step: the micro-batches taken, and the mean loss.
    gradients, magnitudes
        Of each update, by parameter: the gradient; Σ |share · gradient of a sample's loss|, where that is needed.
    parameters
        At last.
    """

    taken: list[list[list[int]]] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, NDArray[Any]]] = dataclasses.field(default_factory=list)
    magnitudes: list[dict[str, NDArray[Any]]] = dataclasses.field(default_factory=list)
    parameters: dict[str, NDArray[Any]] = dataclasses.field(default_factory=dict)

    def end(self, model: Model) -> Trained:
        self.parameters = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
        return self

    def all_gradients(self, name: str) -> NDArray[Any]:
        """(updates, …) those of one parameter."""
        return np.stack([gradients[name] for gradients in self.gradients])


class Training:
    """A job on this rank, as a user's script is; every rank makes one and calls :meth:`run`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.data = Data(job)
        replicas = {} if job.speeds is None else {"num_replicas": job.speeds}
        self.sampler = chronica.BatchSampler(self.data.sizes, job.batch_size, **replicas, **self.data.plan_options)
        self.loader = chronica.DataLoader(self.data, batch_sampler=self.sampler, collate_fn=self.data.collate)
        self.model = Model(job)
        options = {**job.optimizer, "op": getattr(hvd, job.optimizer["op"])}
        if job.is_compressed:
            options["compression"] = getattr(hvd.Compression, job.optimizer["compression"])
        self.optimizer = chronica.DistributedOptimizer(
            sgd(job, self.model), self.model.named_parameters(), sampler=self.sampler, **options
        )
        self.trained = Trained()

    def run(self) -> Trained:
        for epoch in range(self.job.epochs):
            self.sampler.set_epoch(epoch)
            counts = self.sampler.plan.counts[:, hvd.rank()]
            for step, micro_batches in enumerate(self._steps()):
                if step % self.job.steps_per_update == 0:
                    self.optimizer.zero_grad()
                ends_update = (step + 1) % self.job.steps_per_update == 0 or step + 1 == len(counts)
                self._step(micro_batches, is_filler=counts[step] == 0, ends_update=ends_update)
        return self.trained.end(self.model)

    def _steps(self) -> Iterator[Iterable[Batch]]:
        """Yield the micro-batches of each step, taken as the job says."""
        if self.job.loop == "steps":
            return self.loader.steps()
        if self.job.loop == "steps_ahead":
            return _read_ahead(list(step) for step in self.loader.steps())
        is_whole = self.sampler.micro_batches == 1
        batches = iter(self.loader) if is_whole else itertools.chain.from_iterable(self.loader.steps())
        if self.job.loop == "ahead":
            batches = _read_ahead(batches)
        plan = self.sampler.plan
        return (itertools.islice(batches, len(plan.batches(step, hvd.rank()))) for step in range(plan.steps))

    def _step(self, micro_batches: Iterable[Batch], is_filler: bool, ends_update: bool) -> None:
        taken, losses = [], []
        for batch in micro_batches:
            taken.append(batch.indices.tolist())
            counts = not is_filler
            if self.job.amounts is not None:
                amount = float(self.data.loss_weights[batch.indices].sum())
                self.optimizer.set_weight(amount)
                # The backward pass of a rank's whole batch may be left out, but not that of a part.
                counts = counts and (amount > 0.0 or self.sampler.micro_batches != 1)
            loss = self._loss(batch) * (float("nan") if is_filler else 1.0)
            if counts or self.job.fillers != "skipped":
                loss.backward()
            losses.append(loss.detach())
        self.trained.taken.append(taken)
        if self.job.average == "before" or not ends_update:
            self._average(losses)
        if ends_update:
            self._update()
            self.trained.gradients.append(self.model.gradients())
            if self.job.average == "after":
                self._average(losses)

    def _loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean as users compute it, which is NaN where nothing has weight."""
        weights, losses = self.data.loss_weights[batch.indices], self.model.losses(batch)
        return losses.sum() if self.job.loss_weight == "sum" else (weights * losses).sum() / weights.sum()

    def _average(self, losses: list[torch.Tensor]) -> None:
        value = losses[0] if self.sampler.micro_batches == 1 else losses
        self.trained.losses.append(chronica.average(value, self.sampler).item())

    def _update(self) -> None:
        if not self.job.clips:
            self.optimizer.step()
            return
        self.optimizer.synchronize()
        with self.optimizer.skip_synchronize():
            self.optimizer.step()


def _read_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield each when the one after it has been read, as wrappers do that copy to a device."""
    return (batch for batch, _ in itertools.pairwise(itertools.chain(batches, [None])))
