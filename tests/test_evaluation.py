"""Evaluation: every sample once, the largest first, in one plan that pads little."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import check, lognormal

import chronica_hvd as chronica

GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"


def sampler(sizes: Any, ranks: int = 2, batch_size: int = 4, rank: int = 0, **options: Any) -> chronica.BatchSampler:
    return chronica.BatchSampler(sizes, batch_size, num_replicas=ranks, rank=rank, evaluation=True, **options)


def by_size(sizes: Any, samples: list[int]) -> list[int]:
    return sorted(samples, key=lambda sample: -float(sizes[sample]))  # stable


def check_evaluation(evaluation: chronica.BatchSampler, sizes: Any) -> None:
    """Each step holds the next largest samples, but the one with the largest micro-batch comes first."""
    plan = evaluation.plan
    order = by_size(sizes, list(range(len(sizes))))
    global_batch = evaluation.batch_size * plan.ranks
    steps = [sorted(order[first : first + global_batch]) for first in range(0, len(order), global_batch)]
    held = {int(i) for rank in range(plan.ranks) for batch in plan.batches(0, rank) for i in batch}
    swapped = steps.index(sorted(held))
    steps[0], steps[swapped] = steps[swapped], steps[0]
    check(plan, sizes, evaluation.batch_size, steps)
    micro_batches = np.diff(plan.offsets) * plan.lengths if plan.padding == "max" else plan.lengths
    assert micro_batches[: plan.parts[plan.ranks]].max() == micro_batches.max()


@pytest.mark.parametrize("micro_batches", [1, 3, "auto"])
@pytest.mark.parametrize("padding", ["max", "none"])
@pytest.mark.parametrize("samples", [1, 2, 3, 23, 24, 25, 500])
def test_every_sample_once_and_the_largest_first(samples: int, padding: str, micro_batches: int | str) -> None:
    sizes = lognormal(samples, seed=samples)
    for ranks in (1, 2, 3):
        evaluation = sampler(sizes, ranks, padding=padding, micro_batches=micro_batches)
        check_evaluation(evaluation, sizes)


@pytest.mark.parametrize("dtype", ["uint8", "uint64", "int16", "float32"])
def test_samples_of_one_size_stay_in_order(dtype: str) -> None:
    sizes = (np.arange(40) * 7 % 5).astype(dtype)
    evaluation = sampler(sizes, 1, 40, padding="none", policy="plain")
    assert evaluation.plan.batches(0, 0)[0].tolist() == by_size(sizes, list(range(40)))
    assert evaluation.plan == sampler(sizes.tolist(), 1, 40, padding="none", policy="plain").plan


def test_given_indices_are_sorted_too() -> None:
    sizes = lognormal(50)
    samples = [7, 3, 49, 3, 20, 11, 30, 31, 32]  # one of them twice
    evaluation = sampler(sizes, indices=samples, batch_size=8)
    held = [int(i) for rank in range(2) for batch in evaluation.plan.batches(0, rank) for i in batch]
    assert sorted(held) == sorted(samples)
    alone = sampler(sizes, 1, 16, indices=samples, padding="none", policy="plain")
    assert alone.plan.batches(0, 0)[0].tolist() == by_size(sizes, samples)


def test_all_epochs_have_one_plan() -> None:
    sizes = lognormal(100)
    evaluation = sampler(sizes, seed=3, epoch=5)
    plan = evaluation.plan
    loader = chronica.DataLoader(sizes, batch_sampler=evaluation)
    first = [batch.tolist() for batch in loader]
    evaluation.set_epoch(7)
    assert evaluation.epoch == 7
    assert evaluation.plan is plan
    assert [batch.tolist() for batch in loader] == first
    assert sampler(sizes).plan == plan
    for policy in ("plain", "static", "dynamic", "guided"):
        assert sampler(sizes, epoch=5, policy=policy).plan == sampler(sizes, policy=policy).plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, r"evaluation=True and shuffle=True contradict each other: .* largest first"),
        ({"drop_last": True}, r"drop_last=True contradict .* counts every sample\. Leave drop_last=True out"),
        ({"reorder": "window"}, r'reorder="window" contradict'),
        ({"first": "largest"}, r"first='largest' contradict .* comes first anyway"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler([5, 3, 8, 1, 2], **options)
    chronica.BatchSampler([5, 3, 8, 1, 2], 1, num_replicas=2, rank=0, evaluation=False, **options)


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="evaluation must be True or False, not 1"):
        chronica.BatchSampler([5, 3], 1, num_replicas=2, rank=0, evaluation=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="indices must be below the number of sizes, 2; 2 was given"):
        sampler([5, 3], indices=[2])
    with pytest.raises(ValueError, match="sizes must not be negative"):
        sampler([5, -3])
    assert sampler([5, 3], shuffle=False).plan == sampler([5, 3]).plan


def test_without_evaluation_nothing_changes() -> None:
    sizes = lognormal(100)
    training = chronica.BatchSampler(sizes, 4, num_replicas=2, rank=0)
    assert training.plan == chronica.plan(sizes, 2, 4)
    training.set_epoch(1)
    assert training.plan == chronica.plan(sizes, 2, 4, epoch=1)


def test_sizes_changed_afterwards() -> None:
    sizes = lognormal(100)
    evaluation = sampler(sizes)
    expected = sampler(sizes.copy()).plan
    sizes[:] = 1
    assert evaluation.plan == expected


@pytest.mark.parametrize("samples", [1, 2, 13, 30])
def test_predictions_without_fillers_are_one_for_each_sample(samples: int) -> None:
    """Ranks one after the other, in one process."""
    predicted: list[int] = []
    fillers = 0
    for rank in range(3):
        evaluation = sampler(lognormal(samples), 3, rank=rank, micro_batches="auto", min_local_batch=2)
        loader = chronica.DataLoader(range(samples), batch_sampler=evaluation)
        with pytest.raises(RuntimeError, match="no step is at work"):
            _ = evaluation.is_filler
        for number, step in enumerate(loader.steps()):
            for batch in step:
                assert evaluation.is_filler == (evaluation.plan.counts[number, rank] == 0)
                if evaluation.is_filler:
                    fillers += 1
                else:
                    predicted += batch.tolist()
    assert sorted(predicted) == list(range(samples))
    assert (fillers > 0) == (samples % 12 in (1, 2))


@pytest.mark.parametrize(("ranks", "batch_size", "times"), [(2, 32, 4.5), (8, 32, 4.5), (32, 4, 2.0)])
def test_much_less_padding_than_in_the_order_of_the_data_set(ranks: int, batch_size: int, times: float) -> None:
    sizes = lognormal(20_000, mean=6.0, largest=4096)
    plain = chronica.plan(sizes, ranks, batch_size, shuffle=False, policy="plain")
    evaluation = sampler(sizes, ranks, batch_size).plan
    work = sizes.sum() / ranks
    assert (1 - evaluation.padding_waste) / (1 - plain.padding_waste) >= times
    assert evaluation.makespans.sum() <= 1.02 * work
    assert plain.makespans.sum() >= 5 * work


def test_the_figures_of_the_guide() -> None:
    section = GUIDE.read_text().split("## Evaluate\n")[1].split("\n## ")[0]
    (example,) = re.findall(r"```pycon\n(.*?)```", section, re.DOTALL)
    runner = doctest.DocTestRunner()
    runner.run(doctest.DocTestParser().get_doctest(example, {}, "guide", str(GUIDE), 0))
    assert runner.tries > 0
    assert runner.failures == 0


def test_the_evaluation_of_the_guide() -> None:
    """On one rank; with several in parallel/."""
    section = GUIDE.read_text().split("## Evaluate\n")[1].split("\n## ")[0]
    program = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    inputs = torch.randn(21, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    names: dict[str, Any] = {
        "chronica": chronica,
        "torch": torch,
        "sizes": list(range(1, 22)),
        "dataset": [(sample, inputs[sample], inputs[sample, :2]) for sample in range(21)],
        "pad": torch.utils.data.default_collate,
        "loss_fn": torch.nn.functional.mse_loss,
    }
    exec(program.replace("evaluation=True", "evaluation=True, num_replicas=1, rank=0"), names)
    model = torch.nn.Linear(3, 2).double()
    loss, predictions = names["evaluate"](model)
    outputs = model(inputs)
    assert loss == pytest.approx(torch.nn.functional.mse_loss(outputs, inputs[:, :2]).item(), rel=1e-14)
    for sample in range(21):
        assert predictions[sample] == pytest.approx(outputs[sample].tolist(), rel=1e-14)
