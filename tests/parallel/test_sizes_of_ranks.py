"""Sizes measured by real ranks: each sample once, and not again after ranks were killed; errors, never hangs."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import Launch, horovodrun, succeeded
from measuring import LENGTHS, READ_UNTIL_ENDED

from chronica_hvd.sizes import PROBES

pytestmark = pytest.mark.parallel

each_size = pytest.mark.parametrize("ranks", [2, 3])


@pytest.fixture
def launch(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Any:
    """Return a function that runs a scenario on so many ranks, all on one cache."""

    def run(ranks: int, scenario: str) -> Launch:
        folder = tmp_path_factory.mktemp(scenario)
        return horovodrun(ranks, "sizes", folder, scenario, str(tmp_path / "sizes"))

    return run


def results(launched: Launch, ranks: int) -> list[dict[str, Any]]:
    return [succeeded(launched).json(rank) for rank in range(ranks)]


def check(of_ranks: list[dict[str, Any]], reads: int) -> None:
    """Every rank has all sizes, and together they have read so many samples."""
    for result in of_ranks:
        assert result["sizes"] == LENGTHS
    assert sum(len(result["read"]) for result in of_ranks) == reads


def kept(folder: Path) -> int:
    """Return how many samples the part files hold."""
    return sum((len(path.read_bytes().split(b"\n", 1)[1]) // 16) for path in folder.glob("*.part-*"))


def probes(ranks: int) -> int:
    return ranks * math.ceil(PROBES / ranks)


@each_size
def test_every_sample_is_read_once_by_all_ranks_together(ranks: int, launch: Any, tmp_path: Path) -> None:
    of_ranks = results(launch(ranks, "all"), ranks)
    check(of_ranks, len(LENGTHS))
    assert sorted(sample for result in of_ranks for sample in result["read"]) == list(range(len(LENGTHS)))
    check(results(launch(2, "again"), 2), probes(2))
    assert [path.name for path in tmp_path.iterdir()] == ["sizes"]


@pytest.mark.parametrize("scenario", ["killed", "interrupted"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_ranks_that_are_ended_are_gone_on_from(
    scenario: str, before: int, after: int, launch: Any, tmp_path: Path
) -> None:
    ended = launch(before, scenario)
    assert ended.status not in (0, None), ended.output
    number = kept(tmp_path)
    # Each has kept what it had measured a moment before at the latest.
    assert READ_UNTIL_ENDED // 2 <= number < len(LENGTHS)
    check(results(launch(after, "all"), after), len(LENGTHS) - number + probes(after))
    assert [path.name for path in tmp_path.iterdir()] == ["sizes"]


@each_size
def test_an_error_on_one_rank_is_raised_on_every_rank(ranks: int, launch: Any, tmp_path: Path) -> None:
    of_ranks = results(launch(ranks, "broken"), ranks)
    (kind, message), *others = [result["error"] for result in of_ranks]
    assert others == [[kind, message]] * (ranks - 1)
    assert kind == "RuntimeError"
    sample = READ_UNTIL_ENDED * ranks + ranks - 1
    assert message == f"on rank {ranks - 1}, reading sample {sample} failed: OSError: no file {sample}"
    number = sum(len(result["read"]) for result in of_ranks)
    assert kept(tmp_path) == number
    check(results(launch(ranks, "all"), ranks), len(LENGTHS) - number + probes(ranks))


def test_a_process_set_measures_among_itself(launch: Any) -> None:
    nothing, *of_ranks = results(launch(3, "process-set"), 3)
    assert nothing is None
    check(of_ranks, len(LENGTHS))


def test_ranks_without_a_shared_disk(launch: Any, tmp_path: Path) -> None:
    check(results(launch(2, "apart"), 2), len(LENGTHS))
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["sizes-of-0", "sizes-of-1"]
    assert files[0].read_bytes() == files[1].read_bytes()
    files[0].unlink()
    check(results(launch(3, "apart"), 3), probes(3))
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    assert len(list(tmp_path.iterdir())) == 3


def test_two_jobs_at_once_on_one_cache(launch: Any, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        for launched in pool.map(lambda ranks: launch(ranks, "all"), [2, 2]):
            for result in results(launched, 2):
                assert result["sizes"] == LENGTHS
            assert not re.search("damaged|cannot be", launched.output)
    content = (tmp_path / "sizes").read_bytes().split(b"\n", 1)[1]
    assert np.frombuffer(content, "<f8").reshape(-1, 2)[:, 1].tolist() == LENGTHS
    check(results(launch(2, "again"), 2), probes(2))
    assert [path.name for path in tmp_path.iterdir()] == ["sizes"]
