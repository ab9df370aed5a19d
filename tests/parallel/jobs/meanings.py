"""Averages of what ranks log, ``torch.autograd.grad`` on a watched model, and the optimizer without a sampler."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import rank
import torch
from cases import base, micro_batched, skipping
from train import Run
from training import Case, build, mean, relative_errors, sgd

import chronica_hvd

#: Kind of value → how it is made from a number.
VALUES: dict[str, Callable[[float], Any]] = {
    "float": float,
    "int": int,
    "bool": lambda number: number > 5.0,
    "float64": lambda number: torch.full((2, 3), number, dtype=torch.float64),
    "float32": lambda number: torch.tensor(number, requires_grad=True),
    "float16": lambda number: torch.full((4,), number, dtype=torch.float16),
    "bfloat16": lambda number: torch.tensor(number, dtype=torch.bfloat16),
    "int64": lambda number: torch.tensor([int(number)]),
    "int32": lambda number: torch.tensor(int(number), dtype=torch.int32),
    "not_contiguous": lambda number: torch.tensor([[number, 1.0], [number, 1.0]]).t(),
}
WHOLE = {"int", "int64", "int32", "bool"}  # which cannot be NaN on a filler


def averages(run: Run) -> list[dict[str, Any]]:
    """Average a value of every kind in each step of an epoch, before and after the update."""
    averaged = []
    for step, batch in enumerate(run.loader):
        number, is_filler = logged(run, step)
        before = {kind: average(kind, number, is_filler, run.sampler) for kind in VALUES}
        run.optimizer.zero_grad()
        run.loss(batch, is_filler).backward()
        run.optimizer.step()
        after = {kind: average(kind, number, is_filler, run.sampler) for kind in VALUES}
        averaged.append({"before": before, "after": after})
    return averaged


def averages_without_optimizer(case: Case) -> list[dict[str, Any]]:
    """Average in an evaluation loop."""
    run = Run(case, with_optimizer=False)
    return [
        {"before": {"float": average("float", *logged(run, step), run.sampler)}} for step, _ in enumerate(run.loader)
    ]


def averages_of_micro_batches(run: Run) -> list[list[float]]:
    """Average lists in each step of an epoch: in training before and after the update, in evaluation once."""
    averaged = []
    for step, micro_batches in enumerate(run.loader.steps()):
        number, is_filler = logged(run, step)
        values: list[Any] = []
        if run.optimizer is not None:
            run.optimizer.zero_grad()
        for batch in micro_batches:
            values.append(float("nan") if is_filler else number + len(values) / 8)
            if run.optimizer is not None:
                run.loss(batch, is_filler).backward()
        averaged.append([chronica_hvd.average(values, run.sampler)])
        if run.optimizer is not None:
            run.optimizer.step()
            tensors = [torch.tensor([value], dtype=torch.float64) for value in values]
            averaged[-1].append(chronica_hvd.average(tensors, run.sampler).item())
            averaged[-1].append(chronica_hvd.average(tuple(values), run.sampler))
    return averaged


def logged(run: Run, step: int) -> tuple[float, bool]:
    """Return the number that this rank logs in a step, and whether it holds a filler."""
    return 1.0 + 4 * hvd.rank() + step, bool(run.sampler.plan.counts[step, hvd.rank()] == 0)


def average(kind: str, number: float, is_filler: bool, sampler: chronica_hvd.BatchSampler) -> dict[str, Any]:
    """Average a value of this kind; a filler's is NaN or far off, since it must not count."""
    if is_filler:
        number = 1e6 if kind in WHOLE else float("nan")
    value = VALUES[kind](number)
    mean_value = chronica_hvd.average(value, sampler)
    if not isinstance(value, torch.Tensor):
        return {"values": [mean_value], "type": type(mean_value).__name__}
    assert not mean_value.requires_grad
    assert mean_value.shape == value.shape
    return {"values": mean_value.double().flatten().tolist(), "type": str(mean_value.dtype)}


def autograd_grad(run: Run) -> dict[str, Any]:
    """Return how far ``torch.autograd.grad`` is from that of a model without an optimizer."""
    batch = next(iter(run.loader))
    alone = copy.deepcopy(run.model)
    indices, inputs, targets = batch
    mean(alone.losses(inputs, targets), torch.from_numpy(run.data.loss_weights)[indices]).backward()
    loss = run.loss(batch)
    gradients = torch.autograd.grad(loss, list(run.model.parameters()), retain_graph=True)
    untouched = all(parameter.grad is None for parameter in run.model.parameters())
    loss.backward()  # the weighed one still works
    run.optimizer.step()
    equal = all(torch.equal(one, other.grad) for one, other in zip(gradients, alone.parameters(), strict=True))
    return {"equal": equal, "untouched": untouched, "weight": run.optimizer.weight}


def skips(run: Run) -> list[float]:
    """Skip two steps of every four, all ranks alike and in every way; return the weight of each step trained on."""
    weights = []
    for number, step in enumerate(run.loader.steps()):
        run.optimizer.zero_grad()
        if number % 4 == 1:
            batches = iter(step)
            run.loss(next(batches), is_filler=True).backward()  # NaN, as what one skips for
            before = [parameter.detach().clone() for parameter in run.model.parameters()]
            run.optimizer.skip_step()
            assert all(map(torch.equal, before, run.model.parameters()))
            assert all(parameter.grad is None for parameter in run.model.parameters())
            continue
        batches = list(step) if number % 4 == 2 else step
        if number % 4 == 2:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run.optimizer.synchronize() if number < 8 else run.optimizer.step()
            assert "a step's samples are left out" in str(caught[0].message)
            continue
        total = 0.0
        for batch in batches:
            run.loss(batch, is_filler=run.sampler.weight == 0.0).backward()
            total += run.optimizer.weight
        run.optimizer.step()
        weights.append(total)
    return weights


def without_sampler(options: dict[str, Any], name: str) -> dict[str, Any]:
    """Return how far training without a sampler is from Horovod's own, with uneven batches."""
    trained = []
    weights = set()
    passes = options.get("backward_passes_per_step", 1)
    for distribute in (hvd.DistributedOptimizer, chronica_hvd.DistributedOptimizer):
        model = build(base(1, name))
        named = [(f"{name}.{distribute.__module__}.{key}", value) for key, value in model.named_parameters()]
        optimizer = distribute(sgd(base(1, name), model), named, **options)
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(passes):
                inputs = torch.randn(3 + hvd.rank(), 6, generator=generator, dtype=torch.float64)
                model.losses(inputs, inputs[:, :2]).mean().backward()
            optimizer.step()
            weights.add(getattr(optimizer, "weight", 1.0))
        trained.append({key: value.detach().numpy() for key, value in model.named_parameters()})
    return {"error": max(relative_errors(*trained).values()), "weights": sorted(weights)}


def forgotten_sampler(run: Run) -> list[str]:
    """Train a step by an optimizer without the sampler, then by weights of one's own; return what is warned of."""
    optimizer = chronica_hvd.DistributedOptimizer(sgd(run.case, run.model))
    messages = []
    for is_weighed, batch in enumerate(itertools.islice(run.loader, 2)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (run.loss(batch) * (run.sampler.weight if is_weighed else 1.0)).backward()
            optimizer.step()
        messages.append(" ".join(str(one.message) for one in caught))
    return messages


def averages_without_gradients(run: Run) -> list[float]:
    """Average in inference mode, numbers and tensors."""
    with torch.inference_mode():
        mean = chronica_hvd.Mean(run.sampler)
        for batch in run.loader:
            value = chronica_hvd.average(1.0, run.sampler)
            tensor = chronica_hvd.average(batch[1].mean() * 0 + 1.0, run.sampler)
            mean.add(1.0)
        return [value, float(tensor), mean.result()]


WITHOUT_SAMPLER: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sum": {"op": hvd.Sum},
    "passes": {"backward_passes_per_step": 2},
    "predivide": {"gradient_predivide_factor": 2.0},
    "groups": {"groups": 2},
}


def main() -> None:
    folder = rank.begin()
    ranks = hvd.size()
    result = {
        "training": averages(Run(base(ranks, "training"))),
        "evaluation": averages_without_optimizer(base(ranks, "evaluation")),
        "micro_training": averages_of_micro_batches(Run(micro_batched(ranks, "micro_training"))),
        "micro_evaluation": averages_of_micro_batches(
            Run(micro_batched(ranks, "micro_evaluation"), with_optimizer=False)
        ),
        "skips": {str(most): skips(Run(skipping(ranks, most))) for most in (1, 3)},
        "forgotten_sampler": forgotten_sampler(Run(base(ranks, "forgotten_sampler"), with_optimizer=False)),
        "inference_mode": averages_without_gradients(Run(base(ranks, "inference_mode"), with_optimizer=False)),
        "autograd_grad": autograd_grad(Run(base(ranks, "autograd_grad"))),
        "without_sampler": {name: without_sampler(options, name) for name, options in WITHOUT_SAMPLER.items()},
    }
    rank.write(folder, result)


if __name__ == "__main__":
    main()
