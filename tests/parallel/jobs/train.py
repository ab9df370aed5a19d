"""Train the cases named on the command line, or all; write what each rank saw and got."""

from __future__ import annotations

import contextlib
import itertools
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.torch as hvd
import numpy as np
import rank
import torch
from cases import cases
from helpers import recut_sampler
from training import CLIP, EPOCHS, INFINITE_STEP, Case, Data, build, collate, dtype_of, is_update, mean, schedule, sgd

import chronica_hvd


class Run:
    """A case's data, sampler, loader, model and optimizer on this rank, and a record of its steps."""

    def __init__(self, case: Case, *, with_optimizer: bool = True) -> None:
        self.case = case
        self.data = Data(case, hvd.size())
        options = {"refresh": None, **self._replicas(), **self.data.plan_options}  # plans are known beforehand
        self.sampler = chronica_hvd.BatchSampler(self.data.sizes, case.batch_size, **options)
        if case.cut is not None:
            recut_sampler(self.sampler, case.cut, case.pieces)
        self.loader = chronica_hvd.DataLoader(self.data, batch_sampler=self.sampler, collate_fn=collate, **case.loader)
        self.model = build(case, seed=7 + (hvd.rank() if case.broadcast else 0))
        self.optimizer = self.wrap() if with_optimizer else None
        self.scaler = torch.amp.GradScaler("cpu", enabled=case.update in ("scaler", "scaler_inf"))
        self.batches: list[np.ndarray] = []
        self.weights: list[list[float]] = []  # of optimizer and sampler, after each backward pass
        self.weights_after: list[list[float]] = []  # the same after each update
        self.closed_losses: list[float] = []
        self.fingerprints: list[str] = []
        self.gathered: list[str] = []

    def _replicas(self) -> dict[str, Any]:
        if self.case.by_hand:
            return {"num_replicas": hvd.size(), "rank": hvd.rank()}
        return {} if self.case.speeds is None else {"num_replicas": self.case.speeds}

    def wrap(self) -> Any:
        """Return the optimizer of this run's model and sampler."""
        options = dict(self.case.optimizer)
        if "op" in options:
            options["op"] = getattr(hvd, options["op"])
        if "compression" in options:
            options["compression"] = getattr(hvd.Compression, options["compression"])
        named = [(f"{self.case.name}.{name}", parameter) for name, parameter in self.model.named_parameters()]
        optimizer = chronica_hvd.DistributedOptimizer(
            sgd(self.case, self.model), named, sampler=self.sampler, **options
        )
        if self.case.broadcast:
            optimizer.param_groups[0]["lr"] /= 1 + hvd.rank()
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return optimizer

    def train(self) -> None:
        scheduler = schedule(self.optimizer)
        for epoch in range(EPOCHS):
            self.sampler.set_epoch(epoch)
            plan = self._plan_again(epoch)
            self.fingerprints.append(plan.fingerprint)
            for step, micro_batches in enumerate(self._steps()):
                if step % self.case.accumulate == 0:
                    self._zero_grad()
                if self.case.update == "closure":
                    self._step_by_closure(list(micro_batches))
                    continue
                self._step(micro_batches, step, is_filler=self.sampler.plan.counts[step, hvd.rank()] == 0)
                if is_update(self.case, step, plan.steps):
                    update(self)
                # A loop that reads ahead has the next step open by now, and is told to ask before the update.
                if "ahead" not in self.case.loop:
                    self.weights_after.append([self.optimizer.weight, self.sampler.weight])
            if self.case.update == "scheduler":
                scheduler.step()

    def _zero_grad(self) -> None:
        if self.case.set_to_none is None:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=self.case.set_to_none)

    def _plan_again(self, epoch: int) -> chronica_hvd.Plan:
        sampler = self.sampler
        options = {**self.data.plan_options, "cost": sampler.cost}
        plan = chronica_hvd.plan(self.data.sizes, sampler.speeds, sampler.batch_size, epoch=epoch, **options)
        return self.data.recut(plan, epoch)

    def _steps(self) -> Iterator[Iterable[Any]]:
        """Yield the micro-batches of each step, taken as the case says."""
        if self.case.loop == "steps":
            return self.loader.steps()
        if self.case.loop == "steps_ahead":
            return ahead(list(step) for step in self.loader.steps())
        is_whole = self.sampler.micro_batches == 1
        batches = iter(self.loader) if is_whole else (batch for step in self.loader.steps() for batch in step)
        if self.case.loop == "ahead":
            batches = ahead(batches)
        plan = self.sampler.plan
        return (itertools.islice(batches, len(plan.batches(step, hvd.rank()))) for step in range(plan.steps))

    def loss(self, batch: Any, is_filler: bool = False) -> torch.Tensor:
        """Return this rank's mean (or summed) loss, NaN on a filler: it must not count."""
        indices, inputs, targets = batch
        losses = self.model.losses(inputs, targets) * (float("nan") if is_filler else 1.0)
        if self.case.loss_weight == "sum":
            return losses.sum()
        return mean(losses, torch.from_numpy(self.data.amounts)[indices])

    def _step(self, micro_batches: Iterable[Any], step: int, is_filler: bool) -> None:
        for batch in micro_batches:
            self.batches.append(batch[0].numpy())
            amount = self.data.amounts[batch[0].numpy()].sum()
            if self.case.amounts:
                self.optimizer.set_weight(amount)
            if not (self.case.update == "skip_fillers" and (is_filler or amount == 0.0)):
                self._backward(self.scaler.scale(self.loss(batch, is_filler)), step)
            self.weights.append([self.optimizer.weight, self.sampler.weight])

    def _backward(self, loss: torch.Tensor, step: int) -> None:
        if self.case.update == "scaler_inf" and step == INFINITE_STEP and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        shares = [1.0] if self.case.losses == 1 else [0.3, 0.5, 0.2][: self.case.losses - 1]
        shares += [1.0 - sum(shares)] if self.case.losses > 1 else []
        for number, share in enumerate(shares, 1):
            (loss * share).backward(retain_graph=number < len(shares))

    def _step_by_closure(self, batches: list[Any]) -> None:
        def closure() -> Any:
            self._zero_grad()
            losses = []
            for batch in batches:
                if self.case.amounts:
                    self.optimizer.set_weight(self.data.amounts[batch[0].numpy()].sum())
                losses.append(self.loss(batch))
                losses[-1].backward()
            return [loss.detach() for loss in losses] if len(losses) > 1 else losses[0].item()

        self.batches += [batch[0].numpy() for batch in batches]
        self.closed_losses.append(float(self.optimizer.step(closure)))

    def save(self, folder: Path) -> None:
        np.savez(
            folder / f"{self.case.name}.{hvd.rank()}.npz",
            indices=np.concatenate(self.batches),
            lengths=[len(batch) for batch in self.batches],
            weights=self.weights,
            weights_after=self.weights_after,
            fingerprints=self.fingerprints,
            gathered=np.array(self.gathered, dtype=str),
            closed_losses=self.closed_losses,
            **{
                f"parameter.{name}": value.detach().to(dtype_of(self.case)).numpy()
                for name, value in self.model.named_parameters()
            },
        )


def update(run: Run) -> None:
    """Update the parameters as the case says."""
    if run.case.update in ("scaler", "scaler_inf"):
        run.optimizer.synchronize()
        run.scaler.unscale_(run.optimizer)
        with run.optimizer.skip_synchronize():
            run.scaler.step(run.optimizer)
        run.scaler.update()
    elif run.case.update == "twice":
        run.optimizer.synchronize()
        run.optimizer.synchronize()
        with run.optimizer.skip_synchronize():
            run.optimizer.step()
    elif run.case.update == "clip":
        run.optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), CLIP)
        with run.optimizer.skip_synchronize():
            run.optimizer.step()
    else:
        run.optimizer.step()


def ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """Read one batch ahead, as wrappers do that copy to a device."""
    iterator = iter(batches)
    batch = next(iterator)
    for following in iterator:
        yield batch
        batch = following
    yield batch


@contextlib.contextmanager
def recorded_gathers(names: list[str]) -> Iterator[None]:
    """Add the name of every allgather to the list."""
    allgather = hvd.allgather

    def recording(tensor: torch.Tensor, name: str, **options: Any) -> torch.Tensor:
        names.append(name)
        return allgather(tensor, name=name, **options)

    with mock.patch.object(hvd, "allgather", recording):
        yield


def main() -> None:
    folder = rank.begin()
    every = cases(hvd.size())
    for name in sys.argv[2:] or every:
        try:
            run = Run(every[name])
            with recorded_gathers(run.gathered):
                run.train()
            run.save(folder)
        except Exception:  # ranks fail alike, so the other cases can be shown
            (folder / f"{name}.{hvd.rank()}.error").write_text(traceback.format_exc())


if __name__ == "__main__":
    main()
