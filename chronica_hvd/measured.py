"""Model: a cost that follows what is measured while training goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chronica_hvd import allreduce, cells, checks
from chronica_hvd.cost import CostModel, FittedCost, coefficients_of
from chronica_hvd.fit import fitted_cost
from chronica_hvd.refit import refit
from chronica_hvd.rows import LARGEST, Row

#: Where a rank is: a number for its host, and its number there.
Place = tuple[int, int]

#: A wait for the allreduce of less than this share of a step's compute is not told apart from none.
LEAST_WAIT = 0.05
#: The allreduce's duration is changed where it is off by more than this share of itself.
LEAST_COMM_CHANGE = 0.2
#: Scales that differ by less do so by rounding.
ROUNDING = 1e-9


#: A state in which a rank is more times slower or faster than another than this was not written by us.
LARGEST_RATIO = 2.0**20


class Measured:
    """A cost that begins as ``start`` and follows measured times: what a sampler plans with unless told otherwise.

    ``start`` itself is never changed. How long each rank takes is remembered by host and local rank, so that it
    survives a change of ranks.

    Parameters
    ----------
    start
        A :class:`CostModel`, for instance of FLOPs; ``None``: by size.

    Raises
    ------
    TypeError
        ``start`` is neither.
    """

    def __init__(self, start: CostModel | None = None) -> None:
        if start is not None and not isinstance(start, CostModel):
            raise TypeError(f"start must be a CostModel or None, not {start!r} of type {type(start).__name__}")
        self._start = start
        self._default = start or CostModel()
        self._fitted: FittedCost | None = None  # without the ranks' scales
        self._scales: dict[Place, float] = {}
        self._drifts: dict[Place, float] = {}  # see Outcome.drifts
        self._memory = cells.NONE
        self._comm = 0.0  # as planned with
        self._places: tuple[Place, ...] = ()
        self._speeds: tuple[float, ...] = ()
        self._model: CostModel | None = None  # for these places

    @property
    def start(self) -> CostModel | None:
        """What the cost begins as; ``None``: by size."""
        return self._start

    @property
    def has_learnt(self) -> bool:
        """Whether anything was measured so far that a state must carry, though the start may still be planned with."""
        return self._fitted is not None or len(self._memory) > 0 or bool(self._drifts)

    def __repr__(self) -> str:
        return f"Measured({self._model or self._start or 'by size'})"

    def model(
        self,
        default: CostModel,
        places: Sequence[Place] | None,
        ranks: int,
        speeds: Sequence[float] | None = None,
    ) -> CostModel:
        """Return what to plan with now.

        Parameters
        ----------
        default
            What there is to plan with where nothing has been measured: ``start`` as the plan reads it, or by size.
        places
            (ranks,) host number and local rank of each rank; ``None``: those of before if as many, else unknown.
        ranks
            Number of ranks.
        speeds
            (ranks,) relative speeds that the plan knows of by itself; ``None``: all alike.
        """
        if places is None:
            places = self._places if len(self._places) == ranks else [(-1, rank) for rank in range(ranks)]
        now = tuple((int(host), int(local)) for host, local in places)
        known = (1.0,) * ranks if speeds is None else tuple(map(float, speeds))
        if self._model is None or (default, now, known) != (self._default, self._places, self._speeds):
            self._default, self._places, self._speeds = default, now, known
            self._model = self._with_scales()
        return self._model

    def follow(
        self,
        rows: NDArray[np.float64],
        places: Sequence[Place],
        waits: Sequence[float],
        tails: Sequence[float],
    ) -> CostModel:
        """Return what to plan with from now on: the same object as before where nothing changed beyond the noise.

        Every rank that is given the same gets the same, to the last bit.

        Parameters
        ----------
        rows
            (ranks, ROW) what :func:`chronica_hvd.rows.summarize` made of each rank's records.
        places
            (ranks,) host number and local rank of each.
        waits
            Nanoseconds that the rank which waited least did wait for the allreduce, in each step; NaN: unknown.
        tails
            Nanoseconds of the last backward pass, which the allreduce overlaps with, in each of these steps as planned.
        """
        speeds = self._speeds if len(self._speeds) == len(places) else None
        before = self.model(self._default, places, len(places), speeds)
        unpacked = [Row.unpack(row) for row in rows]
        scales = self._scales_now()
        drifts = [self._drifts.get(place, 0.0) for place in self._places]
        outcome = refit(unpacked, self._fitted or self._default, scales, drifts, self._memory, self._default)
        if outcome is None:
            return before
        self._memory = outcome.memory
        self._drifts |= zip(self._places, outcome.drifts, strict=True)
        step_time = max(row.step_time for row in unpacked if row is not None)
        comm = allreduce.duration(waits, tails, self._comm)
        # As it was planned with: where all compute has become slower, so would the allreduce have, for the plan.
        used = self._comm * outcome.unit_before if self._fitted else 0.0
        is_other_comm = abs(comm - used) > max(LEAST_WAIT * step_time, LEAST_COMM_CHANGE * max(comm, used))
        if not (outcome.is_new or outcome.scales != scales or is_other_comm):
            return before
        self._comm = comm
        self._take(fitted_cost(outcome, comm=comm), outcome.scales)
        self._model = self._with_scales()
        return self._model

    def _take(self, fitted: FittedCost, found: Sequence[float]) -> None:
        """Keep a fit and the ranks' scales; those of ranks that are not here any more in the same unit."""
        scale = fitted.rank_scale or ()
        unit = scale[0] / found[0]
        self._scales = {place: one * unit for place, one in self._scales.items()}
        self._scales |= dict(zip(self._places, scale, strict=True))
        self._fitted = dataclasses.replace(fitted, rank_scale=None)

    def _scales_now(self) -> list[float]:
        """Return (ranks,) how many times longer than predicted each rank takes."""
        believed = self._default.rank_scale
        if believed is None or len(believed) != len(self._places):
            believed = (1.0,) * len(self._places)
        return [
            self._scales.get(place, scale / speed)
            for place, scale, speed in zip(self._places, believed, self._speeds, strict=True)
        ]

    def _with_scales(self) -> CostModel:
        """Return the model for the ranks of now, without what the plan knows of their speeds."""
        if self._fitted is None:
            return self._default
        scale = [one * speed for one, speed in zip(self._scales_now(), self._speeds, strict=True)]
        middle = median_low(scale)
        scale = [one / middle for one in scale]
        is_even = all(abs(one - 1.0) < ROUNDING for one in scale)
        fixed, per_sample, per_size, per_size2 = (one * middle for one in coefficients_of(self._fitted))
        return dataclasses.replace(
            self._fitted,
            fixed=fixed,
            per_sample=per_sample,
            per_size=per_size,
            per_size2=per_size2,
            floor=self._fitted.floor * middle,
            rank_scale=None if is_even else scale,
        )

    def state(self) -> dict[str, Any]:
        """Return what has been learnt, made of dicts, lists, numbers and strings only."""
        fitted = self._fitted
        return {
            "fitted": None if fitted is None else {name: getattr(fitted, name) for name in _FITTED},
            "scales": [[*place, scale] for place, scale in self._scales.items()],
            "drifts": [[*place, drift] for place, drift in self._drifts.items()],
            "places": [list(place) for place in self._places],
            "memory": self._memory.tolist(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with what had been learnt when a state was taken.

        Raises
        ------
        TypeError, ValueError
            It is no such state; nothing is changed then.
        """
        if not isinstance(state, Mapping):
            raise TypeError(
                f"the state of a measured cost must be a dict, not {state!r} of type {type(state).__name__}"
            )
        keys = {"fitted", "scales", "drifts", "places", "memory"}
        if set(state) != keys:
            raise ValueError(
                f"the state of a measured cost must have the keys {sorted(keys)}, not {dict(state)!r:.200}"
            )
        fitted = _loaded_fit(state["fitted"])
        scales, drifts = (_of_places(name, state[name]) for name in ("scales", "drifts"))
        if not all(1.0 / LARGEST_RATIO <= scale <= LARGEST_RATIO for scale in scales.values()):
            allowed = f"from {1.0 / LARGEST_RATIO:g} to {LARGEST_RATIO:g}"
            raise ValueError(f"scales of the state must be {allowed}, not {state['scales']!r}")
        places, memory = _loaded_places(state["places"]), _loaded_memory(state["memory"])
        self._fitted, self._scales, self._drifts, self._memory = fitted, scales, drifts, memory
        self._places = places  # as long as nobody knows better
        self._comm = 0.0 if fitted is None else fitted.comm
        self._model = None


_FITTED = ("fixed", "per_sample", "per_size", "per_size2", "floor", "records", "median_error", "comm")


def _loaded_fit(value: Any) -> FittedCost | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or set(value) != set(_FITTED):
        raise ValueError(f"fitted of the state must be None or a dict of {list(_FITTED)}, not {value!r}")
    return FittedCost(**value)


def _of_places(name: str, value: Any) -> dict[Place, float]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, list | tuple) and len(one) == 3 for one in value):
        raise TypeError(f"{name} of the state must be a list of [host, local rank, number], not {value!r}")
    places = _loaded_places([one[:2] for one in value])
    return {
        place: checks.real(f"a number in {name} of the state", one[2]) for place, one in zip(places, value, strict=True)
    }


def _loaded_places(value: Any) -> tuple[Place, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, list | tuple) and len(one) == 2 for one in value):
        raise TypeError(f"places of the state must be a list of [host, local rank], not {value!r}")
    return tuple(
        (checks.integer("a host of the state", host), checks.integer("a local rank of the state", local))
        for host, local in value
    )


def _loaded_memory(value: Any) -> cells.Cells:
    what = f"memory of the state must be a list of lists of {cells.COLUMNS} numbers"
    try:
        memory = np.array(value if len(value) else cells.NONE)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what}: {error}") from None
    if memory.dtype.kind not in "if" or memory.ndim != 2 or memory.shape[1] != cells.COLUMNS:
        raise ValueError(f"{what}, not {value!r:.200}")
    if not (memory.min(initial=0.0) >= 0.0 and memory.max(initial=0.0) < LARGEST):
        raise ValueError(f"{what} that are finite and not negative, below {LARGEST:g}")
    return memory.astype(np.float64)
