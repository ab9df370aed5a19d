"""Make every mistake, write the error, then go on training as one should."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import rank
import torch
from cases import base
from train import Run
from training import build, collate, sgd

import chronica_hvd

Error = list[str] | None


def attempt(action: Callable[[], object]) -> Error:
    """Return [type, message] of the error, or None if there was none."""
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


# Before hvd.init(). ---------------------------------------------------------------------------------------------------


def sampler_before_init() -> None:
    chronica_hvd.BatchSampler([1, 2, 3, 4], 1)


def optimizer_before_init() -> None:
    case = base(2, "early")
    chronica_hvd.DistributedOptimizer(sgd(case, build(case)))


# With a run that is ready: errors that come before any collective, so that the run can go on. -------------------------


def batch_read_ahead(run: Run) -> None:
    batches = iter(run.loader)
    batch = next(batches)
    next(batches)
    run.loss(batch).backward()


def two_batches_read_ahead(run: Run) -> None:
    batches = iter(run.loader)
    batch = next(batches)
    next(batches)
    next(batches)
    run.loss(batch).backward()


def torchs_loader(run: Run) -> None:
    loader = torch.utils.data.DataLoader(run.data, batch_sampler=run.sampler, collate_fn=collate)
    run.loss(next(iter(loader))).backward()


def loader_of_another_sampler(run: Run) -> None:
    sampler = chronica_hvd.BatchSampler(run.data.sizes, run.case.batch_size, **run.data.plan_options)
    loader = chronica_hvd.DataLoader(run.data, batch_sampler=sampler, collate_fn=collate)
    run.loss(next(iter(loader))).backward()


def two_iterations_at_once(run: Run) -> None:
    first, second = iter(run.loader), iter(run.loader)
    next(first)
    next(second)
    next(first)


def wrapped_twice(run: Run) -> None:
    chronica_hvd.DistributedOptimizer(run.optimizer, run.model.named_parameters(), sampler=run.sampler)


def wrapped_by_horovod(run: Run) -> None:
    model = build(run.case)
    wrapped = hvd.DistributedOptimizer(sgd(run.case, model), model.named_parameters())
    chronica_hvd.DistributedOptimizer(wrapped, model.named_parameters(), sampler=run.sampler)


def same_parameters_twice(run: Run) -> None:
    wrap(run)


def same_name_twice(run: Run) -> None:
    release(run)
    named = [("same", parameter) for parameter in run.model.parameters()]
    chronica_hvd.DistributedOptimizer(sgd(run.case, run.model), named, sampler=run.sampler)


def wrapped_anew(run: Run) -> None:
    """No mistake: the earlier optimizer is gone."""
    release(run)
    run.optimizer = run.wrap()


def another_operation(run: Run) -> None:
    wrap(run, op=hvd.Min)


def adasum(run: Run) -> None:
    wrap(run, op=hvd.Adasum)


def predivide_in_groups(run: Run) -> None:
    wrap(run, gradient_predivide_factor=2.0, groups=2)


def closure_under_skip_synchronize(run: Run) -> None:
    next(iter(run.loader))
    with run.optimizer.skip_synchronize():
        run.optimizer.step(lambda: None)


def gradients_with_a_graph(run: Run) -> None:
    run.loss(next(iter(run.loader))).backward(create_graph=True)


def after_backward(run: Run, mistake: Callable[[], object]) -> None:
    """Make a mistake between a step's backward pass and its update, then give the step up."""
    run.loss(next(iter(run.loader))).backward()
    try:
        mistake()
    finally:
        run.optimizer.skip_step()


def gradients_forgotten_on_their_way(run: Run) -> None:
    after_backward(run, run.optimizer.zero_grad)


def scaler_without_synchronize(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(run.loss(next(iter(run.loader)))).backward()
    try:
        scaler.step(run.optimizer)
    finally:
        run.optimizer.skip_step()


def clipped_before_synchronize(run: Run) -> None:
    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
        run.optimizer.step()

    after_backward(run, clip_and_step)


def gradients_of_the_model_forgotten(run: Run) -> None:
    def forget_and_step() -> None:
        run.model.zero_grad()
        run.optimizer.step()

    after_backward(run, forget_and_step)


def state_loaded_in_the_middle_of_a_step(run: Run) -> None:
    after_backward(run, lambda: run.optimizer.load_state_dict(run.optimizer.state_dict()))


def update_without_a_step(run: Run) -> None:
    run.optimizer.step()


def left_out_by_all(run: Run) -> None:
    """Train on a copy of the model, whose gradients nobody sends."""
    own = run.model
    run.model = copy.deepcopy(own)
    run.loss(next(iter(run.loader))).backward()
    try:
        run.optimizer.step()
    finally:
        run.model = own
        run.optimizer.skip_step()


def amount_after_backward(run: Run) -> None:
    after_backward(run, lambda: run.optimizer.set_weight(1.0))


def amount_before_any_batch(run: Run) -> None:
    run.optimizer.set_weight(1.0)


def amounts_from_the_second_step_on(run: Run) -> None:
    batches = iter(run.loader)
    run.loss(next(batches)).backward()
    run.optimizer.synchronize()
    run.optimizer.zero_grad()
    next(batches)
    run.optimizer.set_weight(1.0)


def negative_amount(run: Run) -> None:
    next(iter(run.loader))
    run.optimizer.set_weight(-1.0)


def amount_in_words(run: Run) -> None:
    next(iter(run.loader))
    run.optimizer.set_weight("1")


def step_skipped_before_any(run: Run) -> None:
    run.optimizer.skip_step()


def unknown_option(run: Run) -> None:
    wrap(run, sampling=True)


def negative_lookahead(run: Run) -> None:
    wrap(run, lookahead=-1)


def torchs_sampler(run: Run) -> None:
    sampler = torch.utils.data.distributed.DistributedSampler(run.data, hvd.size(), hvd.rank())
    wrap(run, sampler=sampler)


def sampler_for_more_ranks(run: Run) -> None:
    chronica_hvd.BatchSampler(run.data.sizes, 4, num_replicas=hvd.size() + 1)


def declared_size_for_more_ranks(run: Run) -> None:
    sampler = chronica_hvd.BatchSampler(run.data.sizes, 4, num_replicas=hvd.size() + 1, rank=hvd.rank())
    wrap(run, sampler=sampler)


def declared_rank_of_another(run: Run) -> None:
    another = (hvd.rank() + 1) % hvd.size()
    wrap(run, sampler=chronica_hvd.BatchSampler(run.data.sizes, 4, num_replicas=hvd.size(), rank=another))


def average_before_any_batch(run: Run) -> None:
    chronica_hvd.average(1.0, run.sampler)


def average_of_steps_not_trained_on(run: Run) -> None:
    batches = iter(run.loader)
    next(batches)
    chronica_hvd.average(1.0, run.sampler)
    next(batches)
    chronica_hvd.average(1.0, run.sampler)


def average_of_a_text(run: Run) -> None:
    next(iter(run.loader))
    chronica_hvd.average("1.0", run.sampler)


def average_without_a_sampler(run: Run) -> None:
    chronica_hvd.average(1.0, None)


def operation_by_name(run: Run) -> None:
    wrap(run, op="average")


def compression_by_name(run: Run) -> None:
    wrap(run, compression="fp16")


def predivide_by_text(run: Run) -> None:
    wrap(run, gradient_predivide_factor="2")


def predivide_by_zero(run: Run) -> None:
    wrap(run, gradient_predivide_factor=0.0)


def predivide_a_sum(run: Run) -> None:
    wrap(run, gradient_predivide_factor=2.0, op=hvd.Sum)


# With micro-batches, three on every rank in every full step. ----------------------------------------------------------


def loop_without_steps(run: Run) -> None:
    iter(run.loader)


def gradients_set_by_hand(run: Run) -> None:
    parameters = list(run.model.parameters())
    losses = [run.loss(batch) for batch in next(run.loader.steps())]
    for parameter, gradient in zip(parameters, torch.autograd.grad(sum(losses), parameters), strict=True):
        parameter.grad = gradient
    try:
        run.optimizer.step()
    finally:
        run.optimizer.skip_step()


def micro_batch_without_backward(run: Run) -> None:
    step = iter(next(run.loader.steps()))
    next(step)
    run.loss(next(step)).backward()


def micro_batches_read_ahead(run: Run) -> None:
    for batch in list(next(run.loader.steps())):
        run.loss(batch).backward()


def micro_batches_reversed(run: Run) -> None:
    for batch in reversed(list(next(run.loader.steps()))):
        run.loss(batch).backward()


def update_before_the_last_is_taken(run: Run) -> None:
    run.optimizer.zero_grad()
    run.loss(next(iter(next(run.loader.steps())))).backward()
    try:
        run.optimizer.step()
    finally:
        run.optimizer.skip_step()


def update_after_every_micro_batch(run: Run) -> None:
    try:
        for batch in next(run.loader.steps()):
            run.optimizer.zero_grad()
            run.loss(batch).backward()
            run.optimizer.step()
    finally:
        run.optimizer.skip_step()


def synchronize_before_the_last_backward(run: Run) -> None:
    batches = iter(next(run.loader.steps()))
    run.loss(next(batches)).backward()
    run.loss(next(batches)).backward()
    next(batches)
    try:
        run.optimizer.synchronize()
    finally:
        run.optimizer.skip_step()


def next_step_without_update(run: Run) -> None:
    try:
        for step in run.loader.steps():
            for batch in step:
                run.loss(batch).backward()
    finally:
        run.optimizer.skip_step()


def step_left_early(run: Run) -> None:
    for step in run.loader.steps():
        for _ in step:
            break


def step_gone_through_twice(run: Run) -> None:
    step = next(run.loader.steps())
    sum(len(indices) for indices, *_ in step)
    for batch in step:
        run.loss(batch).backward()


def one_pass_too_many_while_reading_ahead(run: Run) -> None:
    batches = iter(next(run.loader.steps()))
    loss = run.loss(next(batches))
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    finally:
        run.optimizer.skip_step()


def rest_of_a_step_given_up(run: Run) -> None:
    step = iter(next(run.loader.steps()))
    run.loss(next(step)).backward()
    run.optimizer.skip_step()
    next(step)


def gradients_forgotten_between_micro_batches(run: Run) -> None:
    try:
        for batch in next(run.loader.steps()):
            run.model.zero_grad()
            run.loss(batch).backward()
    finally:
        run.optimizer.skip_step()


def average_in_the_middle_of_a_step(run: Run) -> None:
    for _ in next(run.loader.steps()):
        chronica_hvd.average(1.0, run.sampler)


def average_of_too_few_values(run: Run) -> None:
    for _ in next(run.loader.steps()):
        pass
    chronica_hvd.average([1.0, 2.0], run.sampler)


def average_of_one_value(run: Run) -> None:
    for _ in next(run.loader.steps()):
        pass
    chronica_hvd.average(torch.ones(3), run.sampler)


def average_of_shapes(run: Run) -> None:
    for _ in next(run.loader.steps()):
        pass
    chronica_hvd.average([torch.ones(number) for number in range(3)], run.sampler)


def release(run: Run) -> None:
    """Let go of the optimizer, so that its parameters are free."""
    run.optimizer = None
    gc.collect()


def wrap(run: Run, **options: Any) -> None:
    """Wrap the run's parameters once more."""
    options = {"sampler": run.sampler, **options}
    chronica_hvd.DistributedOptimizer(sgd(run.case, run.model), run.model.named_parameters(), **options)


MISTAKES = [
    batch_read_ahead,
    two_batches_read_ahead,
    torchs_loader,
    loader_of_another_sampler,
    two_iterations_at_once,
    wrapped_twice,
    wrapped_by_horovod,
    same_parameters_twice,
    same_name_twice,
    wrapped_anew,
    another_operation,
    adasum,
    predivide_in_groups,
    closure_under_skip_synchronize,
    gradients_with_a_graph,
    gradients_forgotten_on_their_way,
    scaler_without_synchronize,
    clipped_before_synchronize,
    gradients_of_the_model_forgotten,
    state_loaded_in_the_middle_of_a_step,
    update_without_a_step,
    left_out_by_all,
    amount_after_backward,
    amount_before_any_batch,
    amounts_from_the_second_step_on,
    negative_amount,
    amount_in_words,
    step_skipped_before_any,
    unknown_option,
    negative_lookahead,
    torchs_sampler,
    sampler_for_more_ranks,
    declared_size_for_more_ranks,
    declared_rank_of_another,
    average_before_any_batch,
    average_of_steps_not_trained_on,
    average_of_a_text,
    average_without_a_sampler,
    operation_by_name,
    compression_by_name,
    predivide_by_text,
    predivide_by_zero,
    predivide_a_sum,
]
WITH_MICRO_BATCHES = [
    loop_without_steps,
    gradients_set_by_hand,
    micro_batch_without_backward,
    micro_batches_read_ahead,
    micro_batches_reversed,
    update_before_the_last_is_taken,
    update_after_every_micro_batch,
    synchronize_before_the_last_backward,
    next_step_without_update,
    step_left_early,
    step_gone_through_twice,
    one_pass_too_many_while_reading_ahead,
    rest_of_a_step_given_up,
    gradients_forgotten_between_micro_batches,
    average_in_the_middle_of_a_step,
    average_of_too_few_values,
    average_of_one_value,
    average_of_shapes,
]

#: What a mistake needs to be one: options of its case.
MICRO = {"plan": {"micro_batches": "auto", "local_batch": "equal"}, "loop": "steps", "cut": 0, "pieces": 3}
NEEDS: dict[str, dict[str, Any]] = {
    **{mistake.__name__: MICRO for mistake in WITH_MICRO_BATCHES},
    "two_batches_read_ahead": {"optimizer": {"lookahead": 1}},
    "one_pass_too_many_while_reading_ahead": {**MICRO, "optimizer": {"lookahead": 1}},
}


def go_on(run: Run, folder: Path) -> None:
    """Train as one should, after the mistake."""
    if run.optimizer is None:
        run.optimizer = run.wrap()
    run.train()
    run.save(folder)


# Ranks that differ: found by all of them in their first step. ---------------------------------------------------------


def different(run: Run, update: Callable[[Run], None]) -> tuple[Error, bool]:
    """Return the error of the first step, and whether the parameters were left alone."""
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    run.loss(next(iter(run.loader))).backward()
    error = attempt(lambda: update(run))
    return error, all(map(torch.equal, before, run.model.parameters()))


def evaluated(run: Run) -> tuple[Error, bool]:
    """Return the error of the first average, and whether there was one after the first batch."""
    batches = iter(run.loader)
    next(batches)
    error = attempt(lambda: chronica_hvd.average(1.0, run.sampler))
    return error, error is not None


def left_early(run: Run, ahead: int) -> tuple[Error, bool]:
    """Train for an epoch, less the last steps on some ranks; return the error of the next epoch's first step."""
    for step, batch in enumerate(run.loader):
        if step == len(run.loader) - ahead:
            break
        run.optimizer.zero_grad()
        run.loss(batch, is_filler=run.sampler.weight == 0.0).backward()
        run.optimizer.step()
    run.sampler.set_epoch(1)
    run.optimizer.zero_grad()
    return different(run, lambda run: run.optimizer.step())


def left_out_alone(run: Run, is_alone: bool) -> tuple[Error, bool]:
    """Train for an epoch, but for a step that some ranks leave out; return the error of the next epoch's first step."""
    for step, batch in enumerate(run.loader):
        run.optimizer.zero_grad()
        if not (is_alone and step == 2):
            run.loss(batch, is_filler=run.sampler.weight == 0.0).backward()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a step's samples are left out")
            run.optimizer.step()
    run.sampler.set_epoch(1)
    run.optimizer.zero_grad()
    return different(run, lambda run: run.optimizer.step())


def given_a_part_of_the_data(run: Run) -> tuple[Error, bool]:
    """Train on a part of the data that was split by rank before, where all sizes are alike."""
    own = torch.utils.data.Subset(run.data, range(hvd.rank(), 16 * hvd.size(), hvd.size()))
    run.optimizer = None
    gc.collect()
    run.sampler = chronica_hvd.BatchSampler([1] * len(own), 4)
    run.loader = chronica_hvd.DataLoader(own, batch_sampler=run.sampler, collate_fn=collate)
    run.optimizer = run.wrap()
    return different(run, lambda run: run.optimizer.step())


def differences() -> dict[str, tuple[Error, bool]]:
    second = min(hvd.rank(), 1)  # ranks 1 and 2 agree
    seeds = Run(base(hvd.size(), "seeds", plan={"seed": second}))
    clipped = Run(base(hvd.size(), "clipped", plan={"local_batch": ("free", "equal")[second]}))
    epochs = Run(base(hvd.size(), "epochs"))
    epochs.sampler.set_epoch(second)
    evaluated_seeds = Run(base(hvd.size(), "evaluated_seeds", plan={"seed": second}), with_optimizer=False)
    evaluated_sizes = Run(base(hvd.size(), "evaluated_sizes"), with_optimizer=False)
    if second:
        evaluated_sizes.sampler = chronica_hvd.BatchSampler(
            evaluated_sizes.data.sizes + 1, 4, **evaluated_sizes.data.plan_options
        )
        evaluated_sizes.loader = chronica_hvd.DataLoader(
            evaluated_sizes.data, batch_sampler=evaluated_sizes.sampler, collate_fn=collate
        )
    return {
        "evaluated_seeds": evaluated(evaluated_seeds),
        "evaluated_sizes": evaluated(evaluated_sizes),
        "seeds": different(seeds, lambda run: run.optimizer.step()),
        "clipped": different(clipped, lambda run: run.optimizer.synchronize()),
        "epochs": different(epochs, lambda run: run.optimizer.step()),
        "part_of_the_data": given_a_part_of_the_data(Run(base(hvd.size(), "part_of_the_data"))),
        "left_out_alone": left_out_alone(Run(base(hvd.size(), "left_out_alone")), is_alone=bool(second)),
        "left_early": left_early(Run(base(hvd.size(), "left_early")), ahead=second),  # last: gradients stay under way
    }


def main() -> None:
    folder = rank.begin(init=False)
    errors = {action.__name__: attempt(action) for action in (sampler_before_init, optimizer_before_init)}
    hvd.init()
    afterwards = {}
    for mistake in [*MISTAKES, *WITH_MICRO_BATCHES]:
        name = mistake.__name__
        run = Run(base(hvd.size(), name, **NEEDS.get(name, {})))
        errors[name] = attempt(functools.partial(mistake, run))
        afterwards[name] = attempt(functools.partial(go_on, run, folder))
    batch = collate([run.data[0]])
    errors["backward_after_the_last_step"] = attempt(lambda: run.loss(batch).backward())
    rank.write(folder, {"errors": errors, "afterwards": afterwards, "differences": differences()})


if __name__ == "__main__":
    main()
