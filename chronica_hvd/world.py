"""Who takes part: this rank among the ranks that share one plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chronica_hvd import checks


@dataclass(frozen=True)
class World:
    """The ranks that share one plan, seen from one of them.

    Parameters
    ----------
    rank, size
        This rank's number and how many ranks there are.
    local_rank
        This rank's number on its host.
    process_set
        Horovod's process set; ``None`` where the world was given by hand and no collective can run.
    """

    rank: int
    size: int
    local_rank: int = 0
    process_set: Any = None

    def __post_init__(self) -> None:
        checks.integer("size", self.size, least=1)
        checks.integer("rank", self.rank, least=0)
        checks.integer("local_rank", self.local_rank, least=0)
        check_process_set(self.process_set)
        if self.rank >= self.size:
            raise ValueError(f"rank must be below the number of ranks, {self.size}; {self.rank} was given")

    @classmethod
    def from_horovod(cls, process_set: Any = None) -> World:
        """Ask Horovod, once.

        Raises
        ------
        TypeError, ValueError
            ``process_set`` is none, or Horovod was not told of it.
        RuntimeError
            Horovod is missing, half installed, or not initialised, or this rank is outside of the process set.
        """
        check_process_set(process_set)
        hvd = horovod()
        if not hvd.is_initialized():
            raise RuntimeError(
                "Horovod is not initialised: call hvd.init() first, or give num_replicas and rank by hand"
            )
        if process_set is None:
            process_set = hvd.global_process_set
        if not process_set.included():
            raise RuntimeError(f"this rank ({hvd.rank()}) is not in the process set {process_set}")
        return cls(process_set.rank(), process_set.size(), hvd.local_rank(), process_set)


def check_process_set(process_set: Any) -> None:
    """Raise a TypeError for what is no process set, and a ValueError for one that Horovod was not told of."""
    if process_set is None:
        return
    has_methods = all(callable(getattr(process_set, name, None)) for name in ("included", "rank", "size"))
    if isinstance(process_set, type) or not has_methods:
        raise TypeError(f"process_set must be a hvd.ProcessSet or None, not {process_set!r}")
    if getattr(process_set, "process_set_id", 0) is None:
        raise ValueError(
            f"process_set must be one that Horovod knows, by hvd.init(process_sets=...) or hvd.add_process_set(...), "
            f"not {process_set}"
        )


def horovod() -> Any:
    """Return the module ``horovod.torch``; a missing or half install (which imports silently) is a RuntimeError."""
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise RuntimeError(
            f"Horovod does not import ({error}); `chronica-hvd build-horovod` builds it for the installed torch"
        ) from error
    if not hasattr(hvd, "init"):
        raise RuntimeError(
            "Horovod is installed without its torch extension (built without torch, or against another one); "
            "`chronica-hvd build-horovod` builds it for the installed torch"
        )
    return hvd
