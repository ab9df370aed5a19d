"""Sample: torch's DataLoader, which besides says which step it hands out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch.utils.data

from chronica_hvd.progress import StepTicket
from chronica_hvd.sampler import BatchSampler


class DataLoader(torch.utils.data.DataLoader[Any]):
    """torch's ``DataLoader`` over the batches of a :class:`chronica_hvd.BatchSampler`.

    It tells the sampler's optimizer which step the loop has taken, so that a gradient gets the weight of its own batch.

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

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # The batches and what is said of them come from one plan: set_epoch() in the middle changes neither.
        return self._hand_out(super().__iter__(), self.batch_sampler.tickets())

    def _hand_out(self, batches: Iterator[Any], tickets: Iterator[StepTicket]) -> Iterator[Any]:
        progress = self.batch_sampler.progress
        iteration = progress.begin()
        for batch, ticket in zip(batches, tickets, strict=False):
            progress.hand_out(iteration, ticket)
            yield batch
        progress.end(iteration)

    def steps(self) -> Iterator[Iterable[Any]]:
        """Yield for each step its micro-batches, in the order in which they must be trained on.

        The loop that serves every mode::

            for step in loader.steps():
                optimizer.zero_grad()
                for batch in step:
                    loss_fn(model(batch)).backward()
                optimizer.step()
        """
        return ((batch,) for batch in self)
