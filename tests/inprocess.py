"""Ranks as threads of this process: Horovod's own Python code and ours run in them, only its library is played.

Ranks take turns. One thread runs at a time and hands the turn on where Horovod is called, to a rank that a seed draws.
So a run can be repeated exactly, and it is known at once when nobody can go on. What is played is stricter than Horovod
is: collectives need a name, the ranks must agree, and nobody may write to a tensor on its way.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

import chronica_hvd.mean
import chronica_hvd.optimizer

Result = TypeVar("Result")

#: Ranks that only ask whether something is complete, so often in a row, will never go on.
LARGEST_IDLE_POLLS = 1000


class Hang(BaseException):
    """A real job would wait for ever. Not an Exception: no code that runs on could catch a hang."""


class RanksError(AssertionError):
    """Some ranks raised; ``errors`` holds what, by rank."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        self.errors = errors
        lines = [f"rank {rank}: {type(error).__name__}: {error}" for rank, error in sorted(errors.items())]
        super().__init__("\n".join(lines))


def run_ranks(count: int, function: Callable[[int], Result], *, seed: int = 0) -> list[Result]:
    """Run ``function(rank)`` on so many ranks and return what each of them returned.

    Another ``seed`` lets the ranks take turns, and collectives be carried out, at other moments.

    Raises
    ------
    RanksError
        Some ranks raised; its cause is the first error that is no hang, if there is one.
    """
    job = _Job(count, seed)
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            job.begin(rank)
            results[rank] = function(rank)
        except BaseException as error:  # of a rank, whatever it is
            errors[rank] = error
        finally:
            job.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(count)]
    with _played(job):
        for thread in threads:
            thread.start()
        job.start()
        for thread in threads:
            thread.join()
    if errors:
        causes = [error for error in errors.values() if not isinstance(error, Hang)]
        raise RanksError(errors) from (causes or list(errors.values()))[0]
    return [results[rank] for rank in range(count)]


@contextlib.contextmanager
def _played(job: _Job) -> Iterator[None]:
    """Have Horovod's Python code call ``job`` in place of its library."""
    with contextlib.ExitStack() as stack:
        replace = mock.patch.object
        stack.enter_context(replace(mpi_ops, "mpi_lib", _Library(job, mpi_ops.mpi_lib)))
        basics = mpi_ops._basics
        stack.enter_context(replace(basics, "MPI_LIB_CTYPES", _Processes(job, basics.MPI_LIB_CTYPES)))
        stack.enter_context(replace(hvd.global_process_set, "ranks", list(range(job.count))))
        for module, name in ((hvd, "init"), (mpi_ops, "init"), (hvd, "shutdown"), (mpi_ops, "shutdown")):
            stack.enter_context(replace(module, name, lambda *_, **__: None))
        # Our optimizers and means are numbered per process, for the names of their collectives: here, per rank.
        stack.enter_context(replace(chronica_hvd.optimizer, "_numbers", _PerRank(job)))
        stack.enter_context(replace(chronica_hvd.mean, "_numbers", {0: _PerRank(job)}))
        yield


class _PerRank:
    """An ``itertools.count`` of each rank's own."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._counts = [itertools.count() for _ in range(job.count)]

    def __next__(self) -> int:
        return next(self._counts[self._job.rank])


class _Processes:
    """What Horovod's library knows of the processes."""

    def __init__(self, job: _Job, real: Any) -> None:
        self._job = job
        self._real = real

    def horovod_is_initialized(self) -> bool:
        return True

    def horovod_rank(self) -> int:
        return self._job.rank

    def horovod_size(self) -> int:
        return self._job.count

    horovod_local_rank, horovod_local_size = horovod_rank, horovod_size

    def horovod_cross_rank(self) -> int:
        return 0

    def horovod_cross_size(self) -> int:
        return 1

    def horovod_process_set_rank(self, process_set: Any) -> int:
        _refuse_other_process_sets(process_set.value)
        return self._job.rank

    def horovod_process_set_size(self, process_set: Any) -> int:
        _refuse_other_process_sets(process_set.value)
        return self._job.count

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_built"):
            raise NotImplementedError(f"{name} is not played")
        return getattr(self._real, name)


class _Library:
    """The collectives of Horovod's library, for the tensor types that it knows."""

    def __init__(self, job: _Job, real: Any) -> None:
        self._job = job
        self._real = real

    def __getattr__(self, name: str) -> Any:
        getattr(self._real, name)  # an AttributeError is how Horovod finds that it cannot send a type
        played = name.removeprefix("horovod_torch_").split("_async_")[0]
        if played not in ("poll", "wait_and_clear", *_CARRIERS):
            raise NotImplementedError(f"{name} is not played")
        return getattr(self, f"_{played}")

    def _allreduce(
        self, tensor: Any, output: Any, _: int, name: Any, op: int, before: float, after: float, process_set: int
    ) -> int:
        return self._reduce("allreduce", [tensor], [output], name, op, before, after, process_set)

    def _grouped_allreduce(
        self, tensors: Any, outputs: Any, _: int, name: Any, op: int, before: float, after: float, process_set: int
    ) -> int:
        assert all(tensor.is_contiguous() for tensor in tensors), "Horovod looks at the first of a group only"
        return self._reduce("grouped_allreduce", tensors, outputs, name, op, before, after, process_set)

    def _reduce(
        self, kind: str, tensors: Any, outputs: Any, name: Any, op: int, before: float, after: float, process_set: int
    ) -> int:
        _refuse_other_process_sets(process_set)
        if op not in (hvd.Average, hvd.Sum):
            raise NotImplementedError(f"the reduction {op} is not played")
        options = {"op": op, "prescale factor": before, "postscale factor": after}
        return self._job.enqueue(name, _Request(kind, list(tensors), list(outputs), options))

    def _allgather(self, tensor: Any, output: Any, name: Any, process_set: int) -> int:
        _refuse_other_process_sets(process_set)
        return self._job.enqueue(name, _Request("allgather", [tensor], [output], {}))

    def _broadcast(self, tensor: Any, output: Any, root: int, name: Any, process_set: int) -> int:
        _refuse_other_process_sets(process_set)
        return self._job.enqueue(name, _Request("broadcast", [tensor], [output], {"root rank": root}))

    def _poll(self, handle: int) -> bool:
        return self._job.poll(handle)

    def _wait_and_clear(self, handle: int) -> None:
        self._job.wait(handle)


def _refuse_other_process_sets(number: int) -> None:
    if number != hvd.global_process_set.process_set_id:
        raise NotImplementedError(f"process set {number} is not played")


@dataclass
class _Request:
    """What one rank wants a collective to do."""

    kind: str
    tensors: list[torch.Tensor]
    outputs: list[torch.Tensor]
    options: dict[str, Any]
    versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.note_versions()

    def note_versions(self) -> None:
        self.versions = [tensor._version for tensor in [*self.tensors, *self.outputs]]

    @property
    def is_written_to(self) -> bool:
        """Whether somebody else than the collective has written to its tensors meanwhile."""
        return self.versions != [tensor._version for tensor in [*self.tensors, *self.outputs]]

    def facts(self) -> dict[str, Any]:
        """What must be the same on every rank."""
        shapes = [tuple(tensor.shape) for tensor in self.tensors]
        if self.kind == "allgather":
            shapes = [shape[1:] for shape in shapes]
        return {"operation": self.kind, "dtype": [t.dtype for t in self.tensors], "shape": shapes, **self.options}


class _Collective:
    """One meeting of the ranks under a name."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind
        self.requests: dict[int, _Request] = {}
        self.error: str | None = None
        self.is_carried_out = False

    def carry_out(self) -> None:
        """Read all ranks' tensors and write the results, unless the ranks do not agree."""
        if self.is_carried_out:
            return
        self.is_carried_out = True
        requests = [self.requests[rank] for rank in sorted(self.requests)]
        self.error = self._mismatch(requests) or self._written_to()
        if self.error is None:
            with torch.no_grad():
                _CARRIERS[self.kind](requests)
            for request in requests:
                request.note_versions()

    def _mismatch(self, requests: list[_Request]) -> str | None:
        every = [request.facts() for request in requests]
        for what, value in every[0].items():
            for rank, facts in enumerate(every):
                if facts.get(what) != value:
                    return f"Mismatched {what} in {self}: rank 0 has {value}, but rank {rank} {facts.get(what)}"
        if self.kind == "allgather" and requests[0].tensors[0].dim() == 0:
            return f"Rank zero tried to gather a rank-zero tensor in {self}"
        return None

    def _written_to(self) -> str | None:
        ranks = [rank for rank, request in self.requests.items() if request.is_written_to]
        return f"a tensor of {self} was written to on its way, on ranks {ranks}" if ranks else None

    def refuse_errors(self, rank: int) -> None:
        """Raise what Horovod would raise; a write on the way is an error of ours, for there it is a race."""
        if self.error is not None:
            raise RuntimeError(self.error)
        if self.requests[rank].is_written_to:
            raise RuntimeError(f"the result of {self} was written to before it was waited for, on rank {rank}")

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


def _allreduce(requests: list[_Request]) -> None:
    options = requests[0].options
    after = options["postscale factor"] / (len(requests) if options["op"] == hvd.Average else 1)
    for place, first in enumerate(requests[0].tensors):
        total = torch.zeros_like(first)
        for request in requests:
            total += _scaled(request.tensors[place], options["prescale factor"])
        for request in requests:
            request.outputs[place].data.copy_(_scaled(total, after))  # unseen by autograd, as Horovod's writing


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1.0 else (tensor * factor).to(tensor.dtype)


def _allgather(requests: list[_Request]) -> None:
    every = torch.cat([request.tensors[0] for request in requests])
    for request in requests:
        request.outputs[0].resize_(every.shape).copy_(every)


def _broadcast(requests: list[_Request]) -> None:
    root = requests[0].options["root rank"]
    for request in requests:
        request.outputs[0].data.copy_(requests[root].tensors[0])


_CARRIERS: dict[str, Callable[[list[_Request]], None]] = {
    "allreduce": _allreduce,
    "grouped_allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
}


class _Job:
    """Ranks that take turns, and the collectives in which they meet."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self._random = random.Random(seed)
        self._own = threading.local()
        self._turns = [threading.Semaphore(0) for _ in range(count)]
        self._living = set(range(count))
        self._waiting: dict[int, _Collective] = {}
        self._gathering: dict[str, _Collective] = {}  # by name, until every rank is there
        self._due: list[_Collective] = []  # every rank is there
        self._handles: dict[int, _Collective] = {}
        self._numbers = itertools.count(1)
        self._in_flight: set[tuple[int, str]] = set()
        self._idle_polls = 0
        self._hang = ""

    @property
    def rank(self) -> int:
        """That of the thread that asks."""
        return self._own.rank  # type: ignore[no-any-return]

    def start(self) -> None:
        """Give the first rank its turn."""
        self._turns[self._drawn()].release()

    def begin(self, rank: int) -> None:
        """Make this thread a rank, and wait for its first turn."""
        self._own.rank = rank
        self._turns[rank].acquire()

    def end(self, rank: int) -> None:
        """Hand the turn on for good."""
        self._living.discard(rank)
        if self._living:
            self._turns[self._drawn()].release()

    def enqueue(self, name: bytes | str, request: _Request) -> int:
        """Join the collective of this name; returns a handle."""
        if not name:
            raise RuntimeError(f"{request.kind} needs a name: Horovod would number it, and ranks may count differently")
        name = name.decode() if isinstance(name, bytes) else name
        if (self.rank, name) in self._in_flight:
            raise RuntimeError(f"Duplicate tensor name {name}: it is on its way already, on rank {self.rank}")
        self._in_flight.add((self.rank, name))
        collective = self._gathering.setdefault(name, _Collective(name, request.kind))
        collective.requests[self.rank] = request
        handle = next(self._numbers)
        self._handles[handle] = collective
        if len(collective.requests) == self.count:
            del self._gathering[name]
            self._due.append(collective)
            self._waiting = {rank: other for rank, other in self._waiting.items() if other is not collective}
        self._idle_polls = 0
        self._hand_on()
        return handle

    def poll(self, handle: int) -> bool:
        """Whether waiting would take no time."""
        self._hand_on()
        self._idle_polls += 1
        if self._idle_polls > LARGEST_IDLE_POLLS * self.count:
            raise Hang(f"every rank keeps asking whether something is complete, such as {self._handles[handle]}")
        return self._handles[handle].is_carried_out

    def wait(self, handle: int) -> None:
        """Return when the collective has been carried out."""
        collective = self._handles.pop(handle)
        if len(collective.requests) < self.count:
            self._waiting[self.rank] = collective
        self._hand_on()
        if len(collective.requests) < self.count:
            raise Hang(self._hang)
        self._carry_out(collective)
        self._in_flight.discard((self.rank, collective.name))
        self._idle_polls = 0
        collective.refuse_errors(self.rank)

    def _carry_out(self, collective: _Collective) -> None:
        collective.carry_out()
        self._due = [other for other in self._due if other is not collective]

    def _hand_on(self) -> None:
        """Carry out what may be, as drawn, and let another rank have its turn, or this one go on."""
        for collective in [other for other in self._due if self._random.random() < 0.3]:
            self._carry_out(collective)
        rank, following = self.rank, self._drawn()
        if following != rank:
            self._turns[following].release()
            self._turns[rank].acquire()

    def _drawn(self) -> int:
        """Return a rank that can go on; where there is none, they all find that they hang."""
        if not self._living - self._waiting.keys():
            self._hang = f"no rank can go on: {'; '.join(map(self._state, range(self.count)))}"
            self._waiting.clear()
        return self._random.choice(sorted(self._living - self._waiting.keys()))

    def _state(self, rank: int) -> str:
        collective = self._waiting.get(rank)
        if collective is None:
            return f"rank {rank} has ended"
        missing = sorted(set(range(self.count)) - collective.requests.keys())
        return f"rank {rank} waits in {collective} for ranks {', '.join(map(str, missing))}"
