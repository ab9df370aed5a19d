"""Sample: the batches of this rank, step by step, as its plan says."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from chronica_hvd import checks
from chronica_hvd.blocks import BLOCK_STEPS
from chronica_hvd.cost import CostModel
from chronica_hvd.options import PlanOptions
from chronica_hvd.planned import Planned
from chronica_hvd.planner import Planner
from chronica_hvd.plans import Plan
from chronica_hvd.position import Intervals, Position, Segment, digest
from chronica_hvd.progress import Progress
from chronica_hvd.tickets import StepTicket
from chronica_hvd.workload import Workload
from chronica_hvd.world import World, check_process_set

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
        check_process_set(process_set)
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
        self._go_to(checked.epoch, self._whole(checked.epoch))

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
            keeps_plan = self.evaluation and not self._planned.segment.before
            self._go_to(epoch, self._planned if keeps_plan else self._whole(epoch))

    @property
    def plan(self) -> Plan:
        """The plan of this epoch for all ranks, computed when first asked for.

        After :meth:`load_state_dict` in another world, or with options under which other samples would have been
        consumed: of what was left of the epoch then.
        """
        return self._planned.plan

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
    def sizes(self) -> NDArray[Any]:
        """(samples,) as given."""
        return self._planner.workload.sizes

    @property
    def loss_weight(self) -> str | NDArray[np.float64]:
        """What a sample counts in the loss, as given: (samples,) or a word."""
        given, weights = self._planner.options.loss_weight, self._planner.workload.loss_weights
        return given if isinstance(given, str) or weights is None else weights

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
        """Yield what the optimizer will need to know of each step that the next iteration goes through."""
        steps = range(self._start, self.plan.steps)
        return _by_blocks(steps, functools.partial(self._ticket, self.plan, self.epoch))

    def _ticket(self, plan: Plan, epoch: int, step: int) -> StepTicket:
        rank = self.world.rank
        part = plan.part(step, rank)
        divisor = float(plan.divisors[step])
        divides_by_own = self._planner.options.normalize != "epoch"
        return StepTicket(
            epoch,
            step,
            weights=tuple(plan.factors[part].tolist()),
            fingerprint=plan.fingerprint,
            work=tuple(map(self._planner.workload.work, plan.batches(step, rank), plan.lengths[part].tolist())),
            unit=plan.ranks / divisor if divisor else float(divides_by_own),
            is_filler=bool(plan.counts[step, rank] == 0),
            divides_by_own=divides_by_own,
        )

    def steps(self) -> Iterator[list[list[int]]]:
        """Yield the micro-batches of each step, from where a loaded state has left off."""
        plan, rank = self.plan, self.world.rank
        steps = range(self._start, plan.steps)
        return _by_blocks(steps, lambda step: [batch.tolist() for batch in plan.batches(step, rank)])

    def __iter__(self) -> Iterator[list[int] | list[list[int]]]:
        """Return an iterator over the steps: a list of indices each, with micro-batches a list of lists."""
        return (step[0] for step in self.steps()) if self.micro_batches == 1 else iter(self.steps())

    def __len__(self) -> int:
        return self.plan.steps - self._start

    def state_dict(self) -> dict[str, Any]:
        """Return where in the epoch training is: small, and equal on all ranks where they are in the same step.

        A step is consumed when the loop has taken a micro-batch of it from :class:`chronica_hvd.DataLoader`; what
        workers have fetched ahead is not. Made of dicts, lists, numbers and strings only, so that ``torch.save`` (also
        with ``weights_only=True`` on loading) and JSON keep it.
        """
        planned, steps = self._planned, self._steps_consumed()
        before = planned.segment.before
        position = Position(self.epoch, self.speeds, self.batch_size, before, steps, planned.consumed(steps))
        return position.state(self._identity)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, at any number of ranks, speeds and batch size.

        With the same ranks, speeds and batch size the plan of the epoch goes on, bit for bit if the options and the
        cost are the same too. Else what is left of the epoch is planned anew: each sample counts once in the epoch.
        Every iteration begins there until :meth:`set_epoch` chooses another epoch. Nothing is communicated: load the
        same state on every rank.

        Raises
        ------
        TypeError, ValueError
            It is no state, or one of another data set, ``indices``, ``seed``, ``shuffle``, ``drop_last``, ``reorder``
            or ``window``; nothing has changed then.
        """
        loaded = Position.from_state(state, self._identity, self._planner.workload.samples)
        if (loaded.speeds, loaded.batch_size) == (self.speeds, self.batch_size):
            same = self._whole(loaded.epoch, loaded.before)
            if same.consumed(loaded.steps) == loaded.consumed:
                self._go_to(loaded.epoch, same, loaded.steps)
                return
        self._go_to(loaded.epoch, self._whole(loaded.epoch, loaded.consumed))

    def _whole(self, epoch: int, before: Intervals = ()) -> Planned:
        """Return all of an epoch that is left; evaluations have one plan for all epochs."""
        planner = self._planner
        segment = Segment(planner.workload.samples, planner.global_batch, self.drop_last, before)
        return Planned(planner, 0 if self.evaluation else epoch, segment)

    @functools.cached_property
    def _identity(self) -> dict[str, int | str]:
        """What must be the same for a state to be loaded: which samples an epoch has, in which order."""
        work, options = self._planner.workload, self._planner.options
        return {
            "sizes": digest(work.sizes),
            "indices": digest(work.indices),
            **{name: getattr(options, name) for name in ("seed", "shuffle", "drop_last", "reorder", "window")},
        }

    def _go_to(self, epoch: int, planned: Planned, start: int = 0) -> None:
        """Have iterations begin at a step of a plan."""
        self._epoch = epoch
        self._planned = planned
        self._start = start
        self._left_behind = self.progress.last_begun()  # says nothing of this position

    def _steps_consumed(self) -> int:
        """Return how many steps of the plan are consumed."""
        last = self.progress.last_begun()
        if last is None or last is self._left_behind or last.epoch != self.epoch:
            return self._start
        # An iteration that was under way when a state was loaded goes on with its own plan.
        return last.step + 1 if last.fingerprint == self.plan.fingerprint else self._start

    def __getstate__(self) -> dict[str, Any]:
        # A copy has a loop of its own, and no optimizer.
        return {**self.__dict__, "progress": Progress()}


def _by_blocks(steps: range, of_step: Callable[[int], Item]) -> Iterator[Item]:
    """Yield what a function returns of each step, asked a block ahead.

    Asked step by step, between a model's computations, it would find nothing of its own in the processor's caches, and
    take several times as long.
    """
    for first in range(0, len(steps), BLOCK_STEPS):
        yield from [of_step(step) for step in steps[first : first + BLOCK_STEPS]]


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
