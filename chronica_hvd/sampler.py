"""Sample: the batches of this rank, step by step, as its plan says."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from chronica_hvd import checks
from chronica_hvd.blocks import BLOCK_STEPS
from chronica_hvd.cost import CostModel
from chronica_hvd.options import PlanOptions
from chronica_hvd.planner import Planner
from chronica_hvd.plans import Plan
from chronica_hvd.progress import Progress
from chronica_hvd.tickets import StepTicket
from chronica_hvd.workload import Workload
from chronica_hvd.world import World

Item = TypeVar("Item")


class BatchSampler(Sampler[list[int] | list[list[int]]]):
    """Batch sampler of this rank: give it to :class:`chronica_hvd.DataLoader` as ``batch_sampler``.

    Every rank plans the whole epoch from the same numbers and takes its own part; nothing is communicated here.

    Parameters
    ----------
    sizes
        (samples,) size of every sample of the data set, the same on every rank.
    batch_size
        Samples per rank and step on average, as in every Horovod script.
    num_replicas, rank
        A count or the ranks' relative speeds (as ``ranks`` of :func:`chronica_hvd.plan`), and this rank's number. By
        default Horovod knows both. With speeds alone the rank comes from Horovod; with both Horovod is not needed.
    process_set
        The Horovod process set that shares the data; by default all ranks.
    refresh
        When measured costs replace the planned ones: ``"epoch"`` or ``None``. Costs are not measured yet, so the given
        cost (by default: by size) holds throughout either way; a number of blocks is not built yet.
    evaluation
        Plan for speed alone, since an evaluation has no order: every sample (of ``indices``) once over all ranks, the
        largest first, so that global batches hold samples alike. The step with the largest micro-batch comes first:
        memory runs out at once or never. All epochs have one plan. See :class:`chronica_hvd.Mean`.
    options
        The keyword options of :func:`chronica_hvd.plan`; ``epoch`` is the first epoch.

    Attributes
    ----------
    world
        This rank among the others.
    batch_size, drop_last, micro_batches, evaluation
        As given.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`chronica_hvd.plan`, on construction; with ``evaluation`` also an option that contradicts it.
    RuntimeError
        Horovod is needed and is missing or not initialised.
    """

    def __init__(
        self,
        sizes: Any,
        batch_size: int,
        *,
        num_replicas: Any = None,
        rank: int | None = None,
        process_set: Any = None,
        refresh: int | str | None = "epoch",
        evaluation: bool = False,
        **options: Any,
    ) -> None:
        checked = PlanOptions.from_keywords(options)
        self.evaluation = checks.boolean("evaluation", evaluation)
        if self.evaluation:
            _refuse_training_options(checked, is_shuffle_given="shuffle" in options)
        _check_refresh(refresh)
        if rank is not None:
            checks.integer("rank", rank, least=0)
        # Values first: an array of bad sizes is reported whether or not Horovod runs.
        planner = None if num_replicas is None else Planner(sizes, num_replicas, batch_size, checked)
        self.world = _world(None if planner is None else planner.workload.ranks, rank, process_set)
        self._planner = planner or Planner(sizes, self.world.size, batch_size, checked)
        if self.evaluation:
            work = self._planner.workload  # where sizes and indices are checked
            checked = dataclasses.replace(checked, indices=_largest_first(work), first="largest")
            self._planner = Planner(work.sizes, work.speeds, batch_size, checked)
        self._planner.workload.keep_sizes()
        if refresh is not None and not isinstance(refresh, str):
            raise NotImplementedError(f"refresh={refresh!r} is not built yet; this version supports 'epoch' and None")
        self.batch_size = self._planner.batch_size
        self.drop_last = checked.drop_last
        self.micro_batches = checked.micro_batches
        self.progress = Progress()
        self._epoch = checked.epoch
        self._plan: Plan | None = None

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration draws."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration draws; an iteration under way goes on as planned.

        An evaluation keeps its plan.
        """
        epoch = checks.integer("epoch", epoch, least=0, most=checks.LARGEST_INT64)
        if epoch != self._epoch:
            self._epoch = epoch
            if not self.evaluation:
                self._plan = None

    @property
    def plan(self) -> Plan:
        """The plan of this epoch for all ranks, computed when first asked for."""
        if self._plan is None:
            self._plan = self._planner.plan(0 if self.evaluation else self._epoch)
        return self._plan

    @property
    def cost(self) -> CostModel | NDArray[np.float64]:
        """What a sample costs: as given, or the default by size."""
        return self._planner.workload.cost

    @property
    def speeds(self) -> tuple[float, ...]:
        """Relative speed of each rank."""
        return self._planner.workload.speeds

    @property
    def draws_anew(self) -> bool:
        """Whether every epoch has an order of its own."""
        return self._planner.options.shuffle and self._planner.workload.indices is None

    @property
    def samples(self) -> int:
        """Number of samples of the data set."""
        return int(self._planner.workload.sizes.size)

    @property
    def weight(self) -> float:
        """Gradient factor of the micro-batch at work: the one taken last, in the oldest step that is not finished.

        Where a wrapper reads ahead: the one that ``backward()`` was called for last.

        Raises
        ------
        RuntimeError
            No step has been taken from the loader yet, or more were than the optimizer was told of.
        """
        return self.progress.weight

    @property
    def is_filler(self) -> bool:
        """Whether the micro-batch at work repeats samples that count elsewhere, since this rank has none in this step.

        Leave it out where predictions of each sample are kept. Asked, and an error, as ``weight``.
        """
        return self.progress.latest().ticket.is_filler

    def tickets(self) -> Iterator[StepTicket]:
        """Yield what the optimizer will need to know of each step of this epoch's plan."""
        return _by_blocks(self.plan.steps, functools.partial(self._ticket, self.plan, self._epoch))

    def _ticket(self, plan: Plan, epoch: int, step: int) -> StepTicket:
        rank = self.world.rank
        part = plan.part(step, rank)
        divisor = float(plan.divisors[step])
        return StepTicket(
            epoch,
            step,
            weights=tuple(plan.factors[part].tolist()),
            fingerprint=plan.fingerprint,
            work=tuple(map(self._planner.workload.work, plan.batches(step, rank), plan.lengths[part].tolist())),
            unit=plan.ranks / divisor if divisor else 1.0,
            is_filler=bool(plan.counts[step, rank] == 0),
            divides_by_own=self._planner.options.normalize != "epoch",
        )

    def steps(self) -> Iterator[list[list[int]]]:
        """Yield the micro-batches of each step."""
        plan, rank = self.plan, self.world.rank
        return _by_blocks(plan.steps, lambda step: [batch.tolist() for batch in plan.batches(step, rank)])

    def __iter__(self) -> Iterator[list[int] | list[list[int]]]:
        """Return an iterator over the steps: a list of indices each, with micro-batches a list of lists."""
        return (step[0] for step in self.steps()) if self.micro_batches == 1 else iter(self.steps())

    def __len__(self) -> int:
        return self.plan.steps


def _by_blocks(steps: int, of_step: Callable[[int], Item]) -> Iterator[Item]:
    """Yield what a function returns of each step, asked a block ahead.

    Asked step by step, between a model's computations, it would find nothing of its own in the processor's caches, and
    take several times as long.
    """
    for first in range(0, steps, BLOCK_STEPS):
        yield from [of_step(step) for step in range(first, min(first + BLOCK_STEPS, steps))]


def _refuse_training_options(options: PlanOptions, *, is_shuffle_given: bool) -> None:
    """Raise a ValueError for an option that says in which order, or which, samples of an evaluation are taken."""
    order = "an evaluation takes its samples the largest first, so that little is padded"
    contradictions = (
        ("shuffle=True", options.shuffle and is_shuffle_given, order),
        ("drop_last=True", options.drop_last, "an evaluation counts every sample"),
        ('reorder="window"', options.reorder == "window", f"{order}; none is left to be moved"),
        (f"first={options.first!r}", options.first is not None, "its largest micro-batch comes first anyway"),
    )
    for option, is_given, reason in contradictions:
        if is_given:
            raise ValueError(f"evaluation=True and {option} contradict each other: {reason}. Leave {option} out")


def _largest_first(work: Workload) -> NDArray[np.int64]:
    """Return the samples by size, descending; of one size in the order given."""
    samples = np.arange(work.samples, dtype=np.int64) if work.indices is None else work.indices
    backwards = samples[::-1]
    ascending = np.argsort(work.sizes[backwards], kind="stable")
    return backwards[ascending[::-1]]


def _check_refresh(refresh: object) -> None:
    if refresh is None or isinstance(refresh, str):
        checks.choice("refresh", refresh, ("epoch", None))
    else:
        checks.integer("refresh", refresh, least=1)


def _world(ranks: int | None, rank: int | None, process_set: Any) -> World:
    """Return the world: by hand where both numbers are given, else Horovod's, which must agree with what is given."""
    if ranks is not None and rank is not None and process_set is None:
        return World(rank, ranks)
    world = World.from_horovod(process_set)
    for name, given, actual in (("num_replicas", ranks, world.size), ("rank", rank, world.rank)):
        if given is not None and given != actual:
            raise ValueError(f"{name} says {given}, but Horovod says {actual}")
    return world
