"""Bad input is refused before anything is computed: the message says what was given and what is allowed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import chronica_hvd as chronica
from chronica_hvd.options import NOT_BUILT

NAN, INF = float("nan"), float("inf")
SIZES = [5, 3, 8, 1, 2]
ONE_PER_SAMPLE = "one value per sample: 5 are needed"


def plan(**changes: Any) -> chronica.Plan:
    return chronica.plan(**{"sizes": SIZES, "ranks": 2, "batch_size": 2, **changes})


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ([], ValueError, "sizes is empty; at least one"),
        ([3, -1], ValueError, "sizes must not be negative; position 1 holds -1"),
        ([3.0, NAN], ValueError, "sizes must be finite; position 1 holds nan"),
        ([INF, 3.0], ValueError, "sizes must be finite; position 0 holds inf"),
        ([1e30], ValueError, "sizes must be at most 9223372036854775807"),
        ([1, 2**63], ValueError, r"sizes must be at most 9223372036854775807 \(int64\); position 1"),
        ([1, 10**30], ValueError, "sizes must be at most .*int64.*position 1 holds 1000"),
        ([1, -(10**30)], ValueError, "sizes must be at most .*int64"),
        (np.array([1, 2**64 - 1], dtype=np.uint64), ValueError, "sizes must be at most .*int64"),
        ([[1, 2], [3, 4]], ValueError, r"sizes must be one-dimensional, not of shape \(2, 2\)"),
        (7, ValueError, r"sizes must be one-dimensional, not of shape \(\)"),
        (None, ValueError, r"sizes must be one-dimensional, not of shape \(\)"),
        ([[1], [2, 3]], TypeError, "sizes must be a one-dimensional array of numbers"),
        (["a", "b"], TypeError, "sizes must hold integers or floats, not <U1"),
        ("123", ValueError, "sizes must be one-dimensional"),
        ([True, False], TypeError, "sizes must hold integers or floats, not bool"),
        ([1 + 2j], TypeError, "sizes must hold integers or floats, not complex128"),
        ([None, 1], TypeError, r"sizes must hold numbers, not None \(position 0\)"),
        ([10**30, True], TypeError, r"sizes must hold numbers, not True \(position 1\)"),
        ({3: 4}, ValueError, "sizes must be one-dimensional"),
        ((size for size in SIZES), ValueError, "sizes must be one-dimensional"),
    ],
)
def test_sizes(sizes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan(sizes=sizes)
    with pytest.raises(error, match=message):
        chronica.BatchSampler(sizes, 2, num_replicas=2, rank=0)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("batch_size", 0, ValueError, "batch_size must be at least 1, not 0"),
        ("batch_size", -1, ValueError, "batch_size must be at least 1, not -1"),
        ("batch_size", 2**41, ValueError, "batch_size must be at most"),
        ("batch_size", 1.5, TypeError, "batch_size must be an integer, not 1.5 of type float"),
        ("batch_size", 32.0, TypeError, "batch_size must be an integer, not 32.0"),
        ("batch_size", True, TypeError, "batch_size must be an integer, not True"),
        ("batch_size", "8", TypeError, "batch_size must be an integer, not '8'"),
        ("batch_size", None, TypeError, "batch_size must be an integer, not None"),
        ("ranks", 0, ValueError, "ranks must be at least 1, not 0"),
        ("ranks", -1, ValueError, "ranks must be at least 1, not -1"),
        ("ranks", 1.5, TypeError, "ranks must be an integer, not 1.5"),
        ("ranks", True, TypeError, "ranks must be an integer, not True"),
        ("ranks", None, TypeError, "ranks must be an integer, not None"),
        ("ranks", "2", TypeError, "ranks must be an integer, not '2'"),
        ("ranks", [], ValueError, r"ranks \(speeds\) is empty"),
        ("ranks", [1, 0], ValueError, r"speeds must be positive and finite, not \[1.0, 0.0\]"),
        ("ranks", [1, -1], ValueError, r"speeds must be positive and finite, not \[1.0, -1.0\]"),
        ("ranks", [1, NAN], ValueError, "speeds must be positive and finite"),
        ("ranks", [1, INF], ValueError, "speeds must be positive and finite"),
        ("ranks", [1, 1e-7], ValueError, "speeds must not differ by more than a factor of"),
        ("ranks", [[1, 1]], ValueError, r"ranks \(speeds\) must be one-dimensional"),
        ("ranks", ["a", "b"], TypeError, r"ranks \(speeds\) must hold integers or floats"),
        ("indices", [0, -1], ValueError, "indices must not be negative; position 1 holds -1"),
        ("indices", [0, 5], ValueError, "indices must be below the number of sizes, 5; 5 was given"),
        ("indices", [0.0, 1.0], TypeError, "indices must hold integers, not float64"),
        ("indices", [], ValueError, "indices is empty"),
        ("indices", [[0], [1]], ValueError, "indices must be one-dimensional"),
        ("loss_weight", [1, 1, -1, 1, 1], ValueError, "loss_weight must not be negative; position 2 holds -1"),
        ("loss_weight", [1, 1, NAN, 1, 1], ValueError, "loss_weight must be finite; position 2 holds nan"),
        ("loss_weight", [0] * 5, ValueError, "loss_weight must not be 0 for all samples"),
        ("loss_weight", [1, 2, 3], ValueError, f"loss_weight must have {ONE_PER_SAMPLE}, 3 were given"),
        ("loss_weight", [[1]] * 5, ValueError, "loss_weight must be one-dimensional"),
        ("loss_weight", "tokens", ValueError, "loss_weight must be one of 'samples', 'sizes', 'sum', not 'tokens'"),
        ("loss_weight", None, TypeError, "loss_weight must be one of 'samples', 'sizes', 'sum' or an array, not None"),
        ("cost", [1] * 5, ValueError, 'an array of costs needs padding="none"'),
        ("cost", "size", TypeError, "cost must be a CostModel, an array of costs or None, not 'size'"),
        ("cost", len, TypeError, "cost must be a CostModel, an array of costs or None, not <built-in"),
        ("cost", chronica.CostModel(rank_scale=[1, 2, 3]), ValueError, "one value per rank: 2 are needed, 3 were"),
        ("cost", chronica.CostModel(rank_scale=[1, 1e9]), ValueError, "must not differ by more than a factor of"),
        ("cost", chronica.CostModel(per_size2=1e308), ValueError, "costs inf .*load would overflow"),
        ("padding", "min", ValueError, "padding must be one of 'max', 'none', not 'min'"),
        ("padding", None, ValueError, "padding must be one of 'max', 'none', not None"),
        ("local_batch", 8, ValueError, "local_batch must be one of 'free', 'equal', not 8"),
        ("shuffle", 1, TypeError, "shuffle must be True or False, not 1"),
        ("drop_last", "yes", TypeError, "drop_last must be True or False, not 'yes'"),
        ("seed", 0.5, TypeError, "seed must be an integer, not 0.5"),
        ("seed", 2**64, ValueError, "seed must be at most"),
        ("epoch", -1, ValueError, "epoch must be at least 0, not -1"),
        ("epoch", None, TypeError, "epoch must be an integer, not None"),
    ],
)
def test_values(name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan(**{name: value})
    # The sampler refuses the same values, on construction.
    sampler_names = {"ranks": "num_replicas"}
    arguments = {"sizes": SIZES, "batch_size": 2, "num_replicas": 2, "rank": 0, sampler_names.get(name, name): value}
    if arguments["num_replicas"] is not None:
        with pytest.raises(error, match=message.replace("ranks must", "(ranks|num_replicas) must")):
            chronica.BatchSampler(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cost": [1, 2, 3]}, ValueError, f"cost must have {ONE_PER_SAMPLE}, 3 were given"),
        ({"cost": [1, 2, -3, 4, 5]}, ValueError, "cost must not be negative; position 2 holds -3"),
        ({"cost": [1, 2, NAN, 4, 5]}, ValueError, "cost must be finite; position 2 holds nan"),
        ({"cost": [1, 2, 1e300, 4, 5]}, ValueError, "cost must be at most"),
    ],
)
def test_arrays_of_costs(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan(padding="none", **changes)


def test_values_that_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match=r"sizes .* must not be 0 for all samples"):
        plan(sizes=[0, 0, 0], loss_weight="sizes")
    with pytest.raises(ValueError, match="must not be 0 for all samples"):
        plan(loss_weight=[0, 1, 1, 1, 1], indices=[0, 0])
    with pytest.raises(ValueError, match="drop_last leaves nothing: 5 samples are fewer than one global batch of 3 on"):
        plan(batch_size=3, drop_last=True)
    with pytest.raises(ValueError, match="min_local_batch must be at most batch_size, 2; 3 was given"):
        plan(min_local_batch=3)


#: For each option that is checked and not built: values that are allowed, and values that are not.
UNBUILT: dict[str, tuple[list[Any], list[Any]]] = {
    "reorder": (["window"], ["epoch", None, 3]),
    "micro_batches": ([2, "auto"], [0, -1, 1.5, "all", None, True]),
    "max_size": ([100, 0.5], [0, -1, NAN, INF, "big"]),
    "pad_to": ([64, [64, 128], np.array([8, 16])], [0, 1.5, "64", [0, 8], [], [8, NAN]]),
    "comm": ([0.5, 3], [-1, NAN, INF, "fast", None]),
    "min_local_batch": ([2], [0, 1.0, True, None]),
    "normalize": (["step", "epoch"], ["batch", 1]),
    "policy": (["plain", "static", "dynamic", "guided"], ["greedy", None]),
    "first": (["largest"], ["smallest", True]),
}
ALWAYS_CHECKED = {"window": [0, 1.5, None], "max_moved": [-0.1, 1.1, NAN, None, "half"]}


def test_the_table_is_complete() -> None:
    assert set(UNBUILT) == set(NOT_BUILT)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (allowed, _) in UNBUILT.items() for value in allowed]
)
def test_what_is_not_built_says_so_after_all_checks(name: str, value: Any) -> None:
    with pytest.raises(NotImplementedError, match=rf"{name}=.* is not built yet; this version supports {name}="):
        plan(**{name: value})
    with pytest.raises(NotImplementedError, match=name):
        chronica.BatchSampler(SIZES, 2, num_replicas=2, rank=0, **{name: value})
    with pytest.raises(ValueError, match="sizes must not be negative"):
        plan(**{name: value}, sizes=[-1])


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, (_, wrong) in UNBUILT.items() for value in wrong]
    + [(name, value) for name, wrong in ALWAYS_CHECKED.items() for value in wrong],
)
def test_wrong_values_of_what_is_not_built(name: str, value: Any) -> None:
    for other in ({}, {"policy": "plain"}, {"reorder": "window"}):
        with pytest.raises((TypeError, ValueError), match=name):
            plan(**{**other, name: value})


def test_unknown_options() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'paddding'"):
        plan(paddding="max")
    with pytest.raises(TypeError, match="unknown option 'paddding'; the options of plan are indices, cost, padding"):
        chronica.BatchSampler(SIZES, 2, num_replicas=2, rank=0, paddding="max")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rank": 2}, ValueError, "rank must be below the number of ranks, 2; 2 was given"),
        ({"rank": -1}, ValueError, "rank must be at least 0, not -1"),
        ({"rank": 0.0}, TypeError, "rank must be an integer, not 0.0"),
        ({"refresh": 0}, ValueError, "refresh must be at least 1, not 0"),
        ({"refresh": 1.5}, TypeError, "refresh must be an integer, not 1.5"),
        ({"refresh": "block"}, ValueError, "refresh must be one of 'epoch', None, not 'block'"),
        ({"refresh": 3}, NotImplementedError, "refresh=3 is not built yet"),
        ({"rank": None}, RuntimeError, r"Horovod is not initialised: call hvd.init\(\)"),
        ({"num_replicas": None}, RuntimeError, r"Horovod is not initialised: call hvd.init\(\)"),
    ],
)
def test_samplers(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        chronica.BatchSampler(SIZES, 2, **{"num_replicas": 2, "rank": 0, **arguments})


@pytest.mark.parametrize("epoch", [-1, 1.0, None, "1", True])
def test_epochs(epoch: Any) -> None:
    sampler = chronica.BatchSampler(SIZES, 2, num_replicas=2, rank=0)
    with pytest.raises((TypeError, ValueError), match="epoch must be"):
        sampler.set_epoch(epoch)
    assert sampler.epoch == 0


def test_loaders() -> None:
    sampler = chronica.BatchSampler(SIZES, 2, num_replicas=2, rank=0)
    for length in (4, 6):
        with pytest.raises(ValueError, match=f"the sampler has 5 sizes, but the data set has {length} samples"):
            chronica.DataLoader(torch.zeros(length), batch_sampler=sampler)
    for other in (None, [[0, 1]], torch.utils.data.BatchSampler(range(5), 2, drop_last=False)):
        with pytest.raises(TypeError, match=r"batch_sampler must be a chronica_hvd.BatchSampler, not"):
            chronica.DataLoader(torch.zeros(5), batch_sampler=other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("world", "error", "message"),
    [
        ((0, 0), ValueError, "size must be at least 1, not 0"),
        ((2, 2), ValueError, "rank must be below the number of ranks, 2; 2 was given"),
        ((-1, 2), ValueError, "rank must be at least 0, not -1"),
        ((0.0, 2), TypeError, "rank must be an integer, not 0.0"),
        ((0, None), TypeError, "size must be an integer, not None"),
    ],
)
def test_worlds(world: tuple[Any, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        chronica.World(*world)


@pytest.mark.parametrize("value", ["1.0", None, [1.0], 1 + 2j, torch.tensor(1j)])
def test_averages(value: Any) -> None:
    sampler = chronica.BatchSampler([1], 1, num_replicas=1, rank=0)
    with pytest.raises(TypeError, match="value must be a real number or tensor, not"):
        chronica.average(value, sampler)
