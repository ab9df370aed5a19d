"""What following measured times is worth: two ranks train the example's model, and plans follow what they take.

A slow rank: while another process competes for the last rank's core, its share of the work and what the ranks idle, by
epoch, beside what they idle when both compute the same batches. Kinds of cost: what ranks idle with plans by size, by
FLOPs and by measured times, by turns; and how far the fitted cost is off for micro-batches that it has not seen, beside
how far the times of one shape are off their median when it is repeated. Writes bench/results/feedback.json.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from launch import KEEP_MEMORY, horovodrun

RESULTS = Path(__file__).resolve().parent / "results" / "feedback.json"
JOB = Path(__file__).with_name("feedback_job.py")
TIMEOUT_S = 600


def measured(part: str, folder: Path) -> Any:
    """Return what the job measures of one part."""
    written = folder / f"{part}.json"
    if status := horovodrun(2, JOB, part, str(written), timeout_s=TIMEOUT_S, **KEEP_MEMORY):
        raise SystemExit(f"the job failed with status {status}")
    return json.loads(written.read_text())


def main() -> None:
    """Measure, print, write."""
    with tempfile.TemporaryDirectory() as folder:
        slow_rank, by_cost = (measured(part, Path(folder)) for part in ("slow-rank", "by-cost"))
    print("\nepoch  competing load  work of the last rank    idle  same batches  named")
    for epoch in slow_rank:
        named = ", ".join(f"rank {one['rank']}: {one['cause']}, {one['factor']:.2f}x" for one in epoch["stragglers"])
        print(
            f"{epoch['epoch']:5}  {'yes' if epoch['loaded'] else 'no':>14}  {epoch['share'][-1]:21.1%}"
            f"{epoch['idle_share']:8.1%}{epoch['floor']:14.1%}  {named}"
        )
    print("\nidle, median of the epochs: ", end="")
    print(", ".join(f"by {name} {median(shares):.1%}" for name, shares in by_cost["idle_share"].items()), end="")
    print(f"; both computing the same batches {by_cost['floor']:.1%}")
    for rank, (error, repeat) in enumerate(zip(by_cost["prediction_error"], by_cost["repeat_error"], strict=True)):
        print(
            f"rank {rank}: micro-batches predicted to within {error:.1%}, repeated ones vary by {repeat:.1%} (medians)"
        )
    print(by_cost["cost"])
    RESULTS.write_text(json.dumps({"slow_rank": slow_rank, "by_cost": by_cost}, indent=1) + "\n")
    print(f"written to {RESULTS.relative_to(RESULTS.parent.parent.parent)}")


if __name__ == "__main__":
    main()
