"""Train the example on two ranks, with plain Horovod and balanced; say what was gained and where it came from.

Both runs have the same seed, the same start and the same global batches. Writes build/demo/summary.json (with another
cut of the texts than 2048 bytes: build/demo-<cut>/summary.json).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
SAMPLES = 96 * 32 * RANKS  # 96 steps of 32 samples per rank, no short last step
NOISE_FLOOR_STEPS = 24
TIMEOUT_S = 600

#: Long texts allocate tens of megabytes at a time. By default glibc returns such memory to the system after every use,
#: and both runs spend much of their time on page faults, by chance more on one rank than on the other.
KEEP_MEMORY = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_threshold": 1 << 32,
    "glibc.malloc.trim_threshold": 1 << 33,
    "glibc.malloc.top_pad": 1 << 30,
}

FIGURES = ("steps_per_s", "tokens_per_s", "idle_share", "predicted_idle_share", "padding_share", "final_loss")


def train(output: Path, name: str, *options: str) -> dict[str, Any]:
    """Run the example under horovodrun; returns what it wrote into the folder ``output``."""
    summary = output / f"{name}.json"
    summary.unlink(missing_ok=True)
    horovodrun = [str(Path(sys.executable).parent / "horovodrun"), "-np", str(RANKS)]
    script = [sys.executable, str(ROOT / "examples" / "train_text.py"), "--pin", "--samples", str(SAMPLES)]
    tunables = ":".join(f"{name}={value}" for name, value in KEEP_MEMORY.items())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": tunables}
    print(f"{name}: {SAMPLES // (32 * RANKS)} steps on {RANKS} ranks", flush=True)
    command = [*horovodrun, *script, "--summary", str(summary), *options]
    with (output / f"{name}.log").open("w") as log:
        # A session of its own: when the demo is interrupted, the launcher and its ranks end with it.
        run = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = run.wait(TIMEOUT_S)
        except BaseException:
            os.killpg(run.pid, 15)
            run.wait()
            raise
    if status != 0 or not summary.exists():
        raise SystemExit(f"the {name} run failed with status {status}; its output is in {log.name}")
    result: dict[str, Any] = json.loads(summary.read_text())
    return result


def report(plain: dict[str, Any], balanced: dict[str, Any], summary: dict[str, Any]) -> str:
    """Return the two runs side by side, and the speed-up as a product of its causes."""
    rows = [
        ("", "plain", "balanced"),
        ("steps per second", f"{plain['steps_per_s']:.3f}", f"{balanced['steps_per_s']:.3f}"),
        ("bytes of text per second", f"{plain['tokens_per_s']:.0f}", f"{balanced['tokens_per_s']:.0f}"),
        ("padding in the batches", f"{plain['padding_share']:.1%}", f"{balanced['padding_share']:.1%}"),
        ("idle, waiting for the other rank", f"{plain['idle_share']:.1%}", f"{balanced['idle_share']:.1%}"),
        (
            "  as the cost model predicts",
            f"{plain['predicted_idle_share']:.1%}",
            f"{balanced['predicted_idle_share']:.1%}",
        ),
        ("  when both compute the same batch", "", f"{summary['noise_floor']:.1%}"),
        ("loss of the last step", f"{plain['final_loss']:.6f}", f"{balanced['final_loss']:.6f}"),
    ]
    table = "\n".join(f"{name:<36}{left:>12}{right:>12}" for name, left, right in rows)
    less_work = work_per_step(plain) / work_per_step(balanced)
    less_idle = (1 - balanced["idle_share"]) / (1 - plain["idle_share"])
    return (
        f"{table}\n\n"
        f"speed-up {summary['speedup']:.2f}x = {less_work:.2f}x less padded work, {less_idle:.2f}x by idling, "
        f"{summary['speedup'] / (less_work * less_idle):.2f}x by the rest (loading, allreduce, optimizer)\n"
        f"largest relative difference of a step's loss: {summary['max_loss_difference']:.1e}"
    )


def work_per_step(run: dict[str, Any]) -> float:
    """Return a rank's mean compute time of a step, in seconds."""
    return float(run["compute_share"] / run["steps_per_s"])


def main() -> None:
    """Run both, print, write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cut", type=int, default=2048, help="cut the texts at this many bytes (default: 2048)")
    cut = parser.parse_args().cut
    output = ROOT / "build" / ("demo" if cut == 2048 else f"demo-{cut}")
    output.mkdir(parents=True, exist_ok=True)
    plain = train(output, "plain", "--cut", str(cut), "--plain")
    balanced = train(output, "balanced", "--cut", str(cut), "--noise-floor", str(NOISE_FLOOR_STEPS))
    differences = (abs(a - b) / abs(a) for a, b in zip(plain["losses"], balanced["losses"], strict=True))
    summary = {
        "plain": {name: plain[name] for name in FIGURES},
        "balanced": {name: balanced[name] for name in FIGURES},
        "speedup": balanced["steps_per_s"] / plain["steps_per_s"],
        "noise_floor": balanced["noise_floor"],
        "max_loss_difference": max(differences),
    }
    written = output / "summary.json"
    written.write_text(json.dumps(summary, indent=2) + "\n")
    print(f"\n{report(plain, balanced, summary)}\n\nwritten to {written.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
