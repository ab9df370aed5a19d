"""Train where one rank is slow in some epochs; write the reports, and who took how much.

The layer sleeps as long as a device would compute, whose clock tells just that: so the costs that are fitted, and the
plans by them, do not depend on how busy the machine is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np
import rank
import torch

import chronica_hvd as chronica
from chronica_hvd import _core

SAMPLES, BATCH_SIZE = 120, 4
SECONDS_PER_SIZE, FIXED_S = 2e-5, 5e-4
SIZES = np.clip(np.random.default_rng(3).lognormal(5, 1, SAMPLES), 20, 1500).astype(int)


class Items(torch.utils.data.Dataset[int]):
    """The sizes themselves; a slow rank takes its time to load them."""

    def __init__(self, sizes: Any) -> None:
        self.sizes = sizes
        self.pause_s = 0.0

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> int:
        time.sleep(self.pause_s)
        return int(self.sizes[index])


class Device:
    """What computes, and its clock."""

    name = "played"

    def __init__(self) -> None:
        self.now_ns = 0

    def compute(self, seconds: float) -> None:
        time.sleep(seconds)
        self.now_ns += round(seconds * 1e9)

    def begin(self) -> list[int]:
        return [self.now_ns]

    def end(self, interval: list[int]) -> bool:
        interval[1:] = [self.now_ns]
        return True

    def ready(self, interval: list[int]) -> bool:
        return len(interval) == 2

    def elapsed_ns(self, interval: list[int]) -> int:
        return interval[1] - interval[0]


class Job:
    """A rank of it."""

    def __init__(self, sizes: Any = SIZES, **options: Any) -> None:
        self.reports: list[chronica.EpochReport] = []
        self.dataset = Items(sizes)
        self.sampler = chronica.BatchSampler(sizes, BATCH_SIZE, on_report=self.reports.append, **options)
        self.loader = chronica.DataLoader(self.dataset, batch_sampler=self.sampler, collate_fn=list)
        self.model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.optimizer = chronica.DistributedOptimizer(optimizer, self.model.named_parameters(), sampler=self.sampler)
        self.device = Device()
        self.optimizer.timing.timer = _core.StepTimer(4096, clock=self.device)
        self.result: list[dict[str, Any]] = []

    def epoch(self, epoch: int, slowness: float = 1.0) -> None:
        """Train for an epoch, this rank's compute taking so many times longer than it should."""
        self.sampler.set_epoch(epoch)
        for step in self.loader.steps():
            self.optimizer.zero_grad()
            for sizes in step:
                loss = self.model(torch.ones(len(sizes), 1)).mean()
                self.device.compute(slowness * (FIXED_S + SECONDS_PER_SIZE * len(sizes) * max(sizes)))
                loss.backward()
            self.optimizer.step()
        course = self.sampler.course
        steps = range(course.end - course.plan.steps, course.end)
        work = course.expected(steps, chronica.CostModel(fixed=FIXED_S, per_size=SECONDS_PER_SIZE)).sum(axis=0)
        self.result.append(
            {
                **self.reports[-1].as_dict(),
                "text": str(self.reports[-1]),
                "work": (work / work.sum()).tolist(),
            }
        )


def device() -> list[dict[str, Any]]:
    """The last rank takes twice as long in the epochs 1 and 2."""
    job = Job(micro_batches="auto")
    for epoch in range(5):
        job.epoch(epoch, 2.0 if hvd.rank() == hvd.size() - 1 and epoch in (1, 2) else 1.0)
    return job.result


def blocks() -> list[dict[str, Any]]:
    """The last rank takes twice as long from the beginning, in an epoch of five blocks."""
    sizes = np.tile(SIZES, -(-5 * 64 * hvd.size() * 2 // SAMPLES))[: 5 * 64 * hvd.size() * 2] // 4
    job = Job(sizes, refresh=1)
    job.epoch(0, 2.0 if hvd.rank() == hvd.size() - 1 else 1.0)
    return job.result


def input_() -> list[dict[str, Any]]:
    """The last rank's loader is slow."""
    job = Job(micro_batches="auto")
    job.dataset.pause_s = 0.005 if hvd.rank() == hvd.size() - 1 else 0.0
    for epoch in range(2):
        job.epoch(epoch)
    return job.result


def data() -> list[dict[str, Any]]:
    """The first rank always draws the long samples."""
    sizes = np.sort(SIZES).reshape(hvd.size(), -1)[::-1].T.ravel()
    job = Job(sizes, policy="plain", shuffle=False)
    for epoch in range(2):
        job.epoch(epoch)
    return job.result


CASES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "device": device,
    "blocks": blocks,
    "input": input_,
    "data": data,
}


def main() -> None:
    folder = rank.begin()
    rank.write(folder, CASES[sys.argv[2]]())


if __name__ == "__main__":
    main()
