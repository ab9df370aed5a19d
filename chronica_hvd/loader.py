"""Sample: torch's DataLoader, which besides says which step it hands out."""

from __future__ import annotations

import collections
import hashlib
import inspect
import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sized
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch.utils.data

from chronica_hvd import checks
from chronica_hvd.course import Course
from chronica_hvd.sampler import BatchSampler
from chronica_hvd.tickets import StepTicket
from chronica_hvd.user_warning import warn

#: What torch's loader asks to make batches itself, and what says that it need not.
_OF_THE_SAMPLER = {"batch_size": (1,), "shuffle": (None, False), "sampler": (None,), "drop_last": (False,)}

#: More are a mistake rather than a machine.
MOST_WORKERS = 2**16


class _MicroBatches:
    """The micro-batches of all steps in a row, so that torch's workers load each as a task of its own.

    Of the loop begun last: torch keeps this object for several loops where workers are persistent.
    """

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.chain.from_iterable(self._sampler.course.batches(self._sampler.world.rank))

    def __len__(self) -> int:
        return sum(map(len, self._sampler.steps()))


class Step:
    """The micro-batches of a step, loaded while they are gone through, which can be done once."""

    def __init__(self, batches: Iterator[Any], micro_batches: int) -> None:
        self._batches: Iterator[Any] | None = batches
        self._micro_batches = micro_batches

    def __iter__(self) -> Iterator[Any]:
        if self._batches is None:
            raise RuntimeError(
                "the micro-batches of this step were taken before, and a step can be gone through once: do all that "
                "needs them in one loop (len(step) is their number)"
            )
        batches, self._batches = self._batches, None
        return batches

    def __len__(self) -> int:
        return self._micro_batches


class DataLoader(torch.utils.data.DataLoader[Any]):
    """torch's ``DataLoader`` over the batches of a :class:`chronica_hvd.BatchSampler`.

    It tells the sampler's optimizer what the loop has taken, so that a gradient gets the weight of its own batch.
    ``len`` is the number of steps.

    Parameters
    ----------
    dataset
        A map-style data set with one item per size of the sampler.
    batch_sampler
        The sampler.
    options
        Everything else that torch's ``DataLoader`` takes.

    Raises
    ------
    TypeError
        The sampler or the data set is of another kind; an option is unknown or of a wrong type.
    ValueError
        The data set's length is not the number of sizes; an option is out of range, contradicts the sampler's batches
        (``batch_size``, ``shuffle``, ``sampler``, ``drop_last``), or is ``in_order=False``.
    """

    batch_sampler: BatchSampler

    def __init__(self, dataset: Any, *, batch_sampler: BatchSampler, **options: Any) -> None:
        if not isinstance(batch_sampler, BatchSampler):
            raise TypeError(
                f"batch_sampler must be a chronica_hvd.BatchSampler, not {batch_sampler!r}; "
                "without one use torch.utils.data.DataLoader"
            )
        _check_dataset(dataset, batch_sampler)
        _check_options(options)
        super().__init__(dataset, batch_sampler=batch_sampler, **options)
        batch_sampler.progress.data = _data_identity(dataset)

    @property
    def _index_sampler(self) -> _MicroBatches:
        # What torch's loader asks for what to load.
        return _MicroBatches(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return an iterator over the batches, one per step.

        Raises
        ------
        RuntimeError
            The sampler plans micro-batches, for which there is :meth:`steps`.
        """
        if self.batch_sampler.micro_batches != 1:
            raise RuntimeError(
                f"with micro_batches={self.batch_sampler.micro_batches!r} a step has several batches, so the loader "
                "itself cannot be iterated. Write: for step in loader.steps(): optimizer.zero_grad(); "
                "for batch in step: loss_fn(model(batch)).backward(); and then optimizer.step()"
            )
        return itertools.chain.from_iterable(self.steps())

    def steps(self) -> Iterator[Step]:
        """Return an iterator over the steps: each holds its micro-batches, to be trained on in this order.

        The loop that serves every mode::

            for step in loader.steps():
                optimizer.zero_grad()
                for batch in step:
                    loss_fn(model(batch)).backward()
                optimizer.step()

        A step is begun when its first micro-batch is taken. Doing so before all of the step before it was taken, or
        going through a step twice, is a RuntimeError. ``len(step)`` is the number of its micro-batches on this rank.
        """
        sampler = self.batch_sampler
        if sampler.draws_anew and sampler.progress.would_repeat(sampler.epoch):
            warn(
                f"epoch {sampler.epoch} is trained on once more, with the same batches in the same order: call "
                "sampler.set_epoch(epoch) before each epoch"
            )
        # The batches and what is said of them come from one course: set_epoch() in the middle changes neither.
        course = sampler.begin()
        return self._steps(enumerate(super().__iter__()), course)

    def _steps(self, batches: Iterator[tuple[int, Any]], course: Course) -> Iterator[Step]:
        progress = self.batch_sampler.progress
        iteration = progress.begin(course)
        first = 0
        for ticket in course.tickets(self.batch_sampler.world.rank):
            micro_batches = len(ticket.weights)
            own = itertools.islice(batches, micro_batches)
            yield Step(self._hand_out(iteration, ticket, own, first), micro_batches)
            first += micro_batches
            if progress.is_given_up(ticket):
                collections.deque(own, maxlen=0)  # what was not taken of it is loaded all the same
        progress.end(iteration, course.epoch)

    def _hand_out(
        self, iteration: int, ticket: StepTicket, batches: Iterator[tuple[int, Any]], first: int
    ) -> Iterator[Any]:
        """Yield the step's micro-batches; its first is number ``first`` of the epoch."""
        for expected in itertools.count(first):
            asked_ns = time.monotonic_ns()
            number, batch = next(batches, (None, None))
            if number is None:
                return
            if number != expected:
                raise RuntimeError(
                    f"a micro-batch of step {ticket.step} was asked for, but those before it were not all taken: go "
                    "through every step to its end, one after the other"
                )
            waited_ns = time.monotonic_ns() - asked_ns
            is_training = torch.is_grad_enabled()
            self.batch_sampler.progress.hand_out(iteration, ticket, waited_ns, is_training=is_training)
            yield batch


def _check_dataset(dataset: Any, sampler: BatchSampler) -> None:
    """Refuse what is no map-style data set with one sample per size."""
    is_mapping = hasattr(type(dataset), "__getitem__") and not isinstance(dataset, torch.utils.data.IterableDataset)
    if not is_mapping or (isinstance(dataset, np.ndarray | torch.Tensor) and dataset.ndim == 0):
        raise TypeError(
            f"dataset must be a map-style data set, with one item for each of {sampler.samples} sizes, not {dataset!r}"
        )
    if isinstance(dataset, Sized) and len(dataset) != sampler.samples:
        raise ValueError(
            f"the sampler has {sampler.samples} sizes, but the data set has {len(dataset)} samples; "
            "give one size per sample"
        )


def _check_options(options: dict[str, Any]) -> None:
    """Refuse of torch's options what torch would refuse later, or in words that do not say what is wrong."""
    known = list(inspect.signature(torch.utils.data.DataLoader).parameters)
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"unknown option {unknown[0]!r}; the options of torch's DataLoader are {', '.join(known)}")
    for name, defaults in _OF_THE_SAMPLER.items():
        given = options.get(name, defaults[0])
        if not any(given is default for default in defaults):
            raise ValueError(f"{name} must be left to the BatchSampler, which makes the batches; {given!r} was given")
    for name in ("pin_memory", "persistent_workers", "in_order"):
        checks.boolean(name, options.get(name, name == "in_order"))
    if not options.get("in_order", True):
        raise ValueError("in_order must be True, not False: a batch out of order would get another step's weight")
    workers = checks.integer("num_workers", options.get("num_workers", 0), least=0, most=MOST_WORKERS)
    checks.real("timeout", options.get("timeout", 0), least=0.0)
    if (prefetch := options.get("prefetch_factor")) is not None:
        checks.integer("prefetch_factor", prefetch, least=1)
    for name in ("persistent_workers", "prefetch_factor"):
        if options.get(name) and not workers:
            raise ValueError(f"{name}={options[name]!r} needs num_workers of at least 1, not {workers}")
    for name in ("collate_fn", "worker_init_fn"):
        if not (options.get(name) is None or callable(options[name])):
            raise TypeError(f"{name} must be a function or None, not {options[name]!r}")
    if not isinstance(generator := options.get("generator"), torch.Generator | None):
        raise TypeError(f"generator must be a torch.Generator or None, not {generator!r}")
    if not isinstance(device := options.get("pin_memory_device", ""), str):
        raise TypeError(f"pin_memory_device must be the name of a device, not {device!r}")
    _check_context(options.get("multiprocessing_context"), workers)


def _check_context(context: Any, workers: int) -> None:
    if context is None:
        return
    methods = multiprocessing.get_all_start_methods()
    if not isinstance(context, str | BaseContext):
        raise TypeError(
            f"multiprocessing_context must be a context, or one of {', '.join(map(repr, methods))}, not {context!r}"
        )
    if isinstance(context, str) and context not in methods:
        raise ValueError(f"multiprocessing_context must be one of {', '.join(map(repr, methods))}, not {context!r}")
    if not workers:
        raise ValueError(f"multiprocessing_context={context!r} needs num_workers of at least 1, not {workers}")


def _data_identity(dataset: Any) -> int:
    """Return a number that differs where ranks were given different parts of a data set; 0 where nobody can tell."""
    if not isinstance(dataset, torch.utils.data.Subset):
        return 0
    chosen = np.fromiter(dataset.indices, dtype=np.int64, count=len(dataset.indices))
    return int.from_bytes(hashlib.blake2b(chosen.data, digest_size=7).digest(), "little")
