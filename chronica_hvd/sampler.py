"""Sample: the batches of this rank, step by step, as its plan says."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from chronica_hvd import checks
from chronica_hvd.cost import CostModel
from chronica_hvd.course import Course
from chronica_hvd.feedback import Feedback
from chronica_hvd.measured import Measured
from chronica_hvd.options import PlanOptions
from chronica_hvd.planned import Planned
from chronica_hvd.planner import Planner
from chronica_hvd.plans import Plan
from chronica_hvd.position import Intervals, Position, Segment, digest
from chronica_hvd.progress import Progress
from chronica_hvd.report import EpochReport
from chronica_hvd.tickets import StepTicket
from chronica_hvd.workload import Workload
from chronica_hvd.world import World, check_process_set


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
        When plans follow measured times, where the cost is one that does (:class:`Measured`; by default it is, and
        starts by size): ``"epoch"``: from the next epoch on; a number: within the epoch too, every so many blocks of 64
        steps, from the first block on that no rank has asked for; ``None``: never.
    evaluation
        Plan for speed alone, since an evaluation has no order: every sample (of ``indices``) once over all ranks, the
        largest first, so that global batches hold samples alike. The step with the largest micro-batch comes first:
        memory runs out at once or never. All epochs have one plan, by the cost as given: for one that was measured in
        training give ``cost=sampler.cost``. See :class:`chronica_hvd.Mean`.
    on_report
        A function that is given each epoch's :class:`EpochReport`, when its last step is finished; all ranks that give
        one get the same. Its times are those of the optimizer that was wrapped last.
    options
        The keyword options of :func:`chronica_hvd.plan`; ``epoch`` is the first epoch. ``cost`` may be a
        :class:`Measured` too; where it is, or is not given, ``comm`` holds until a cost is measured, with which the
        allreduce is.

    Attributes
    ----------
    world
        This rank among the others.
    course
        The plan, and those that replace it within the epoch.
    batch_size, drop_last, micro_batches, evaluation
        As given.

    Raises
    ------
    TypeError, ValueError
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
        on_report: Callable[[EpochReport], object] | None = None,
        **options: Any,
    ) -> None:
        measured, options["cost"] = _measured(options.get("cost"), refresh)
        checked = PlanOptions.from_keywords(options)
        self.evaluation = checks.boolean("evaluation", evaluation)
        if self.evaluation:
            _refuse_training_options(checked, on_report, refresh, is_shuffle_given="shuffle" in options)
        blocks = _blocks_of(refresh)
        if not (on_report is None or callable(on_report)):
            raise TypeError(f"on_report must be a function or None, not {on_report!r}")
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
        if blocks is not None and measured is None:
            advice = "leave refresh out" if checked.padding == "none" else "leave refresh out, or give Measured(cost)"
            raise ValueError(f"refresh={blocks} has nothing to refresh: a given cost stays as it is; {advice}")
        self._planner.workload.keep_sizes()
        self.batch_size = self._planner.batch_size
        self.drop_last = checked.drop_last
        self.micro_batches = checked.micro_batches
        self._measured = None if self.evaluation else measured
        self._blocks_of_refresh = blocks
        self._on_report = on_report
        self._given = self._planner
        self._wire()
        self._adopt_cost()
        self._go_to(checked.epoch, self._whole(checked.epoch))

    def _wire(self) -> None:
        """Begin without a loop, and without an optimizer."""
        feedback = Feedback(self._given, self._measured, self._blocks_of_refresh, self._on_report)
        self.progress = Progress(None if self.evaluation else feedback)

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
            self._adopt_cost()
            keeps_plan = self.evaluation and not self._planned.segment.before
            self._go_to(epoch, self._planned if keeps_plan else self._whole(epoch))

    @property
    def plan(self) -> Plan:
        """The plan of this epoch for all ranks, computed when first asked for.

        After :meth:`load_state_dict` in another world, or with options under which other samples would have been
        consumed, and after a refresh within the epoch: of what was left of the epoch then.
        """
        return self.course.plan

    @property
    def cost(self) -> CostModel | NDArray[np.float64]:
        """What a sample costs, as :attr:`plan` believes: as given; measured, in ns; or the default by size."""
        return self.course.cost

    @property
    def speeds(self) -> tuple[float, ...]:
        """Relative speed of each rank, as given; what was measured is the ``rank_scale`` of :attr:`cost`."""
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

    def begin(self) -> Course:
        """Return the course of a loop over the loader that begins now, by the newest cost."""
        before = self._planner
        self._adopt_cost()
        if self._planner is before:
            self.course = self._next_course()
        else:
            left = dataclasses.replace(self._planned.segment, before=self._planned.consumed(self._start))
            self._go_to(self._epoch, Planned(self._planner, self._planned.epoch, left, self._given))
        return self.course

    def tickets(self) -> Iterator[StepTicket]:
        """Yield what the optimizer will need to know of each step of the next iteration."""
        return self._next_course().tickets(self.world.rank)

    def steps(self) -> Iterator[list[list[int]]]:
        """Yield the micro-batches of each step, from where a loaded state has left off."""
        return self._next_course().batches(self.world.rank)

    def __iter__(self) -> Iterator[list[int] | list[list[int]]]:
        """Return an iterator over the steps: a list of indices each, with micro-batches a list of lists."""
        return (step[0] for step in self.steps()) if self.micro_batches == 1 else iter(self.steps())

    def __len__(self) -> int:
        return self.course.end - self.course.start

    def state_dict(self) -> dict[str, Any]:
        """Return where in the epoch training is: small, and equal on all ranks where they are in the same step.

        A step is consumed when the loop has taken a micro-batch of it from :class:`chronica_hvd.DataLoader`; what
        workers have fetched ahead is not. Made of dicts, lists, numbers and strings only, so that ``torch.save`` (also
        with ``weights_only=True`` on loading) and JSON keep it.
        """
        step = self._step_reached()
        leg = self.course.leg_at(step)
        planned, steps = leg.planned, step - leg.first
        before, consumed = planned.segment.before, planned.consumed(steps)
        measured = None
        if self._measured is not None and self._measured.has_learnt:
            measured = self._measured.state()
        position = Position(self.epoch, self.speeds, self.batch_size, before, steps, consumed, measured)
        return position.state(self._identity)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, at any number of ranks, speeds and batch size.

        With the same ranks, speeds and batch size the plan of the epoch goes on, bit for bit if the options and the
        cost are the same too. Else what is left of the epoch is planned anew: each sample counts once in the epoch.
        What was measured goes on to be followed. Every iteration begins there until :meth:`set_epoch` chooses another
        epoch. Nothing is communicated: load the same state on every rank.

        Raises
        ------
        TypeError, ValueError
            It is no state, or one of another data set, ``indices``, ``seed``, ``shuffle``, ``drop_last``, ``reorder``
            or ``window``; nothing has changed then.
        """
        loaded = Position.from_state(state, self._identity, self._planner.workload.samples)
        if loaded.measured is not None and self._measured is not None:
            self._measured.load(loaded.measured)
            self._adopt_cost()
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
        return Planned(planner, 0 if self.evaluation else epoch, segment, self._given)

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
        self.course = self._next_course()
        self._left_behind = self.progress.last_begun()  # says nothing of this position

    def _adopt_cost(self) -> None:
        """Plan by the newest cost from now on."""
        if self.progress.feedback is not None:
            self._planner = self.progress.feedback.planner(self._planner)

    def _next_course(self) -> Course:
        """Return a course of its own: to look at its steps changes nothing."""
        return Course(self._epoch, self._planned, self._start)

    def _step_reached(self) -> int:
        """Return the first step of the course that is not consumed."""
        last = self.progress.last_begun()
        if last is None or last is self._left_behind:
            return self.course.start
        # An iteration that was under way when a state was loaded goes on with its own plan.
        return last.step + 1 if self.course.holds(last) else self.course.start

    def __repr__(self) -> str:
        return (
            f"BatchSampler(rank {self.world.rank} of {self.world.size}, {self.samples} samples, batch_size "
            f"{self.batch_size}, epoch {self.epoch}, {len(self)} steps, cost {self.cost!r})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("progress", "course")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy has a loop of its own, and no optimizer.
        self.__dict__.update(state)
        self._wire()
        self._go_to(self._epoch, self._planned, self._start)


def _measured(cost: Any, refresh: object) -> tuple[Measured | None, Any]:
    """Return the cost that follows what is measured, if one is to, and the one that it starts from."""
    if cost is None:
        cost = Measured()
    if not isinstance(cost, Measured):
        return None, cost
    return (None if refresh is None else cost), cost.start


def _refuse_training_options(
    options: PlanOptions, on_report: object, refresh: object, *, is_shuffle_given: bool
) -> None:
    """Raise a ValueError for an option that says in which order, or which, samples of an evaluation are taken."""
    order = "an evaluation takes its samples the largest first, so that little is padded"
    contradictions = (
        ("shuffle=True", options.shuffle and is_shuffle_given, order),
        ("drop_last=True", options.drop_last, "an evaluation counts every sample"),
        ('reorder="window"', options.reorder == "window", f"{order}; none is left to be moved"),
        (f"first={options.first!r}", options.first is not None, "its largest micro-batch comes first anyway"),
        ("on_report", on_report is not None, "what it reports is what an optimizer measures"),
        (f"refresh={refresh!r}", refresh not in ("epoch", None), "all its epochs have one plan"),
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


def _blocks_of(refresh: object) -> int | None:
    """Return the number of blocks that ``refresh`` says; ``None``: plans change between epochs at most."""
    if refresh is None or isinstance(refresh, str):
        checks.choice("refresh", refresh, ("epoch", None))
        return None
    return checks.integer("refresh", refresh, least=1)


def _world(ranks: int | None, rank: int | None, process_set: Any) -> World:
    """Return the world: by hand where both numbers are given, else Horovod's, which must agree with what is given."""
    if ranks is not None and rank is not None and process_set is None:
        return World(rank, ranks)
    world = World.from_horovod(process_set)
    for name, given, actual in (("num_replicas", ranks, world.size), ("rank", rank, world.rank)):
        if given is not None and given != actual:
            raise ValueError(f"{name} says {given}, but Horovod says {actual}")
    return world
