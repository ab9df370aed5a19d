"""Train with one slow rank; write what the optimizer's timing says, and when each backward pass was through."""

from __future__ import annotations

import time

import horovod.torch as hvd
import rank
from cases import micro_batched
from train import Run

import chronica_hvd

PAUSE_S = 0.05


def main() -> None:
    folder = rank.begin()
    run = Run(micro_batched(hvd.size(), "timing"))
    through = []
    for step in run.loader.steps():
        run.optimizer.zero_grad()
        for batch in step:
            if hvd.rank() == hvd.size() - 1:
                time.sleep(PAUSE_S)
            run.loss(batch, is_filler=run.sampler.weight == 0.0).backward()
            through.append(time.monotonic_ns())
        run.optimizer.step()
    timing = run.optimizer.timing
    assert isinstance(timing, chronica_hvd.timing.Timing)
    records, steps = timing.micro_batches(), timing.steps()
    rank.write(
        folder,
        {
            "micro_batches": {name: records[name].tolist() for name in records.dtype.names},
            "steps": {name: steps[name].tolist() for name in steps.dtype.names},
            "through": through,
        },
    )


if __name__ == "__main__":
    main()
