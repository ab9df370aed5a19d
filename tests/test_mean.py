"""``Mean`` on one rank, and what it does with progress; over several ranks in parallel/."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lognormal, recut_sampler
from inprocess import run_ranks

import chronica_hvd as chronica

SIZES = lognormal(59, largest=500)
ARRAY = np.random.default_rng(0).choice([0.0, 0.5, 3.0], 59)
VALUES = np.random.default_rng(1).normal(size=59)


class Owner:
    """Stands for an optimizer."""


def sampler(**options: Any) -> chronica.BatchSampler:
    """Return one of many micro-batches on one rank."""
    options = {"micro_batches": "auto", "num_replicas": 1, "rank": 0, **options}
    return recut_sampler(chronica.BatchSampler(SIZES, 8, **options), seed=1)


def batches(of: chronica.BatchSampler) -> Any:
    """Yield each micro-batch's samples."""
    loader = chronica.DataLoader(range(59), batch_sampler=of, collate_fn=list)
    return (batch for step in loader.steps() for batch in step)


def weighted(weights: np.ndarray, samples: Any = slice(None)) -> float:
    """Return the mean of samples' values; 0 where none counts."""
    total = math.fsum(weights[samples])
    return math.fsum(weights[samples] * VALUES[samples]) / total if total else math.nan


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize(
    ("loss_weight", "weights"), [("samples", np.ones(59)), ("sizes", SIZES.astype(float)), (ARRAY, ARRAY)]
)
def test_it_is_the_mean_over_the_data_set(evaluation: bool, loss_weight: Any, weights: np.ndarray) -> None:
    """A micro-batch that counts 0 gives NaN, which is ignored."""
    of = sampler(loss_weight=loss_weight, evaluation=evaluation)
    mean = chronica.Mean(of)
    for samples in batches(of):
        mean.add(weighted(weights, samples))
    assert isinstance(mean.result(), float)
    assert mean.result() == pytest.approx(weighted(weights), rel=1e-14)


def test_with_windows_and_the_epochs_weight_all_units_count_alike() -> None:
    of = sampler(loss_weight="sizes", reorder="window", normalize="epoch")
    mean = chronica.Mean(of)
    for samples in batches(of):
        mean.add(weighted(SIZES.astype(float), samples))
    assert mean.result() == pytest.approx(weighted(SIZES.astype(float)), rel=1e-14)


@pytest.mark.parametrize("loss_weight", ["samples", "sizes", "sum"])
@pytest.mark.parametrize("as_amount", [float, torch.tensor, np.float64])
def test_amounts_that_are_known_only_after_reading(loss_weight: str, as_amount: Callable[[float], Any]) -> None:
    of = sampler(loss_weight=loss_weight)
    mean = chronica.Mean(of)
    for samples in batches(of):
        mean.add(weighted(ARRAY, samples), amount=as_amount(ARRAY[samples].sum()))
    assert mean.result() == pytest.approx(weighted(ARRAY), rel=1e-14)


def test_summed_losses_need_amounts() -> None:
    of = sampler(loss_weight="sum")
    mean = chronica.Mean(of)
    next(batches(of))
    with pytest.raises(ValueError, match=r'loss_weight="sum" .* mean\.add\(total / number, amount=number\)'):
        mean.add(1.0)
    mean.add(1.0, amount=3)
    assert mean.result() == 1.0


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (float, ()),
        (int, ()),
        (lambda number: number > 0, ()),
        (np.float32, ()),
        (lambda number: torch.tensor(number, requires_grad=True), ()),
        (lambda number: torch.full((2, 3), number, dtype=torch.float64), (2, 3)),
        (lambda number: torch.full((4,), number, dtype=torch.float16), (4,)),
        (lambda number: torch.full((1,), number, dtype=torch.bfloat16, requires_grad=True) * 1.0, (1,)),
        (lambda number: torch.full((2,), number).int(), (2,)),
        (lambda number: torch.full((2, 3, 1), number).mT, (2, 1, 3)),
        (lambda number: torch.zeros(0), (0,)),
    ],
)
def test_kinds_of_values(make: Callable[[float], Any], shape: tuple[int, ...]) -> None:
    of = sampler()
    mean = chronica.Mean(of)
    expected: Any = 0.0
    for number, samples in enumerate(batches(of)):
        value = make(number - 3.25)
        mean.add(value)
        value = value.detach().double() if isinstance(value, torch.Tensor) else torch.tensor(float(value)).double()
        expected = expected + value * len(samples) / 59
    result = mean.result()
    if shape == ():
        assert isinstance(result, float)
    else:
        assert result.dtype == torch.float64
        assert not result.requires_grad
    torch.testing.assert_close(torch.as_tensor(result, dtype=torch.float64), expected, rtol=1e-14, atol=0.0)
    assert tuple(expected.shape) == shape


def test_sums_are_kept_in_float64() -> None:
    of = chronica.BatchSampler([1] * 3, 1, num_replicas=1, rank=0)
    mean = chronica.Mean(of)
    for number, _ in enumerate(chronica.DataLoader(range(3), batch_sampler=of)):
        mean.add(torch.tensor([2.0**24, 1.0, 1.0][number]))
    assert mean.result() == (2**24 + 2) / 3


def test_it_can_go_on_and_begin_anew() -> None:
    of = sampler()
    mean = chronica.Mean(of)
    assert math.isnan(mean.result())
    seen: list[int] = []
    for samples in batches(of):
        mean.add(weighted(np.ones(59), samples))
        seen += samples
        assert mean.result() == mean.result() == pytest.approx(weighted(np.ones(59), seen), rel=1e-14)
    mean.reset()
    assert math.isnan(mean.result())
    for _ in batches(of):
        mean.add(torch.ones(2))
        last = mean.result()
        mean.reset()
        mean.add(last)  # the same micro-batch
    assert mean.result().tolist() == [1.0, 1.0]


def test_a_result_is_not_changed_by_what_is_added_later() -> None:
    of = sampler()
    mean = chronica.Mean(of)
    results = []
    for number, _ in enumerate(batches(of)):
        value = torch.full((2,), float(number))
        mean.add(value)
        value.fill_(math.nan)
        results.append(mean.result())
    assert results[0].tolist() == [0.0, 0.0]
    assert not results[-1].isnan().any()


@pytest.mark.parametrize("first", [True, False])
def test_values_of_inference_mode_and_others(first: bool) -> None:
    of = sampler()
    mean = chronica.Mean(of)
    for number, samples in enumerate(batches(of)):
        with torch.inference_mode((number % 2 == 0) == first):
            mean.add(torch.tensor(weighted(np.ones(59), samples), dtype=torch.float64))
    assert mean.result() == pytest.approx(weighted(np.ones(59)), rel=1e-14)


def test_where_nothing_counts_it_is_nan() -> None:
    """Where only some count, NaN of the others does not."""
    weights = np.array([0.0, 0.0, 1.0])
    of = chronica.BatchSampler([1, 1, 1], 1, num_replicas=1, rank=0, shuffle=False, loss_weight=weights)
    mean, shaped = chronica.Mean(of), chronica.Mean(of)
    for number, _ in enumerate(chronica.DataLoader(range(3), batch_sampler=of)):
        if number == 2:
            assert math.isnan(mean.result())
            assert shaped.result().isnan().tolist() == [True, True]
        mean.add(5.0 if number == 2 else math.nan)
        shaped.add(torch.full((2,), 5.0 if number == 2 else math.inf))
    assert mean.result() == 5.0
    assert shaped.result().tolist() == [5.0, 5.0]


def test_a_filler_is_ignored() -> None:
    of = chronica.BatchSampler([3], 2, num_replicas=1, rank=0, min_local_batch=1, evaluation=True)
    mean = chronica.Mean(of)
    for _ in chronica.DataLoader(range(1), batch_sampler=of):
        mean.add(2.0)
    real = mean.result()
    filler = chronica.BatchSampler([3], 2, num_replicas=2, rank=1, evaluation=True)
    mean = chronica.Mean(filler)
    for _ in chronica.DataLoader(range(1), batch_sampler=filler):
        assert filler.is_filler
        mean.add(math.nan, amount=math.pi)
    assert real == 2.0
    assert mean._amount == 0.0
    assert mean._sum is not None
    assert mean._sum.item() == 0.0


def test_the_mean_of_chosen_steps() -> None:
    of = sampler()
    mean = chronica.Mean(of)
    seen: list[int] = []
    for number, samples in enumerate(batches(of)):
        if number % 3 == 1:
            mean.add(weighted(np.ones(59), samples))
            seen += samples
    assert mean.result() == pytest.approx(weighted(np.ones(59), seen), rel=1e-14)


# In training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after", "updated"])
def test_it_follows_a_training_loop(when: str) -> None:
    """Value given before the backward pass, after it, or (that of the last micro-batch) after the update."""
    of, owner = sampler(loss_weight="sizes"), Owner()
    cursor = of.progress.attach(owner, 0)
    mean = chronica.Mean(of)
    weights = SIZES.astype(float)
    for epoch in range(2):
        of.set_epoch(epoch)
        for number, step in enumerate(chronica.DataLoader(range(59), batch_sampler=of, collate_fn=list).steps()):
            for place, samples in enumerate(step):
                is_after_update = when == "updated" and place == len(step) - 1
                if when == "before":
                    mean.add(weighted(weights, samples))
                cursor.work(100 * number + place)
                if when != "before" and not is_after_update:
                    mean.add(weighted(weights, samples))
            cursor.finish()
            if is_after_update:
                mean.add(weighted(weights, samples))
    assert mean.result() == pytest.approx(weighted(weights), rel=1e-14)


def test_amounts_that_were_set_are_what_values_count() -> None:
    of, owner = sampler(loss_weight="samples"), Owner()
    cursor = of.progress.attach(owner, 0)
    mean = chronica.Mean(of)
    for number, step in enumerate(chronica.DataLoader(range(59), batch_sampler=of, collate_fn=list).steps()):
        for place, samples in enumerate(step):
            cursor.set_amount(SIZES[samples].sum())
            cursor.work(100 * number + place)
            mean.add(weighted(SIZES.astype(float), samples))
        cursor.finish()
    assert mean.result() == pytest.approx(weighted(SIZES.astype(float)), rel=1e-14)


@pytest.mark.parametrize("ahead", [1, 2])
def test_it_follows_a_loop_that_reads_ahead(ahead: int) -> None:
    of, owner = sampler(loss_weight="sizes"), Owner()
    cursor = of.progress.attach(owner, 2)
    mean = chronica.Mean(of)
    weights = SIZES.astype(float)
    micro_batches = batches(of)
    taken = [next(micro_batches) for _ in range(ahead)]
    for step in range(of.plan.steps):
        for place in range(len(of.plan.batches(step, 0))):
            taken += [following for following in [next(micro_batches, None)] if following is not None]
            cursor.work(100 * step + place)
            mean.add(weighted(weights, taken.pop(0)))
        cursor.finish()
    assert mean.result() == pytest.approx(weighted(weights), rel=1e-14)


def test_a_value_too_early_in_a_loop_that_reads_ahead_is_an_error() -> None:
    of, owner = sampler(), Owner()
    cursor = of.progress.attach(owner, 1)
    mean = chronica.Mean(of)
    micro_batches = batches(of)
    assert len(of.plan.batches(0, 0)) > 1
    next(micro_batches)
    next(micro_batches)
    mean.add(1.0)
    cursor.work(0)
    with pytest.raises(RuntimeError, match="micro-batch 0 of step 0 already"):
        mean.add(2.0)


def test_after_a_step_that_was_skipped_a_value_is_of_its_last_micro_batch() -> None:
    of, owner = sampler(loss_weight="sizes"), Owner()
    cursor = of.progress.attach(owner, 0)
    mean = chronica.Mean(of)
    steps = chronica.DataLoader(range(59), batch_sampler=of, collate_fn=list).steps()
    sizes = []
    for value in (1.0, 2.0):
        step = list(next(steps))
        assert len(step) > 1
        sizes.append(SIZES[step[-1]].sum())
        cursor.finish()
        mean.add(value)
    assert mean.result() == pytest.approx((sizes[0] + 2 * sizes[1]) / sum(sizes), rel=1e-14)


# Mistakes -------------------------------------------------------------------------------------------------------------


def test_two_values_for_one_micro_batch() -> None:
    of = sampler()
    loss, accuracy = chronica.Mean(of), chronica.Mean(of)
    for number, _ in enumerate(batches(of)):
        loss.add(float(number))
        accuracy.add(1.0)
        with pytest.raises(RuntimeError, match=r"has a value of micro-batch \d of step \d already.* a Mean of its own"):
            loss.add(100.0)
    assert loss.result() < 100.0
    assert accuracy.result() == 1.0


def test_values_of_other_shapes() -> None:
    of = sampler()
    mean = chronica.Mean(of)
    micro_batches = batches(of)
    next(micro_batches)
    mean.add(torch.ones(2, 3))
    next(micro_batches)
    for wrong in (1.0, torch.ones(3, 2), torch.ones(6)):
        with pytest.raises(ValueError, match=r"the values must have one shape: \(2, 3\) before, now \("):
            mean.add(wrong)
    mean.add(torch.ones(2, 3))  # a refused value leaves no trace
    assert mean.result().tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("wrong", ["1", None, [1.0], np.ones(2), torch.ones(1, dtype=torch.complex64)])
def test_what_is_no_value(wrong: Any) -> None:
    of = sampler()
    next(batches(of))
    with pytest.raises(TypeError, match="value must be a real number or tensor, not "):
        chronica.Mean(of).add(wrong)


@pytest.mark.parametrize(
    ("amount", "error", "message"),
    [
        (-1, ValueError, "amount must be at least 0, not -1"),
        (math.nan, ValueError, "amount must be finite, not nan"),
        ("3", TypeError, "amount must be a number, not '3'"),
        (torch.ones(2), TypeError, "amount must be a number, not tensor"),
    ],
)
def test_wrong_amounts(amount: Any, error: type[Exception], message: str) -> None:
    of = sampler()
    mean = chronica.Mean(of)
    next(batches(of))
    with pytest.raises(error, match=message):
        mean.add(1.0, amount=amount)
    mean.add(1.0, amount=2)
    assert mean.result() == 1.0


def test_outside_of_a_loop() -> None:
    of = sampler()
    mean = chronica.Mean(of)
    with pytest.raises(RuntimeError, match="no step is at work"):
        mean.add(1.0)
    list(batches(of))
    with pytest.raises(RuntimeError, match="no step is at work"):
        mean.add(1.0)


def test_it_needs_a_sampler() -> None:
    with pytest.raises(TypeError, match=r"Mean needs the sampler .* not None of type NoneType"):
        chronica.Mean(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_first_given", [False, True])
def test_amounts_are_given_always_or_never(is_first_given: bool) -> None:
    sampler = chronica.BatchSampler([1, 2, 3], 1, num_replicas=1, rank=0)
    mean = chronica.Mean(sampler)
    batches = iter(chronica.DataLoader(range(3), batch_sampler=sampler))
    next(batches)
    mean.add(4.0, amount=5.0 if is_first_given else None)
    next(batches)
    with pytest.raises(ValueError, match=r"with an amount, or none; this one is with(out)? one"):
        mean.add(100.0, amount=None if is_first_given else 5.0)
    assert mean.result() == 4.0
    mean.reset()
    mean.add(3.0, amount=None if is_first_given else 5.0)
    assert mean.result() == 3.0


def test_ranks_that_give_amounts_and_others_that_do_not_are_all_told() -> None:
    def error_of(rank: int) -> str:
        sampler = chronica.BatchSampler([1, 2], 1)
        mean = chronica.Mean(sampler)
        next(iter(chronica.DataLoader(range(2), batch_sampler=sampler)))
        mean.add(1.0, amount=5.0 if rank else None)
        with pytest.raises(ValueError, match="amounts are planned on rank 0, given on rank 1") as raised:
            mean.result()
        return str(raised.value)

    assert len(set(run_ranks(2, error_of))) == 1


def test_nothing_counts_in_the_rest_of_an_epoch_without_weights() -> None:
    options = {"num_replicas": 1, "rank": 0, "shuffle": False, "loss_weight": [1.0, 0.0, 0.0], "normalize": "epoch"}
    sampler = chronica.BatchSampler([1, 1, 1], 1, **options)
    next(iter(chronica.DataLoader(range(3), batch_sampler=sampler)))
    resumed = chronica.BatchSampler([1, 1, 1], 2, **options)  # another world: only what is left is planned
    resumed.load_state_dict(sampler.state_dict())
    mean = chronica.Mean(resumed)
    for _ in chronica.DataLoader(range(3), batch_sampler=resumed):
        assert resumed.progress.latest().ticket.weights == (0.0,)
        mean.add(5.0)
    assert math.isnan(mean.result())
