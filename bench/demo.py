"""Train the example on two ranks: plain Horovod, balanced, and plain Horovod with batches grouped by length.

The first two have the same seed, start and global batches; grouping by length changes the batches. The quick two run
twice, by turns; the figures are those of the quicker run, and what the other run reached stands below. Writes
build/demo/summary.json (with another cut of the texts than 2048 bytes: build/demo-<cut>/summary.json).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from launch import KEEP_MEMORY, horovodrun

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
SAMPLES = 96 * 32 * RANKS  # 96 steps of 32 samples per rank, no short last step
NOISE_FLOOR_STEPS = 24
TIMEOUT_S = 600

FIGURES = (
    "steps_per_s",
    "tokens_per_s",
    "micro_batches",
    "idle_share",
    "predicted_idle_share",
    "padding_share",
    "final_loss",
)


def train(output: Path, name: str, *options: str) -> dict[str, Any]:
    """Run the example under horovodrun; returns what it wrote into the folder ``output``."""
    summary = output / f"{name}.json"
    summary.unlink(missing_ok=True)
    script = ROOT / "examples" / "train_text.py"
    settings = ("--pin", "--samples", str(SAMPLES), "--mode", name, "--summary", str(summary))
    print(f"{name}: {SAMPLES // (32 * RANKS)} steps on {RANKS} ranks", flush=True)
    with (output / f"{name}.log").open("w") as log:
        status = horovodrun(RANKS, script, *settings, *options, timeout_s=TIMEOUT_S, log=log, **KEEP_MEMORY)
    if status != 0 or not summary.exists():
        raise SystemExit(f"the {name} run failed with status {status}; its output is in {log.name}")
    result: dict[str, Any] = json.loads(summary.read_text())
    return result


def report(plain: dict[str, Any], balanced: dict[str, Any], by_length: dict[str, Any], summary: dict[str, Any]) -> str:
    """Return the runs side by side, and the speed-up as a product of its causes."""
    runs = (plain, balanced, by_length)
    rows = [
        ("", "plain", "balanced", "by length"),
        ("global batches", "as drawn", "as drawn", "changed"),
        ("steps per second", *(f"{run['steps_per_s']:.3f}" for run in runs)),
        ("  the other run", "", *(f"{other:.3f}" for other in summary["other_runs"].values())),
        ("bytes of text per second", *(f"{run['tokens_per_s']:.0f}" for run in runs)),
        ("micro-batches per rank and step", *(f"{run['micro_batches']:.1f}" for run in runs)),
        ("padding in the batches", *(f"{run['padding_share']:.1%}" for run in runs)),
        ("idle, waiting for the other rank", *(f"{run['idle_share']:.1%}" for run in runs)),
        ("  as the cost model predicts", *(f"{run['predicted_idle_share']:.1%}" for run in runs)),
        ("  when both compute the same batches", "", f"{summary['noise_floor']:.1%}", ""),
        ("loss of the last step", *(f"{run['final_loss']:.6f}" for run in runs)),
    ]
    table = "\n".join(f"{name:<37}" + "".join(f"{figure:>12}" for figure in figures) for name, *figures in rows)
    less_work = work_per_step(plain) / work_per_step(balanced)
    less_idle = (1 - balanced["idle_share"]) / (1 - plain["idle_share"])
    return (
        f"{table}\n\n"
        f"speed-up {summary['speedup']:.2f}x = {less_work:.2f}x less padded work, {less_idle:.2f}x by idling, "
        f"{summary['speedup'] / (less_work * less_idle):.2f}x by the rest (loading, allreduce, optimizer); "
        f"{summary['speedup_by_length']:.2f}x grouped by length\n"
        f"largest relative difference of a step's loss to plain: {summary['max_loss_difference']:.1e}"
    )


def work_per_step(run: dict[str, Any]) -> float:
    """Return a rank's mean compute time of a step, in seconds."""
    return float(run["compute_share"] / run["steps_per_s"])


def main() -> None:
    """Run all, print, write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cut", type=int, default=2048, help="cut the texts at this many bytes (default: 2048)")
    cut = parser.parse_args().cut
    output = ROOT / "build" / ("demo" if cut == 2048 else f"demo-{cut}")
    output.mkdir(parents=True, exist_ok=True)
    of_text = ("--cut", str(cut))
    floor = ("--noise-floor", str(NOISE_FLOOR_STEPS))
    balanced, by_length, plain, again_by_length, again_balanced = (
        train(output, "balanced", *of_text, *floor),
        train(output, "by-length", *of_text),
        train(output, "plain", *of_text),
        train(output, "by-length", *of_text),
        train(output, "balanced", *of_text, *floor),
    )
    balanced, other_balanced = quicker_first(balanced, again_balanced)
    by_length, other_by_length = quicker_first(by_length, again_by_length)
    differences = (abs(a - b) / abs(a) for a, b in zip(plain["losses"], balanced["losses"], strict=True))
    summary = {
        "plain": {name: plain[name] for name in FIGURES},
        "balanced": {name: balanced[name] for name in FIGURES},
        "by_length": {name: by_length[name] for name in FIGURES},
        "other_runs": {"balanced": other_balanced["steps_per_s"], "by_length": other_by_length["steps_per_s"]},
        "speedup": balanced["steps_per_s"] / plain["steps_per_s"],
        "speedup_by_length": by_length["steps_per_s"] / plain["steps_per_s"],
        "noise_floor": balanced["noise_floor"],
        "max_loss_difference": max(differences),
    }
    written = output / "summary.json"
    written.write_text(json.dumps(summary, indent=2) + "\n")
    print(f"\n{report(plain, balanced, by_length, summary)}\n\nwritten to {written.relative_to(ROOT)}")


def quicker_first(run: dict[str, Any], again: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two runs of the same training, the quicker first."""
    return (run, again) if run["steps_per_s"] >= again["steps_per_s"] else (again, run)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted; nothing was written") from None
