"""A rank of what bench_feedback.py measures: the example's training, followed by its own times.

horovodrun -np 2 python bench/feedback_job.py slow-rank|by-cost <summary.json>
"""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import horovod.torch as hvd
import numpy as np
import torch
from stdlib_text import Functions
from text_model import ByteTransformer, mean_loss
from train_text import HEADS, noise_floor, pad, pin_to_core

import chronica_hvd as chronica

CUT, WIDTH, BATCH_SIZE = 2048, 32, 32
STEPS = 24  # of an epoch
FLOOR_STEPS = 24
#: Epochs in which another process competes with the last rank for its core.
EPOCHS, LOADED = 6, (1, 2, 3)
ROUNDS = 4  # of the comparison of costs
REPEATED_SHAPES, REPEATS = 12, 8


class Training:
    """A model, its data, and plans by one kind of cost."""

    def __init__(self, model: torch.nn.Module, dataset: Functions, cost: Any) -> None:
        self.reports: list[chronica.EpochReport] = []
        self.model = copy.deepcopy(model)
        self.sampler = chronica.BatchSampler(
            dataset.sizes, BATCH_SIZE, cost=cost, micro_batches="auto", on_report=self.reports.append
        )
        self.loader = chronica.DataLoader(dataset, batch_sampler=self.sampler, collate_fn=pad)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.optimizer = chronica.DistributedOptimizer(optimizer, self.model.named_parameters(), sampler=self.sampler)

    def epoch(self, epoch: int) -> chronica.EpochReport:
        """Train for an epoch."""
        self.sampler.set_epoch(epoch)
        for step in self.loader.steps():
            self.optimizer.zero_grad()
            for text, lengths in step:
                mean_loss(self.model, text, lengths).backward()
            self.optimizer.step()
        return self.reports[-1]

    def share(self) -> list[float]:
        """Return the share of the work that each rank is given, as if all were alike."""
        plan, cost = self.sampler.plan, self.sampler.cost
        work = plan.loads / np.array(cost.rank_scale or [1.0] * plan.ranks)
        return [round(float(of_rank), 4) for of_rank in work.sum(axis=0) / work.sum()]


@contextlib.contextmanager
def competing(is_loaded: bool) -> Iterator[None]:
    """Have another process use the last rank's core as well."""
    if not (is_loaded and hvd.rank() == hvd.size() - 1):
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:  # on the same core
        try:
            yield
        finally:
            busy.kill()


def slow_rank(model: torch.nn.Module, dataset: Functions) -> list[dict[str, Any]]:
    """Return what became of each epoch, some of them with a competing load on the last rank."""
    training = Training(model, dataset, None)
    result = []
    for epoch in range(EPOCHS):
        hvd.barrier()
        with competing(epoch in LOADED):
            report = training.epoch(epoch)
            hvd.barrier()
        floor = noise_floor(model, dataset, training.sampler.plan, FLOOR_STEPS)
        result.append(
            {
                "epoch": epoch,
                "loaded": epoch in LOADED,
                "idle_share": report.idle_share,
                "predicted_idle_share": report.predicted_idle_share,
                "floor": floor,
                "share": training.share(),
                "slowdown": [float(one) for one in report.slowdown],
                "stragglers": [vars(one) for one in report.stragglers],
                "cost": repr(training.sampler.cost),
            }
        )
    return result


def by_cost(model: torch.nn.Module, dataset: Functions) -> dict[str, Any]:
    """Return how well plans by size, by FLOPs and by what was measured balance, by turns."""
    flops = chronica.flops.estimate(model, lambda size: torch.zeros(1, size, dtype=torch.long), dataset.sizes)
    by_size = chronica.BatchSampler(dataset.sizes, BATCH_SIZE, micro_batches="auto", refresh=None).cost
    trainings = {
        "size": Training(model, dataset, by_size),
        "flops": Training(model, dataset, flops),
        "measured": Training(model, dataset, chronica.Measured(flops)),
    }
    idle: dict[str, list[float]] = {name: [] for name in trainings}
    trainings["measured"].epoch(0)  # what the first plans by it stand on
    for epoch in range(1, 1 + ROUNDS):
        for name, training in trainings.items():
            training.optimizer.timing.micro_batches()
            idle[name].append(training.epoch(epoch).idle_share)
    measured = trainings["measured"]
    records = measured.optimizer.timing.micro_batches()  # of the last epoch, which the cost was not fitted to
    cost = measured.sampler.cost
    scale = (cost.rank_scale or [1.0] * hvd.size())[hvd.rank()]
    predicted = scale * cost.predict(records["samples"], records["size"], records["size2"])
    own_error = np.median(np.abs(predicted / records["elapsed_ns"] - 1.0))
    errors = hvd.allgather(torch.tensor([own_error, repeat_error(model, records)]), name="errors").reshape(-1, 2)
    return {
        "idle_share": idle,
        "floor": noise_floor(model, dataset, measured.sampler.plan, FLOOR_STEPS),
        "prediction_error": errors[:, 0].tolist(),
        "repeat_error": errors[:, 1].tolist(),
        "cost": repr(cost),
        "steps_s": {name: training.reports[-1].elapsed for name, training in trainings.items()},
    }


def repeat_error(model: torch.nn.Module, records: Any) -> float:
    """Return the median relative deviation of a shape's times from their median: no model predicts better."""
    timer = chronica.StepTimer()
    model = copy.deepcopy(model)
    shapes = np.unique(np.stack([records["samples"], records["size"] // records["samples"]]), axis=1).T
    chosen = shapes[np.linspace(0, len(shapes) - 1, REPEATED_SHAPES).astype(int)]
    for _ in range(REPEATS):
        for number, (samples, longest) in enumerate(chosen.tolist()):
            text = torch.randint(256, (samples, longest))
            timer.start(step=number)
            mean_loss(model, text, torch.full((samples,), longest)).backward()
            timer.stop()
    times = timer.drain()["elapsed_ns"].reshape(REPEATS, -1)
    return float(np.median(np.abs(times / np.median(times, axis=0) - 1.0)))


def main() -> None:
    """Measure; rank 0 writes."""
    pin_to_core()
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    dataset = Functions(CUT, STEPS * BATCH_SIZE * hvd.size())
    model = ByteTransformer(WIDTH, HEADS, longest=CUT)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    result = {"slow-rank": slow_rank, "by-cost": by_cost}[sys.argv[1]](model, dataset)
    if hvd.rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
