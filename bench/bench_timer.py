"""What we cost: a pair of the timer, our own time in a step of the demo, whole steps beside plain Horovod.

Own time is what a step of the demo's training takes the processor longer with us than the same micro-batches with plain
torch and Horovod, which adds them up unweighed, plus the planning of the epoch spread over its steps; on one rank, as
waiting for another one blurs it by more than it is. The whole steps are on two ranks, of even data, where nothing can
be gained, by the clock on the wall. Always ours and the rival by turns. Writes bench/results/timer.json.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from launch import KEEP_MEMORY, horovodrun

import chronica_hvd as chronica

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "timer.json"
PAIRS, REPEATS = 100_000, 15
DEMO_STEPS, DEMO_EPOCHS, WARM_UP = 96, 2, 4
EVEN_STEPS, EVEN_LENGTH = 320, 192
BATCH_SIZE = 32
TIMEOUT_S = 900


def main() -> None:
    """Time pairs here and steps on ranks; print and write."""
    figures: dict[str, Any] = {"pair_ns": pairs()}
    for name, value in figures["pair_ns"].items():
        print(f"{name:<40}{value:8.1f} ns a pair")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")
    for ranks, job in ((1, "--own-time"), (2, "--whole-steps")):
        status = horovodrun(ranks, Path(__file__), job, timeout_s=TIMEOUT_S, **KEEP_MEMORY)
        if status != 0:
            raise SystemExit(f"the ranks ended with status {status}")


def pairs() -> dict[str, float]:
    """Return the nanoseconds of a start and a stop, loop included: the median of repeats by turns."""
    timer, kept = chronica.StepTimer(), []

    def ours() -> None:
        for step in range(PAIRS):
            timer.start(step=step, samples=32, size=4096, size2=524288, flops=1)
            timer.stop()

    def in_python() -> None:
        for step in range(PAIRS):
            start = time.perf_counter_ns()
            kept.append((step, 32, 4096, 524288, 1, start, time.perf_counter_ns() - start))
        kept.clear()

    kinds: dict[str, Callable[[], None]] = {"StepTimer": ours, "perf_counter_ns and a list": in_python}
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(REPEATS):
        for name, loop in kinds.items():
            begin = time.perf_counter_ns()
            loop()
            taken[name].append((time.perf_counter_ns() - begin) / PAIRS)
    return {name: median(values) for name, values in taken.items()}


def rank(job: str) -> None:
    """Measure on one of the ranks; rank 0 prints and writes."""
    sys.path.insert(0, str(ROOT / "examples"))
    import horovod.torch as hvd
    from train_text import pin_to_core

    pin_to_core()
    torch.set_num_threads(1)
    hvd.init()
    name, measure, line = JOBS[job]
    figures = measure()
    if hvd.rank() == 0:
        print(line.format(**figures))
        RESULTS.write_text(json.dumps({**json.loads(RESULTS.read_text()), name: figures}, indent=2) + "\n")


def own_time() -> dict[str, float]:
    """Train steps of the demo, balanced in micro-batches: by us, and the same batches by plain torch and Horovod."""
    import horovod.torch as hvd
    from measuring import calibrate
    from stdlib_text import Functions
    from text_model import ByteTransformer, mean_loss
    from train_text import HEADS, pad

    torch.manual_seed(0)
    dataset = Functions(2048, DEMO_STEPS * BATCH_SIZE * hvd.size())
    models = {name: ByteTransformer(32, HEADS, longest=2048) for name in ("ours", "plain")}
    cost = calibrate(lambda text, lengths: mean_loss(models["plain"], text, lengths), dataset.sizes, BATCH_SIZE)
    begin = time.thread_time_ns()
    sampler = chronica.BatchSampler(dataset.sizes, BATCH_SIZE, cost=cost, micro_batches="auto")
    plan = sampler.plan
    planning_us = (time.thread_time_ns() - begin) / plan.steps / 1e3
    optimizers = wrapped(models, sampler, "demo")
    batches = [plan.batches(step, hvd.rank()) for step in range(plan.steps)]
    flat = [batch.tolist() for step in batches for batch in step]

    loader = chronica.DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)

    def plain_steps() -> Iterator[Iterator[Any]]:
        loaded = iter(torch.utils.data.DataLoader(dataset, batch_sampler=flat, collate_fn=pad))
        return (itertools.islice(loaded, len(step)) for step in batches)

    def step(name: str, steps: Iterator[Any], micro_batches: int) -> int:
        if name == "plain":
            optimizers[name].set_backward_passes_per_step(micro_batches)
        hvd.barrier()
        begin = time.thread_time_ns()
        optimizers[name].zero_grad()
        for text, lengths in next(steps):
            mean_loss(models[name], text, lengths).backward()
        optimizers[name].step()
        return time.thread_time_ns() - begin

    extra, whole = [], []
    for epoch in range(DEMO_EPOCHS):
        steps = {"ours": loader.steps(), "plain": plain_steps()}
        before = plain_steps()
        for number, of_step in enumerate(batches):
            step("plain", before, len(of_step))  # whoever computes a shape first has to prepare its kernels
            taken = {name: step(name, steps[name], len(of_step)) for name in by_turns(number + epoch)}
            if epoch > 0 or number >= WARM_UP:
                extra.append(taken["ours"] - taken["plain"])
                whole.append(taken["plain"])
    own_us = median(extra) / 1e3 + planning_us
    return {
        "own_us": own_us,
        "own_us_standard_error": standard_error_of_median(extra) / 1e3,
        "planning_us": planning_us,
        "step_ms": median(whole) / 1e6,
        "share": own_us * 1e3 / median(whole),
        "micro_batches": len(flat) / plan.steps,
        "steps": len(extra),
    }


def standard_error_of_median(values: list[int]) -> float:
    """Return it as for normal errors, their deviation taken from the quartiles, which outliers leave alone."""
    lower, _, upper = quantiles(values, n=4)
    return 1.2533 * (upper - lower) / 1.349 / len(values) ** 0.5


def by_turns(number: int) -> tuple[str, str]:
    """Return in which order the two are timed."""
    return ("plain", "ours") if number % 2 else ("ours", "plain")


def wrapped(models: dict[str, Any], sampler: chronica.BatchSampler, kind: str) -> dict[str, Any]:
    """Return plain Horovod's optimizer and ours, one for each model; ``kind`` is a part of the parameters' names."""
    import horovod.torch as hvd

    ours = functools.partial(chronica.DistributedOptimizer, sampler=sampler)
    optimizers = {}
    for name, wrap in (("plain", hvd.DistributedOptimizer), ("ours", ours)):
        named = [(f"{kind}.{name}.{key}", parameter) for key, parameter in models[name].named_parameters()]
        optimizers[name] = wrap(torch.optim.AdamW(models[name].parameters()), named)
    return optimizers


def whole_steps() -> dict[str, float]:
    """Train on texts of one length, ours and plain Horovod by turns."""
    import horovod.torch as hvd
    from text_model import ByteTransformer, mean_loss
    from torch.utils.data import DistributedSampler
    from train_text import HEADS, pad

    count = EVEN_STEPS + WARM_UP
    sizes = [EVEN_LENGTH] * (count * BATCH_SIZE * hvd.size())
    text = torch.randint(256, (EVEN_LENGTH,), dtype=torch.uint8)
    dataset = torch.utils.data.StackDataset([text] * len(sizes))

    def collate(items: list[tuple[torch.Tensor]]) -> Any:
        return pad([item for (item,) in items])

    sampler = chronica.BatchSampler(sizes, BATCH_SIZE)
    drawn = DistributedSampler(dataset, hvd.size(), hvd.rank())
    batches: dict[str, Iterator[Any]] = {
        "plain": iter(torch.utils.data.DataLoader(dataset, BATCH_SIZE, sampler=drawn, collate_fn=collate)),
        "ours": iter(chronica.DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)),
    }
    models = {name: ByteTransformer(32, HEADS, longest=EVEN_LENGTH) for name in batches}
    optimizers = wrapped(models, sampler, "even")

    def step(name: str) -> int:
        hvd.barrier()
        begin = time.perf_counter_ns()
        text, lengths = next(batches[name])
        optimizers[name].zero_grad()
        mean_loss(models[name], text, lengths).backward()
        optimizers[name].step()
        return time.perf_counter_ns() - begin

    taken: dict[str, list[int]] = {name: [] for name in batches}
    for turn in range(count):
        for name in by_turns(turn):
            taken[name].append(step(name))
    plain, ours = taken["plain"][WARM_UP:], taken["ours"][WARM_UP:]
    assert len(optimizers["ours"].timing.micro_batches()) == count
    return {
        "plain_ms": median(plain) / 1e6,
        "ours_ms": median(ours) / 1e6,
        "ratio": median(ours) / median(plain),
        "paired_ratio": median(a / b for a, b in zip(ours, plain, strict=True)),
        "steps": len(ours),
    }


JOBS: dict[str, tuple[str, Callable[[], dict[str, float]], str]] = {
    "--own-time": (
        "demo",
        own_time,
        "own time of a demo step {own_us:.0f} ± {own_us_standard_error:.0f} us of {step_ms:.1f} ms: {share:.2%} "
        "({micro_batches:.1f} micro-batches, {steps} steps)",
    ),
    "--whole-steps": (
        "even",
        whole_steps,
        "even data: ours {ours_ms:.2f} ms, plain Horovod {plain_ms:.2f} ms a step, ratio of medians {ratio:.4f}, "
        "median of the ratios {paired_ratio:.4f} ({steps} each)",
    ),
}


if __name__ == "__main__":
    rank(sys.argv[1]) if sys.argv[1:2] and sys.argv[1] in JOBS else main()
