"""A sample of the random jobs on real ranks: no wrong gradient, no lost sample; ranks in one process do the same."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
from collections.abc import Callable

import pytest
from job_check import LIMITS, check, relative_error
from job_training import Trained, trained_within
from launch import Launch, horovodrun, succeeded
from random_jobs import Job, random_job

pytestmark = pytest.mark.parallel

JOBS = 40
every_job = pytest.mark.parametrize(("ranks", "number"), [(ranks, n) for ranks in (2, 3) for n in range(JOBS)])


def of_ranks(ranks: int) -> list[Job]:
    return [random_job(number, ranks) for number in range(JOBS)]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Launch]:
    """All jobs of a number of ranks, in one launch."""

    @functools.cache
    def launch(ranks: int) -> Launch:
        folder = tmp_path_factory.mktemp(f"{ranks}-ranks")
        (folder / "jobs.json").write_text(json.dumps([dataclasses.asdict(job) for job in of_ranks(ranks)]))
        return horovodrun(ranks, "train_random_jobs", folder, timeout_s=400.0)

    return lambda ranks: succeeded(launch(ranks))


@every_job
def test_a_random_job_of_ranks_equals_a_single_process(
    ranks: int, number: int, launched: Callable[[int], Launch]
) -> None:
    check(random_job(number, ranks), _trained(launched(ranks), ranks, number))


@every_job
def test_ranks_in_one_process_do_what_ranks_do(ranks: int, number: int, launched: Callable[[int], Launch]) -> None:
    """Else what they prove would prove nothing of real ones."""
    job = random_job(number, ranks)
    for real_leg, leg in zip(_trained(launched(ranks), ranks, number), trained_within(job), strict=True):
        for real, played in zip(real_leg, leg, strict=True):
            if not job.follows_times:  # which are never the same
                assert real.taken == played.taken
            for name, values in real.parameters.items():
                assert relative_error(values, played.parameters[name]) <= 2 * LIMITS[job.dtype]


def _trained(launch: Launch, ranks: int, number: int) -> list[list[Trained]]:
    """Return what became of each leg, on each rank."""
    files = [launch.folder / f"{number}.{rank}.pickle" for rank in range(ranks)]
    return [list(leg) for leg in zip(*(pickle.loads(file.read_bytes()) for file in files), strict=True)]
