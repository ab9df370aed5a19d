"""Report: where the time of an epoch went, who kept the others waiting, and why."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from chronica_hvd import checks
from chronica_hvd.attribution import LEAST_SHARE, Array, Attribution, Straggler, in_unit_of

#: Why ranks wait for one → what is the matter, and what to do.
CAUSES = {
    "data": "work that the plan could not share out evenly; more samples in a step help, or reorder='window'",
    "device": "the same work takes longer there; look for other processes, a throttled clock or a lower power limit "
    "(with refresh set the plan gives such a rank less)",
    "input": "waiting for the loader; more workers help, faster storage, or less to do for a sample",
    "loop": "other work of the training loop (logging, checkpoints, metrics); do it more rarely, or in a thread",
    "plan": "costs or speeds that the plan had wrong; the next refresh corrects them",
    "start": "an epoch's first step: workers start, kernels are chosen; persistent_workers=True spares some of it",
    "noise": "compute that varies from step to step, or in another way than the cost model says; nobody's fault",
}
#: A line per rank is printed for at most so many.
PRINTED_RANKS = 16


@dataclass(frozen=True, eq=False)
class EpochReport:
    """The time of an epoch's steps on all ranks. Frozen; its arrays are read-only; printed, it says so in words.

    Ranks are those of the sampler's process set. An epoch's last step is told of before it is finished, and left out.

    All times are in seconds, over the steps of which all is known on every rank (but for ranks of which nothing is
    known: their entries are NaN). On each rank compute + data_wait + other + peer_wait + wire is about ``elapsed``.

    Attributes
    ----------
    epoch, steps, ranks
        Which epoch, and how many steps on how many ranks.
    complete
        Of how many steps all is known.
    elapsed
        The time of these steps, as the mean of the ranks.
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
        Median relative error of the plan's load of a rank, after each step's unit is fitted; NaN where unknown.
    slowdown
        (ranks,) how many times longer than on the median rank (of two, the faster one) the same work takes: the mean
        over groups of consecutive steps without the largest and the smallest; NaN where unknown.
    waiting_by_cause
        The seconds of ``peer_wait``, over all ranks, by the cause of the wait. In each step the rank with the smallest
        wait keeps the others waiting. This is shared out to the causes in proportion to how much that rank exceeds the
        mean of the others: ``"data"``, ``"device"``, ``"input"`` and ``"loop"`` as for :class:`Straggler`, ``"plan"``
        (costs or speeds that the plan had wrong), ``"noise"`` (the rest), ``"start"`` (these two and the loader in the
        first step).
    stragglers
        Who is to be named, the largest waiting first. Nobody is for less than 2 % of the time; but a device is that is
        slower by 5 % or more, and still so in the end, even if the plan relieves it so that nobody waits.
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
            Waiting in ``synchronize()``, for slower ranks and the allreduce; below 0 it counts as 0.
        period
            From the end of the step before until the end of this one; NaN in the first.
        loads
            The loads of the plan, in a unit that may change from step to step.
        expected
            What the compute should have taken on ranks as fast as declared, by a cost model fitted since, in any unit;
            ``None``: the loads. Give it where the plan's model may be wrong, or believes ranks to be slow: a plan deals
            a step's samples to the ranks in the order of their sizes, so what it has wrong of some sizes looks like a
            slow rank.

        Raises
        ------
        TypeError, ValueError
            An array is none of numbers, or not of the shape of ``compute``.
        """
        epoch = checks.integer("epoch", epoch, least=0)
        c = _table("compute", compute)
        shape = c.shape
        d = _table("data_wait", data_wait, shape)
        w = _table("wait", wait, shape, least=-np.inf)  # below 0 where all of the period is explained
        p = _table("period", period, shape)
        planned = _table("loads", loads, shape)
        work = planned if expected is None else _table("expected", expected, shape)
        is_known = ~np.isnan(c + d + w)
        ranks = np.flatnonzero(is_known.any(axis=0)) if is_known.any() else np.arange(shape[1])
        steps = is_known[:, ranks].all(axis=1)
        c, d, w, p, planned, work = (array[np.ix_(steps, ranks)] for array in (c, d, w, p, planned, work))
        # What overlaps with compute is no wait: it would not fit into the period.
        rest = np.where(np.isnan(p), d, np.maximum(p - c - w, 0.0))
        d = np.minimum(d, rest)
        found = Attribution(c, d, rest - d, w, planned, work, np.asarray(np.isnan(p).any(axis=1)))

        def of_ranks(values: Array) -> Array:
            spread = np.full(shape[1], np.nan)
            if len(c):
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
            waiting_by_cause={cause: float(found.waiting[cause].sum() / 1e9) for cause in CAUSES},
            stragglers=found.stragglers(ranks.tolist()),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as numbers, strings, lists and dicts, so that JSON keeps them; None where unknown."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    def __str__(self) -> str:
        if self.complete == 0:
            return f"Epoch {self.epoch}: of no step the times are known on every rank."
        named = {straggler.rank for straggler in self.stragglers}
        known = np.flatnonzero(~np.isnan(self.compute))
        first = sorted(known, key=lambda rank: (rank not in named, -self.compute[rank]))[:PRINTED_RANKS]
        lines = [
            f"Epoch {self.epoch}: {self.complete} of {self.steps} steps on {self.ranks} ranks in {self.elapsed:.3g} s, "
            f"{self.wire:.3g} s of it for the allreduce.",
            f"Idle for {self.idle_share:.1%} of the compute time, as planned {self.predicted_idle_share:.1%}; a rank's "
            f"load is off by {self.prediction_error:.1%}.",
            "  rank    compute  data wait      other  for peers  slowdown",
        ]
        for rank in sorted(first):
            times = (times[rank] for times in (self.compute, self.data_wait, self.other, self.peer_wait))
            lines.append(f"{rank:6}{''.join(f' {seconds:8.3g} s' for seconds in times)}{self.slowdown[rank]:10.2f}")
        if len(first) < self.ranks:
            lines.append(f"  and {self.ranks - len(first)} more")
        for cause in CAUSES:
            lines.extend(self._sentences(cause))
        return "\n".join(lines)

    def _sentences(self, cause: str) -> list[str]:
        """Return what there is to say of a cause, if anything: how much was waited for it, for whom, and what to do."""
        spent = self.elapsed * np.isfinite(self.compute).sum()
        share = self.waiting_by_cause[cause] / spent if spent > 0.0 else 0.0
        named = [straggler for straggler in self.stragglers if straggler.cause == cause]
        if not named and share < LEAST_SHARE:
            return []
        who = [f"rank {one.rank} ({one.waiting:.3g} s)" for one in named]
        if cause == "device":
            who = [f"rank {one.rank} ({one.waiting:.3g} s; takes {one.factor:.2f} times as long)" for one in named]
        if named and share < LEAST_SHARE:
            slow = ", ".join(f"rank {one.rank} takes {one.factor:.2f} times as long" for one in named)
            return [f"{cause}: {slow} as others for the same work, but has so much less of it that few wait."]
        if len(who) > PRINTED_RANKS:
            who[PRINTED_RANKS:] = [f"{len(who) - PRINTED_RANKS} more"]
        of_all = f"{cause}: {self.waiting_by_cause[cause]:.3g} s of waiting, {share:.1%} of the ranks' time"
        return [f"{of_all}{', for ' if who else ''}{', '.join(who)}: {CAUSES[cause]}."]


def _idle_share(loads: Array) -> float:
    largest = float(loads.max(axis=1).sum())
    return 1.0 - float(loads.mean(axis=1).sum()) / largest if largest > 0.0 else 0.0


def _table(name: str, values: Any, shape: tuple[int, ...] | None = None, least: float = 0.0) -> Array:
    """Return a table of times or loads as float64; what is not known, infinite or negative is NaN."""
    try:
        array = np.asarray(values)
        if array.dtype.kind not in "iuf" or np.ma.is_masked(values):
            raise TypeError("it must hold numbers")
        table = array.astype(np.float64)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be an array (steps, ranks) of numbers, not {values!r}") from None
    if table.ndim != 2 or table.shape[1] == 0:
        raise ValueError(f"{name} must be an array (steps, ranks), not of shape {table.shape}: {values!r}")
    if shape not in (None, table.shape):
        raise ValueError(f"{name} must be of the shape of compute, {shape}, not of shape {table.shape}")
    return np.where((table >= least) & (table < np.inf), np.maximum(table, 0.0), np.nan)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if value != value else value
