"""Two optimizers in one job, on one sampler or on two; and process sets, each with data and a model of its own."""

from __future__ import annotations

import os
from typing import Any

import horovod.torch as hvd
import numpy as np
import rank
import torch
from cases import base, process_sets
from training import Case, Data, build, collate, mean, sgd

import chronica_hvd


class Trained:
    """A model that predicts the targets, or those and another's errors, with Horovod's or our optimizer."""

    def __init__(self, case: Case, sampler: Any, seed: int, **options: Any) -> None:
        self.case = case
        self.model = build(case, seed)
        self.optimizer = chronica_hvd.DistributedOptimizer(
            sgd(case, self.model), self.model.named_parameters(), sampler=sampler, **options
        )

    def train(self, data: Data, batch: Any, targets: torch.Tensor | None = None) -> None:
        self.optimizer.zero_grad()
        weights = torch.from_numpy(data.loss_weights)[batch[0]]
        mean(self.model.losses(batch[1], batch[2] if targets is None else targets), weights).backward()
        self.optimizer.step()

    def parameters(self, name: str) -> dict[str, np.ndarray]:
        return {f"{name}.{key}": value.detach().numpy() for key, value in self.model.named_parameters()}


def loader_of(case: Case, data: Data, process_set: Any = None) -> chronica_hvd.DataLoader:
    sampler = chronica_hvd.BatchSampler(data.sizes, case.batch_size, process_set=process_set, **data.plan_options)
    return chronica_hvd.DataLoader(data, batch_sampler=sampler, collate_fn=collate)


def rivals(case: Case, every: int) -> dict[str, np.ndarray]:
    """Train two models of the same parameter names on one sampler, the second only on every so many-th step."""
    data = Data(case, hvd.size())
    loader = loader_of(case, data)
    first, second = (Trained(case, loader.batch_sampler, seed) for seed in (1, 2))
    averages = []
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):
            first.train(data, batch)
            averages.append(chronica_hvd.average(float(step), loader.batch_sampler))
            if step % every == every - 1:
                with torch.no_grad():
                    targets = first.model(batch[1])
                second.train(data, batch, targets)
                assert second.optimizer.weight == first.optimizer.weight == loader.batch_sampler.weight
    return {"averages": np.array(averages), **first.parameters("first"), **second.parameters("second")}


def neighbours(cases: list[Case]) -> dict[str, np.ndarray]:
    """Train two models by turns, each on a sampler of its own."""
    data = [Data(case, hvd.size()) for case in cases]
    loaders = [loader_of(case, own) for case, own in zip(cases, data, strict=True)]
    trained = [Trained(case, loader.batch_sampler, 1) for case, loader in zip(cases, loaders, strict=True)]
    for batches in zip(*loaders, strict=True):
        for one, own, batch in zip(trained, data, batches, strict=True):
            one.train(own, batch)
    return {**trained[0].parameters("first"), **trained[1].parameters("second")}


def in_a_set(case: Case, process_set: Any) -> dict[str, np.ndarray]:
    """Train with the ranks of this process set only."""
    data = Data(case, process_set.size())
    loader = loader_of(case, data, process_set)
    one = Trained(case, loader.batch_sampler, 1)
    averages = []
    for batch in loader:
        one.train(data, batch)
        averages.append(chronica_hvd.average(float(process_set.rank()), loader.batch_sampler))
    return {"averages": np.array(averages), **one.parameters("first")}


def main() -> None:
    folder = rank.begin(init=False)
    ranks = int(os.environ["HOROVOD_SIZE"])
    sets = [hvd.ProcessSet(members) for members in process_sets(ranks)]
    hvd.init(process_sets=sets)
    own = next(number for number, one in enumerate(sets) if one.included())
    results = {
        "rivals": rivals(base(ranks, "rivals"), every=1),
        "seldom": rivals(base(ranks, "seldom"), every=3),
        "neighbours": neighbours([base(ranks, "one"), base(ranks, "other", plan={"seed": 3})]),
        "set": in_a_set(base(len(process_sets(ranks)[own]), f"set{own}", samples=25 + own), sets[own]),
    }
    for name, arrays in results.items():
        np.savez(folder / f"{name}.{hvd.rank()}.npz", **arrays)
    hvd.barrier()  # a rank that ends shuts Horovod down for those of other sets


if __name__ == "__main__":
    main()
