"""Sample: where in an epoch training is: which of its samples are consumed, kept in a state and found again."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chronica_hvd import checks

#: Of the layout of a state; one that an older or newer layout wrote is refused.
VERSION = 2

#: Places in the drawn order of an epoch as half-open intervals, sorted and disjoint: first, end, first, end, …
Intervals = tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """What is left of an epoch when a world begins to plan it, all of it at once.

    Attributes
    ----------
    samples
        Of the whole epoch.
    global_batch, drop_last
        As the world plans.
    before
        What was consumed before the segment began.
    """

    samples: int
    global_batch: int
    drop_last: bool
    before: Intervals = ()

    @property
    def steps(self) -> int:
        """Number of steps in which the segment is planned."""
        left = self.samples - _size(self.before)
        return left // self.global_batch if self.drop_last else -(-left // self.global_batch)

    def left(self) -> NDArray[np.int64] | None:
        """Return the places that are left when it begins; ``None``: all."""
        return np.flatnonzero(~_mask(self.before, self.samples)) if self.before else None

    def consumed_in_order(self, steps: int) -> Intervals:
        """Return what is consumed, in all, after so many steps that take what is left in drawn order."""
        if steps == self.steps:
            return (0, self.samples)  # what drop_last leaves out is over with the last step
        if steps == 0:
            return self.before
        end = steps * self.global_batch
        further = iter(self.before)
        for first, stop in zip(further, further, strict=True):
            if first > end:
                return (0, end, first, stop, *further)
            end += stop - first
        return (0, end)

    def consumed_with(self, places: NDArray[np.int64], steps: int) -> Intervals:
        """Return the same where the steps take these ``places``, one step after the other."""
        if steps in (0, self.steps):
            return self.consumed_in_order(steps)
        mask = _mask(self.before, self.samples)
        mask[places[: steps * self.global_batch]] = True
        return _intervals(mask)


def entry_places(
    entries: NDArray[np.int64], drawn: NDArray[np.int64], left: NDArray[np.int64] | None, may_repeat: bool
) -> NDArray[np.int64]:
    """Return where in an epoch's drawn order the entries of a plan stand.

    Parameters
    ----------
    entries
        Samples as a plan takes them. Of one that was drawn several times, the first drawn is taken first.
    drawn, left
        What the plan was made of, and the places of that; ``None``: all.
    may_repeat
        Whether a sample may have been drawn several times.
    """
    if may_repeat:
        by_sample, entries_by_sample = np.argsort(drawn, kind="stable"), np.argsort(entries, kind="stable")
        ordered = entries[entries_by_sample]
        occurrence = np.arange(ordered.size) - np.searchsorted(ordered, ordered)
        within = np.empty_like(entries)
        within[entries_by_sample] = by_sample[np.searchsorted(drawn[by_sample], ordered) + occurrence]
    else:
        place_of = np.empty(int(drawn.max(initial=-1)) + 1, dtype=np.int64)
        place_of[drawn] = np.arange(drawn.size)
        within = place_of[entries]
    return within if left is None else left[within]


@dataclass(frozen=True)
class Position:
    """Where in an epoch training is, as a state says it.

    Attributes
    ----------
    speeds, batch_size
        The world that trains: relative speed of each rank, samples per rank and step on average.
    before
        What was consumed before this world began.
    steps
        Steps of this world's plan that are consumed.
    consumed
        What is consumed in all.
    measured
        What is known of costs: a state of :class:`chronica_hvd.Measured`; ``None`` where the cost is fixed.
    """

    epoch: int
    speeds: tuple[float, ...]
    batch_size: int
    before: Intervals
    steps: int
    consumed: Intervals
    measured: Mapping[str, Any] | None = None

    def state(self, identity: Mapping[str, int | str]) -> dict[str, Any]:
        """Return it as a state, with the ``identity`` of what is trained on: data and options that must stay."""
        return {
            "version": VERSION,
            **identity,
            "epoch": self.epoch,
            "speeds": list(self.speeds),
            "batch_size": self.batch_size,
            "before": list(self.before),
            "steps": self.steps,
            "consumed": list(self.consumed),
            "measured": None if self.measured is None else dict(self.measured),
        }

    @classmethod
    def from_state(cls, state: object, identity: Mapping[str, int | str], samples: int) -> Position:
        """Return what a state says of an epoch of so many samples.

        Raises
        ------
        TypeError, ValueError
            It is none, contradicts itself, or belongs to something of another ``identity``.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be what state_dict() returned, a dict, not {state!r}")
        if "version" in state and checks.integer("the state's version", state["version"]) != VERSION:
            raise ValueError(f"the state is of version {state['version']}; this chronica_hvd reads version {VERSION}")
        _check_names(state, {"version", *identity, *cls.__dataclass_fields__})
        _refuse_other(state, identity)
        position = cls(
            checks.integer("the state's epoch", state["epoch"], least=0, most=checks.LARGEST_INT64),
            _speeds(state["speeds"]),
            checks.integer("the state's batch_size", state["batch_size"], least=1, most=2**40),
            _checked_intervals("before", state["before"], samples),
            checks.integer("the state's steps", state["steps"], least=0),
            _checked_intervals("consumed", state["consumed"], samples),
        )
        if not isinstance(measured := state["measured"], Mapping | None):
            raise TypeError(f"the state's measured must be a dict or None, not {measured!r}")
        position = dataclasses.replace(position, measured=measured)
        position._refuse_contradiction(samples, bool(identity["drop_last"]))
        return position

    def _refuse_contradiction(self, samples: int, drop_last: bool) -> None:
        # Of more steps than there are nobody can have consumed as many samples.
        segment = Segment(samples, self.batch_size * len(self.speeds), drop_last, self.before)
        expected = _size(segment.consumed_in_order(self.steps))
        if _size(self.consumed) != expected:
            raise ValueError(
                f"the state's consumed holds {_size(self.consumed)} samples; after {self.steps} steps it must be "
                f"{expected}"
            )
        if (_mask(self.before, samples) & ~_mask(self.consumed, samples)).any():
            raise ValueError("the state's consumed must hold all that was consumed before")


def digest(values: NDArray[Any] | None) -> str:
    """Return a hash (16 hex digits) of an array's values whatever their type; of ``None`` an empty string."""
    if values is None:
        return ""
    hashed = hashlib.blake2b(digest_size=8)
    chunk = 1 << 16
    for first in range(0, values.size, chunk):
        hashed.update(values[first : first + chunk].astype("<f8").data)
    return hashed.hexdigest()


def _check_names(state: Mapping[Any, Any], expected: set[str]) -> None:
    missing = [name for name in sorted(expected) if name not in state]
    unknown = [name for name in state if name not in expected]
    if missing or unknown:
        what = f"lacks {missing[0]!r}" if missing else f"holds {unknown[0]!r}, which is unknown"
        raise ValueError(f"the state {what}; give what state_dict() returned")


def _refuse_other(state: Mapping[str, Any], identity: Mapping[str, int | str]) -> None:
    for name, own in identity.items():
        given = state[name]
        if isinstance(given, bool) is not isinstance(own, bool) or not isinstance(given, type(own)):
            raise TypeError(f"the state's {name} must be of type {type(own).__name__}, not {given!r}")
        if given != own:
            what = {"sizes": "a data set of other sizes", "indices": "other indices"}.get(name)
            differs = what or f"{name}={given!r}, while this sampler has {name}={own!r}"
            raise ValueError(
                f"the state belongs to {differs}: it can only go on with the same data, seed, shuffle, drop_last, "
                "reorder and window"
            )


def _speeds(given: Any) -> tuple[float, ...]:
    if not isinstance(given, list | tuple):
        raise TypeError(f"the state's speeds must be a list, not {given!r}")
    speeds = tuple(checks.real("the state's speeds", speed) for speed in given)
    if not speeds or min(speeds) <= 0.0:
        raise ValueError(f"the state's speeds must be positive, and at least one, not {given!r}")
    return speeds


def _checked_intervals(name: str, given: Any, samples: int) -> Intervals:
    if not isinstance(given, list | tuple) or not all(type(place) is int for place in given):
        raise TypeError(f"the state's {name} must be a list of integers, not {given!r}")
    is_sorted = all(one < other for one, other in itertools.pairwise(given))
    if len(given) % 2 or not is_sorted or (given and (given[0] < 0 or given[-1] > samples)):
        raise ValueError(
            f"the state's {name} must hold pairs of places from 0 to {samples}, the first and the end of an interval, "
            f"sorted and with a gap between two; not {given!r}"
        )
    return tuple(given)


def _size(intervals: Intervals) -> int:
    return sum(intervals[1::2]) - sum(intervals[::2])


def _mask(intervals: Intervals, samples: int) -> NDArray[np.bool_]:
    """Return (samples,) whether each place is in one of the intervals."""
    changes = np.zeros(samples + 1, dtype=np.int8)
    changes[list(intervals[::2])] = 1
    changes[list(intervals[1::2])] = -1
    return np.cumsum(changes[:-1], dtype=np.int8).astype(np.bool_)


def _intervals(mask: NDArray[np.bool_]) -> Intervals:
    changes = np.diff(mask.view(np.int8), prepend=np.int8(0), append=np.int8(0))
    return tuple(np.flatnonzero(changes).tolist())
