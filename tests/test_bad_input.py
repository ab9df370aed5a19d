"""Bad input is refused before anything is computed: the message says what was given and what is allowed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import chronica_hvd as chronica

NAN, INF = float("nan"), float("inf")
SIZES = [5, 3, 8, 1, 2]
AT_MOST = r"must be at most 9223372036854775807 \(int64\); position"


def plan(**changes: Any) -> chronica.Plan:
    return chronica.plan(**{"sizes": SIZES, "ranks": 2, "batch_size": 2, **changes})


def sampler(**changes: Any) -> chronica.BatchSampler:
    return chronica.BatchSampler(**{"sizes": SIZES, "batch_size": 2, "num_replicas": 2, "rank": 0, **changes})


def refused(error: type[Exception], message: str, **changes: Any) -> None:
    """Check that the plan refuses it, and so does the sampler, on construction."""
    with pytest.raises(error, match=message):
        plan(**changes)
    if "ranks" in changes:
        changes["num_replicas"] = changes.pop("ranks")
    if changes.get("num_replicas", 2) is not None:  # None asks Horovod
        with pytest.raises(error, match=message.replace("ranks must", "(ranks|num_replicas) must")):
            sampler(**changes)


@pytest.mark.parametrize("name", ["sizes", "indices", "loss_weight", "cost"])
@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([], ValueError, "is empty; at least one value is needed"),
        ([1, 1, -1, 1, 1], ValueError, "must not be negative; position 2 holds -1"),
        (np.array([1, -(2**63)]), ValueError, "must not be negative; position 1 holds -9223372036854775808"),
        ([1, 1, 1, NAN, 1], ValueError, "must be finite; position 3 holds nan"),
        ([INF, 1, 1, 1, 1], ValueError, "must be finite; position 0 holds inf"),
        ([1, -INF, 1, 1, 1], ValueError, "must be finite; position 1 holds -inf"),
        ([1, 1e30, 1, 1, 1], ValueError, rf"{AT_MOST} 1 holds 1e\+30"),
        ([2.0**63] * 5, ValueError, f"{AT_MOST} 0 holds 9.223"),
        ([1, 2**63], ValueError, f"{AT_MOST} 1 holds 9"),
        ([1, 10**30], ValueError, f"{AT_MOST} 1 holds 1000"),
        ([1, -(10**30)], ValueError, "must not be negative; position 1 holds -1000"),
        ([1.5, 10**30], ValueError, f"{AT_MOST} 1 holds 1"),
        (np.array([1, 2**64 - 1], dtype=np.uint64), ValueError, f"{AT_MOST} 1 holds 18446744073709551615"),
        ([[1, 2], [3, 4]], ValueError, r"must be one-dimensional, not of shape \(2, 2\)"),
        (7, ValueError, r"must be one-dimensional, not of shape \(\)"),
        ((size for size in SIZES), ValueError, r"must be one-dimensional, not of shape \(\)"),
        ([[1], [2, 3]], TypeError, "must be a one-dimensional array of numbers: .*inhomogeneous"),
        (["a", "b"], TypeError, "must hold integers or floats, not <U1"),
        ([True, False], TypeError, "must hold integers or floats, not bool"),
        ([1 + 2j], TypeError, "must hold integers or floats, not complex128"),
        (np.array([1, 2], "m8[s]"), TypeError, r"must hold integers or floats, not timedelta64\[s\]"),
        (np.ma.masked_array([1, 2], [False, True]), TypeError, "must .*mask"),
        ([None, 1], TypeError, r"must hold numbers, not None \(position 0\)"),
        ([10**30, True], TypeError, r"must hold numbers, not True \(position 1\)"),
        (torch.ones(2, requires_grad=True), TypeError, "must be a one-dimensional array of numbers: .*grad"),
        (torch.ones(2, dtype=torch.bfloat16), TypeError, "must be a one-dimensional array of numbers: .*BFloat16"),
    ],
)
def test_vectors(name: str, values: Any, error: type[Exception], message: str) -> None:
    for padding in ("max", "none"):
        refused(error, f"{name} {message}", padding=padding, **{name: values})


@pytest.mark.parametrize("name", ["loss_weight", "cost"])
@pytest.mark.parametrize("count", [4, 6])
def test_vectors_of_other_lengths(name: str, count: int) -> None:
    message = f"{name} must have one value per sample: 5 are needed, {count} were given"
    refused(ValueError, message, padding="none", **{name: [1] * count})


@pytest.mark.parametrize("value", [1.5, 32.0, NAN, INF, "8", b"8", None, True, np.True_, torch.tensor(True), 1j])
@pytest.mark.parametrize("name", ["batch_size", "ranks", "seed", "epoch", "window", "min_local_batch"])
def test_what_is_not_an_integer(name: str, value: Any) -> None:
    refused(TypeError, re.escape(f"{name} must be an integer, not {value!r}"), **{name: value})


@pytest.mark.parametrize("value", [0, 1, None, "True", "yes", NAN, [True]])
@pytest.mark.parametrize("name", ["shuffle", "drop_last"])
def test_what_is_neither_true_nor_false(name: str, value: Any) -> None:
    refused(TypeError, re.escape(f"{name} must be True or False, not {value!r}"), **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("sizes", None, ValueError, r"sizes must be one-dimensional, not of shape \(\), None of type NoneType; give a"),
        ("sizes", "123", ValueError, r"sizes must be one-dimensional, not of shape \(\)"),
        ("batch_size", 0, ValueError, "batch_size must be at least 1, not 0"),
        ("batch_size", -1, ValueError, "batch_size must be at least 1, not -1"),
        ("batch_size", 2**41, ValueError, "batch_size must be at most 1099511627776, not 2199023255552"),
        ("batch_size", np.array([2]), TypeError, r"batch_size must be an integer, not array\(\[2\]\)"),
        ("ranks", 0, ValueError, "ranks must be at least 1, not 0"),
        ("ranks", -1, ValueError, "ranks must be at least 1, not -1"),
        ("ranks", 2**21, ValueError, "ranks must be at most 1048576, not 2097152"),
        ("ranks", [], ValueError, r"ranks \(speeds\) is empty; at least one value is needed"),
        ("ranks", [1, 0], ValueError, r"speeds must be positive and finite, not \[1.0, 0.0\]"),
        ("ranks", [1, -1], ValueError, r"speeds must be positive and finite, not \[1.0, -1.0\]"),
        ("ranks", [1, NAN], ValueError, r"speeds must be positive and finite, not \[1.0, nan\]"),
        ("ranks", [1, INF], ValueError, r"speeds must be positive and finite, not \[1.0, inf\]"),
        ("ranks", [1, 2.0**-21], ValueError, r"by more than a factor of 1.04858e\+06, not as \[1.0, 4.768"),
        ("ranks", [1e300, 1e-300], ValueError, r"by more than a factor of 1.04858e\+06, not as \[1e\+300, 1e-300"),
        ("ranks", [1e-310, 1e-310], ValueError, "a speed of 1e-310: .* overflow; scale costs and speeds towards 1"),
        ("ranks", [[1, 1]], ValueError, r"ranks \(speeds\) must be one-dimensional, not of shape \(1, 2\)"),
        ("ranks", [[1], [1, 2]], TypeError, "ranks .*must be .*one-dimensional"),
        ("ranks", ["a", "b"], TypeError, r"ranks \(speeds\) must hold integers or floats, not <U1"),
        ("ranks", [True, True], TypeError, r"ranks \(speeds\) must hold integers or floats, not bool"),
        ("indices", [0, 5], ValueError, "indices must be below the number of sizes, 5; 5 was given"),
        ("indices", [0.0, 1.0], TypeError, "indices must hold integers, not float64"),
        ("loss_weight", [0] * 5, ValueError, "loss_weight must not be 0 for all samples of the epoch"),
        ("loss_weight", "tokens", ValueError, "loss_weight must be one of 'samples', 'sizes', 'sum', not 'tokens'"),
        ("loss_weight", None, TypeError, "loss_weight must be one of 'samples', 'sizes', 'sum' or an array, not None"),
        ("cost", [1] * 5, ValueError, 'an array of costs needs padding="none"'),
        ("cost", "size", TypeError, "cost must be a CostModel, an array of costs or None, not 'size'"),
        ("cost", len, TypeError, "cost must be a CostModel, an array of costs or None, not <built-in"),
        ("cost", chronica.CostModel(rank_scale=[1, 2, 3]), ValueError, "one value per rank: 2 are needed, 3 were"),
        ("cost", chronica.CostModel(rank_scale=[1, 1e9]), ValueError, r"by more than a factor of 1.04858e\+06, not"),
        ("cost", chronica.CostModel(per_size2=1e308), ValueError, "costs inf .*load would overflow; scale costs"),
        ("cost", chronica.CostModel(fixed=1e308), ValueError, r"costs 1e\+308 .*load would overflow; scale costs"),
        ("padding", "min", ValueError, "padding must be one of 'max', 'none', not 'min'"),
        ("padding", ["max"], ValueError, r"padding must be one of 'max', 'none', not \['max'\]"),
        ("local_batch", None, ValueError, "local_batch must be one of 'free', 'equal', not None"),
        ("seed", 2**64, ValueError, "seed must be at most 18446744073709551615, not 18446744073709551616"),
        ("seed", -(2**63) - 1, ValueError, "seed must be at least -9223372036854775808, not -9223372036854775809"),
        ("epoch", -1, ValueError, "epoch must be at least 0, not -1"),
        ("epoch", 2**63, ValueError, "epoch must be at most 9223372036854775807, not 9223372036854775808"),
    ],
)
def test_values(name: str, value: Any, error: type[Exception], message: str) -> None:
    refused(error, message, **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": [0, 0, 0], "loss_weight": "sizes"}, r"sizes .* must not be 0 for all samples"),
        ({"loss_weight": [0, 1, 1, 1, 1], "indices": [0, 0]}, "loss_weight must not be 0 for all samples of the epoch"),
        ({"batch_size": 3, "drop_last": True}, "leaves nothing: 5 samples are fewer than one global batch of 3 on"),
        ({"min_local_batch": 3}, "min_local_batch must be at most batch_size, 2; 3 was given"),
        ({"pad_to": 8, "padding": "none"}, 'pad_to needs padding="max"'),
        ({"reorder": "window", "loss_weight": "sizes"}, 'each unit of weight counts alike.* normalize="step"'),
        ({"reorder": "window", "loss_weight": [1, 2, 3, 4, 5]}, 'normalize="epoch"'),
        ({"sizes": [1, 9, 2], "max_size": 8}, "sample 1 has a size of 9, more than max_size, 8: no micro-batch may"),
        ({"sizes": [1, 7, 2], "max_size": 7, "pad_to": 4}, "sample 1 has a size of 7, padded to 8, more than max_size"),
        ({"sizes": [1, 9, 2], "pad_to": [4, 8]}, "sample 1 has a size of 9, more than the largest length of pad_to, 8"),
        ({"sizes": [9, 1, 7], "indices": [1, 2], "max_size": 5}, "sample 2 has a size of 7, more than max_size, 5"),
        # The loads of 100 steps overflow where they are added up, though none of them does.
        ({"sizes": [1] * 200, "cost": chronica.CostModel(per_size=2e307)}, r"costs 2e\+307 .*overflow; scale costs"),
    ],
)
def test_values_that_do_not_fit_together(changes: dict[str, Any], message: str) -> None:
    refused(ValueError, message, **changes)


@pytest.mark.parametrize("options", [{}, {"padding": "none"}, {"local_batch": "equal"}, {"policy": "guided"}])
def test_a_step_that_cannot_keep_max_size(options: dict[str, Any]) -> None:
    for micro_batches, batch_size in ((1, 2), (2, 4)):
        held = 2 * batch_size
        with pytest.raises(
            ValueError, match=rf"max_size=4\.5 could not be kept in step 1: .*micro_batches={micro_batches} of them at"
        ):
            plan(
                sizes=[1] * held + [4] * held,
                shuffle=False,
                batch_size=batch_size,
                max_size=4.5,
                micro_batches=micro_batches,
                **options,
            )


#: For each option: wrong values, and values of a wrong type.
CHECKED: dict[str, tuple[list[Any], list[Any]]] = {
    "reorder": (["epoch", None, 3], []),
    "window": ([0, -1], [1.5, NAN, None, True, [2]]),
    "max_moved": ([-0.1, 1.1, NAN, INF], [None, True, "half"]),
    "micro_batches": ([0, -1, "all", 2**41], [1.5, NAN, None, True, [2]]),
    "max_size": ([0, -1, NAN, INF], ["big", True, [8]]),
    "pad_to": ([0, [0, 8], [], [8, NAN]], [1.5, NAN, "64", True, [[8], [8, 9]]]),
    "comm": ([-1, NAN, INF], ["fast", None, True, np.array(True), [0.5]]),
    "min_local_batch": ([0, -1], [1.5, True]),
    "normalize": (["batch", 1, NAN], []),
    "policy": (["greedy", None, 1], []),
    "first": (["smallest", True, 0], []),
}
WRONG = [
    (name, value, error)
    for name, wrong in CHECKED.items()
    for values, error in zip(wrong, (ValueError, TypeError), strict=True)
    for value in values
]


@pytest.mark.parametrize(("name", "value", "error"), WRONG)
def test_wrong_values_of_options(name: str, value: Any, error: type[Exception]) -> None:
    shown = {"[]": "is empty", "[8, nan]": "holds nan", "[[8], [8, 9]]": "inhomogeneous"}.get(repr(value), repr(value))
    for other in ({}, {"policy": "plain"}, {"reorder": "window"}):
        with pytest.raises(error, match=rf"{name} .*(must|at most|at least)") as caught:
            plan(**{**other, name: value})
        assert shown in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"sizes": [-1]}, "sizes must not be negative"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"num_replicas": [1, NAN]}, "speeds must be positive and finite"),
        ({"indices": [5]}, "indices must be below"),
        ({"loss_weight": [0] * 5}, "loss_weight must not be 0"),
        ({"cost": [1, NAN, 1, 1, 1]}, "cost must be finite"),
        ({"batch_size": 3, "drop_last": True}, "drop_last leaves nothing"),
        ({"rank": 2}, "rank must be below the number of ranks, 2; 2 was given"),
    ],
)
def test_bad_data_comes_before_what_is_not_built(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(refresh=3, **bad)


@pytest.mark.parametrize("option", [{"micro_batches": np.int64(1)}, {"comm": 0}, {"min_local_batch": np.int32(1)}])
def test_a_default_in_another_type_is_built(option: dict[str, Any]) -> None:
    assert plan(**option) == plan()


def test_unknown_options() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'paddding'"):
        plan(paddding="max")
    with pytest.raises(TypeError, match="unknown option 'paddding'; the options of plan are indices, cost, padding"):
        sampler(paddding="max")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rank": -1}, ValueError, "rank must be at least 0, not -1"),
        ({"rank": 0.0}, TypeError, "rank must be an integer, not 0.0"),
        ({"rank": True}, TypeError, "rank must be an integer, not True"),
        ({"rank": "0"}, TypeError, "rank must be an integer, not '0'"),
        ({"refresh": 0}, ValueError, "refresh must be at least 1, not 0"),
        ({"refresh": -1}, ValueError, "refresh must be at least 1, not -1"),
        ({"refresh": 1.5}, TypeError, "refresh must be an integer, not 1.5"),
        ({"refresh": True}, TypeError, "refresh must be an integer, not True"),
        ({"refresh": "block"}, ValueError, "refresh must be one of 'epoch', None, not 'block'"),
        ({"refresh": 2, "cost": chronica.CostModel()}, ValueError, "refresh=2 has nothing to refresh.*give Measured"),
        ({"evaluation": True, "refresh": 2}, ValueError, "evaluation=True and refresh=2 contradict"),
        ({"cost": "measured"}, TypeError, "cost must be a CostModel"),
        ({"on_report": 3}, TypeError, "on_report must be a function or None, not 3"),
        (
            {"evaluation": True, "on_report": print},
            ValueError,
            "evaluation=True and on_report contradict",
        ),
        ({"rank": None}, RuntimeError, r"Horovod is not initialised: call hvd.init\(\)"),
        ({"num_replicas": None}, RuntimeError, r"Horovod is not initialised: call hvd.init\(\)"),
    ],
)
def test_samplers(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sampler(**arguments)


@pytest.mark.parametrize("epoch", [-1, 1.0, NAN, None, "1", True, 2**63])
def test_epochs(epoch: Any) -> None:
    made = sampler()
    with pytest.raises((TypeError, ValueError), match=f"epoch must be .*, not {epoch!r}"):
        made.set_epoch(epoch)
    assert made.epoch == 0


@pytest.mark.parametrize("length", [0, 4, 6])
def test_loaders_of_other_lengths(length: int) -> None:
    with pytest.raises(ValueError, match=f"sampler has 5 sizes, but the data set has {length} samples; give one size"):
        chronica.DataLoader(torch.zeros(length), batch_sampler=sampler())


@pytest.mark.parametrize(
    "other", [None, [[0, 1]], chronica.BatchSampler, torch.utils.data.BatchSampler(range(5), 2, drop_last=False)]
)
def test_loaders_of_other_samplers(other: Any) -> None:
    message = re.escape(f"batch_sampler must be a chronica_hvd.BatchSampler, not {other!r}; without one use torch")
    with pytest.raises(TypeError, match=message):
        chronica.DataLoader(torch.zeros(5), batch_sampler=other)


@pytest.mark.parametrize(
    ("world", "error", "message"),
    [
        ((0, 0), ValueError, "size must be at least 1, not 0"),
        ((2, 2), ValueError, "rank must be below the number of ranks, 2; 2 was given"),
        ((-1, 2), ValueError, "rank must be at least 0, not -1"),
        ((True, 2), TypeError, "rank must be an integer, not True"),
        ((0, None), TypeError, "size must be an integer, not None"),
        ((0, 1.5), TypeError, "size must be an integer, not 1.5"),
        ((0, True), TypeError, "size must be an integer, not True"),
        ((0, 2, -1), ValueError, "local_rank must be at least 0, not -1"),
        ((0, 2, "0"), TypeError, "local_rank must be an integer, not '0'"),
    ],
)
def test_worlds(world: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        chronica.World(*world)


@pytest.mark.parametrize("value", ["1.0", None, ["1.0"], [1.0, None], [[1.0]], {1.0}, 1 + 2j, torch.tensor(1j)])
def test_averages(value: Any) -> None:
    with pytest.raises(TypeError, match="value must be a real number or tensor, not"):
        chronica.average(value, sampler(num_replicas=1))


@pytest.mark.parametrize("other", [None, 3, chronica.BatchSampler, torch.utils.data.SequentialSampler(range(5))])
def test_averages_without_a_sampler(other: Any) -> None:
    message = re.escape(
        f"needs the sampler whose batch the value belongs to, a chronica_hvd.BatchSampler, not {other!r}"
    )
    with pytest.raises(TypeError, match=message):
        chronica.average(1.0, other)


def test_loaders_out_of_order() -> None:
    with pytest.raises(ValueError, match="in_order must be True, not False"):
        chronica.DataLoader(torch.zeros(5), batch_sampler=sampler(), in_order=False)


def test_a_plan_measures_nothing() -> None:
    with pytest.raises(TypeError, match=r"a plan takes its sampler\.cost"):
        chronica.plan([1, 2, 3], 2, 1, cost=chronica.Measured())
