"""Every public function is tried with wrong values of every parameter: a clear error, and nothing half done.

``CALLABLES`` says how a good call is made and of what kind each parameter is; the wrong values come from the kinds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from inprocess import run_ranks

import chronica_hvd as chronica
from chronica_hvd.timing import Timing

NAN, INF = math.nan, math.inf
SIZES = [5, 3, 8, 1, 2]

# Wrong values, by the kind of a parameter. ----------------------------------------------------------------------------


class Nothing:
    """An object of no use."""

    def __repr__(self) -> str:
        return "Nothing()"


def a_function(_: Any) -> None:
    """Return nothing."""


#: Of no parameter that is a number.
NO_NUMBERS: list[Any] = [
    *("1", "", "auto ", b"1", bytearray(b"1"), memoryview(b"1"), np.str_("1")),
    *(True, False, np.True_, torch.tensor(True), np.array(True)),
    *([], [1], (1,), {}, {1: 1}, {1}, frozenset([1]), range(3), slice(1), iter([1]), (i for i in [1])),
    *(1 + 2j, np.complex64(1), torch.tensor(1j)),
    *(np.array([1]), np.array([[1]]), np.array([]), np.array("1"), np.array(1, dtype=object), np.array(None)),
    *(np.ma.masked, np.ma.masked_array(1, mask=True), np.ma.masked_array([1, 2], [True, False])),
    *(np.timedelta64(1, "s"), np.datetime64("2020-01-01"), np.array([1, "1"], dtype=object)),
    *(torch.tensor([1]), torch.ones(2), torch.ones(1, 1), torch.empty(0), torch.ones((), device="meta")),
    *(Nothing(), Nothing, int, len, a_function, lambda: 1, NotImplemented, ..., torch.nn.Linear(1, 1)),
]
NO_INTEGERS = [*NO_NUMBERS, 1.0, 1.5, NAN, INF, -INF, np.float32(1), np.array(1.0), torch.tensor(1.0), np.float64(NAN)]
NOT_FINITE = [NAN, INF, -INF, 10**400, -(10**400), np.float32(NAN), np.float64(INF), np.array(NAN), torch.tensor(-INF)]
#: Neither a number nor an array of amounts.
NO_AMOUNTS: list[Any] = [
    *("1", "auto ", b"1", {}, {1: 1}, {1}, (i for i in [1]), iter([1]), 1j, NAN),
    *(Nothing(), len, lambda: 1, ..., np.ma.masked, np.array(NAN), [[1], [2, 3]], [torch.ones(2), 1]),
    *(["1"] * 5, [b"1"] * 5, [True] * 5, [1j] * 5, [None] * 5, [1, None, 1, 1, 1], [[1], 1, 1, 1, 1], [{}] * 5),
    *(np.array([1, "1"], dtype=object), np.array([1, True], dtype=object), np.array(["a"]), np.ones(5, bool)),
    *(np.ones(5, "m8[s]"), np.ones(5, "M8[s]"), np.ones(5, complex), np.ones(5, [("size", int)]), torch.ones(5) > 0),
    *(torch.ones(5, requires_grad=True), torch.ones(5, dtype=torch.bfloat16), torch.ones(5, device="meta")),
    *(torch.ones(5).to_sparse(), np.ma.masked_array([1] * 5, [0, 1, 0, 0, 0]), torch.ones(5, dtype=torch.complex64)),
    *([NAN] * 5, [1, 1, INF, 1, 1], [1, -INF, 1, 1, 1], [1, -1, 1, 1, 1], [1, -1e-300, 1, 1, 1]),
    *([1, 2**70, 1, 1, 1], [-(2**70)] * 5, torch.full((5,), NAN)),
]
#: Nor a vector of numbers within int64.
NO_VECTORS: list[Any] = [
    *NO_AMOUNTS,
    *([], (), bytearray(), np.array([]), torch.empty(0), [[]], np.empty((0, 3)), range(0)),
    *([[1, 2]] * 5, np.ones((5, 1)), torch.ones(5, 1), np.ones((5, 5, 5)), torch.tensor(2.0)),
    *([1, 1e300, 1, 1, 1], np.full(5, 2**64 - 1, np.uint64)),
]
#: Of no parameter that is a value from a few strings, nor of a flag.
NO_CHOICES: list[Any] = [
    *("", " ", "auto ", "MAX", "True", "none ", b"max", np.bytes_(b"max"), 1, 0, -1, 2**70, 1.5, NAN, 1j),
    *(["max"], ("max",), {"max"}, {"max": 1}, np.array("max"), np.array(["max"]), iter("max"), (c for c in "max")),
    *(torch.ones(1), torch.tensor(True), torch.ones(3), np.array([True, False]), np.ones(2), Nothing(), len, str, ...),
    *(np.ma.masked, lambda: "max"),
]
NO_OBJECTS: list[Any] = [
    *(1, 0, True, 1.5, NAN, 2**70, 1j, "", "auto ", "model", b"1", [], [1], (), {}, {"a": 1}, {1}, range(5)),
    *((i for i in [1]), np.ones(5), np.array(None), np.ma.masked, torch.ones(5), torch.empty(0), Nothing(), Nothing),
    *(len, int, lambda: 1, ..., NotImplemented, np.array([1, None], dtype=object), chronica, torch.nn.Module),
]


@dataclasses.dataclass(frozen=True)
class Kind:
    """The wrong values of a parameter; ``allows_none``: None is right."""

    wrong: list[Any]
    allows_none: bool = False

    @property
    def values(self) -> list[Any]:
        return self.wrong if self.allows_none else [*self.wrong, None]


def small(number: int) -> list[Any]:
    """Return a small number in the types of array libraries."""
    return [np.int64(number), np.array(number), torch.tensor(number)] if abs(number) < 9 else []


def integer(least: int | None, most: int | None = None, *extra: Any) -> Kind:
    below = [] if least is None else [least - 1, least - 2, -(2**70), *small(least - 1)]
    above = [] if most is None else [most + 1, 2 * most + 1, 2**70, 10**400]
    return Kind([*NO_INTEGERS, *below, *above, *extra])


def real(*out_of_range: Any) -> Kind:
    return Kind([*NO_NUMBERS, *NOT_FINITE, *out_of_range])


NOT_NEGATIVE = (-1, -1e-300, np.float32(-1), torch.tensor(-1.0), np.array(-2))


def vector(*extra: Any) -> Kind:
    return Kind([*NO_VECTORS, *extra])


def choice(*extra: Any, allows_none: bool = False) -> Kind:
    return Kind([*NO_CHOICES, *extra], allows_none)


FLAG = choice("max", "false")


def objects(*extra: Any, without: Callable[[Any], bool] = lambda value: False, allows_none: bool = False) -> Kind:
    """Return the kind of an object of one class; what ``without`` says is right is left out."""
    return Kind([*(value for value in NO_OBJECTS if not without(value)), *extra], allows_none)


def or_none(kind: Kind) -> Kind:
    return Kind(kind.wrong, allows_none=True)


def is_op(value: Any) -> bool:
    return type(value) is int and value in (hvd.Average, hvd.Sum)


def function(allows_none: bool = False) -> Kind:
    return objects(without=callable, allows_none=allows_none)


LONG = 2**63
OTHER_LENGTH = [[1], [1] * 4, np.ones(6), torch.ones(7), (1, 2, 3)]
FAR_APART = [[1, 0], [0.0, 0.0], [1, 2.0**-21], [1e300, 1e-300], np.zeros(2)]
PLAN: dict[str, Kind] = {
    "indices": or_none(vector([0, 5], [0.0, 1.0], [2**40], np.array([1.5]), torch.ones(2))),
    "cost": or_none(vector(chronica.CostModel(rank_scale=[1, 2, 3]), chronica.CostModel, [1] * 5, *OTHER_LENGTH)),
    "padding": choice("min"),
    "local_batch": choice("Free"),
    "reorder": choice("epoch"),
    "window": integer(1),
    "max_moved": real(1.1, 2**70, *NOT_NEGATIVE),
    "micro_batches": integer(1, 2**40, "all"),
    "max_size": or_none(real(0, 0.0, 1, 7.9, *NOT_NEGATIVE)),
    "pad_to": or_none(Kind([*NO_VECTORS, "64", True, 0, -1, 1.5, LONG, [0, 8], [1, 2], [4, 7.5], torch.tensor(0)])),
    "comm": real(*NOT_NEGATIVE),
    "min_local_batch": integer(1, 2),
    "normalize": choice("batch", allows_none=True),
    "shuffle": FLAG,
    "seed": integer(-LONG, 2**64 - 1),
    "epoch": integer(0, LONG - 1),
    "drop_last": FLAG,
    "loss_weight": vector([0] * 5, np.zeros(5), "Samples", *OTHER_LENGTH),
    "policy": choice("greedy"),
    "first": choice("smallest", allows_none=True),
}
RANKS = Kind([*NO_VECTORS, 1.5, NAN, INF, 0, -1, 2**20 + 1, 2**70, True, *FAR_APART])
SPEEDS = or_none(RANKS)

# Good calls. ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """A public callable in a world of its own: the good arguments, and what must be left as it was."""

    call: Callable[..., Any]
    good: dict[str, Any]
    state: Callable[[], Any] = lambda: None


@dataclasses.dataclass(frozen=True)
class Entry:
    """What the tests know of a public callable.

    ``parameters`` is the kind of each parameter, ``signature`` what has them all, ``options`` those behind ``**``.
    """

    make: Callable[[], Case]
    parameters: dict[str, Kind]
    signature: Callable[..., Any]
    options: tuple[str, ...] = ()


def sampler(**changes: Any) -> chronica.BatchSampler:
    return chronica.BatchSampler(**{"sizes": SIZES, "batch_size": 2, "num_replicas": 1, "rank": 0, **changes})


def position(of: chronica.BatchSampler) -> Any:
    return of.plan.fingerprint, of.epoch, len(of), of.state_dict()


def of_plan() -> Case:
    sizes = np.array(SIZES)
    good = {"sizes": sizes, "ranks": 2, "batch_size": 2}
    return Case(chronica.plan, good, lambda: (sizes.tolist(), chronica.plan(sizes, 2, 2).fingerprint))


def of_plans_method(name: str, **good: Any) -> Case:
    plan = chronica.plan(SIZES, 2, 2)
    return Case(getattr(plan, name), good, lambda: (plan.fingerprint, plan.loads.tolist()))


def of_sampler() -> Case:
    return Case(chronica.BatchSampler, {"sizes": SIZES, "batch_size": 2, "num_replicas": 2, "rank": 0})


def of_set_epoch() -> Case:
    of = sampler(num_replicas=2)
    return Case(of.set_epoch, {"epoch": 1}, lambda: position(of))


def in_the_middle() -> tuple[chronica.BatchSampler, Any]:
    """Return a sampler and its loop, a step of which was taken."""
    of = sampler(reorder="window")
    loop = iter(chronica.DataLoader(range(5), batch_sampler=of, collate_fn=list))
    next(loop)
    return of, loop


def of_load_state(name: str | None = None) -> Case:
    """Of the whole state, or of one entry of it."""
    of, loop = in_the_middle()
    state = of.state_dict()

    def load(value: Any) -> None:
        of.load_state_dict({**state, name: value} if name else value)

    return Case(load, {"value": state[name] if name else state}, lambda: (position(of), loop))


def of_loader() -> Case:
    of = sampler()
    return Case(
        chronica.DataLoader, {"dataset": range(5), "batch_sampler": of}, lambda: (position(of), of.progress.data)
    )


@functools.cache
def in_use() -> torch.nn.Linear:
    return torch.nn.Linear(2, 1)


def of_optimizer() -> Case:
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    good = {"optimizer": inner, "named_parameters": list(model.named_parameters()), "sampler": sampler()}

    def state() -> Any:
        hooks = [dict(parameter._backward_hooks or {}) for parameter in model.parameters()]
        return str(inner.state_dict()), type(inner).__module__, hooks, list(good["sampler"].progress._cursors)

    return Case(chronica.DistributedOptimizer, good, state)


def of_optimizers_method(name: str, good: dict[str, Any]) -> Case:
    of, loop = in_the_middle()
    model = torch.nn.Linear(2, 1)
    made = chronica.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler=of)
    if name != "set_weight":  # which comes before backward()
        model(torch.ones(1, 2)).sum().backward()
    if name == "zero_grad":
        made.step()

    def state() -> Any:
        tensors = [(str(tensor.tolist()), str(tensor.grad)) for tensor in model.parameters()]
        return of.progress.latest().weights, tensors, position(of), loop, made.timing.overwritten

    return Case(getattr(made, name), good, state)


def of_average() -> Case:
    of, loop = in_the_middle()
    return Case(chronica.average, {"value": 1.0, "sampler": of}, lambda: (position(of), of.weight, loop))


def of_add() -> Case:
    of, loop = in_the_middle()
    mean = chronica.Mean(of)
    mean.add(3.0, amount=2.0)
    next(loop)
    return Case(mean.add, {"value": 2.0, "amount": 1.0}, lambda: (mean.result(), position(of)))


def of_verify() -> Case:
    of = sampler(num_replicas=2)
    model = torch.nn.Linear(1, 1).double()

    def step_fn(indices: list[int]) -> torch.Tensor:
        return model(torch.tensor(indices).double().reshape(-1, 1)).square().mean()

    def state() -> Any:
        return (
            position(of),
            [(tensor.tolist(), tensor.grad) for tensor in model.parameters()],
            torch.get_rng_state()[:9],
        )

    return Case(chronica.verify, {"step_fn": step_fn, "sampler": of}, lambda: str(state()))


def of_records(name: str | None = None) -> Case:
    fields = {"samples": [1, 2, 3], "size": [5, 6, 9], "size2": [25, 20, 30], "elapsed_ns": [7, 8, 9]}
    good = np.array(list(zip(*fields.values(), strict=True)), [(field, "<i8") for field in fields])
    if name is None:
        return Case(chronica.CostModel.fit, {"records": good})

    def fit(value: Any) -> chronica.CostModel:
        changed = np.array(good, [(field, object if field == name else "<i8") for field in fields])
        changed[name] = value
        return chronica.CostModel.fit(changed)

    return Case(fit, {"value": 5})


def of_from_times() -> Case:
    good = dict.fromkeys(("compute", "data_wait", "wait", "period", "loads"), np.ones((4, 3)))
    return Case(chronica.EpochReport.from_times, {"epoch": 0, **good})


def of_load() -> Case:
    measured = chronica.Measured()
    return Case(measured.load, {"state": measured.state()}, state=measured.state)


def of_start() -> Case:
    timer = chronica.StepTimer()
    timer.start(step=7, samples=1)
    return Case(timer.start, {"step": 1}, lambda: (timer.overwritten, timer.skipped, timer.failure))


def of_estimate() -> Case:
    model = torch.nn.Linear(99, 9)
    good = {"model": model, "make_batch": lambda size: torch.zeros(size, 99), "sizes": [1, 2]}
    return Case(chronica.flops.estimate, good, lambda: str([(one.tolist(), one.grad) for one in model.parameters()]))


def has_samples(value: Any) -> bool:
    """Whether it is a data set of any length."""
    return isinstance(value, list | tuple | dict | range) or (
        isinstance(value, np.ndarray | torch.Tensor) and not np.ma.isMaskedArray(value) and value.ndim > 0
    )


def is_of_five(value: Any) -> bool:
    """Whether it is a data set of five samples."""
    has_length = isinstance(value, str | range) or (isinstance(value, np.ndarray | torch.Tensor) and value.ndim > 0)
    return has_length and len(value) == 5


PROCESS_SET = objects(hvd.ProcessSet, hvd, hvd.ProcessSet([0]), allows_none=True)
ANY_SAMPLER = objects(chronica.BatchSampler, torch.utils.data.SequentialSampler(range(5)))
WRONG_NAMES = [
    [("a", 1)],
    [(1, torch.ones(1))],
    [["a", torch.ones(1)]],
    [("a", torch.ones(1))],
    [("a", torch.ones(1))] * 2,
    {"a": torch.ones(1)},
    torch.nn.Linear(2, 1),
]
#: StepTimer.start() takes whatever stands for an integer, bools too.
TIMER_INTEGER = Kind(
    [
        *(value for value in NO_INTEGERS if not hasattr(type(value), "__index__")),
        *(1.5, NAN, np.array([1]), np.array(1.0), torch.ones(2), torch.tensor(1.0), torch.ones((), device="meta")),
        *(LONG, -LONG - 1, 2**70, -(2**70), 10**400, np.uint64(LONG)),
    ]
)
#: Neither numbers nor tensors, or not such as have a mean.
NO_REAL_VALUES: list[Any] = [
    *("1", "auto ", b"1", {}, {1: 1}, {1}, (i for i in [1]), range(3), 1j, np.complex64(1), torch.tensor(1j)),
    *(np.array(1.0), np.array([1.0]), np.ma.masked, np.array(None), np.timedelta64(1, "s"), Nothing(), len, int, ...),
    *([], [None], ["1"], [1.0, 2.0], [[1.0]], (1.0, None), [1j], [{}], [Nothing()], 10**400, [10**400], -(10**400)),
    *(torch.ones(2).to_sparse(), torch.ones((), device="meta"), torch.ones(2, dtype=torch.complex64)),
]
PLACE = integer(None)  # beyond the plan it is an IndexError, as the docstring says
AMOUNTS = Kind([*NO_AMOUNTS, *NOT_NEGATIVE, *NOT_FINITE, True, np.True_])
AMOUNT = real(*NOT_NEGATIVE)
COEFFICIENT = real(*NOT_NEGATIVE)
START = objects(chronica.CostModel, allows_none=True)
RANK_SCALE = or_none(vector(0, 1, 1.5, -1, True, [1, 0], [0.0], np.zeros(3)))
COST_MODEL = {
    **dict.fromkeys(("fixed", "per_sample", "per_size", "per_size2", "floor"), COEFFICIENT),
    "rank_scale": RANK_SCALE,
}
STATE_INTEGER = integer(0)
INTERVALS = Kind(
    [
        *(value for value in NO_VECTORS if not isinstance(value, list | tuple) or len(value) > 0),
        *(1, True, [0], [0, 6], [-1, 2], [3, 1], [0, 0], [0, 1, 1, 2], [0, 2**70], [0, 1.0], [False, 2], [0, "2"]),
    ]
)
STATE: dict[str, Kind] = {
    "version": integer(2, 2),
    "epoch": integer(0, LONG - 1),
    "speeds": Kind([*NO_CHOICES[:-1], [], [0], [-1], [1, NAN], [INF], ["1"], [True], [None], [2**70, -1], [10**400]]),
    "batch_size": integer(1, 2**40, 1, 3),
    "steps": integer(0, None, 0, 2, 3, 2**70),
    "before": INTERVALS,
    "consumed": INTERVALS,
    "measured": or_none(Kind(NO_NUMBERS)),
    "sizes": choice("0" * 16),
    "indices": Kind([value for value in [*NO_CHOICES, "0" * 16] if repr(value) != "''"]),
    "seed": integer(0, 0),
    "shuffle": Kind([*NO_CHOICES, False, np.True_, None]),
    "drop_last": Kind([*NO_CHOICES, True, None]),
    "reorder": choice("batch"),
    "window": integer(64, 64),
}
TIMES = vector(0, 1.0, True, [1, 2, 3], np.ones((3, 4)), np.ones((4, 0)), torch.ones(4, 2), np.full((4, 3), "1"))
GROUPS = or_none(
    Kind(
        [
            *(value for value in NO_NUMBERS if not isinstance(value, list | tuple)),
            *(0, -1, -(2**70), 1.5, NAN, INF, [1], ["a"], [None], [torch.ones(1)], [[1]], [["a"]], [[None]], ([NAN],)),
            *([[torch.ones(1)]], [[in_use().weight]], [[[in_use().weight]]], [{}], [(p for p in ())], (1,)),
        ]
    )
)
WRONG_CONTEXT = objects("auto ", "Fork", "fork", "spawn", allows_none=True)

CALLABLES: dict[str, Entry] = {
    "plan": Entry(of_plan, {"sizes": vector(), "ranks": RANKS, "batch_size": integer(1, 2**40), **PLAN}, chronica.plan),
    "Plan.batches": Entry(
        lambda: of_plans_method("batches", step=0, rank=0), {"step": PLACE, "rank": PLACE}, chronica.Plan.batches
    ),
    "Plan.micro_weights": Entry(
        lambda: of_plans_method("micro_weights", step=0, rank=0),
        {"step": PLACE, "rank": PLACE},
        chronica.Plan.micro_weights,
    ),
    "Plan.part": Entry(
        lambda: of_plans_method("part", step=0, rank=0), {"step": PLACE, "rank": PLACE}, chronica.Plan.part
    ),
    "Plan.step_times": Entry(
        lambda: of_plans_method("step_times"), {"comm": real(*NOT_NEGATIVE)}, chronica.Plan.step_times
    ),
    "BatchSampler": Entry(
        of_sampler,
        {
            "sizes": vector(),
            "batch_size": integer(1, 2**40),
            "num_replicas": SPEEDS,
            "rank": or_none(integer(0, 1)),
            "process_set": PROCESS_SET,
            "refresh": or_none(Kind([*NO_INTEGERS, 0, -1, -(2**70), "block", "epoch "])),
            "evaluation": FLAG,
            "on_report": function(allows_none=True),
            **PLAN,
        },
        chronica.BatchSampler,
        options=tuple(PLAN),
    ),
    "BatchSampler.set_epoch": Entry(of_set_epoch, {"epoch": integer(0, LONG - 1)}, chronica.BatchSampler.set_epoch),
    "BatchSampler.load_state_dict": Entry(
        of_load_state,
        {"state": objects({"version": 2}, {"version": 1}, {1: 2}, {"version": NAN}, [("version", 1)])},
        chronica.BatchSampler.load_state_dict,
    ),
    "DataLoader": Entry(
        of_loader,
        {
            "dataset": objects(without=lambda value: is_of_five(value)),
            "batch_sampler": ANY_SAMPLER,
            "batch_size": Kind([*NO_INTEGERS, 0, -1, 2, 2**70]),
            "shuffle": choice(True, allows_none=True),
            "sampler": or_none(ANY_SAMPLER),
            "drop_last": choice(True),
            "num_workers": integer(0, 2**16),
            "collate_fn": function(allows_none=True),
            "pin_memory": FLAG,
            "timeout": real(*NOT_NEGATIVE),
            "worker_init_fn": function(allows_none=True),
            "multiprocessing_context": WRONG_CONTEXT,
            "generator": objects(torch.Generator, np.random.default_rng(0), allows_none=True),
            "prefetch_factor": or_none(integer(1, None, 2)),  # without workers
            "persistent_workers": choice(True),  # without workers
            "pin_memory_device": objects(without=lambda value: isinstance(value, str)),
            "in_order": choice(False),
        },
        chronica.DataLoader,
        options=tuple(
            name
            for name in inspect.signature(torch.utils.data.DataLoader).parameters
            if name not in ("dataset", "batch_sampler")
        ),
    ),
    "DistributedOptimizer": Entry(
        of_optimizer,
        {
            "optimizer": objects(torch.optim.SGD, torch.optim.Optimizer),
            "named_parameters": objects(*WRONG_NAMES, allows_none=True),
            "sampler": or_none(ANY_SAMPLER),
            "lookahead": integer(0),
            "compression": objects(without=lambda value: value is None),
            "backward_passes_per_step": integer(1),
            "op": objects(
                hvd.Adasum,
                9,
                -1,
                1.0,
                0.0,
                b"1",
                np.zeros(2),
                np.array(1),
                torch.tensor(1),
                without=is_op,
                allows_none=True,
            ),
            "gradient_predivide_factor": real(0, 0.0, *NOT_NEGATIVE),
            "num_groups": integer(0),
            "groups": GROUPS,
            "sparse_as_dense": FLAG,
            "process_set": PROCESS_SET,
        },
        chronica.DistributedOptimizer,
        options=tuple(inspect.signature(hvd.DistributedOptimizer).parameters)[2:],
    ),
    "DistributedOptimizer.set_weight": Entry(
        lambda: of_optimizers_method("set_weight", {"amount": 2.0}), {"amount": AMOUNT}, lambda amount: None
    ),
    "DistributedOptimizer.zero_grad": Entry(
        lambda: of_optimizers_method("zero_grad", {}), {"set_to_none": FLAG}, lambda set_to_none: None
    ),
    "DistributedOptimizer.step": Entry(
        lambda: of_optimizers_method("step", {"closure": None}), {"closure": function(True)}, lambda closure: None
    ),
    "average": Entry(
        of_average,
        {"value": Kind(list(NO_REAL_VALUES)), "sampler": ANY_SAMPLER},
        chronica.average,
    ),
    "Mean": Entry(lambda: Case(chronica.Mean, {"sampler": sampler()}), {"sampler": ANY_SAMPLER}, chronica.Mean),
    "Mean.add": Entry(
        of_add,
        {"value": Kind([*NO_REAL_VALUES, [1.0], (1.0,), torch.ones(2)]), "amount": or_none(AMOUNT)},
        chronica.Mean.add,
    ),
    "verify": Entry(of_verify, {"step_fn": function(), "sampler": ANY_SAMPLER}, chronica.verify),
    "CostModel": Entry(
        lambda: Case(chronica.CostModel, {}),
        COST_MODEL,
        chronica.CostModel,
    ),
    "FittedCost": Entry(
        lambda: Case(chronica.FittedCost, {}),
        {
            **COST_MODEL,
            "records": integer(0),
            "median_error": COEFFICIENT,
            "comm": COEFFICIENT,
        },
        chronica.FittedCost,
    ),
    "EpochReport.from_times": Entry(
        of_from_times,
        {
            "epoch": integer(0),
            **dict.fromkeys(("compute", "data_wait", "wait", "period", "loads"), TIMES),
            "expected": or_none(TIMES),
        },
        chronica.EpochReport.from_times,
    ),
    "Measured": Entry(lambda: Case(chronica.Measured, {}), {"start": START}, chronica.Measured),
    "Measured.load": Entry(of_load, {"state": objects()}, chronica.Measured.load),
    "StepTimer": Entry(
        lambda: Case(chronica.StepTimer, {}),
        {
            "device": objects(
                "cpu:", "cuda:-1", "cuda:x", "CPU", "mps", "cuda:1.5", torch.device("meta"), allows_none=True
            ),
            "capacity": integer(1, 2**24),
        },
        chronica.StepTimer,
    ),
    "StepTimer.start": Entry(
        of_start,
        dict.fromkeys(("step", "samples", "size", "size2", "flops"), TIMER_INTEGER),
        chronica.StepTimer.start,
    ),
    "measure_sizes": Entry(
        lambda: Case(chronica.measure_sizes, {"dataset": ["a", "bb"], "size_fn": len, "progress": False}),
        {
            "dataset": objects(without=has_samples),
            "size_fn": function(),
            "cache": objects("", ".", "a\0b", b"sizes", without=lambda value: isinstance(value, str), allows_none=True),
            "key": objects(b"key", without=lambda value: isinstance(value, str)),
            "process_set": PROCESS_SET,
            "progress": FLAG,
        },
        chronica.measure_sizes,
    ),
    "World": Entry(
        lambda: Case(chronica.World, {"rank": 0, "size": 1}),
        {"rank": integer(0, 0), "size": integer(1), "local_rank": integer(0), "process_set": PROCESS_SET},
        chronica.World,
    ),
    "World.from_horovod": Entry(
        lambda: Case(chronica.World.from_horovod, {}), {"process_set": PROCESS_SET}, chronica.World.from_horovod
    ),
    "flops.estimate": Entry(
        of_estimate,
        {
            "model": objects(torch.nn.Linear),
            "make_batch": function(),
            "sizes": vector([0, 1], [1.0, 2.0], [1.5], np.zeros(2, int), torch.zeros(2)),
        },
        chronica.flops.estimate,
    ),
    "Timing": Entry(
        lambda: Case(Timing, {}),
        {"device": objects("cuda:x", "CPU", allows_none=True), "capacity": integer(1, 2**24)},
        Timing,
    ),
}

CALLABLES |= {
    f"{name}.{method}": entry
    for name in ("CostModel", "FittedCost")
    for method, entry in {
        "sample_costs": Entry(
            lambda: Case(chronica.CostModel().sample_costs, {"sizes": [1, 2]}),
            {"sizes": AMOUNTS},
            chronica.CostModel.sample_costs,
        ),
        "predict": Entry(
            lambda: Case(chronica.CostModel().predict, {"samples": 1, "size": [2, 3], "size2": [4, 9]}),
            dict.fromkeys(("samples", "size", "size2"), Kind([*AMOUNTS.wrong, [], [1, 2, 3], np.ones((2, 2))])),
            chronica.CostModel.predict,
        ),
        "fit": Entry(
            of_records,
            {
                "records": objects(*NO_VECTORS, np.zeros(0, [("samples", "<i8")]), np.zeros(2, [("size", "<f8")])),
                "start": START,
            },
            chronica.CostModel.fit,
        ),
    }.items()
}

#: What users do not make: its constructor takes what we have computed.
MADE_BY_US = {"EpochReport", "Plan"}
#: What users do not call: the sampler does, with what it has computed.
CALLED_BY_US = {"Measured.model", "Measured.follow"}
#: What has no signature to be read, and no parameters.
TAKES_NOTHING = {"StepTimer.drain"}

# The tests. -----------------------------------------------------------------------------------------------------------

#: Other words that a message has for a parameter.
ALSO_CALLED = {"num_replicas": "ranks", "dataset": "data set", "value": "values", "sizes": "sample"}
#: What a message says of values that it does not repeat.
SHOWN_AS = (
    *("is empty", "masked", "inhomogeneous", "not of shape", "were given", "must not be 0 for all samples"),
    *("position", "finite, not inf", "finite, not -inf", "an array of costs needs", "BFloat16", "must have one shape"),
    *(
        "is among them",
        "is given twice",
        "each once, not",
        "is not among the",
        "the one named",
        "the state belongs to",
        "op=hvd.Adasum",
    ),
)


def is_clear(message: str, name: str, value: Any) -> bool:
    """Whether a message names the parameter and shows what was given, or of what kind it is."""
    return (name in message or ALSO_CALLED.get(name, name) in message) and any(
        shown in message for shown in (*descriptions(value), *SHOWN_AS)
    )


def descriptions(value: Any) -> Iterator[str]:
    """Yield how a value may be shown."""
    yield from (repr(value), str(value), type(value).__name__)
    if isinstance(value, str | bytes | list | tuple) and len(value) > 0:
        yield from (repr(one) for one in value if not isinstance(one, torch.Tensor))
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        array = np.asarray(value)
        yield from (str(array.dtype), str(array.tolist()))
        if array.ndim == 0 and array.dtype.kind in "iuf":
            yield from (f"{array:g}", f"{float(array)}")
        if array.size == 0:
            yield from ("0 samples", "0 given")
    if isinstance(value, int) and abs(value) < 2**99:
        yield from (f"{value:g}", f"{float(value)}")
    if isinstance(value, dict):
        yield from map(repr, value.values())
        yield from map(str, value.values())
    with contextlib.suppress(TypeError):
        yield f"the data set has {len(value)} samples"


def wrongly_treated(case: Case, name: str, values: list[Any], called: str) -> Iterator[str]:
    """Yield what is wrong with how each value is refused; at last the good call must still be one."""
    before = case.state()
    for value in values:
        what = f"{called}({name}={value!r}): "
        try:
            case.call(**{**case.good, name: value})
            yield f"{what}was not refused"
        except Exception as error:
            if type(error) not in (TypeError, ValueError):
                yield f"{what}{type(error).__name__}: {error}"
            elif not is_clear(str(error), called_as(called, name), value):
                yield f"{what}unclear: {error}"
        if case.state() != before:
            yield f"{what}has changed something"
            before = case.state()
    try:
        case.call(**case.good)
    except Exception as error:
        yield f"{called}: afterwards a good call fails: {error}"


def called_as(called: str, name: str) -> str:
    return {"value": "state"}.get(name, name) if "load_state_dict" in called else name


def check(make: Callable[[], Case], name: str, values: list[Any], called: str) -> None:
    found = run_ranks(1, lambda rank: list(wrongly_treated(make(), name, values, called)))[0]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("called", "name"), [(called, name) for called in CALLABLES for name in CALLABLES[called].parameters]
)
def test_wrong_values_are_refused(called: str, name: str) -> None:
    entry = CALLABLES[called]
    parameter = "value" if called == "BatchSampler.load_state_dict" else name
    check(entry.make, parameter, entry.parameters[name].values, called)


@pytest.mark.parametrize("name", STATE)
def test_wrong_entries_of_a_state_are_refused(name: str) -> None:
    check(lambda: of_load_state(name), "value", STATE[name].values, f"load_state_dict of {name}")


def test_there_are_many() -> None:
    own = [
        (called, name, len(kind.values))
        for called, entry in CALLABLES.items()
        for name, kind in entry.parameters.items()
    ]
    assert sum(count for *_, count in own) >= 300
    assert min(count for *_, count in own) >= 20


def public_callables() -> dict[str, Callable[..., Any]]:
    """Return every public function and class, and their public methods, that take parameters."""
    found: dict[str, Any] = {}
    for name in chronica.__all__:
        value = getattr(chronica, name)
        if inspect.ismodule(value):
            own = {
                key: one
                for key, one in vars(value).items()
                if inspect.isfunction(one) and one.__module__ == value.__name__
            }
            found |= {f"{name}.{key}": one for key, one in own.items() if not key.startswith("_")}
            continue
        found[name] = value
        if inspect.isclass(value):
            methods = {key: getattr(value, key) for key in own_names(value) if not key.startswith("_")}
            found |= {f"{name}.{key}": one for key, one in methods.items() if callable(one)}
    left_out = MADE_BY_US | CALLED_BY_US | TAKES_NOTHING
    return {name: value for name, value in found.items() if name not in left_out and own_parameters(value)}


def own_names(of: type) -> set[str]:
    """Return the names in a class and in those of its bases that are ours."""
    return {name for one in of.__mro__ if one.__module__.startswith("chronica_hvd") for name in vars(one)}


def own_parameters(of: Callable[..., Any]) -> set[str]:
    """Return the names of a signature, without ``self`` and what stands for any others."""
    parameters = inspect.signature(of).parameters.values()
    return {one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)} - {"self"}


@pytest.mark.parametrize("called", public_callables())
def test_every_parameter_has_an_entry(called: str) -> None:
    entry = CALLABLES[called]
    assert own_parameters(public_callables()[called]) | set(entry.options) == set(entry.parameters)


def test_the_entries_are_of_public_functions() -> None:
    added = {name for name in CALLABLES if name.startswith("DistributedOptimizer.")} | {"Timing"}
    assert set(CALLABLES) - added == set(public_callables())


def test_every_entry_of_a_state_is_tried() -> None:
    assert set(STATE) == set(sampler().state_dict())


@pytest.mark.parametrize("called", [name for name in CALLABLES if name.startswith("DistributedOptimizer.")])
def test_the_methods_of_optimizers_have_these_parameters(called: str) -> None:
    method = run_ranks(1, lambda rank: CALLABLES[called].make().call)[0]
    assert own_parameters(method) == set(CALLABLES[called].parameters)


@pytest.mark.parametrize("place", [(-1, 0), (0, -1), (3, 0), (0, 2), (2**70, 0), (0, -(2**70))])
@pytest.mark.parametrize("method", ["batches", "micro_weights", "part"])
def test_places_beyond_a_plan(method: str, place: tuple[int, int]) -> None:
    with pytest.raises(IndexError, match=rf"the plan has steps 0 to 1 on ranks 0 to 1, not \({place[0]}, {place[1]}\)"):
        getattr(chronica.plan(SIZES, 2, 2), method)(*place)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "step_fn .*None"),
        (1.0, "step_fn .*float"),
        ([torch.ones(())], "step_fn .*list"),
        (torch.ones(2), "step_fn .*shape"),
        (torch.tensor(1), "step_fn .*int64"),
        (torch.tensor(NAN), "loss .*nan|loss .*graph|step_fn .*"),
        (torch.tensor(1j), "step_fn .*complex"),
    ],
)
def test_step_functions_that_return_something_else(returned: Any, message: str) -> None:
    of = sampler(num_replicas=2)
    before = position(of)
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        chronica.verify(lambda indices: returned, of)
    assert type(caught.value) in (TypeError, ValueError)
    assert position(of) == before


@pytest.mark.parametrize("returned", [None, 1, 1.0, NAN, "x", {1}, Nothing(), np.ones(2), len])
def test_batches_of_another_kind(returned: Any) -> None:
    with pytest.raises(TypeError, match=r"make_batch\(1\) must return a tensor, .*, not " + type(returned).__name__):
        chronica.flops.estimate(torch.nn.Linear(2, 1), lambda size: returned, [1, 2])
