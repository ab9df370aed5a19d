"""Gather: what one rank cannot do is an error on every rank, and no rank waits for it in vain."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chronica_hvd.world import World, horovod

#: Of an error's text, in bytes.
LONGEST_TEXT = 2000

_KINDS: tuple[type[Exception], ...] = (RuntimeError, TypeError, ValueError)
_log = logging.getLogger("chronica_hvd")


class Agreement:
    """Ranks that work at the same thing, and tell one another how it went.

    Parameters
    ----------
    world
        The ranks; a single one needs neither torch nor Horovod.
    name
        What the names of the collectives begin with.
    what
        What a rank waits in, for who reads that it waits long.

    Attributes
    ----------
    notes
        What this rank has to say; of the ranks that have something, the first one says it.
    """

    def __init__(self, world: World, name: str, what: str) -> None:
        self.world = world
        self._name, self._what = name, what
        self.notes: list[str] = []

    def agree(self, work: Callable[[], tuple[int, int]]) -> list[tuple[int, int]]:
        """Return what ``work`` returns on each rank; an error on any of them is raised on every rank."""
        error: Exception | None = None
        result = (0, 0)
        try:
            result = work()
        except Exception as caught:
            if self.world.size == 1:
                raise
            error = caught
        kind = 0 if error is None else 1 + (_KINDS.index(type(error)) if type(error) in _KINDS else 0)
        every = self._gather("state", np.array([[kind, len(self.notes), *result]])).tolist()
        noting = [rank for rank, row in enumerate(every) if row[1]]
        for note in self.notes:
            if noting[0] == self.world.rank:
                _log.warning(note)
        self.notes.clear()
        failed = [rank for rank, row in enumerate(every) if row[0]]
        if failed:
            raise self._error(failed, _KINDS[every[failed[0]][0] - 1], error) from error
        return [(first, second) for *_, first, second in every]

    def all(self, records: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the records of all ranks, one rank's after the other's."""
        return self._gather("records", records)

    def _error(self, failed: list[int], kind: type[Exception], error: Exception | None) -> Exception:
        """Return the error of the first rank that has one, for every rank to raise."""
        text = ("" if error is None else str(error)).encode(errors="replace")[:LONGEST_TEXT]
        texts = self._gather("errors", np.frombuffer(text.ljust(LONGEST_TEXT, b"\0"), np.uint8)[None])
        first = texts[failed[0]].tobytes().rstrip(b"\0").decode(errors="replace")
        others = f"; rank {', '.join(map(str, failed[1:]))} failed as well" if failed[1:] else ""
        return kind(f"on rank {failed[0]}, {first}{others}")

    def _gather(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """Return the rows of all ranks."""
        if self.world.size == 1:
            return array
        import torch

        from chronica_hvd import gather

        hvd = horovod()
        with gather.talking(self._what):
            own = torch.from_numpy(array.copy())
            every = hvd.allgather(own, name=f"{self._name}.{name}", process_set=self.world.process_set)
        return np.asarray(every.numpy())
