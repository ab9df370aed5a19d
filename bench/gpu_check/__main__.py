"""Command line: runs the blocks one after the other and keeps the report; see scripts/gpu_check.sh."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from gpu_check import machine, runner
from gpu_check.block import Setting
from gpu_check.report import Report

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0
#: A block that would have less is not begun.
LEAST_S = 3.0
MACHINE_BUDGET_S = 60.0


class Block(NamedTuple):
    """A part of the check: a module whose ``run`` is called with the setting."""

    name: str
    module: str
    budget_s: float
    needs_cuda: bool = False


BLOCKS = (
    Block("build", "gpu_check.build", 180),
    Block("accuracy", "gpu_check.accuracy", 40),
    Block("cost", "gpu_check.cost", 40),
    Block("capture", "gpu_check.capture", 80, needs_cuda=True),
    Block("streams", "gpu_check.streams", 40, needs_cuda=True),
    Block("threads", "gpu_check.threads", 80),
    Block("end_of_compute", "gpu_check.end_of_compute", 40),
    Block("asynchronous", "gpu_check.asynchronous", 40, needs_cuda=True),
    Block("surface", "gpu_check.surface", 60),
    Block("virtual_ranks", "gpu_check.virtual_ranks", 90),
    Block("compiling", "gpu_check.compiling", 90),
)


def main(given: Sequence[str] | None = None, blocks: Sequence[Block] = BLOCKS) -> int:
    """Run the blocks; returns 0 if every one ran and every criterion holds, else 1."""
    options = arguments(given, blocks)
    with tempfile.TemporaryDirectory() as folder:
        return check(options, blocks, Path(folder) if "build" in options.blocks else None)


def check(options: argparse.Namespace, blocks: Sequence[Block], package: Path | None) -> int:
    """Run the chosen blocks, the package being built into a folder or, without one, installed."""
    end = time.monotonic() + options.limit_s
    chosen = [block for block in blocks if block.name in options.blocks]
    left_out = [block.name for block in chosen if block.needs_cuda and options.device == "cpu"]
    heading = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": options.commit or machine.commit(ROOT),
        "device": options.device,
        "quick": options.quick,
        "left_out": left_out,
    }
    report = Report(options.output, heading)
    setting = Setting(options.device, options.quick, package)
    about = runner.run("gpu_check.machine:run", setting, min(MACHINE_BUDGET_S, options.limit_s))
    report.put("machine", about.get("figures", about))
    print(f"{'machine':<16}{about.get('summary', about.get('error'))}", flush=True)
    if "error" in about:
        print(f"nothing can be checked here; the report is {options.output}")
        return 1
    for block in chosen:
        if block.name in left_out:
            continue
        report.begin(block.name)
        left_s = end - time.monotonic()
        if left_s < LEAST_S:
            entry = {"seconds": 0.0, "error": f"no time is left of the {options.limit_s:.0f} s"}
        else:
            setting = Setting(options.device, options.quick, package, report.figures())
            entry = runner.run(f"{block.module}:run", setting, min(block.budget_s, left_s))
        report.add(block.name, entry)
        verdict = "ERROR" if "error" in entry else "-" if "ok" not in entry else "ok" if entry["ok"] else "WRONG"
        print(
            f"{block.name:<16}{verdict:<6}{entry['seconds']:6.1f} s  {entry.get('error', entry.get('summary'))}",
            flush=True,
        )
    passed = report.finish()
    print(f"{'passed' if passed else 'NOT PASSED'}; the report is {options.output}")
    return 0 if passed else 1


def arguments(given: Sequence[str] | None, blocks: Sequence[Block]) -> argparse.Namespace:
    """Read the command line."""
    names = [block.name for block in blocks]
    parser = argparse.ArgumentParser(prog="gpu_check", description="Check the timing on a GPU, block by block.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the check itself")
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats")
    parser.add_argument("--blocks", nargs="+", choices=names, default=names, metavar="BLOCK", help=", ".join(names))
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "gpu.json", help="the report")
    parser.add_argument("--commit", help="what is checked, where git cannot say")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help=f"seconds for everything (default: {LIMIT_S:g})")
    return parser.parse_args(given)


if __name__ == "__main__":
    # So that an end from outside, as Ctrl-C does, passes the places that end what was started.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
