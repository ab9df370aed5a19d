"""Wiring: a step as the loader hands it out, and how far a loop has come with it."""

from __future__ import annotations

from dataclasses import dataclass

from chronica_hvd.timing import Place, Work


@dataclass(frozen=True)
class StepTicket:
    """A step as the loader hands it out: what the optimizer needs to weigh its gradients and to time it.

    Attributes
    ----------
    weights, work
        This rank's gradient factors, and what is computed; one each per micro-batch.
    unit
        The factor of one unit of loss weight, ranks ÷ divisor; NaN where losses are summed. Where the divisor is 0 any
        number does if the step divides by its own true weight, and 0 if not.
    is_filler
        Whether the samples count elsewhere, and here only keep the rank in step.
    divides_by_own
        Whether the step's loss is divided by the step's own loss weight (not so with ``normalize="epoch"``).
    is_last
        Whether no step of the epoch follows.
    """

    epoch: int
    step: int
    weights: tuple[float, ...]
    fingerprint: str
    work: tuple[Work, ...] = ()
    unit: float = 1.0
    is_filler: bool = False
    divides_by_own: bool = True
    is_last: bool = False


class OpenStep:
    """How far a loop has come with a step: micro-batches taken, and those that a backward pass has reached.

    Attributes
    ----------
    number
        Of the steps taken since training began.
    weights
        The gradient factors of its micro-batches: as planned, or as ``set_weight`` has said since.
    is_left_to_others
        Whether another optimizer has finished this step, so that this one may leave it out.
    """

    __slots__ = ("data_wait_ns", "is_left_to_others", "number", "reached", "taken", "ticket", "weights")

    def __init__(self, ticket: StepTicket, number: int = 0) -> None:
        self.ticket = ticket
        self.number = number
        self.taken = 0
        self.reached = 0
        self.data_wait_ns = 0
        self.weights: tuple[float, ...] = ticket.weights
        self.is_left_to_others = False

    @property
    def place(self) -> Place:
        """Which micro-batch a backward pass has reached last."""
        return self.number, self.reached - 1

    @property
    def micro_batches(self) -> int:
        """How many there are on this rank in this step."""
        return len(self.weights)

    @property
    def is_complete(self) -> bool:
        """Whether a backward pass has reached every micro-batch."""
        return self.reached == len(self.weights)

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it counts on this rank, so that it may go without a backward pass."""
        return not any(self.weights)

    def set_weight(self, place: int, weight: float) -> None:
        """Replace the factor of one micro-batch."""
        self.weights = (*self.weights[:place], weight, *self.weights[place + 1 :])

    def refuse_untaken(self, what: str) -> None:
        """Raise a RuntimeError if some micro-batches were not taken yet."""
        if self.taken < self.micro_batches:
            raise RuntimeError(
                f"{what} after {self.taken} of the {self.micro_batches} micro-batches of step {self.ticket.step}: "
                "first take every one: for batch in step: ..."
            )

    def refuse_unreached(self) -> None:
        """Raise a RuntimeError if some micro-batches, but not all, were reached by a backward pass."""
        if 0 < self.reached < self.micro_batches:
            raise RuntimeError(
                f"optimizer.step() or synchronize() was called, but only {self.reached} of the {self.micro_batches} "
                f"micro-batches of step {self.ticket.step} had a backward pass: call backward() for each, where it "
                "is taken; to give the whole step up, on every rank: optimizer.skip_step()"
            )
