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
from typing import Any, NamedTuple

from gpu_check import machine, runner
from gpu_check.block import Setting
from gpu_check.report import Report

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0
#: A block that would have less is not begun.
LEAST_S = 3.0
MACHINE_BUDGET_S = 60.0


class Block(NamedTuple):
    """A part of the check: a function, as ``module:function``, that is called with the setting."""

    name: str
    target: str
    budget_s: float
    needs_cuda: bool = False


BUILD = Block("build", "gpu_check.build:run", 180)
BLOCKS = (
    Block("accuracy", "gpu_check.accuracy:run", 40),
    Block("cost", "gpu_check.cost:run", 40),
    Block("capture", "gpu_check.capture:run", 80, needs_cuda=True),
    Block("streams", "gpu_check.streams:run", 40, needs_cuda=True),
    Block("threads", "gpu_check.threads:run", 80),
    Block("end_of_compute", "gpu_check.end_of_compute:run", 40),
    Block("asynchronous", "gpu_check.asynchronous:run", 40, needs_cuda=True),
    Block("surface", "gpu_check.surface:run", 60),
    Block("virtual_ranks", "gpu_check.virtual_ranks:run", 90),
    Block("compiling", "gpu_check.compiling:run", 90),
)


def main(given: Sequence[str] | None = None, blocks: Sequence[Block] = BLOCKS) -> int:
    """Run the blocks; returns 0 if every one ran and every criterion holds, else 1."""
    options = arguments(given, blocks)
    chosen = [block for block in blocks if block.name in options.blocks]
    if options.installed:
        return check(options, chosen, None)
    with tempfile.TemporaryDirectory() as package:
        return check(options, [BUILD, *chosen], Path(package))


def check(options: argparse.Namespace, blocks: Sequence[Block], package: Path | None) -> int:
    """Run these blocks, the package being built into a folder or, without one, installed."""
    end = time.monotonic() + options.limit_s
    left_out = [block.name for block in blocks if block.needs_cuda and options.device == "cpu"]
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
    _print("machine", about.get("error", about.get("summary")))
    if "error" in about:
        print(f"nothing can be checked here; the report is {options.output}")
        return 1
    for block in blocks:
        if block.name in left_out:
            continue
        report.begin(block.name)
        left_s = end - time.monotonic()
        if left_s < LEAST_S:
            entry = {"seconds": 0.0, "error": f"no time is left of the {options.limit_s:.0f} s"}
        else:
            setting = Setting(options.device, options.quick, package, report.figures())
            entry = runner.run(block.target, setting, min(block.budget_s, left_s))
        report.add(block.name, entry)
        _print(
            block.name, f"{_verdict(entry):<5} {entry['seconds']:5.1f} s  {entry.get('error', entry.get('summary'))}"
        )
    passed = report.finish()
    print(f"{'passed' if passed else 'NOT PASSED'}; the report is {options.output}")
    return 0 if passed else 1


def _verdict(entry: dict[str, Any]) -> str:
    if "error" in entry:
        return "ERROR"
    if "ok" not in entry:
        return "-"
    return "ok" if entry["ok"] else "WRONG"


def _print(name: str, line: Any) -> None:
    print(f"{name:<16} {line}", flush=True)


def arguments(given: Sequence[str] | None, blocks: Sequence[Block]) -> argparse.Namespace:
    """Read the command line."""
    names = [block.name for block in blocks]
    parser = argparse.ArgumentParser(prog="gpu_check", description="Check the timing on a GPU, block by block.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the check itself")
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats")
    parser.add_argument("--blocks", nargs="+", choices=names, default=names, metavar="BLOCK", help=", ".join(names))
    parser.add_argument("--installed", action="store_true", help="check the package that is installed, build none")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "gpu.json", help="the report")
    parser.add_argument("--commit", help="what is checked, where git cannot say")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help=f"seconds for everything (default: {LIMIT_S:g})")
    return parser.parse_args(given)


if __name__ == "__main__":
    # So that an end from outside, as Ctrl-C does, passes the places that end what was started.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
