"""One slow rank: its compute takes long, the others' does not, and they wait in ``synchronize()``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import micro_batched
from launch import launched_once
from training import Data

pytestmark = pytest.mark.parallel

launched = launched_once("timing")


def arrays(values: dict[str, list[int]]) -> dict[str, np.ndarray]:
    return {name: np.array(value, dtype=np.int64) for name, value in values.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_compute_leaves_out_the_wait_for_a_slow_rank(ranks: int, launched: Any) -> None:
    """All on one machine, so on one clock: the order of events says it, however busy the machine is."""
    plan = Data(micro_batched(ranks, "timing"), ranks).plan(epoch=0)
    of_ranks = [launched(ranks).json(rank) for rank in range(ranks)]
    computed = [np.zeros(plan.steps, dtype=np.int64) for _ in range(ranks)]
    waited = []
    for rank, result in enumerate(of_ranks):
        records, steps = arrays(result["micro_batches"]), arrays(result["steps"])
        batches = [batch for step in range(plan.steps) for batch in plan.batches(step, rank)]
        assert records["samples"].tolist() == list(map(len, batches))
        assert steps["step"].tolist() == list(range(plan.steps))
        assert records["step"].tolist() == [step for step in range(plan.steps) for _ in plan.batches(step, rank)]
        ends = records["start_ns"] + records["elapsed_ns"]
        assert (ends <= result["through"]).all()
        np.maximum.at(computed[rank], records["step"], ends)  # when the step's compute was over
        assert (computed[rank] <= steps["finished_ns"] - steps["synchronize_ns"]).all()
        assert (steps["data_wait_ns"] > 0).all()
        waited.append(steps)
    for rank in range(ranks - 1):
        # No step is finished before the slow rank's compute is over, and until then the others wait.
        assert (waited[rank]["finished_ns"] >= computed[-1]).all()
        # In most steps: in the first one everybody waits for whoever started last.
        assert np.median(waited[rank]["synchronize_ns"]) > np.median(waited[-1]["synchronize_ns"])
    slow = arrays(of_ranks[-1]["micro_batches"])["elapsed_ns"]
    assert (slow >= 50_000_000).all()
