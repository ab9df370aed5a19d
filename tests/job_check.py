"""How what ranks have made of a random job is held against what one process makes of it."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from job_model import LEAST_AT_FIRST
from job_reference import reference
from job_training import Trained
from numpy.typing import NDArray
from random_jobs import Job

LIMITS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-12}  # on relative L2 errors: another order of summation


def check(job: Job, legs: list[list[Trained]]) -> dict[str, float]:
    """Compare what the ranks have trained with one process; returns what was compared → error ÷ allowed error."""
    state = legs[0][0].checkpoint and legs[0][0].checkpoint["sampler"]
    largest: dict[str, float] = {}
    for leg, ranks, expected in zip(job.legs, legs, reference(job, state), strict=True):
        assert len(ranks) == leg.ranks
        _check_batches(leg, ranks, expected)
        for trained in ranks[1:]:
            _check_equal(trained, ranks[0])
        errors = dict(_errors(leg, ranks, expected))
        wrong = {what: error for what, error in errors.items() if not error <= 1.0}  # a NaN is wrong
        assert not wrong, f"error ÷ allowed error: {wrong}"
        for what, error in errors.items():
            largest[what] = max(error, largest.get(what, 0.0))
    return largest


def _check_equal(trained: Trained, other: Trained) -> None:
    """What every rank must have alike."""
    assert list(trained.parameters) == list(other.parameters)
    for name in other.parameters:
        np.testing.assert_array_equal(trained.parameters[name], other.parameters[name])
        np.testing.assert_array_equal(trained.all_gradients(name), other.all_gradients(name))
    np.testing.assert_array_equal(trained.losses, other.losses)
    np.testing.assert_array_equal(trained.evaluations, other.evaluations)
    if other.checkpoint is not None:
        assert trained.checkpoint["sampler"] == other.checkpoint["sampler"]


def _check_batches(job: Job, ranks: list[Trained], expected: Trained) -> None:
    """Each sample of a step is taken once, over all ranks, but by ranks that have a filler."""
    least = job.plan["min_local_batch"]
    for trained in ranks:
        assert len(trained.taken) == len(trained.fillers) == len(expected.taken)
    for step, (samples,) in enumerate(expected.taken):
        held = [sorted(itertools.chain(*trained.taken[step])) for trained in ranks]
        real = [indices for indices, trained in zip(held, ranks, strict=True) if not trained.fillers[step]]
        taken = sorted(itertools.chain(*real))
        if step in job.skips:  # maybe in its middle
            assert not collections.Counter(taken) - collections.Counter(samples), f"step {step}"
            continue
        assert taken == samples, f"step {step}"
        fillers = [len(indices) for indices, trained in zip(held, ranks, strict=True) if trained.fillers[step]]
        assert fillers == [least] * len(fillers)
        assert len(samples) < job.ranks * least or min(map(len, held)) >= least, f"step {step} needs no filler"


def _errors(job: Job, ranks: list[Trained], expected: Trained) -> Iterator[tuple[str, float]]:
    """Yield what is compared, and the error ÷ what is allowed."""
    limit = LIMITS[job.dtype]
    trained = ranks[0]
    yield "losses", relative_error(np.array(trained.losses), np.array(expected.losses)) / limit
    yield "evaluation", relative_error(np.array(trained.evaluations), np.array(expected.evaluations)) / limit
    for name in expected.parameters:
        found, wanted = trained.all_gradients(name), expected.all_gradients(name)
        assert found.shape == wanted.shape, f"updates of {name}"
        if job.is_rounded:
            allowed = _rounding(job, ranks, expected.all_magnitudes(name))
            yield f"gradients of {name}", float(np.max(np.abs(found - wanted) / allowed, initial=0.0))
        else:
            yield f"gradients of {name}", relative_error(found, wanted) / limit
        change = trained.parameters[name] - expected.parameters[name]
        # Training may bring them near 0, but not their rounding.
        scale = max(LEAST_AT_FIRST, float(np.linalg.norm(expected.parameters[name])))
        yield name, float(np.linalg.norm(change)) / scale / limit


def _rounding(job: Job, ranks: list[Trained], magnitudes: NDArray[Any]) -> NDArray[Any]:
    """Return what half precision may lose.

    In float16 each rank's part is rounded, scaled twice, and added to the others'; in bfloat16 the gradient of each
    loss is rounded, weighed and added to the others of its rank, and the ranks' sum is rounded and maybe corrected.
    Each loses half a unit in the last of 11 or 8 bits, of no more than the parts' magnitudes together; numbers that are
    too small for float16 a fixed amount.
    """
    allowed = np.zeros(())
    if job.is_compressed:
        allowed = (job.ranks + 4) * (2.0**-11 * magnitudes + 2.0**-23)
    if job.dtype == "bfloat16":
        passes = (
            job.losses
            * job.steps_per_update
            * max((len(step) for trained in ranks for step in trained.taken), default=0)
        )
        allowed = allowed + (passes + 4) * 2.0**-8 * magnitudes + 2.0**-120
    return allowed


def relative_error(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    return float(np.linalg.norm(found - wanted) / (np.linalg.norm(wanted) or 1.0))
