"""How good plans are, how long planning takes and how much memory it needs, beside FlatFlow 0.0.63 in the same run.

Each row: name, ours, the rivals beside it, the target, whether it is reached. Quality rows are deterministic. Times are
medians over subprocesses that alternate between the tools: with one thread its CPU time, which neighbours on a shared
machine hardly disturb and which is the wall time on an idle one; with all threads the wall time, for an idle machine
only. Ours draws the shuffled order and plans for all ranks; FlatFlow takes the order as it is and returns one rank's
part. Writes bench/results/plan.json, with every run's wall and CPU time. ``make bench-plan`` installs FlatFlow too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import flatflow_rival
import numpy as np
from numpy.typing import NDArray
from plan_case import FLATFLOW, Case

RESULTS = Path(__file__).resolve().parent / "results" / "plan.json"
CORES = len(os.sched_getaffinity(0))
MILLION = 1_000_000
WARM_UP_SAMPLES = 10_240
TEXT_COST = (150.0, 0.0, 1.0, 1 / 2048)


@dataclass(frozen=True)
class Row:
    """One line of the table; a rival's figure is None where it is not installed."""

    name: str
    ours: float
    beside: dict[str, float | None] = field(default_factory=dict)
    target: float | None = None
    target_ratio: float | None = None  # of ours to FlatFlow's
    unit: str = ""
    runs: dict[str, Any] = field(default_factory=dict)  # tool → a pair per run: wall and CPU seconds

    @property
    def reached(self) -> str:
        """Say whether the targets are reached, as far as that can be told."""
        rival = self.beside.get("FlatFlow")
        if self.target is not None and self.ours > self.target:
            return "no"
        if self.target_ratio is not None:
            return "no rival" if rival is None else "yes" if self.ours <= self.target_ratio * rival else "no"
        return "" if self.target is None else "yes"

    def text(self, value: float | None) -> str:
        """Return a figure with its unit."""
        digits = {"s": 3, "B": 1}.get(self.unit, 5)
        return "not installed" if value is None else f"{value:.{digits}f}{' ' if self.unit else ''}{self.unit}"

    def line(self) -> str:
        """Return the line of the table."""
        targets = [] if self.target is None else [f"≤ {self.target:g}{' ' if self.unit else ''}{self.unit}"]
        targets += [] if self.target_ratio is None else [f"≤ {self.target_ratio:g}×"]
        beside = ", ".join(f"{name} {self.text(value)}" for name, value in self.beside.items())
        return f"{self.name:<46}{self.text(self.ours):>11}   {beside:<39}{' and '.join(targets):<21}{self.reached}"


def against_bound() -> list[Row]:
    """Σ makespan ÷ Σ lower bound, without padding."""
    targets = {"free": 1.0002, "equal": 1.002}
    none = {"padding": "none"}
    cases = [
        (f"{counts} counts, {ranks} ranks", Case(2**17, ranks, 256 // ranks, options=none), counts, targets[counts])
        for counts in targets
        for ranks in (8, 32)
    ]
    slow = Case(2**17, 4, 64, speeds=(1.0, 1.0, 1.0, 0.5), options=none)
    cases.append(("free counts, one of 4 ranks slow", slow, "free", 1.0005))
    rows = []
    for name, case, counts, target in cases:
        plan = case.but(local_batch=counts).plan_in_order()
        bound = float(plan.lower_bounds.sum())
        beside = {"FlatFlow": None if FLATFLOW is None else case.flatflow() / bound, "plain": case.plain() / bound}
        rows.append(Row(f"optimality, {name}", plan.optimality, beside, target))
    return rows


def padded() -> list[Row]:
    """Σ makespan of padded batches ÷ what the same samples cost a rank without padding."""
    case = Case(2**17, 8, 32, mu=6.0, cut=4096, cost=TEXT_COST)
    ideal = float(case.model().sample_costs(case.sizes()).sum()) / case.ranks
    plain: dict[str, float | None] = {"plain": case.plain() / ideal}

    def row(name: str, target: float | None, **options: Any) -> Row:
        plan = case.but(**options).plan_in_order()
        return Row(name, float(plan.makespans.sum()) / ideal, plain, target)

    return [
        row("padded ÷ unpadded work, micro-batches", 1.06, micro_batches="auto"),
        row("padded ÷ unpadded work, the same, pad_to=64", None, micro_batches="auto", pad_to=64),
        row("padded ÷ unpadded work, one batch per rank", None),
    ]


def window() -> list[Row]:
    """Σ makespan ÷ Σ mean load where one sample outweighs a rank."""
    case = Case(2**17, 32, 4, mu=6.0, cost=(0.0, 0.0, 1.0, 1 / 2048), options={"padding": "none"})
    batch = case.plan_in_order()
    plan = case.but(reorder="window", window=64, max_moved=0.25).plan_in_order()
    beside: dict[str, float | None] = {'reorder="batch"': batch.imbalance}
    return [
        Row("makespan ÷ mean, heavy tail, window of 64", plan.imbalance, beside, 1.01),
        Row("share of samples moved, the same", plan.moved, {}, 0.25),
    ]


def timing(rounds: int, huge: bool) -> list[Row]:
    """Median seconds of planning, per million samples."""
    case = Case(MILLION, 32, 32, options={"padding": "none"})
    padded = dataclasses.replace(case, cost=TEXT_COST).but(padding="max")
    both, alone = ("FlatFlow", "ours"), ("ours",)
    jobs: dict[str, tuple[Case, int, tuple[str, ...]]] = {
        "plan 1 M samples, 32 ranks, 1 thread": (case, 1, both),
        f"plan 1 M samples, 32 ranks, {CORES} threads": (case, CORES, both),
        "plan 1 M samples, equal counts, 1 thread": (case.but(local_batch="equal"), 1, both),
        "plan 1 M samples, padded, 1 thread": (padded, 1, alone),
        "plan 1 M samples, micro-batches, 1 thread": (padded.but(micro_batches="auto"), 1, alone),
        "plan 1 M samples, window of 64, 1 thread": (case.but(reorder="window"), 1, alone),
        "plan 10 M samples, 1 thread, per million": (dataclasses.replace(case, samples=10 * MILLION), 1, both),
    }
    if huge:
        large = dataclasses.replace(case, samples=100 * MILLION)
        jobs["plan 100 M samples, 1 thread, per million"] = (large, 1, alone)
    runs: dict[str, dict[str, list[list[float]]]] = {name: {tool: [] for tool in jobs[name][2]} for name in jobs}
    for _ in range(rounds):
        for name, (job, threads, tools) in jobs.items():
            for tool in tools:
                seconds = in_subprocess("seconds", tool, job, threads)
                runs[name][tool] += [
                    [wall * MILLION / job.samples, cpu * MILLION / job.samples] for wall, cpu in seconds
                ]
    rows = []
    for name, by_tool in runs.items():
        clock = 1 if jobs[name][1] == 1 else 0
        rivals = ((tool, pairs) for tool, pairs in by_tool.items() if tool != "ours")
        figures = {tool: median(run[clock] for run in pairs) if pairs else None for tool, pairs in rivals}
        ours = median(run[clock] for run in by_tool["ours"])
        target, ratio = (0.15, 0.6) if "32 ranks" in name else (None, None)
        rows.append(Row(name, ours, figures, target, ratio, unit="s", runs=by_tool))
    return rows


def memory() -> list[Row]:
    """Peak bytes per sample: peak resident memory while planning 4 M samples, less what was resident before.

    A process of its own reads the sizes from a memory map and touches all its pages before the first reading. Peak and
    resident are VmHWM and VmRSS of /proc/self/status: ru_maxrss would start at the parent's peak. The plan is included.
    """
    case = Case(4 * MILLION, 32, 32, options={"padding": "none"})
    cut = dataclasses.replace(case, cost=TEXT_COST).but(padding="max", micro_batches="auto")
    ours, in_cuts, theirs = (
        in_subprocess("bytes", tool, each, 1) for tool, each in (("ours", case), ("ours", cut), ("FlatFlow", case))
    )
    beside = {"FlatFlow, 1 of 32 parts": theirs[0] if theirs else None}
    return [
        Row("peak memory per sample", ours[0], beside, 64.0, unit="B"),
        Row("peak memory per sample, micro-batches", in_cuts[0], {}, 64.0, unit="B"),
    ]


def in_subprocess(what: str, tool: str, case: Case, threads: int) -> list[Any]:
    """Measure in a process of its own; empty if the tool is not installed."""
    limits = {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "RAYON")} | {"CHRONICA_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sizes"
        case.sizes().tofile(path)
        job = json.dumps({"what": what, "tool": tool, "path": str(path), "case": dataclasses.asdict(case)})
        command = [sys.executable, __file__, "--worker", job]
        run = subprocess.run(command, env={**os.environ, **limits}, stdout=subprocess.PIPE, check=True)
    return list(json.loads(run.stdout))


def work(what: str, tool: str, path: str, case: dict[str, Any]) -> list[Any]:
    """Measure in this process: wall and CPU seconds of one to three runs, or peak bytes per sample."""
    sizes: NDArray[np.int64] = np.memmap(path, dtype=np.int64, mode="r")
    run: Callable[[NDArray[np.int64]], Any] = Case(**case).plan
    if tool == "FlatFlow":
        if FLATFLOW is None:
            return []
        run = partial(flatflow_rival.schedule, FLATFLOW, flatflow_rival.graph(), case["ranks"], case["batch"], 0)
    run(sizes[:WARM_UP_SAMPLES])
    if what == "bytes":
        sizes.sum()
        before = resident("VmRSS")
        plan = run(sizes)
        peak = resident("VmHWM")
        del plan
        return [(peak - before) / len(sizes)]
    sizes = np.array(sizes)
    seconds = []
    for _ in range(4 if len(sizes) <= MILLION else 2):
        wall, cpu = time.perf_counter(), time.process_time()
        run(sizes)
        seconds.append([time.perf_counter() - wall, time.process_time() - cpu])
    return seconds[1:]


def resident(name: str) -> int:
    """Return a figure of /proc/self/status in bytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def machine() -> dict[str, Any]:
    """Say what was measured where."""
    models = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return {
        "cpu": next(models, platform.machine()).split(":")[-1].strip(),
        "cores": CORES,
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "chronica_hvd": metadata.version("chronica-hvd"),
        "flatflow": None if FLATFLOW is None else FLATFLOW.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often the timed subprocesses alternate (default: 5)")
    parser.add_argument("--huge", action="store_true", help="plan 100 M samples too (about 8 GB)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(**json.loads(options.worker))))
        return
    described = machine()
    print(", ".join(f"{name} {value}" for name, value in described.items()), end="\n\n")
    rows: list[Row] = []
    for part in (against_bound, padded, window, lambda: timing(options.rounds, options.huge), memory):
        for row in part():
            print(row.line(), flush=True)
            rows.append(row)
    result = {"machine": described, "rows": [{**dataclasses.asdict(row), "reached": row.reached} for row in rows]}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
