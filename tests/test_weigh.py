from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint

from chronica_hvd.progress import Progress
from chronica_hvd.tickets import StepTicket
from chronica_hvd.weigh import Weigher, refuse_weighed
from chronica_hvd.world import World


class Loop:
    """A loader and an optimizer reduced to what the weigher sees of them."""

    def __init__(self, *parameters: torch.nn.Parameter) -> None:
        self.parameters = parameters
        self.progress = Progress()
        self.weigher = Weigher(self.progress, World(0, 1), "test")
        self.weigher.watch(parameters)
        self.iteration = self.progress.begin()

    def take(self, weight: float) -> None:
        self.progress.hand_out(self.iteration, StepTicket(0, 0, (weight,), ""))


class HorovodsCounts:
    """Horovod's optimizer reduced to its counts of backward passes."""

    op = None
    gradient_predivide_factor = 1.0

    def __init__(self, parameters: list[torch.nn.Parameter], told: Callable[[int], object]) -> None:
        self.backward_passes_per_step = 1
        self._allreduce_delay = dict.fromkeys(parameters, 1)
        self._told = told

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.backward_passes_per_step = passes
        self._allreduce_delay = dict.fromkeys(self._allreduce_delay, passes)
        self._told(passes)


def parameter(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values))


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0, 3.0])
def test_gradients_are_multiplied(weight: float) -> None:
    p = parameter(1.0, 2.0)
    loop = Loop(p)
    loop.take(weight)
    (p * torch.tensor([3.0, 5.0])).sum().backward()
    assert p.grad is not None
    assert p.grad.tolist() == [3.0 * weight, 5.0 * weight]
    assert loop.weigher.is_step_open
    loop.weigher.finish_step()
    assert not loop.weigher.is_step_open


def test_weight_zero_replaces() -> None:
    p = parameter(1.0)
    loop = Loop(p)
    loop.take(0.0)
    (p * float("nan")).sum().backward()
    assert p.grad is not None
    assert p.grad.tolist() == [0.0]


def test_several_batches_accumulate_with_their_own_weights() -> None:
    p = parameter(1.0)
    loop = Loop(p)
    for weight in (0.5, 2.0, 1.0):
        loop.take(weight)
        (3 * p).sum().backward()
        loop.weigher.finish_step()
    assert p.grad is not None
    assert p.grad.item() == 3 * (0.5 + 2.0 + 1.0)


def test_micro_batches_accumulate_and_their_number_is_told_before_the_first() -> None:
    p = parameter(1.0)
    loop = Loop()
    told: list[tuple[int, bool]] = []
    loop.weigher.watch([p], HorovodsCounts([p], lambda passes: told.append((passes, p.grad is None))))
    for weights in ((0.5, 0.0, 2.0), (4.0,), (1.0, 2.0)):
        p.grad = None
        ticket = StepTicket(0, 0, weights, "")
        for weight in weights:
            loop.progress.hand_out(loop.iteration, ticket)
            (3 * p * (1.0 if weight else float("nan"))).sum().backward()
            assert loop.weigher.is_step_open
        loop.weigher.begin_synchronize([p])
        loop.weigher.finish_step()
        assert p.grad is not None
        assert p.grad.item() == 3 * sum(weights)
    assert told == [(3, True), (1, True), (2, True)]


def test_after_a_step_given_up_the_passes_are_told_anew() -> None:
    p = parameter(1.0)
    loop = Loop()
    told: list[int] = []
    loop.weigher.watch([p], HorovodsCounts([p], told.append))
    loop.progress.hand_out(loop.iteration, StepTicket(0, 0, (1.0, 1.0), ""))
    p.sum().backward()
    iteration = loop.progress.begin()  # after an exception, say
    loop.progress.hand_out(iteration, StepTicket(1, 0, (1.0, 1.0), ""))
    p.sum().backward()
    assert told == [2, 2]


@pytest.mark.parametrize("gradient", [None, 0.0, 1.0, float("nan")])
def test_gradients_that_no_backward_pass_brought_are_refused(gradient: float | None) -> None:
    p = parameter(1.0)
    loop = Loop(p)
    loop.take(2.0)
    p.grad = None if gradient is None else torch.tensor([gradient])
    if not gradient:
        with pytest.warns(UserWarning, match=r"a step's samples are left out: .*skip_step\(\) in place of step"):
            loop.weigher.begin_synchronize([p])
        return
    with pytest.raises(RuntimeError, match=r"not weighed: use loss\.backward\(\) rather than to set \.grad"):
        loop.weigher.begin_synchronize([p])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_has_backward_passes_within_one(reentrant: bool) -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(4)))
    loop = Loop(*layers.parameters())
    ticket = StepTicket(0, 0, (0.5, 2.0), "")
    expected = [torch.zeros(1, 1) for _ in layers]
    for weight in ticket.weights:
        loop.progress.hand_out(loop.iteration, ticket)
        inputs = torch.ones(1, 1, requires_grad=True)
        for total, gradient in zip(expected, torch.autograd.grad(layers(inputs), layers.parameters()), strict=True):
            total += weight * gradient
        value = inputs
        for layer in layers[:-1]:
            value = torch.utils.checkpoint.checkpoint(layer, value, use_reentrant=reentrant)
        layers[-1](value).backward()
    loop.weigher.begin_synchronize(layers.parameters())
    for layer, total in zip(layers, expected, strict=True):
        assert torch.allclose(layer.weight.grad, total)


def test_a_shared_gradient_is_not_changed_in_place() -> None:
    p = parameter(1.0, 1.0)
    loop = Loop(p)
    loop.take(2.0)
    gradient = torch.tensor([1.0, 4.0])
    p.backward(gradient)
    assert gradient.tolist() == [1.0, 4.0]
    assert p.grad is not None
    assert p.grad.tolist() == [2.0, 8.0]


def accumulate(loop: Loop, weights: list[float]) -> None:
    """Have the loop's parameter get the gradients 3 and 5, once with each weight."""
    for weight in weights:
        loop.take(weight)
        (loop.parameters[0] * torch.tensor([3.0, 5.0])).sum().backward()
        loop.weigher.finish_step()


def test_what_is_added_to_a_gradient_is_weighed_in_place() -> None:
    p = parameter(1.0, 2.0)
    loop = Loop(p)
    p.grad = held = torch.tensor([1.0, 1.0])
    seen: list[list[float]] = []
    p.register_hook(lambda gradient: seen.append(gradient.tolist()))
    accumulate(loop, [0.5, 0.0, 2.0, 1.0])
    assert p.grad is held
    assert held.tolist() == [1.0 + 3 * 3.5, 1.0 + 5 * 3.5]
    assert seen == [[3.0, 5.0]] * 4  # hooks of the user's see every gradient


def test_hooks_after_the_accumulation_see_every_weighed_gradient() -> None:
    p = parameter(1.0, 2.0)
    seen: list[list[float]] = []
    p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))
    accumulate(Loop(p), [0.5, 0.0, 2.0])
    assert seen == [[1.5, 2.5], [1.5, 2.5], [7.5, 12.5]]


def test_hooks_of_the_accumulator_are_called_for_every_gradient() -> None:
    p = parameter(1.0, 2.0)
    called: list[int] = []
    node = p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda *_: called.append(1))  # as Horovod's, which sends what has been accumulated
    accumulate(Loop(p), [0.5, 0.0, 2.0])
    assert len(called) == 3


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_gradient_that_can_be_differentiated_again_is_not_changed_in_place() -> None:
    p = parameter(1.0, 2.0)
    loop = Loop(p)
    for weight in (2.0, 3.0):
        loop.take(weight)
        (p**2).sum().backward(create_graph=True)
        loop.weigher.finish_step()
    assert p.grad is not None
    (second,) = torch.autograd.grad(p.grad.sum(), [p])
    assert (p.grad.tolist(), second.tolist()) == ([10.0, 20.0], [10.0, 10.0])
    p.grad = None  # else the two would hold each other for ever


def test_sparse_gradients_accumulate_with_their_weights() -> None:
    table = torch.nn.Embedding(4, 1, sparse=True)
    loop = Loop(table.weight)
    for weight, row in ((0.5, 0), (2.0, 1), (0.0, 1), (3.0, 0)):
        loop.take(weight)
        table(torch.tensor([row])).sum().backward()
        loop.weigher.finish_step()
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense().flatten().tolist() == [3.5, 2.0, 0.0, 0.0]


def test_autograd_grad_is_not_weighed() -> None:
    p = parameter(1.0)
    Loop(p)  # nothing taken: a backward pass would raise
    (gradient,) = torch.autograd.grad((5 * p).sum(), [p])
    assert gradient.item() == 5.0


def test_a_frozen_parameter_is_left_alone() -> None:
    p, frozen = parameter(1.0), torch.nn.Parameter(torch.ones(1), requires_grad=False)
    loop = Loop(p, frozen)
    loop.take(2.0)
    (p * frozen).sum().backward()
    assert p.grad is not None
    assert p.grad.item() == 2.0


def test_a_failed_backward_pass_leaves_no_stale_weight() -> None:
    first, second = parameter(1.0), parameter(1.0)
    loop = Loop(first, second)

    def fail(_: torch.Tensor) -> None:
        raise MemoryError

    loop.take(3.0)
    handle = second.register_hook(fail)
    with pytest.raises(MemoryError):
        (first + second).sum().backward()
    handle.remove()
    loop.take(0.5)  # the loop gave the batch up and took the next
    with pytest.raises(RuntimeError, match="2 steps were taken"):
        (first + second).sum().backward()
    loop.iteration = loop.progress.begin()
    loop.take(0.5)
    first.grad = second.grad = None
    (first + second).sum().backward()
    assert first.grad == second.grad == torch.tensor([0.5])


@pytest.mark.parametrize("change", ["cast", "cast back", "unfreeze", "add"])
@pytest.mark.parametrize("is_trained", [False, True])
def test_parameters_that_escape_the_weights_are_refused(change: str, is_trained: bool) -> None:
    model = torch.nn.Linear(2, 1)
    model.bias.requires_grad_(change != "unfreeze")
    loop = Loop(*model.parameters())
    if is_trained:
        loop.take(2.0)
        model(torch.ones(1, 2)).sum().backward()
    loop.weigher.begin_synchronize(model.parameters())
    loop.weigher.finish_step()
    if change.startswith("cast"):
        model.double()
    if change == "cast back":
        model.float()
    if change == "unfreeze":
        model.bias.requires_grad_(True)
    if change == "add":
        model.register_parameter("added", parameter(1.0))
    with pytest.raises(RuntimeError, match="cast, moved, unfrozen or added"):
        loop.weigher.begin_synchronize(model.parameters())


def test_parameters_may_be_frozen_and_unfrozen() -> None:
    p = parameter(1.0)
    loop = Loop(p)
    for trainable in (False, True):
        p.requires_grad_(trainable)
        loop.weigher.begin_synchronize([p])


def test_nobody_is_weighed_twice() -> None:
    p = parameter(1.0)
    loop = Loop(p)
    with pytest.raises(ValueError, match="weighed twice"):
        refuse_weighed([p])
    del loop
    gc.collect()
    refuse_weighed([p])
