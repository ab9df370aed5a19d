"""Weigh: multiply a rank's gradient by its weight before it is accumulated and sent."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable
from typing import Any

import torch

from chronica_hvd import _core, checks
from chronica_hvd.amounts import TrueAmounts
from chronica_hvd.cursor import Cursor
from chronica_hvd.feedback import Feedback
from chronica_hvd.gather import Standing, compare_plans
from chronica_hvd.passes import PassCount
from chronica_hvd.progress import Progress
from chronica_hvd.tickets import OpenStep, StepTicket
from chronica_hvd.timing import Timing
from chronica_hvd.user_warning import warn
from chronica_hvd.world import World

#: Marks a parameter's gradient accumulator as weighed; it lives as long as the optimizer that marked it.
_MARK = "chronica_hvd.weighed"


class Weigher:
    """Applies the weight of the micro-batch at work to every gradient that reaches a parameter.

    The hooks sit before the accumulation (so gradients of several batches may have different weights) and before
    Horovod's own hooks, which send what has been accumulated. ``torch.autograd.grad`` does not pass them.

    Parameters
    ----------
    progress
        Of the sampler: which micro-batch is at work.
    world
        The ranks whose plans must agree.
    name
        Tells this optimizer's collectives from those of others; the same on every rank.
    lookahead, passes
        So many steps a wrapper takes ahead; ``backward_passes_per_step``.
    timing
        Who times the micro-batches.
    """

    def __init__(
        self,
        progress: Progress,
        world: World,
        name: str,
        lookahead: int = 0,
        passes: int = 1,
        timing: Timing | None = None,
    ) -> None:
        self._progress = progress
        self._cursor: Cursor = progress.attach(self, lookahead, timing, passes)
        if progress.feedback is not None and timing is not None:
            progress.feedback.lead(timing, world)
        self._timing = timing
        self._world = world
        self._name = name
        self._per_update = passes
        self._at_work: OpenStep | None = None
        self._place = 0  # in that step
        self._pass_weight = _core.PassWeight(self)
        self._followed: set[int] = set()  # backward passes of this update whose end will be told
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._accumulators: list[Any] = []  # hooks live as long as these nodes are held
        self._parameters: list[torch.nn.Parameter] = []
        self._sparse_dims: dict[torch.nn.Parameter, int] = {}  # of gradients that are sparse on some rank
        self._count: PassCount | None = None
        self._amounts: TrueAmounts | None = None

    def watch(self, parameters: Iterable[torch.nn.Parameter], optimizer: Any = None) -> None:
        """Weigh the gradients of these parameters from now on; ``optimizer`` is Horovod's."""
        self._parameters = list(parameters)
        if optimizer is not None:
            self._count = PassCount(optimizer, self._per_update)
            self._amounts = TrueAmounts(self._world, self._name, optimizer, self._parameters)
        for parameter in self._parameters:
            if parameter.requires_grad:
                node = _accumulator(parameter)
                node.metadata[_MARK] = True
                node.register_prehook(functools.partial(self._pass_weight.apply, parameter))
                self._accumulators.append(node)

    def begin_pass(self, backward_pass: int) -> float:
        """Return the weight of a backward pass, from within it; passes within one come back to the outer one."""
        with self._lock:
            self._refuse_graph()
            weight, step = self._cursor.work(backward_pass)
            if step is not self._at_work or step.reached != self._place:
                self._begin_micro_batch(step)
            if backward_pass not in self._followed:
                self._followed.add(backward_pass)
                try:  # have autograd say when the pass is through
                    ended = functools.partial(self._cursor.end_compute, step.place)
                    torch.autograd.Variable._execution_engine.queue_callback(ended)
                except RuntimeError:
                    pass  # where it cannot, synchronize() is taken for the end
            if self._amounts is not None and step.is_complete:
                self._amounts.send(step.weights)
        return weight

    def _begin_micro_batch(self, step: OpenStep) -> None:
        is_new, is_anew = step is not self._at_work, self._at_work is not None
        if is_new and is_anew and self._amounts is not None:  # the step before was left half way
            self._amounts.forget()
        if not is_new and self._place and all(parameter.grad is None for parameter in self._parameters):
            raise RuntimeError(
                f"the gradients of the micro-batches before this one, of step {step.ticket.step}, are gone: call "
                "zero_grad() once in a step, before the first of them"
            )
        if self._count is not None and (is_new or self._per_update > 1):
            is_first = step is self._cursor.open[0] and step.reached == 1
            self._count.begin(step, is_first=is_first, is_anew=is_anew)
        self._at_work, self._place = step, step.reached

    def _refuse_graph(self) -> None:
        if self._world.size > 1 and torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) would have Horovod send gradients that are themselves part of a graph, "
                "which it refuses. For a penalty on gradients take them by "
                "torch.autograd.grad(..., create_graph=True), which neither weighs nor sends them, and call backward() "
                "on the loss made of them"
            )

    def begin_closure(self) -> None:
        """Note that a closure computes the steps at work, maybe several times: see :meth:`Cursor.repeat`."""
        self._cursor.repeat()
        self._forget_passes()

    def begin_synchronize(self, parameters: Iterable[torch.nn.Parameter], *, is_given_up: bool = False) -> None:
        """Check that the update of these parameters can be made, and do what must precede combining gradients.

        Raises
        ------
        RuntimeError
            A parameter is not weighed; not all micro-batches of the step at work (one that ``is_given_up`` aside) were
            taken and had a backward pass; gradients are there that no backward pass of it has brought. Or, on every
            rank: the plans differ, or some ranks left a step out that others have trained on.
        """
        self._refuse_unwatched(parameters)
        if is_given_up:
            self._cursor.refuse_none()
        else:
            self._cursor.refuse_incomplete()
            if self._cursor.is_untouched and any(map(_has_gradient, self._parameters)):
                raise RuntimeError(
                    "there are gradients, but none came through backward() in this step, so they are not weighed: use "
                    "loss.backward() rather than to set .grad, and to skip a step call zero_grad() before"
                )
            if self._cursor.leaves_out:
                warn(
                    "a step's samples are left out: it was taken from the loader and is finished without a backward "
                    "pass that reached a parameter of this optimizer (parameters replaced after wrapping, or a copy of "
                    "the model, are not its own). If that is meant, call optimizer.skip_step() in place of step()"
                )
        self._cursor.end_unended_compute()
        feedback = self._feedback
        if self._cursor.must_compare(at_end=feedback is not None and feedback.is_agreed):
            self._compare(feedback, is_given_up=is_given_up)
        self._have_sparse_gradients()
        if self._amounts is not None and (weights := self._cursor.closing_weights) is not None:
            self._amounts.send(weights)

    def end_synchronize(self) -> None:
        """Correct the combined gradients by the true loss weights, where these were said."""
        if self._amounts is not None:
            self._amounts.correct()

    def finish_step(self, synchronize_ns: int = 0, finished_ns: int = 0, *, is_given_up: bool = False) -> None:
        """Note that the gradients of the step at work have been combined, how long that took and when it was."""
        self._at_work = None
        self._forget_passes()
        self._cursor.finish(synchronize_ns, finished_ns, is_given_up=is_given_up)

    def report(self) -> None:
        """Hand out what there is to report, when the update is made."""
        if (feedback := self._feedback) is not None:
            feedback.report()

    def set_weight(self, amount: Any) -> None:
        """Weigh the micro-batch at work by its true loss weight: see :func:`DistributedOptimizer`."""
        amount = checks.real("amount", amount, least=0.0)
        ticket = self._cursor.at_work().ticket
        if math.isnan(ticket.unit):
            raise RuntimeError(
                'set_weight() has no meaning with loss_weight="sum": summed losses are divided by nothing'
            )
        if self._per_update > 1:
            raise RuntimeError(
                "set_weight() needs backward_passes_per_step=1: the gradients of several steps are added up before "
                "the true loss weight of each is known"
            )
        if self._amounts is not None and ticket.divides_by_own:
            if not (self._amounts.is_agreed or self._cursor.must_compare()):
                raise RuntimeError(
                    f"set_weight() was called for the first time in step {ticket.step} of epoch {ticket.epoch}, when "
                    "other ranks do not expect it any more: call it for every batch, from the first one of an epoch on"
                )
            self._amounts.is_used = True
        self._cursor.set_amount(amount)

    @property
    def is_step_open(self) -> bool:
        """Whether a step has begun that is not finished, by a backward pass or by taking its first micro-batch."""
        return self._at_work is not None or self._cursor.is_surely_begun

    @property
    def oldest(self) -> StepTicket | None:
        """The oldest step that is not finished."""
        return self._cursor.oldest

    @property
    def weight(self) -> float:
        """The gradient factor of the micro-batch at work."""
        return self._cursor.weight

    def latest(self) -> OpenStep:
        """Return the step that what is computed now belongs to."""
        return self._cursor.latest()

    def _forget_passes(self) -> None:
        self._place = 0
        self._followed.clear()
        self._pass_weight.forget()

    @property
    def _feedback(self) -> Feedback | None:
        """What this optimizer's times are given to, if they are wanted; on every rank alike."""
        feedback = self._progress.feedback
        return feedback if feedback is not None and feedback.is_led_by(self._timing) else None

    def _compare(self, feedback: Feedback | None, *, is_given_up: bool) -> None:
        """Have the ranks agree on the plan, and on what they may not know of each other; and tell them the times.

        A step that is given up may have had no gradients that tell which are sparse: the next one compares once more.
        """
        cursor, amounts = self._cursor, self._amounts
        ticket = cursor.oldest
        if ticket is None:
            return
        own = [_sparse_dim(parameter) for parameter in self._parameters]
        is_used = amounts is not None and amounts.is_used
        standing = Standing(ticket, self._progress.data, cursor.finished_steps, cursor.left_out, cursor.idle)
        is_wanted = feedback is not None and feedback.is_wanted
        notes = [int(is_used), int(is_given_up), int(is_wanted), *own]
        if feedback is None:
            notes, _ = compare_plans(self._world, self._name, standing, notes)
        else:
            closing = cursor.closing
            with feedback.telling(closing) as row:
                notes, rows = compare_plans(self._world, self._name, standing, notes, row)
                feedback.is_agreed = bool(notes[2])
                feedback.follow(rows, closing)
        uses_amounts, gives_up, _, *sparse_dims = notes
        if not gives_up:  # on any rank: all must agree on what to compare next
            cursor.note_compared()
        if amounts is not None and uses_amounts:
            amounts.is_agreed = True
        self._sparse_dims |= {p: dim for p, dim in zip(self._parameters, sparse_dims, strict=True) if dim}

    def _have_sparse_gradients(self) -> None:
        """Give parameters an empty gradient where that of other ranks is sparse: they await a sparse one."""
        for parameter, dim in self._sparse_dims.items():
            if parameter.grad is None:
                shape = parameter.shape
                places = torch.empty((dim, 0), dtype=torch.int64, device=parameter.device)
                values = parameter.new_empty((0, *shape[dim:]))
                parameter.grad = torch.sparse_coo_tensor(places, values, shape, check_invariants=False)

    def _refuse_unwatched(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Raise a RuntimeError if a trainable parameter is not weighed; on all ranks alike, and before any collective.

        A cast or a move replaces a parameter's gradient accumulator, and with it our hook and Horovod's.
        """
        # Looking at an accumulator takes longer than all the rest; a gradient that came through our hook says as much.
        unsure = self._pass_weight.unreached(parameters)
        if any(_MARK not in _accumulator(parameter).metadata for parameter in unsure if parameter.requires_grad):
            raise RuntimeError(
                "a trainable parameter is not weighed: it was cast, moved, unfrozen or added after "
                "chronica_hvd.DistributedOptimizer wrapped the optimizer. Do that before wrapping (parameters that are "
                "trainable when wrapped may be frozen and unfrozen later)"
            )


def refuse_weighed(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise a ValueError if a parameter is weighed already: its gradient would be weighed twice."""
    if any(_MARK in _accumulator(parameter).metadata for parameter in parameters if parameter.requires_grad):
        raise ValueError(
            "a parameter already belongs to another chronica_hvd.DistributedOptimizer, so its gradient would be "
            "weighed twice; wrap each parameter once (to wrap anew, delete that optimizer and call gc.collect())"
        )


def _accumulator(parameter: torch.nn.Parameter) -> Any:
    """Return the node that adds to ``parameter.grad``, the same one as long as somebody holds it."""
    view: Any = parameter.expand_as(parameter).grad_fn
    return view.next_functions[0][0]


def _has_gradient(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter has a gradient other than 0."""
    gradient = parameter.grad
    if gradient is None:
        return False
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())


def _sparse_dim(parameter: torch.nn.Parameter) -> int:
    """Return how many dimensions of a parameter's gradient are sparse."""
    return parameter.grad.sparse_dim() if parameter.grad is not None and parameter.grad.is_sparse else 0
