"""Gather: says so when this rank has waited long for others, and in what."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator

#: After so long a wait something is wrong, rather than slow.
PATIENCE_S = 30.0

_log = logging.getLogger("chronica_hvd")


class _Watch:
    """A thread that looks now and then whether this process waits, so that waiting itself costs next to nothing."""

    def __init__(self) -> None:
        self._waits: tuple[float, str] | None = None  # since when, for what
        self._process = 0  # threads do not survive a fork
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def waits_for(self, what: str) -> Iterator[None]:
        if self._process != os.getpid():
            self._start()
        self._waits = time.monotonic(), what
        try:
            yield
        finally:
            self._waits = None

    def _start(self) -> None:
        with self._lock:
            if self._process != os.getpid():
                self._process = os.getpid()
                threading.Thread(target=self._look, name="chronica_hvd.waiting", daemon=True).start()

    def _look(self) -> None:
        told: tuple[float, str] | None = None
        while True:
            time.sleep(PATIENCE_S / 6)
            waits = self._waits
            if waits is not None and waits is not told and time.monotonic() - waits[0] > PATIENCE_S:
                told = waits
                _log.warning(
                    "this rank has been waiting for the others for %.0f s, in %s. Every rank must take the same steps "
                    "and call the same things in the same order: leave a loop on all ranks or on none, and call "
                    "average(), Mean.result(), skip_step() and step() on all. What the others wait in, they say too; a "
                    "rank that says nothing computes or loads, or has ended",
                    time.monotonic() - waits[0],
                    waits[1],
                )


#: ``with waits_for("what this rank waits in"):`` around what may wait for other ranks.
waits_for = _Watch().waits_for
