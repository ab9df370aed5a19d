"""Sample: torch's DataLoader, which besides says which step it hands out."""

from __future__ import annotations

import collections
import hashlib
import itertools
import time
import warnings
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import torch.utils.data

from chronica_hvd.sampler import BatchSampler
from chronica_hvd.tickets import StepTicket


class _MicroBatches:
    """The micro-batches of all steps in a row, so that torch's workers load each as a task of its own."""

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.chain.from_iterable(self._sampler.steps())

    def __len__(self) -> int:
        return sum(len(step) for step in self._sampler.steps())


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
        The sampler is another one.
    ValueError
        The data set's length is not the number of sizes, or ``in_order=False``.
    """

    batch_sampler: BatchSampler

    def __init__(self, dataset: Any, *, batch_sampler: BatchSampler, **options: Any) -> None:
        if not isinstance(batch_sampler, BatchSampler):
            raise TypeError(
                f"batch_sampler must be a chronica_hvd.BatchSampler, not {batch_sampler!r}; "
                "without one use torch.utils.data.DataLoader"
            )
        if isinstance(dataset, Sized) and len(dataset) != batch_sampler.samples:
            raise ValueError(
                f"the sampler has {batch_sampler.samples} sizes, but the data set has {len(dataset)} samples; "
                "give one size per sample"
            )
        if not options.get("in_order", True):
            raise ValueError("in_order must be True, not False: a batch out of order would get another step's weight")
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
            warnings.warn(
                f"epoch {sampler.epoch} is trained on once more, with the same batches in the same order: call "
                "sampler.set_epoch(epoch) before each epoch",
                UserWarning,
                stacklevel=2,
            )
        # The batches and what is said of them come from one plan: set_epoch() in the middle changes neither.
        return self._steps(enumerate(super().__iter__()), sampler.tickets(), sampler.epoch)

    def _steps(self, batches: Iterator[tuple[int, Any]], tickets: Iterator[StepTicket], epoch: int) -> Iterator[Step]:
        progress = self.batch_sampler.progress
        iteration = progress.begin()
        first = 0
        for ticket in tickets:
            micro_batches = len(ticket.weights)
            own = itertools.islice(batches, micro_batches)
            yield Step(self._hand_out(iteration, ticket, own, first), micro_batches)
            first += micro_batches
            if progress.is_given_up(ticket):
                collections.deque(own, maxlen=0)  # what was not taken of it is loaded all the same
        progress.end(iteration, epoch)

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
            self.batch_sampler.progress.hand_out(iteration, ticket, time.monotonic_ns() - asked_ns)
            yield batch


def _data_identity(dataset: Any) -> int:
    """Return a number that differs where ranks were given different parts of a data set; 0 where nobody can tell."""
    if not isinstance(dataset, torch.utils.data.Subset):
        return 0
    chosen = np.fromiter(dataset.indices, dtype=np.int64, count=len(dataset.indices))
    return int.from_bytes(hashlib.blake2b(chosen.data, digest_size=7).digest(), "little")
