"""Evaluate on several ranks, as one should and not; share running statistics; train with those of all ranks."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import horovod.torch as hvd
import rank
import torch
from cases import base, micro_batched
from evaluating import FEATURES, Evaluation, Normalised, block, evaluations
from torch import nn
from train import Run, ahead

import chronica_hvd


def micro_batches(evaluation: Evaluation, sampler: chronica_hvd.BatchSampler) -> Iterator[list[int]]:
    """Yield the samples of each micro-batch of this rank."""
    workers = {"num_workers": evaluation.workers} if evaluation.workers else {}
    loader = chronica_hvd.DataLoader(range(evaluation.samples), batch_sampler=sampler, collate_fn=list, **workers)
    return itertools.chain.from_iterable(loader.steps())


def evaluate(evaluation: Evaluation, process_set: Any = None) -> dict[str, Any]:
    """Average numbers and tensors of every micro-batch, NaN on fillers; keep the samples that count."""
    sampler = evaluation.sampler(hvd.rank(), hvd.size(), process_set)
    number, tensor = chronica_hvd.Mean(sampler), chronica_hvd.Mean(sampler)
    counted = []
    for samples in micro_batches(evaluation, sampler):
        means = torch.from_numpy(evaluation.means(samples))
        amount = evaluation.weights[samples].sum() if evaluation.loss_weight == "sum" else None
        if sampler.is_filler:
            means, amount = torch.full_like(means, math.nan), 1e9
        else:
            counted += samples
        number.add(means[0].item(), amount)
        tensor.add(means.reshape(1, FEATURES), amount)
    return {"counted": counted, "number": number.result(), "tensor": tensor.result().flatten().tolist()}


def training(run: Run) -> dict[str, Any]:
    """Average losses in training over two epochs: Mean, and the values and weights it is to be made of."""
    mean = chronica_hvd.Mean(run.sampler)
    given: list[tuple[float, float]] = []
    plan = run.sampler.plan
    for step, batches in enumerate(run.loader.steps()):
        run.optimizer.zero_grad()
        weights = plan.micro_weights(step, hvd.rank()) * plan.divisors[step] / hvd.size()
        for batch, weight in zip(batches, weights.tolist(), strict=True):
            loss = run.loss(batch, is_filler=run.sampler.is_filler)
            loss.backward()
            mean.add(loss)
            given.append((0.0 if run.sampler.is_filler else loss.item(), weight))
        run.optimizer.step()
    return {"mean": mean.result(), "given": given}


def training_ahead(run: Run) -> dict[str, Any]:
    """The same where a wrapper reads a batch ahead."""
    mean = chronica_hvd.Mean(run.sampler)
    given = []
    plan = run.sampler.plan
    for step, batch in enumerate(ahead(iter(run.loader))):
        run.optimizer.zero_grad()
        is_filler = bool(plan.counts[step, hvd.rank()] == 0)
        loss = run.loss(batch, is_filler)
        loss.backward()
        mean.add(loss)
        weight = float(plan.weights[step, hvd.rank()] * plan.divisors[step] / hvd.size())
        given.append((0.0 if is_filler else loss.item(), weight))
        run.optimizer.step()
    return {"mean": mean.result(), "given": given}


# Ranks that differ ----------------------------------------------------------------------------------------------------


def started(**options: Any) -> tuple[chronica_hvd.BatchSampler, Iterator[list[int]]]:
    """Return a sampler and its micro-batches."""
    evaluation = Evaluation(20 * hvd.size(), options=options)
    sampler = evaluation.sampler(hvd.rank(), hvd.size())
    return sampler, micro_batches(evaluation, sampler)


def only_the_last_rank_adds() -> list[float]:
    sampler, batches = started()
    mean = chronica_hvd.Mean(sampler)
    for number, _ in enumerate(batches):
        if hvd.rank() == hvd.size() - 1:
            mean.add(torch.full((2, 2), 3.0 + (number == 0)) - 1.0 * (number == 0))
    return mean.result().flatten().tolist()


def nobody_adds() -> float:
    sampler, batches = started()
    mean = chronica_hvd.Mean(sampler)
    list(batches)
    return mean.result()


def nothing_counts() -> list[float]:
    """Only tensors of amount 0 on the first rank, nothing on the others."""
    sampler, batches = started()
    mean = chronica_hvd.Mean(sampler)
    for _ in batches:
        if hvd.rank() == 0:
            mean.add(torch.ones(2), amount=0)
    return mean.result().tolist()


def goes_on() -> list[float]:
    """Results after every value, and after a new beginning."""
    sampler, batches = started()
    mean = chronica_hvd.Mean(sampler)
    results = []
    for number, _ in enumerate(batches):
        mean.add(number, amount=1)
        results.append(mean.result())
    mean.reset()
    results.append(mean.result())
    return results


def shapes() -> Any:
    sampler, batches = started()
    mean = chronica_hvd.Mean(sampler)
    next(batches)
    mean.add(torch.ones((2, 3) if hvd.rank() == 0 else (3, 2)))
    return mean.result()


def dimensions() -> Any:
    """As many numbers on every rank."""
    sampler, batches = started()
    mean = chronica_hvd.Mean(sampler)
    next(batches)
    mean.add(1.0 if hvd.rank() == 0 else torch.ones(1, 1))
    return mean.result()


def plans() -> Any:
    sampler, batches = started(evaluation=False, seed=min(hvd.rank(), 1))
    mean = chronica_hvd.Mean(sampler)
    next(batches)
    mean.add(1.0)
    return mean.result()


def order() -> Any:
    sampler, batches = started()
    first, second = chronica_hvd.Mean(sampler), chronica_hvd.Mean(sampler)
    next(batches)
    first.add(1.0)
    second.add(2.0)
    return (first if hvd.rank() == 0 else second).result()


def world_by_hand() -> Any:
    sampler = chronica_hvd.BatchSampler([1] * 9, 1, num_replicas=hvd.size() + 1, rank=hvd.rank())
    return chronica_hvd.Mean(sampler).result()


ODD = [
    only_the_last_rank_adds,
    nobody_adds,
    nothing_counts,
    goes_on,
    shapes,
    dimensions,
    plans,
    order,
    world_by_hand,
]


def attempt(action: Callable[[], Any]) -> dict[str, Any]:
    """Return the result or the error."""
    try:
        return {"result": action()}
    except Exception as error:
        return {"error": [type(error).__name__, str(error)]}


# The guide's code -----------------------------------------------------------------------------------------------------


def guides_evaluation() -> dict[str, Any]:
    """Run the guide's evaluation and its gathering of predictions."""
    inputs = torch.randn(4 * hvd.size() + 1, FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    names: dict[str, Any] = {
        "chronica": chronica_hvd,
        "torch": torch,
        "hvd": hvd,
        "sizes": list(range(1, len(inputs) + 1)),
        "dataset": [(sample, row, row[:2]) for sample, row in enumerate(inputs)],
        "pad": torch.utils.data.default_collate,
        "loss_fn": nn.functional.mse_loss,
    }
    exec(block("def evaluate(").replace("batch_size=32", "batch_size=4"), names)
    torch.manual_seed(1)
    model = nn.Linear(FEATURES, 2).double()
    names["evaluate"](model)
    loss, names["predictions"] = names["evaluate"](model)  # once more: it begins anew
    exec(block("allgather_object(predictions)"), names)
    outputs = model(inputs).detach()
    expected = nn.functional.mse_loss(outputs, inputs[:, :2]).item()
    return {
        "error": abs(loss - expected) / expected,
        "are_all_there": sorted(names["everywhere"]) == list(range(len(inputs))),
        "are_right": all(
            torch.allclose(outputs[i], torch.tensor(value).double()) for i, value in names["everywhere"].items()
        ),
        "own": sorted(names["predictions"]),
    }


def running_statistics() -> dict[str, Any]:
    """Run the guide's function on a model whose ranks have seen other data."""
    sampler = chronica_hvd.BatchSampler(list(range(1, 60)), 4, padding="none")
    names: dict[str, Any] = {"hvd": hvd, "torch": torch}
    exec(block("def share_running_statistics"), names)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    for layer in model:
        layer.train()
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(3):
        model(torch.randn(5, 2, generator=generator) * (1 + hvd.rank()) + hvd.rank())
    before = statistics(model)
    names["share_running_statistics"](model, sampler)
    return {"before": before, "after": statistics(model)}


def statistics(model: nn.Sequential) -> list[list[list[float]]]:
    """Return (layers, mean and variance, channels)."""
    return [[layer.running_mean.tolist(), layer.running_var.tolist()] for layer in model]


class SumOverRanks(torch.autograd.Function):
    """As Horovod's own allreduce, but with a name in the backward pass too: its counter differs between ranks here."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(own, op=hvd.Sum, name="statistics")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(gradient, op=hvd.Sum, name="statistics.gradient")


class OverAllRanks(nn.BatchNorm1d):
    """What SyncBatchNorm computes, on the CPU: gradients are summed over the ranks in its backward pass."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        own = torch.stack([input.sum(dim=0), input.square().sum(dim=0), torch.full_like(input[0], len(input))])
        total, square, count = SumOverRanks.apply(own)
        mean = total / count
        variance = square / count - mean.square()
        return (input - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def synchronized_training(plain_weights: bool) -> dict[str, Any]:
    """Train by the guide's loop for SyncBatchNorm, or (``plain_weights``) by the usual loop."""
    evaluation = Evaluation(8 * 4 * hvd.size())
    inputs = torch.from_numpy(evaluation.values)
    names: dict[str, Any] = {
        "chronica": chronica_hvd,
        "sizes": evaluation.sizes,
        "dataset": [(row,) for row in inputs],
        "pad": lambda rows: torch.stack([row for (row,) in rows]),
        "model": Normalised(OverAllRanks(6)),
        "loss_fn": torch.mean,
    }
    model = names["model"]
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.01)
    program = block("(loss_fn(model(batch)) * sampler.weight)").replace("batch_size=32", "batch_size=4")
    if plain_weights:
        program = program.replace(" * sampler.weight", "").replace(
            "parameters())  #", "parameters(), sampler=sampler)  #"
        )
    exec(program, names)
    reference = Normalised(nn.BatchNorm1d(6))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.01)
    plan = names["sampler"].plan
    for step in range(plan.steps):
        optimizer.zero_grad()
        every = [int(i) for other in range(hvd.size()) for i in plan.batches(step, other)[0]]
        reference(inputs[every]).mean().backward()
        optimizer.step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    error = max(float((one - other).detach().norm() / other.detach().norm()) for one, other in pairs)
    return {"error": error, "weights": plan.weights.tolist()}


def main() -> None:
    folder = rank.begin(init=False)
    later = hvd.ProcessSet(list(range(1, int(os.environ["HOROVOD_SIZE"]))))
    hvd.init(process_sets=[later])
    rank.write(
        folder,
        {
            "evaluations": {name: evaluate(evaluation) for name, evaluation in evaluations(hvd.size()).items()},
            "process_set": evaluate(Evaluation(11), later) if later.included() else None,
            "training": training(Run(micro_batched(hvd.size(), "mean"))),
            "training_ahead": training_ahead(Run(base(hvd.size(), "mean_ahead", optimizer={"lookahead": 1}))),
            "odd": {action.__name__: attempt(action) for action in ODD},
            "again": evaluate(evaluations(hvd.size())["indivisible"]),
            "guide": guides_evaluation(),
            "running_statistics": running_statistics(),
            "synchronized": {str(plain): synchronized_training(plain) for plain in (False, True)},
        },
    )


if __name__ == "__main__":
    main()
