"""Mistakes are errors on every rank alike, never wrong weights or hangs, and training can go on afterwards."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cases import base
from launch import Launch, launched_once
from training import reference, relative_errors

pytestmark = pytest.mark.parallel

#: Mistake → type and pattern of the error; None: no mistake.
EXPECTED: dict[str, tuple[str, str] | None] = {
    "sampler_before_init": ("RuntimeError", r"hvd\.init\(\)"),
    "optimizer_before_init": ("RuntimeError", r"hvd\.init\(\)"),
    "batch_read_ahead": ("RuntimeError", r"2 steps were taken .* lookahead=1"),
    "two_batches_read_ahead": ("RuntimeError", r"3 steps were taken"),
    "torchs_loader": ("RuntimeError", r"no step has been taken .* chronica_hvd\.DataLoader"),
    "loader_of_another_sampler": ("RuntimeError", r"no step has been taken .* the sampler that was given"),
    "two_iterations_at_once": ("RuntimeError", r"a newer iteration"),
    "backward_after_the_last_step": ("RuntimeError", r"no step has been taken"),
    "wrapped_twice": ("TypeError", r"already wrapped"),
    "wrapped_by_horovod": ("TypeError", r"already wrapped by Horovod"),
    "same_parameters_twice": ("ValueError", r"another chronica_hvd\.DistributedOptimizer"),
    "same_name_twice": ("ValueError", r"unique names; 'same' is given twice"),
    "wrapped_anew": None,
    "another_operation": ("ValueError", r"op must be hvd.Average or hvd.Sum, not"),
    "adasum": ("ValueError", r"Adasum.* Average or Sum"),
    "predivide_in_groups": ("ValueError", r"gradient_predivide_factor=2 cannot be used with groups"),
    "closure_under_skip_synchronize": ("RuntimeError", r"step\(closure\) cannot be made under skip_synchronize"),
    "gradients_with_a_graph": ("RuntimeError", r"create_graph=True.* torch\.autograd\.grad"),
    "gradients_forgotten_on_their_way": ("RuntimeError", r"zero_grad\(\) was called after backward.*skip_step\(\)"),
    "scaler_without_synchronize": ("RuntimeError", r"GradScaler.*optimizer\.synchronize\(\) first"),
    "clipped_before_synchronize": ("RuntimeError", r"gradients were changed .* call optimizer\.synchronize\(\) first"),
    "gradients_of_the_model_forgotten": ("RuntimeError", r"gradients were set to None .* model\.zero_grad\(\)"),
    "gradients_forgotten_between_micro_batches": ("RuntimeError", r"step 0, are gone: call zero_grad\(\) once"),
    "state_loaded_in_the_middle_of_a_step": ("RuntimeError", r"load_state_dict\(\) was called after backward"),
    "update_without_a_step": ("RuntimeError", r"step\(\) was called, but no step has been taken"),
    "left_out_by_all": ("UserWarning", r"a step's samples are left out: .*skip_step\(\) in place of step\(\)"),
    "amount_after_backward": ("RuntimeError", r"set_weight\(\) was called after the backward pass of micro-batch 0"),
    "amount_before_any_batch": ("RuntimeError", r"no step is at work: none has been taken"),
    "amounts_from_the_second_step_on": ("RuntimeError", r"for the first time in step 1 .* from the first one of an"),
    "negative_amount": ("ValueError", r"amount must be at least 0, not -1"),
    "amount_in_words": ("TypeError", r"amount must be a number, not '1'"),
    "step_skipped_before_any": ("RuntimeError", r"no step is at work: none has been taken"),
    "rest_of_a_step_given_up": ("RuntimeError", r"skip_step\(\) gave step 0 up, .* leave the loop"),
    "unknown_option": ("TypeError", r"'sampling'.* compression"),
    "negative_lookahead": ("ValueError", r"lookahead.* -1"),
    "torchs_sampler": ("TypeError", r"chronica_hvd\.BatchSampler"),
    "sampler_for_more_ranks": ("ValueError", r"num_replicas says (\d), but Horovod says \d"),
    "declared_size_for_more_ranks": ("ValueError", r"rank \d of (\d), but Horovod runs this as rank \d of \d"),
    "declared_rank_of_another": ("ValueError", r"rank \d of \d, but Horovod runs this as rank \d of \d"),
    "average_before_any_batch": ("RuntimeError", r"no step is at work: none has been taken"),
    "average_of_steps_not_trained_on": ("RuntimeError", r"2 steps were taken"),
    "average_of_a_text": ("TypeError", r"number or tensor.* str"),
    "average_without_a_sampler": ("TypeError", r"chronica_hvd\.BatchSampler, not None"),
    "operation_by_name": ("ValueError", r"op must be hvd.Average or hvd.Sum, not 'average'"),
    "compression_by_name": ("TypeError", r"compression must be hvd\.Compression\.none, .* not 'fp16'"),
    "predivide_by_text": ("TypeError", r"gradient_predivide_factor must be a number, not '2'"),
    "predivide_by_zero": ("ValueError", r"gradient_predivide_factor must be positive, not 0"),
    "predivide_a_sum": ("ValueError", r"gradient_predivide_factor=2 needs op=hvd\.Average"),
    "loop_without_steps": ("RuntimeError", r"micro_batches='auto' .* for step in loader\.steps\(\)"),
    "gradients_set_by_hand": ("RuntimeError", "there are gradients, but none came through backward"),
    "micro_batch_without_backward": ("RuntimeError", r"2 micro-batches of step 0 were taken without a backward pass"),
    "micro_batches_read_ahead": ("RuntimeError", r"3 micro-batches of step 0 were taken without .* lookahead=1"),
    "micro_batches_reversed": ("RuntimeError", r"3 micro-batches of step 0 were taken without a backward pass"),
    "update_before_the_last_is_taken": ("RuntimeError", r"after 1 of the 3 micro-batches of step 0: first take every"),
    "update_after_every_micro_batch": ("RuntimeError", r"after 1 of the 3 micro-batches of step 0: first take every"),
    "synchronize_before_the_last_backward": ("RuntimeError", r"only 2 of the 3 micro-batches of step 0 had a backward"),
    "next_step_without_update": ("RuntimeError", r"2 steps were taken"),
    "step_left_early": ("RuntimeError", r"of step 1 was asked for, but those before it were not all taken"),
    "step_gone_through_twice": ("RuntimeError", r"a step can be gone through once"),
    "one_pass_too_many_while_reading_ahead": ("RuntimeError", r"once more than micro-batches of step 0 were taken, 1"),
    "average_in_the_middle_of_a_step": ("RuntimeError", r"average\(\) was called after 1 of the 3 micro-batches"),
    "average_of_too_few_values": ("ValueError", r"step 0 has 3 micro-batches .* 2 values were given"),
    "average_of_one_value": ("ValueError", r"step 0 has 3 micro-batches .* 1 value was given; give a list"),
    "average_of_shapes": ("ValueError", r"the values must have one shape, not \(0,\), \(1,\), \(2,\)"),
}
WITHOUT_RUN = {"sampler_before_init", "optimizer_before_init", "backward_after_the_last_step"}
each_size = pytest.mark.parametrize("ranks", [2, 3])
launched = launched_once("mistakes")


@each_size
@pytest.mark.parametrize("mistake", EXPECTED)
def test_a_mistake_is_an_error_on_every_rank(ranks: int, mistake: str, launched: Any) -> None:
    expected = EXPECTED[mistake]
    for rank in range(ranks):
        error = launched(ranks).json(rank)["errors"][mistake]
        if expected is None:
            assert error is None
        else:
            assert error is not None
            assert error[0] == expected[0]
            assert re.search(expected[1], error[1], re.DOTALL), error[1]


@each_size
@pytest.mark.parametrize("mistake", sorted(EXPECTED.keys() - WITHOUT_RUN))
def test_training_goes_on_exactly_after_a_mistake(ranks: int, mistake: str, launched: Any) -> None:
    expected = reference(base(ranks, mistake), ranks)
    for rank in range(ranks):
        assert launched(ranks).json(rank)["afterwards"][mistake] is None
        errors = relative_errors(launched(ranks).parameters(mistake, rank), expected)
        assert max(errors.values()) <= 1e-12, errors


def told_to_all(launch: Launch, ranks: int, difference: str) -> str:
    """Return the one message that all ranks got for a difference, having left their parameters alone."""
    messages = set()
    for rank in range(ranks):
        (kind, message), parameters_left_alone = launch.json(rank)["differences"][difference]
        assert kind == "RuntimeError"
        assert parameters_left_alone
        messages.add(message)
    [message] = messages
    return message


@each_size
@pytest.mark.parametrize(
    "difference", ["seeds", "clipped", "epochs", "evaluated_seeds", "evaluated_sizes", "left_early"]
)
def test_ranks_with_different_plans_are_named_in_the_first_step(ranks: int, difference: str, launched: Any) -> None:
    message = told_to_all(launched(ranks), ranks, difference)
    assert "ranks 0: plan" in message
    assert f"{'ranks 1' if ranks == 2 else 'ranks 1, 2'}: plan" in message
    if difference == "left_early":
        assert re.search(r"ranks 0: .* 5 steps made; .* 4 steps made\. .*leave a loop early on all ranks", message)


@each_size
def test_data_split_by_rank_before_are_noticed_though_all_sizes_are_alike(ranks: int, launched: Any) -> None:
    message = told_to_all(launched(ranks), ranks, "part_of_the_data")
    assert re.search(r"different data sets \(ranks 0: data .*; ranks 1: data .*whole data set", message)


@each_size
def test_a_step_that_some_ranks_leave_out_is_noticed(ranks: int, launched: Any) -> None:
    message = told_to_all(launched(ranks), ranks, "left_out_alone")
    left_out = [0] + [1] * (ranks - 1)
    assert f"lack their samples: {left_out} steps had no" in message


@each_size
def test_every_mistake_made_is_expected(ranks: int, launched: Any) -> None:
    assert launched(ranks).json(0)["errors"].keys() == EXPECTED.keys()
