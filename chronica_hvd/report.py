"""Report: where the time of an epoch went, who kept the others waiting, and why."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chronica_hvd import checks

Array = NDArray[np.float64]

#: Why ranks wait for one → what is the matter, and what to do.
CAUSES = {
    "data": "work that the plan could not share out evenly; more samples in a step help, or reorder='window'",
    "device": "compute that took longer than the same work does elsewhere; look for other processes, a throttled clock, "
    "a lower power limit. With refresh set the plan gives it less",
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
#: An epoch is divided into at most so many groups of consecutive steps, to tell what is steady from noise.
GROUPS = 12
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
        shape = np.shape(_table("compute", compute, None))
        given = {"compute": compute, "data_wait": data_wait, "wait": wait, "period": period, "loads": loads}
        c, d, w, p, planned = (_table(name, values, shape) for name, values in given.items())
        scale = np.ones(shape) if rank_scale is None else _table("rank_scale", rank_scale, shape, may_be_row=True)
        if not (scale > 0.0).all():
            raise ValueError(f"rank_scale must be positive on every rank, not {rank_scale!r}")
        work = planned / scale if expected is None else _table("expected", expected, shape)
        is_known = ~np.isnan(c + d + w)
        ranks = np.flatnonzero(is_known.any(axis=0))
        steps = is_known[:, ranks].all(axis=1) & (ranks.size > 0)
        times = _Times(*(array[np.ix_(steps, ranks)] for array in (c, d, w, p, planned, work)))

        def of_ranks(values: Array) -> Array:
            spread = np.full(shape[1], np.nan)
            spread[ranks] = values
            return spread

        waiting = times.waiting()
        return cls(
            epoch=epoch,
            steps=shape[0],
            ranks=shape[1],
            complete=int(steps.sum()),
            elapsed=times.spent / max(ranks.size, 1) * 1e-9,
            compute=of_ranks(times.compute.sum(axis=0) * 1e-9),
            data_wait=of_ranks(times.data_wait.sum(axis=0) * 1e-9),
            other=of_ranks(times.other.sum(axis=0) * 1e-9),
            peer_wait=of_ranks(times.peer_wait.sum(axis=0) * 1e-9),
            wire=float(times.wire.sum() * 1e-9),
            idle_share=_idle_share(times.compute),
            predicted_idle_share=_idle_share(times.planned),
            prediction_error=times.prediction_error(),
            slowdown=of_ranks(times.slowdown),
            waiting_by_cause={cause: float(of_cause.sum() * 1e-9) for cause, of_cause in waiting.items()},
            stragglers=times.stragglers(waiting, ranks.tolist()),
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


class _Times:
    """The times (steps, ranks) in ns of complete steps, and what follows from them."""

    def __init__(self, compute: Array, data_wait: Array, wait: Array, period: Array, planned: Array, work: Array):
        # What overlaps with compute is no wait: it would not fit into the period.
        rest = np.where(np.isnan(period), data_wait, np.maximum(period - compute - wait, 0.0))
        self.is_first = np.isnan(period).any(axis=1)
        self.compute, self.planned = compute, planned
        self.data_wait = np.minimum(data_wait, rest)
        self.other = rest - self.data_wait
        self.wire = wait.min(axis=1, initial=np.inf)
        self.peer_wait = wait - self.wire[:, None]
        self.spent = float((compute + wait + rest).sum())
        size = max(1, -(-len(compute) // GROUPS))
        self._group = np.arange(len(compute)) // size
        self._starts = np.arange(0, len(compute), size)
        self.factor = np.ones_like(compute)
        for _ in range(3):  # since slow ranks are in the unit too
            self.work = _in_unit_of(compute, work, self.factor)
            known = self._sums(np.where(self.work > 0.0, compute, 0.0))
            ratio = _ratio(known, self._sums(self.work))
            mean = _trimmed_mean(ratio)
            self.slowdown = mean / _of_median_rank(mean)
            self.factor = 1.0 + _steady_excess(ratio / _of_median_rank(mean), least=0.01)[self._group]

    def _sums(self, values: Array) -> Array:
        """Return (groups, ranks) the sums over groups of consecutive steps."""
        return np.add.reduceat(values, self._starts, axis=0) if len(values) else values

    def prediction_error(self) -> float:
        """Return the median relative error of the planned loads."""
        predicted = _in_unit_of(self.compute, self.planned, 1.0)
        errors = np.abs(self.compute / predicted - 1.0)[predicted > 0.0]
        return float(np.median(errors)) if errors.size else float("nan")

    def waiting(self) -> dict[str, Array]:
        """Return by cause (ranks,) how long the others waited for each rank, in ns."""
        steps, ranks = self.compute.shape
        last = self.peer_wait.argmin(axis=1) if ranks else np.zeros(steps, np.int64)

        def excess(values: Array) -> Array:
            """Return (steps,) by how much the last rank exceeds the mean of the others."""
            own = values[np.arange(steps), last]
            return own - (values.sum(axis=1) - own) / max(ranks - 1, 1)

        total = self.peer_wait.sum(axis=1)
        slow = excess(self.work * (self.factor - 1.0))
        # Where the plan gives a slow rank less, only the difference of both is waited for.
        compute = np.maximum(excess(self.work) + slow, 0.0)
        device = np.minimum(np.maximum(slow, 0.0), compute)
        data = np.clip(excess(_in_unit_of(self.compute, self.planned, 1.0)) - device, 0.0, compute - device)
        parts = {
            "data": data,
            "device": device,
            "input": np.maximum(excess(self._beyond_noise(self.data_wait)), 0.0),
            "loop": np.maximum(excess(self._beyond_noise(self.other)), 0.0),
            "plan": compute - device - data,
        }
        parts["noise"] = np.maximum(total / max(ranks - 1, 1) - sum(parts.values()), 0.0)
        parts["noise"][sum(parts.values()) == 0.0] = 1.0
        amount = total / sum(parts.values())
        shares = {cause: np.where(self.is_first, 0.0, part * amount) for cause, part in parts.items()}
        shares["start"] = np.where(self.is_first, total, 0.0)
        return {cause: np.bincount(last, shares[cause], minlength=ranks) for cause in CAUSES}

    def stragglers(self, waiting: dict[str, Array], ranks: list[int]) -> tuple[Straggler, ...]:
        """Return who is to be named."""
        named = []
        for cause in OF_A_RANK:
            for place, rank in enumerate(ranks):
                share = waiting[cause][place] / self.spent if self.spent > 0.0 else 0.0
                is_slow = cause == "device" and self.factor[-1, place] >= LEAST_SLOWDOWN
                if share < LEAST_SHARE and not is_slow:
                    continue
                slow = self.factor[:, place][self.factor[:, place] >= LEAST_SLOWDOWN]
                factor = slow.mean() if cause == "device" and slow.size else self.slowdown[place]
                seconds = float(waiting[cause][place] * 1e-9)
                named.append(Straggler(rank, cause, seconds, float(share), float(factor)))
        return tuple(sorted(named, key=lambda one: -one.waiting))

    def _beyond_noise(self, values: Array) -> Array:
        """Return times of which what may be jitter is left out: the steady ones, and in single steps the far larger."""
        steady = _steady_excess(self._sums(values) / np.bincount(self._group)[:, None], least=0.0)[self._group]
        deviation = values - steady
        deviation -= np.median(deviation, axis=0)
        jitter = 1.4826 * _of_median_rank(np.median(np.abs(deviation), axis=0))
        return steady + np.where(np.abs(deviation) > 4.0 * jitter, deviation, 0.0)


def _steady_excess(values: Array, least: float) -> Array:
    """Return (groups, ranks) by how much ranks exceed the median rank steadily; 0 where that can be noise.

    A level may change: where the two halves differ by more than noise, each is looked at by itself.
    """
    step = np.abs(np.diff(values, axis=0))
    own = 1.05 * np.median(step, axis=0) if len(step) else np.zeros(values.shape[1])  # 1 ÷ (0.6745 · √2)
    noise = np.maximum(own, np.median(own))
    return _levels(values, noise, least) if len(values) >= 4 else np.zeros_like(values)


def _levels(values: Array, noise: Array, least: float) -> Array:
    def level(part: Array) -> tuple[Array, Array]:
        mean = _trimmed_mean(part)
        error = 4.0 * (1.0 + 4.0 / len(part)) * (noise + _of_median_rank(noise)) / len(part) ** 0.5
        return mean - _of_median_rank(mean), np.maximum(error, least)

    excess, error = level(values)
    whole = np.tile(np.where(np.abs(excess) > error, excess, 0.0), (len(values), 1))
    half = len(values) // 2
    if half < 3:
        return whole
    halves = values[:half], values[half:]
    (a, error_a), (b, error_b) = map(level, halves)
    parts = np.concatenate([_levels(part, noise, least) for part in halves])
    return np.where(np.abs(a - b) > np.maximum(error_a, error_b) * 2**0.5, parts, whole)


def _trimmed_mean(values: Array) -> Array:
    """Return the mean over groups, of eight or more without the largest and the smallest."""
    return np.sort(values, axis=0)[1:-1].mean(axis=0) if len(values) >= 8 else values.mean(axis=0)


def _of_median_rank(values: Array) -> Any:
    """Return the median over ranks; of an even number the lower one, so that of two ranks the slower one is slow."""
    return np.sort(values)[(values.size - 1) // 2]


def _in_unit_of(compute: Array, loads: Array, factor: Array | float) -> Array:
    """Return loads in ns, each step's unit such that they add up to its compute; 0 where loads are unknown."""
    unit = _ratio(compute.sum(axis=1), (loads * factor).sum(axis=1))
    return np.nan_to_num(loads * unit[:, None])


def _ratio(a: Array, b: Array) -> Array:
    """Return a ÷ b, 1 where b is not positive."""
    return np.divide(a, b, out=np.ones_like(a), where=b > 0.0)


def _idle_share(loads: Array) -> float:
    largest = float(loads.max(axis=1, initial=0.0).sum())
    return 1.0 - float(loads.mean(axis=1).sum()) / largest if largest > 0.0 else 0.0


def _table(name: str, values: Any, shape: tuple[int, ...] | None, may_be_row: bool = False) -> Array:
    """Return a table of times or loads; what is no number of at least 0 becomes NaN."""
    try:
        if np.ma.is_masked(values) or np.asarray(values).dtype.kind not in "iuf":
            raise TypeError("no numbers")
        table = np.asarray(values).astype(np.float64)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be an array (steps, ranks) of numbers, not {values!r}") from None
    if may_be_row and table.ndim == 1 and shape is not None and table.shape == shape[1:]:
        table = np.broadcast_to(table, shape)
    if table.ndim != 2 or table.shape[1] == 0 or table.shape != (shape or table.shape):
        raise ValueError(f"{name} must be of shape {shape or '(steps, ranks)'}, not of shape {table.shape}: {values!r}")
    return np.where((table >= 0.0) & (table < np.inf), table, np.nan)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if value != value else value
