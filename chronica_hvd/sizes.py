"""Measure: the sizes of a data set, each sample read once, by all ranks together."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chronica_hvd import checks
from chronica_hvd.agreement import Agreement
from chronica_hvd.sizes_cache import SizesCache
from chronica_hvd.sizes_key import cache_key
from chronica_hvd.world import World

#: Ranks tell one another how far they are so often.
ROUND_S = 1.0
#: What a rank has measured is kept so often, or where that takes long so many times as rarely.
KEEP_S, KEEP_TIMES = 5.0, 30.0
#: So many sizes from a cache are measured anew, over all ranks.
PROBES = 32
#: Float64 holds every integer up to here, and no sum in a plan may be larger.
LARGEST_SIZE = 2.0**53
#: Hexadecimal digits of a cache's key, which fit int64.
KEY_DIGITS = 15
#: Without tqdm, a line is printed so often.
LINE_S = 10.0


def measure_sizes(
    dataset: Any,
    size_fn: Callable[[Any], Any],
    *,
    cache: str | os.PathLike[str] | None = None,
    key: str = "",
    process_set: Any = None,
    progress: bool = True,
) -> NDArray[np.int64] | NDArray[np.float64]:
    """Return the size of every sample, by reading each once.

    After ``hvd.init()`` it is a collective: every rank calls it with the whole data set, reads its share, and gets the
    same array. Without Horovod one process reads all.

    Of a later run the ``cache`` file spares the reading; an interrupted one goes on from part files beside it, at any
    number of ranks. Ranks that see different folders keep files of their own, and tell one another.

    The file is taken to be right for the data if these are as before: the number of samples, the type of the data set
    and the code of its ``__getitem__``, the ``indices`` of a torch ``Subset``, the code of ``size_fn``, and ``key``.
    With code go the numbers, strings, tuples and functions among the values it was made with (defaults, enclosing
    variables, arguments of a ``partial``, attributes of a callable object) and among what it names of its own module.
    Besides, 32 samples, drawn anew each time, are measured; if one has another size, all are measured anew.

    Not noticed is, where those 32 samples miss it, a change of a few samples, of other objects such as a tokenizer, of
    other modules, and of what a data set holds. Say such in ``key`` (a version, a date, a name), or remove the file.
    Another release of Python, or of a data set's library, has other code, so it measures anew.

    Parameters
    ----------
    dataset
        What has ``len(dataset)`` and ``dataset[i]``, the same on all ranks.
    size_fn
        ``size_fn(sample)``: the size of ``dataset[i]``, a finite number from 0 to 2^53. It must not be random.
    cache
        Name of the file to keep sizes in; its folder is made. ``None``: nothing is kept.
    key
        What else the sizes depend on.
    process_set
        The ranks that share the work, as for :class:`BatchSampler`; ``None``: all.
    progress
        Whether rank 0 shows how far they are, by tqdm if it is installed, else by a line now and then.

    Returns
    -------
    (samples,) int64; float64 if any size is no whole number.

    Raises
    ------
    TypeError, ValueError
        An argument, or what ``size_fn`` returned, is none of the above; ``cache`` is a file of something else; the data
        set has another length on another rank.
    RuntimeError
        Reading a sample, or ``size_fn``, failed; or as :meth:`World.from_horovod`.

    What fails on one rank is raised on every rank, and what was measured is kept.
    """
    ranks = Agreement(_world(process_set), "chronica.sizes", "measure_sizes()")
    measurement = _Measurement(ranks, dataset, size_fn)
    try:
        measurement.begin(cache, key, progress)
        measurement.recall()
        measurement.measure()
        measurement.end()
    finally:  # interrupted, perhaps
        measurement.keep()
        measurement.bar.close()
    sizes = measurement.sizes
    return sizes.astype(np.int64) if (sizes == np.floor(sizes)).all() else sizes


def _world(process_set: Any) -> World:
    """Return the ranks that Horovod runs, or one alone; what nobody has imported runs none."""
    hvd: Any = sys.modules.get("horovod.torch")
    if process_set is None and not (hasattr(hvd, "init") and hvd.is_initialized()):
        return World(rank=0, size=1)
    return World.from_horovod(process_set)


class _Measurement:
    """One call of :func:`measure_sizes`, on this rank.

    Attributes
    ----------
    sizes
        (samples,) NaN where not known yet.
    bar
        Shows how far the ranks are.
    """

    def __init__(self, ranks: Agreement, dataset: Any, size_fn: Callable[[Any], Any]) -> None:
        self.sizes: NDArray[np.float64] = np.empty(0)
        self.bar = _Bar()
        self._ranks, self._dataset, self._size_fn = ranks, dataset, size_fn
        self._cache: SizesCache | None = None
        self._own: NDArray[np.intp] = np.empty(0, np.intp)  # what this rank is to measure
        self._measured = self._kept = 0  # so many of them
        self._keep_at = 0.0

    def begin(self, cache: Any, key: Any, progress: Any) -> None:
        """Check what was given, and that the ranks agree."""

        def check() -> tuple[int, int]:
            samples = _length(self._dataset)
            if not callable(self._size_fn):
                raise TypeError(f"size_fn must be a function of a sample, not {_shown(self._size_fn)}")
            if not isinstance(cache, str | os.PathLike | None):
                raise TypeError(f"cache must be the name of a file or None, not {_shown(cache)}")
            if not isinstance(key, str):
                raise TypeError(f"key must be a string, not {_shown(key)}")
            self.bar.is_shown = checks.boolean("progress", progress) and self._ranks.world.rank == 0
            return samples, int(cache_key(self._dataset, self._size_fn, samples, key)[:KEY_DIGITS], 16)

        lengths, keys = zip(*self._ranks.agree(check), strict=True)
        if len(set(lengths)) > 1:
            raise ValueError(f"dataset must be the whole one on every rank; its lengths, by rank, are {lengths}")
        self.sizes = np.full(lengths[0], math.nan)

        def open_cache() -> tuple[int, int]:
            if cache is None or self.sizes.size == 0:
                return 0, 0
            try:
                path = Path(os.path.realpath(Path(cache).expanduser()))
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"cache must be the name of a file, not {cache!r}: {error}") from None
            if path.is_dir():
                raise ValueError(f"cache must be the name of a file, not of a folder, {cache!r}")
            # Rank 0's key serves all: a function may well hold something of its rank, as a device.
            self._cache = SizesCache(path, f"{keys[0]:0{KEY_DIGITS}x}", self._ranks.notes)
            return 0, 0

        self._ranks.agree(open_cache)

    def recall(self) -> None:
        """Take what the caches hold, the same on every rank, unless some of it is wrong now."""
        rank = self._ranks.world.rank
        for has_turn in (rank == 0, rank > 0):  # mostly rank 0 sees all there is
            if not self._missing().size:
                break
            found = self._read() if has_turn else np.empty((0, 2))
            self._take(self._ranks.all(found))
        if any(differs for differs, _ in self._ranks.agree(self._probe)):
            self.sizes[:] = math.nan
            if self._cache is not None:
                self._cache.forget()

    def measure(self) -> None:
        """Measure what is missing, each rank its share."""
        missing, world = self._missing(), self._ranks.world
        if not missing.size:
            return
        self._own, left = missing[world.rank :: world.size], missing.size
        self._keep_at = time.monotonic() + KEEP_S
        while left:
            self.bar.show(self.sizes.size - left, self.sizes.size)
            left = sum(left_there for left_there, _ in self._ranks.agree(self._round))
        self.bar.show(self.sizes.size, self.sizes.size)

    def end(self) -> None:
        """Give every rank all sizes, and keep them."""
        self._take(self._ranks.all(self._records(self._own)))
        rank = self._ranks.world.rank
        for has_turn in (rank == 0, rank > 0):  # the others need to only where they do not see rank 0's file
            self._ranks.agree(self._complete if has_turn else lambda: (0, 0))

    def keep(self) -> None:
        """Keep what this rank has measured since the last time."""
        if self._cache is not None and self._measured > self._kept:
            begin = time.monotonic()
            self._cache.keep(self._records(self._own[: self._measured]))
            self._kept, now = self._measured, time.monotonic()
            self._keep_at = now + max(KEEP_S, KEEP_TIMES * (now - begin))

    def _missing(self) -> NDArray[np.intp]:
        return np.flatnonzero(np.isnan(self.sizes))

    def _records(self, samples: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return (samples, 2): their numbers and sizes."""
        return np.column_stack([samples, self.sizes[samples]])

    def _take(self, records: NDArray[np.float64]) -> None:
        """Take the sizes that are missing; the first one counts where there are several of a sample."""
        samples, places = np.unique(records[:, 0].astype(np.intp), return_index=True)
        is_missing = np.isnan(self.sizes[samples])
        self.sizes[samples[is_missing]] = records[places[is_missing], 1]

    def _read(self) -> NDArray[np.float64]:
        """Return what this rank's files hold of what is missing."""
        if self._cache is None:
            return np.empty((0, 2))
        records = self._cache.read()
        return records[np.isnan(self.sizes[records[:, 0].astype(np.intp)])]

    def _complete(self) -> tuple[int, int]:
        if self._cache is not None:
            self._cache.complete(self._records(np.arange(self.sizes.size)))
            self._kept = self._measured
        return 0, 0

    def _probe(self) -> tuple[int, int]:
        """Return whether a sample has another size than the cache says."""
        known = np.flatnonzero(~np.isnan(self.sizes))
        share = min(known.size, math.ceil(PROBES / self._ranks.world.size))
        for sample in np.random.default_rng().choice(known, share, replace=False).tolist():
            size = self._size(sample)
            if size != self.sizes[sample]:
                self._ranks.notes.append(
                    f"sample {sample} has size {size:g}, not {self.sizes[sample]:g} as in the cache of measure_sizes: "
                    "the data or what size_fn calls have changed, or it is random; all are measured anew"
                )
                return 1, 0
        return 0, 0

    def _round(self) -> tuple[int, int]:
        """Measure for a while; return how many samples this rank still has to measure."""
        until = time.monotonic() + ROUND_S
        for sample in self._own[self._measured :].tolist():
            self.sizes[sample] = self._size(sample)
            self._measured += 1
            if time.monotonic() >= until:
                break
        if time.monotonic() >= self._keep_at:
            self.keep()
        return self._own.size - self._measured, 0

    def _size(self, sample: int) -> float:
        try:
            data = self._dataset[sample]
        except Exception as error:
            raise RuntimeError(f"reading sample {sample} failed: {_told(error)}") from error
        try:
            size = self._size_fn(data)
        except Exception as error:
            raise RuntimeError(f"size_fn failed on sample {sample}: {_told(error)}") from error
        size = checks.real(f"size_fn of sample {sample}", size, least=0.0)
        if size > LARGEST_SIZE:
            raise ValueError(f"size_fn of sample {sample} must be at most 2^53, not {size:g}")
        return size


class _Bar:
    """Says how many samples are measured: tqdm's bar if it is installed, else a line now and then."""

    def __init__(self) -> None:
        self.is_shown = False
        self._bar: Any = None
        self._shown_at = time.monotonic()

    def show(self, measured: int, samples: int) -> None:
        if self.is_shown:
            try:
                self._show(measured, samples)
            except Exception:  # such as a closed stderr: no reason to stop, nor to let the other ranks wait
                self.is_shown = False

    def _show(self, measured: int, samples: int) -> None:
        if importlib.util.find_spec("tqdm") is not None:
            if self._bar is None:
                make = importlib.import_module("tqdm").tqdm
                self._bar = make(total=samples, initial=measured, desc="sizes", unit="", mininterval=ROUND_S)
            self._bar.update(measured - self._bar.n)
        elif time.monotonic() >= self._shown_at + LINE_S:
            self._shown_at = time.monotonic()
            print(f"measure_sizes: {measured:,} of {samples:,} samples", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(Exception):
                self._bar.close()


def _length(dataset: Any) -> int:
    """Return the number of samples; a TypeError for what has no length, or whose samples have no numbers."""
    try:
        has_samples = hasattr(type(dataset), "__getitem__") and not isinstance(dataset, str | bytes | bytearray)
        length = len(dataset) if has_samples else None
    except (TypeError, NotImplementedError):
        length = None
    if length is None:
        raise TypeError(
            f"dataset must have a length and samples, len(dataset) and dataset[0], as {_shown(dataset)} has not"
        )
    return length


def _shown(value: Any) -> str:
    return f"{value!r} of type {type(value).__name__}"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
