"""Train every case for some steps, from where an earlier launch stopped or from the start; keep where it stopped.

Arguments after the folder: samples per rank and step, steps to train (0: to the end of the last epoch), and the folder
of the launch to go on from, if there is one.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import rank
import torch
from resuming import resuming
from train import Run, ahead, update
from training import EPOCHS

import chronica_hvd


def steps_of(run: Run) -> Iterator[Iterable[Any]]:
    """Yield the micro-batches of each step that is left of the epoch."""
    if run.case.loop == "steps":
        yield from run.loader.steps()
    elif run.case.loop == "steps_ahead":
        yield from ahead(list(step) for step in run.loader.steps())
    else:
        yield from ([batch] for batch in (ahead(run.loader) if run.case.loop == "ahead" else run.loader))


def train(run: Run, most: int) -> None:
    """Train so many steps (0: all) of the sampler's epoch."""
    plan, left = run.sampler.plan, len(run.sampler)
    for step, micro_batches in zip(range(plan.steps - left, plan.steps), steps_of(run), strict=False):
        run.optimizer.zero_grad()
        for batch in micro_batches:
            run.batches.append(batch[0].numpy())
            run.loss(batch, is_filler=plan.counts[step, hvd.rank()] == 0).backward()
        update(run)
        if step + 1 - (plan.steps - left) == most:
            break


def load(run: Run, checkpoint: Path) -> None:
    kept = torch.load(checkpoint / f"{run.case.name}.pt", weights_only=True)
    run.model.load_state_dict(kept["model"])
    run.optimizer.load_state_dict(kept["optimizer"])
    run.sampler.load_state_dict(kept["sampler"])


def save(run: Run, folder: Path) -> None:
    kept = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "sampler": run.sampler.state_dict(),
    }
    torch.save(kept, folder / f"{run.case.name}.pt")


def copies_are_at(sampler: chronica_hvd.BatchSampler) -> list[bool]:
    """Return of each way to copy a sampler that serves an optimizer whether the copy is where iterations begin."""
    expected = list(sampler.steps())
    copies = [copy.copy(sampler), copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))]
    return [list(each.steps()) == expected and each.progress.last_begun() is None for each in copies]


def main() -> None:
    folder = rank.begin()
    batch_size, most, *checkpoint = sys.argv[2:]
    states: dict[str, Any] = {}
    copies: dict[str, list[bool]] = {}
    for case in resuming(hvd.size()):
        run = Run(dataclasses.replace(case, batch_size=int(batch_size)))
        if checkpoint:
            load(run, Path(checkpoint[0]))
        if int(most):
            train(run, int(most))
        else:
            for epoch in range(run.sampler.epoch, EPOCHS):
                run.sampler.set_epoch(epoch)
                train(run, 0)
        if hvd.rank() == 0:  # alone: a collective would wait for ever
            save(run, folder)
        states[case.name] = run.sampler.state_dict()
        copies[case.name] = copies_are_at(run.sampler)
        run.save(folder)
    rank.write(folder, {"states": states, "copies": copies})


if __name__ == "__main__":
    main()
