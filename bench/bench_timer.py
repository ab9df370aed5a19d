"""What we cost: a pair of the timer, our own time in a step of the demo, whole steps beside plain Horovod.

The last two run on two ranks. Own time is all that our classes do between taking a micro-batch and the end of
``synchronize()``, less the time of torch and Horovod in between and of additions to gradients, which autograd would
have done itself, plus the planning of the epoch spread over its steps. The whole steps are of even data, where nothing
can be gained, ours and plain Horovod's by turns in one process. Writes bench/results/timer.json.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import sub
from pathlib import Path
from statistics import median
from typing import Any

import torch
from launch import horovodrun

import chronica_hvd as chronica

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "timer.json"
PAIRS, REPEATS = 100_000, 15
DEMO_STEPS, WARM_UP = 40, 4
EVEN_STEPS, EVEN_LENGTH = 320, 192
BATCH_SIZE = 32
TIMEOUT_S = 900


def main() -> None:
    """Time pairs here and steps on two ranks; print and write."""
    figures: dict[str, Any] = {"pair_ns": pairs()}
    for name, value in figures["pair_ns"].items():
        print(f"{name:<40}{value:8.1f} ns a pair")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")
    raise SystemExit(horovodrun(2, Path(__file__), "--rank", timeout_s=TIMEOUT_S))


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


class OwnTime:
    """Adds up the time in functions of ours, less that of the functions they call that are not ours."""

    def __init__(self) -> None:
        self.total_ns = 0
        self._depth = 0

    def of(self, function: Callable[..., Any], sign: int = 1) -> Callable[..., Any]:
        """Return the function, counted; with ``sign=-1`` one that is not ours: it is taken off where ours call it."""

        @functools.wraps(function)
        def counted(*args: Any, **keywords: Any) -> Any:
            is_counted = self._depth == 0 if sign > 0 else self._depth > 0
            depth, self._depth = self._depth, 1 if sign > 0 else 0
            begin = time.perf_counter_ns()
            try:
                return function(*args, **keywords)
            finally:
                self.total_ns += sign * is_counted * (time.perf_counter_ns() - begin)
                self._depth = depth

        return counted


def rank() -> None:
    """Measure on one of the ranks; rank 0 prints and writes."""
    sys.path.insert(0, str(ROOT / "examples"))
    import horovod.torch as hvd
    from train_text import pin_to_core

    pin_to_core()
    torch.set_num_threads(1)
    hvd.init()
    figures = {"demo": own_time(), "even": whole_steps()}
    if hvd.rank() == 0:
        demo, even = figures["demo"], figures["even"]
        print(
            f"own time of a demo step {demo['own_us']:.0f} us of {demo['step_ms']:.1f} ms: {demo['share']:.3%} "
            f"({demo['micro_batches']:.1f} micro-batches)\n"
            f"even data: ours {even['ours_ms']:.2f} ms, plain Horovod {even['plain_ms']:.2f} ms a step, "
            f"ratio of medians {even['ratio']:.4f}, median of the ratios {even['paired_ratio']:.4f} ({EVEN_STEPS} each)"
        )
        RESULTS.write_text(json.dumps({**json.loads(RESULTS.read_text()), **figures}, indent=2) + "\n")


def own_time() -> dict[str, float]:
    """Train steps of the demo, balanced in micro-batches, and count what is ours in them."""
    import horovod.torch as hvd
    from measuring import calibrate
    from stdlib_text import Functions
    from train_text import HEADS, ByteTransformer, mean_loss, pad

    from chronica_hvd import loader as loader_module
    from chronica_hvd import weigh
    from chronica_hvd.progress import Progress

    own = OwnTime()
    weigh.Weigher._weigh = own.of(weigh.Weigher._weigh)  # type: ignore[method-assign]
    weigh._accumulate = own.of(weigh._accumulate, -1)
    Progress.end_compute = own.of(Progress.end_compute)  # type: ignore[method-assign]
    torchs_next = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    torch.utils.data.dataloader._BaseDataLoaderIter.__next__ = own.of(torchs_next, -1)  # type: ignore[method-assign]

    def counted(items: Iterator[Any]) -> Iterator[Any]:
        take = own.of(next)
        while (item := take(items, loader_module)) is not loader_module:
            yield item

    torch.manual_seed(0)
    dataset = Functions(2048, (DEMO_STEPS + WARM_UP) * BATCH_SIZE * hvd.size())
    model = ByteTransformer(32, HEADS, longest=2048)
    cost = calibrate(lambda text, lengths: mean_loss(model, text, lengths), dataset.sizes, BATCH_SIZE)
    sampler = chronica.BatchSampler(dataset.sizes, BATCH_SIZE, cost=cost, micro_batches="auto")
    steps_of = sampler.steps
    sampler.steps = lambda: counted(steps_of())  # type: ignore[method-assign]
    loader = chronica.DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)
    horovods = hvd.DistributedOptimizer

    def wrap(*args: Any, **options: Any) -> Any:
        # Counted from here on: Horovod's synchronize() is not ours, the one around it is.
        wrapped = horovods(*args, **options)
        type(wrapped).synchronize = own.of(type(wrapped).synchronize, -1)
        return wrapped

    hvd.DistributedOptimizer = wrap
    optimizer = chronica.DistributedOptimizer(
        torch.optim.AdamW(model.parameters()), model.named_parameters(), sampler=sampler
    )
    hvd.DistributedOptimizer = horovods
    type(optimizer).synchronize = own.of(type(optimizer).synchronize)
    begin = time.perf_counter_ns()
    steps_planned = sampler.plan.steps
    planned_ns = time.perf_counter_ns() - begin

    ends = [(time.perf_counter_ns(), own.total_ns)]
    for step in counted(loader.steps()):
        optimizer.zero_grad()
        for text, lengths in counted(iter(step)):
            mean_loss(model, text, lengths).backward()
        optimizer.step()
        ends.append((time.perf_counter_ns(), own.total_ns))
    walls, owns = zip(*(map(sub, end, begin) for begin, end in pairwise(ends[WARM_UP:])), strict=True)
    wall_ns, own_ns = median(walls), median(owns) + planned_ns / steps_planned
    micro_batches = len(optimizer.timing.micro_batches()) / (len(ends) - 1)
    torch.utils.data.dataloader._BaseDataLoaderIter.__next__ = torchs_next  # type: ignore[method-assign]
    return {
        "own_us": own_ns / 1e3,
        "step_ms": wall_ns / 1e6,
        "share": own_ns / wall_ns,
        "micro_batches": micro_batches,
        "planning_us": planned_ns / steps_planned / 1e3,
    }


def whole_steps() -> dict[str, float]:
    """Train on texts of one length, ours and plain Horovod by turns."""
    import horovod.torch as hvd
    from torch.utils.data import DistributedSampler
    from train_text import HEADS, ByteTransformer, mean_loss, pad

    count = EVEN_STEPS + WARM_UP
    sizes = [EVEN_LENGTH] * (count * BATCH_SIZE * hvd.size())
    text = torch.randint(256, (EVEN_LENGTH,), dtype=torch.uint8)
    dataset = torch.utils.data.StackDataset([text] * len(sizes))

    def collate(items: list[tuple[torch.Tensor]]) -> Any:
        return pad([item for (item,) in items])

    samplers = {"plain": DistributedSampler(dataset, hvd.size(), hvd.rank()), "ours": chronica.BatchSampler(sizes, 32)}
    batches: dict[str, Iterator[Any]] = {
        "plain": iter(torch.utils.data.DataLoader(dataset, BATCH_SIZE, sampler=samplers["plain"], collate_fn=collate)),
        "ours": iter(chronica.DataLoader(dataset, batch_sampler=samplers["ours"], collate_fn=collate)),
    }
    models = {name: ByteTransformer(32, HEADS, longest=EVEN_LENGTH) for name in batches}
    optimizers: dict[str, Any] = {}
    for name, model in models.items():
        named = [(f"{name}.{key}", parameter) for key, parameter in model.named_parameters()]
        inner = torch.optim.AdamW(model.parameters())
        optimizers[name] = (
            hvd.DistributedOptimizer(inner, named)
            if name == "plain"
            else chronica.DistributedOptimizer(inner, named, sampler=samplers["ours"])
        )

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
        for name in ("plain", "ours") if turn % 2 else ("ours", "plain"):
            taken[name].append(step(name))
    plain, ours = taken["plain"][WARM_UP:], taken["ours"][WARM_UP:]
    assert len(optimizers["ours"].timing.micro_batches()) == count
    return {
        "plain_ms": median(plain) / 1e6,
        "ours_ms": median(ours) / 1e6,
        "ratio": median(ours) / median(plain),
        "paired_ratio": median(a / b for a, b in zip(ours, plain, strict=True)),
    }


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["--rank"] else main()
