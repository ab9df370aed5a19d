"""Report: where the time of an epoch went, who kept the others waiting, and why."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from chronica_hvd import checks
from chronica_hvd.attribution import Array, Attribution, in_unit_of

#: Why ranks wait for one → what is the matter, and what to do.
CAUSES = {
    "data": "work that the plan could not share out evenly; more samples in a step help, or reorder='window'",
    "device": "compute that took longer than the same work does elsewhere; look for other processes, a throttled clock "
    "or a lower power limit; with refresh set the plan gives such a rank less",
    "input": "waiting for the loader; more workers or faster storage help, or less to do for a sample",
    "loop": "work of the training loop besides (logging, checkpoints, metrics); do it more rarely, or in a thread",
    "plan": "costs or speeds that the plan had wrong; the next refresh corrects them",
    "start": "the first step (workers start, kernels are chosen); persistent_workers=True spares some of it",
    "noise": "compute that varies from step to step, or in another way than the cost model says; nobody's fault",
}
#: Causes that a rank is named for.
OF_A_RANK = ("data", "device", "input", "loop")

#: Below this share of the ranks' time nobody is named for having kept others waiting.
LEAST_SHARE = 0.02
#: Nor below this slowdown for a slow device.
LEAST_SLOWDOWN = 1.05
#: A line per rank is printed for at most so many.
PRINTED_RANKS = 16


@dataclass(frozen=True)
class Straggler:
    """A rank that kept the others waiting, or has a slow device that the plan relieves.

    Attributes
    ----------
    rank
        Which one.
    cause
        ``"data"`` (its work is predicted to take longer), ``"device"`` (it takes longer than predicted, by a steady
        factor), ``"input"`` (it waits for its loader) or ``"loop"`` (other work of the loop between steps).
    waiting
        Seconds that the others waited for it, all together.
    share
        The same as a share of the time of all ranks.
    factor
        How many times longer than on the median rank the same work takes on its device: of its slow steps if the cause
        is ``"device"``, else over the epoch.
    """

    rank: int
    cause: str
    waiting: float
    share: float
    factor: float


@dataclass(frozen=True, eq=False)
class EpochReport:
    """The time of an epoch's steps on all ranks. Frozen; its arrays are read-only; printed, it says so in words.

    All times are in seconds, over the steps of which all is known on every rank (but for ranks of which nothing is
    known: their entries are NaN). On each rank compute + data_wait + other + peer_wait + wire is the time of the epoch.

    Attributes
    ----------
    epoch, steps, ranks
        Which epoch, and how many steps on how many ranks.
    complete
        Of how many steps all is known.
    elapsed
        The time of these steps.
    compute
        (ranks,) forward and backward passes, without waiting for others.
    data_wait
        (ranks,) waiting for the loader while the device had nothing to do.
    other
        (ranks,) all else that the loop does between steps.
    peer_wait
        (ranks,) waiting for slower ranks.
    wire
        The allreduce, as far as nothing overlaps with it: in each step the smallest wait of any rank.
    idle_share
        1 − Σ mean compute / Σ largest compute of a step: the share of the compute time that ranks idle.
    predicted_idle_share
        The same of the plan's loads.
    prediction_error
        Median relative error of the plan's load of a rank in a step, after its unit is fitted; NaN where unknown.
    slowdown
        (ranks,) how many times longer than on the median rank (of two, the faster one) the same work takes: the mean
        over groups of consecutive steps without the largest and the smallest; NaN where unknown.
    waiting_by_cause
        The seconds of ``peer_wait``, over all ranks, by the cause of the wait. In each step the rank with the smallest
        wait keeps the others waiting. This is shared out to the causes in proportion to how much that rank exceeds the
        mean of the others: ``"data"``, ``"device"``, ``"input"`` and ``"loop"`` as for :class:`Straggler`, ``"plan"``
        (costs or speeds that the plan had wrong), ``"start"`` (the first step), ``"noise"`` (the rest).
    stragglers
        Who is to be named, the largest waiting first. Nobody is for less than 2 % of the time; but a device slower than
        the median by 5 % or more is, even if the plan relieves it so that nobody waits.
    """

    epoch: int
    steps: int
    ranks: int
    complete: int
    elapsed: float
    compute: Array
    data_wait: Array
    other: Array
    peer_wait: Array
    wire: float
    idle_share: float
    predicted_idle_share: float
    prediction_error: float
    slowdown: Array
    waiting_by_cause: dict[str, float]
    stragglers: tuple[Straggler, ...]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    @classmethod
    def from_times(
        cls,
        epoch: int,
        compute: Any,
        data_wait: Any,
        wait: Any,
        period: Any,
        loads: Any,
        rank_scale: Any = None,
        expected: Any = None,
    ) -> EpochReport:
        """Return the report of an epoch from its times, arrays (steps, ranks) in ns; NaN where unknown.

        Parameters
        ----------
        epoch
            Which one.
        compute
            Own compute.
        data_wait
            Waiting for the loader.
        wait
            Waiting in ``synchronize()``, for slower ranks and the allreduce.
        period
            From the end of the step before until the end of this one; NaN in the first.
        loads
            The loads of the plan, in a unit that may change from step to step.
        rank_scale
            (ranks,) or (steps, ranks) what the loads contain for ranks believed to be slow; ``None``: nothing.
        expected
            What the compute should take on equal ranks, in any unit, as is known after the epoch; ``None``: loads ÷
            rank_scale. A plan sorts a step's samples over the ranks by size, so that whatever its cost model has wrong
            looks like a slow rank, unless it is corrected here.

        Raises
        ------
        TypeError, ValueError
            An array is none of numbers, or not of the shape of ``compute``; rank_scale is not positive.
        """
        epoch = checks.integer("epoch", epoch, least=0)
        shape = np.shape(_table("compute", compute))
        given = {"compute": compute, "data_wait": data_wait, "wait": wait, "period": period, "loads": loads}
        c, d, w, p, planned = (_table(name, values, shape) for name, values in given.items())
        scale = np.ones(shape) if rank_scale is None else _scale(rank_scale, shape)
        work = planned / scale if expected is None else _table("expected", expected, shape)
        is_known = ~np.isnan(c + d + w)
        ranks = np.flatnonzero(is_known.any(axis=0))
        if ranks.size == 0:
            ranks = np.arange(shape[1])
        steps = is_known[:, ranks].all(axis=1)
        c, d, w, p, planned, work = (array[np.ix_(steps, ranks)] for array in (c, d, w, p, planned, work))
        # What overlaps with compute is no wait: it would not fit into the period.
        rest = np.where(np.isnan(p), d, np.maximum(p - c - w, 0.0))
        d = np.minimum(d, rest)
        found = Attribution(c, d, rest - d, w, planned, work, np.asarray(np.isnan(p).any(axis=1)))
        waiting = found.waiting()

        def of_ranks(values: Array) -> Array:
            spread = np.full(shape[1], np.nan)
            spread[ranks] = values
            return spread

        return cls(
            epoch=epoch,
            steps=shape[0],
            ranks=shape[1],
            complete=len(c),
            elapsed=found.spent / ranks.size / 1e9,
            compute=of_ranks(c.sum(axis=0) / 1e9),
            data_wait=of_ranks(d.sum(axis=0) / 1e9),
            other=of_ranks(found.other.sum(axis=0) / 1e9),
            peer_wait=of_ranks(found.peer_wait.sum(axis=0) / 1e9),
            wire=float(found.wire.sum() / 1e9),
            idle_share=_idle_share(c),
            predicted_idle_share=_idle_share(in_unit_of(c, planned)),
            prediction_error=found.prediction_error,
            slowdown=of_ranks(found.slowdown),
            waiting_by_cause={cause: float(waiting[cause].sum() / 1e9) for cause in CAUSES},
            stragglers=_stragglers(found, waiting, ranks.tolist()),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as numbers, strings, lists and dicts, so that JSON keeps them; None where unknown."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    def __str__(self) -> str:
        known = [rank for rank in range(self.ranks) if not np.isnan(self.compute[rank])]
        lines = [
            f"Epoch {self.epoch}: {self.complete} of {self.steps} steps on {self.ranks} ranks in {self.elapsed:.3g} s. "
            f"Ranks idle {self.idle_share:.1%} of the compute time, {self.predicted_idle_share:.1%} as planned; the "
            f"allreduce takes {self.wire:.3g} s besides.",
            "  rank  compute  data wait    other  for peers  slowdown",
        ]
        printed = known
        if len(known) > PRINTED_RANKS:
            named = {straggler.rank for straggler in self.stragglers}
            printed = sorted(known, key=lambda rank: (rank not in named, -self.compute[rank]))[:PRINTED_RANKS]
        for rank in sorted(printed):
            times = self.compute[rank], self.data_wait[rank], self.other[rank], self.peer_wait[rank]
            lines.append("{:6d} {:7.3g}s {:9.3g}s {:7.3g}s {:9.3g}s {:9.2f}".format(rank, *times, self.slowdown[rank]))
        if len(printed) < self.ranks:
            lines.append(f"  and {self.ranks - len(printed)} more")
        for cause, meaning in CAUSES.items():
            lines.extend(self._sentences(cause, meaning))
        return "\n".join(lines)

    def _sentences(self, cause: str, meaning: str) -> list[str]:
        """Return what there is to say of a cause: nothing, or who waits how much for it and what to do."""
        named = [straggler for straggler in self.stragglers if straggler.cause == cause]
        waiting = self.waiting_by_cause[cause]
        share = waiting / (self.elapsed * max(np.isfinite(self.compute).sum(), 1)) if self.elapsed > 0.0 else 0.0
        if not named and share < LEAST_SHARE:
            return []
        who = ", ".join(
            f"rank {one.rank} ({one.waiting:.3g} s{f', {one.factor:.2f} times as long' if cause == 'device' else ''})"
            for one in named
        )
        return [
            f"{cause}: ranks waited {waiting:.3g} s ({share:.1%} of their time){f' for {who}' * bool(who)}: {meaning}."
        ]


def _stragglers(found: Attribution, waiting: dict[str, Array], ranks: list[int]) -> tuple[Straggler, ...]:
    """Name who has kept the others waiting, or has a slow device at the end of the epoch."""
    named = []
    for cause in OF_A_RANK:
        for place, rank in enumerate(ranks):
            ns = float(waiting[cause][place])
            share = ns / found.spent if found.spent > 0.0 else 0.0
            factors = found.factor[:, place]
            is_slow = cause == "device" and factors[-1:].max(initial=0.0) >= LEAST_SLOWDOWN
            if share >= LEAST_SHARE or is_slow:
                slow = factors[factors > 1.0]
                factor = slow.mean() if cause == "device" and slow.size else found.slowdown[place]
                named.append(Straggler(rank, cause, ns / 1e9, share, float(factor)))
    return tuple(sorted(named, key=lambda straggler: -straggler.waiting))


def _idle_share(loads: Array) -> float:
    largest = float(loads.max(axis=1).sum())
    return 1.0 - float(loads.mean(axis=1).sum()) / largest if largest > 0.0 else 0.0


def _table(name: str, values: Any, shape: tuple[int, ...] | None = None) -> Array:
    """Return a table of times or loads; what is no number of at least 0 becomes NaN."""
    try:
        if np.ma.is_masked(values) or np.asarray(values).dtype.kind not in "iuf":
            raise TypeError("no numbers")
        table = np.asarray(values).astype(np.float64)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be an array (steps, ranks) of numbers, not {values!r}") from None
    if table.ndim != 2 or table.shape[1] == 0 or table.shape != (shape or table.shape):
        raise ValueError(f"{name} must be of shape {shape or '(steps, ranks)'}, not of shape {table.shape}: {values!r}")
    return np.where((table >= 0.0) & (table < np.inf), table, np.nan)


def _scale(rank_scale: Any, shape: tuple[int, ...]) -> Array:
    """Return the ranks' scales as a table."""
    is_row = np.ndim(rank_scale) == 1
    table = _table("rank_scale", [rank_scale] if is_row else rank_scale, (1, *shape[1:]) if is_row else shape)
    if not (table > 0.0).all():
        raise ValueError(f"rank_scale must be positive on every rank, not {rank_scale!r}")
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if value != value else value
