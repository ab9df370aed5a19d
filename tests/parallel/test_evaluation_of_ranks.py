"""Evaluation on several ranks: each sample once, means as of one process; ranks that differ are errors, never hangs."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from evaluating import Evaluation, evaluations
from launch import launched_once

import chronica_hvd

pytestmark = pytest.mark.parallel

each_size = pytest.mark.parametrize("ranks", [2, 3])
launched = launched_once("evaluation")


def check(results: list[dict[str, Any]], evaluation: Evaluation) -> None:
    """Each sample counts on one rank, and every rank holds the means of a single process."""
    samples = sorted(evaluation.options.get("indices", range(evaluation.samples)))
    assert sorted(sample for result in results for sample in result["counted"]) == samples
    expected = evaluation.means(samples)
    for result in results:
        assert result["number"] == pytest.approx(expected[0], rel=1e-13)
        assert result["tensor"] == pytest.approx(expected.tolist(), rel=1e-13)
        assert result["number"] == results[0]["number"]


@each_size
@pytest.mark.parametrize("name", evaluations(2))
def test_every_sample_counts_once(ranks: int, name: str, launched: Any) -> None:
    results = [launched(ranks).json(rank)["evaluations"][name] for rank in range(ranks)]
    check(results, evaluations(ranks)[name])


@each_size
def test_fillers_were_there(ranks: int, launched: Any) -> None:
    """Else nothing would be shown by the above."""
    counted = [
        launched(ranks).json(rank)["evaluations"]["fewer-samples-than-ranks"]["counted"] for rank in range(ranks)
    ]
    assert [] in counted


@each_size
def test_a_process_set_evaluates_among_itself(ranks: int, launched: Any) -> None:
    results = [launched(ranks).json(rank)["process_set"] for rank in range(ranks)]
    assert results[0] is None
    check(results[1:], Evaluation(11))


@each_size
@pytest.mark.parametrize("loop", ["training", "training_ahead"])
def test_the_mean_of_a_training_epoch(ranks: int, loop: str, launched: Any) -> None:
    results = [launched(ranks).json(rank)[loop] for rank in range(ranks)]
    given = [pair for result in results for pair in result["given"]]
    expected = math.fsum(value * weight for value, weight in given) / math.fsum(weight for _, weight in given)
    assert len({weight for _, weight in given}) > 3
    for result in results:
        assert result["mean"] == pytest.approx(expected, rel=1e-13)


@each_size
@pytest.mark.parametrize(
    ("action", "error", "pattern"),
    [
        ("shapes", "ValueError", r"one shape on all ranks, not \(2, 3\) on rank 0, \(3, 2\) on rank 1"),
        ("dimensions", "ValueError", r"one shape on all ranks, not \(\) on rank 0, \(1, 1\) on rank 1"),
        ("plans", "RuntimeError", r"belong to different plans; .*Plan [0-9a-f]{16} on rank 0, [0-9a-f]{16} on rank 1"),
        ("order", "RuntimeError", r"results of different Means; .*Number of the Mean \d+ on rank 0, \d+ on rank 1"),
        ("world_by_hand", "RuntimeError", r"told by hand to be rank \d of \d, which is not how Horovod runs"),
    ],
)
def test_ranks_that_differ_are_an_error_on_every_rank(
    ranks: int, action: str, error: str, pattern: str, launched: Any
) -> None:
    messages = set()
    for rank in range(ranks):
        kind, message = launched(ranks).json(rank)["odd"][action]["error"]
        assert kind == error
        assert re.search(pattern, message), message
        messages.add(message)
    assert len(messages) == (ranks if action == "world_by_hand" else 1)


@each_size
def test_ranks_without_values_take_part(ranks: int, launched: Any) -> None:
    for rank in range(ranks):
        odd = {name: attempt.get("result") for name, attempt in launched(ranks).json(rank)["odd"].items()}
        assert odd["only_the_last_rank_adds"] == [3.0] * 4
        assert math.isnan(odd["nobody_adds"])
        assert np.isnan(odd["nothing_counts"]).tolist() == [True, True]


@each_size
def test_it_goes_on_after_a_result_and_anew_after_a_reset(ranks: int, launched: Any) -> None:
    for rank in range(ranks):
        *results, anew = launched(ranks).json(rank)["odd"]["goes_on"]["result"]
        assert results == [number / 2 for number in range(5)]
        assert math.isnan(anew)


@each_size
def test_after_errors_it_works_as_before(ranks: int, launched: Any) -> None:
    check([launched(ranks).json(rank)["again"] for rank in range(ranks)], evaluations(ranks)["indivisible"])


@each_size
def test_the_guides_evaluation(ranks: int, launched: Any, saw_error: Any) -> None:
    results = [launched(ranks).json(rank)["guide"] for rank in range(ranks)]
    for result in results:
        saw_error("mean of an evaluation", result["error"])
        assert result["error"] <= 1e-13
        assert result["are_all_there"]
        assert result["are_right"]
    own = sorted(sample for result in results for sample in result["own"])
    assert own == list(range(4 * ranks + 1))


@each_size
def test_the_guides_running_statistics(ranks: int, launched: Any) -> None:
    """After it all ranks hold the pooled statistics, each rank's weighted by its samples."""
    results = [launched(ranks).json(rank)["running_statistics"] for rank in range(ranks)]
    means, variances = np.moveaxis(np.array([result["before"] for result in results]), 2, 0)
    counts = chronica_hvd.plan(list(range(1, 60)), ranks, 4, padding="none").counts.sum(axis=0)
    share = (counts / counts.sum())[:, None, None]
    mean = (share * means).sum(axis=0)
    variance = (share * (variances + means**2)).sum(axis=0) - mean**2
    assert len(set(counts)) > 1
    for result in results:
        after = np.array(result["after"])
        np.testing.assert_allclose(after[:, 0], mean, rtol=1e-6)
        np.testing.assert_allclose(after[:, 1], variance, rtol=1e-6)
        assert result["after"] == results[0]["after"]


@each_size
def test_statistics_of_all_ranks_are_exact_with_the_weight_on_the_loss(ranks: int, launched: Any) -> None:
    for rank in range(ranks):
        synchronized = launched(ranks).json(rank)["synchronized"]
        assert len(set(synchronized["False"]["weights"][0])) > 1
        assert synchronized["False"]["error"] <= 1e-10
        assert synchronized["True"]["error"] > 1e-4  # which is why the guide says so
