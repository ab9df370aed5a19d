"""Real ranks, one of them slow: it is named, gets less after one refresh, and its share back when it has recovered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import horovodrun

pytestmark = pytest.mark.parallel


RANKS = 2


def epochs(case: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    launch = horovodrun(ranks, "feedback", folder, case)
    assert launch.status == 0, launch.output
    every = [launch.json(rank) for rank in range(ranks)]
    assert all(other == every[0] for other in every[1:]), "all ranks plan and report alike"
    return every[0]  # type: ignore[no-any-return]


def names(epoch: dict[str, Any]) -> set[tuple[int, str]]:
    return {(one["rank"], one["cause"]) for one in epoch["stragglers"]}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_slow_device(ranks: int, tmp_path: Path) -> None:
    even, slow, relieved, recovered, again = epochs("device", ranks, tmp_path)
    last = ranks - 1
    # As long as nobody knows, the others wait; then not much longer than when all are alike.
    assert slow["idle_share"] > 0.2
    assert relieved["idle_share"] < even["idle_share"] + 0.05
    assert recovered["idle_share"] > 0.15
    assert again["idle_share"] < even["idle_share"] + 0.05
    for epoch, factor in ((even, 1.0), (slow, 2.0), (relieved, 2.0), (recovered, 1.0), (again, 1.0)):
        assert epoch["slowdown"][last] == pytest.approx(factor, rel=0.02)
        assert ((last, "device") in names(epoch)) == (factor == 2.0)
    assert slow["work"][last] == pytest.approx(1 / ranks, rel=0.1)
    for epoch in (relieved, recovered):  # half as much work as the others have
        assert epoch["work"][last] == pytest.approx(0.5 / (ranks - 0.5), rel=0.15)
    assert again["work"][last] == pytest.approx(1 / ranks, rel=0.15)
    assert f"rank {last} " in slow["text"]
    assert slow["text"].count("device:") == 1


def test_a_slow_device_within_an_epoch(tmp_path: Path) -> None:
    (epoch,) = epochs("blocks", RANKS, tmp_path)
    assert (RANKS - 1, "device") in names(epoch)
    assert epoch["work"][-1] == pytest.approx(0.5 / (RANKS - 0.5), rel=0.15)  # of what was planned last


def test_a_slow_loader(tmp_path: Path) -> None:
    for epoch in epochs("input", RANKS, tmp_path):
        assert (RANKS - 1, "input") in names(epoch)
        assert epoch["data_wait"][-1] > 2 * max(epoch["data_wait"][:-1])


def test_long_samples(tmp_path: Path) -> None:
    for epoch in epochs("data", RANKS, tmp_path):
        assert (0, "data") in names(epoch)
        assert epoch["predicted_idle_share"] > 0.2
