"""How a rank trains on a random job, as a user's script does."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from inprocess import run_ranks
from job_data import Batch, Data
from job_model import Model, is_trained, networks, trainer
from numpy.typing import NDArray
from random_jobs import Job

import chronica_hvd as chronica


@dataclass
class Trained:
    """What became of a job, or of one leg of it.

    Attributes
    ----------
    taken, fillers
        Of each step: the micro-batches taken, and whether they count elsewhere.
    losses
        The mean loss of each step that was not given up.
    evaluations
        The mean loss over the data set, at last.
    gradients, magnitudes
        Of each update, by parameter: the gradient; Σ |share · gradient of a sample's loss|, where that is needed.
    parameters, checkpoint
        At last; what the next leg goes on with.
    """

    taken: list[list[list[int]]] = dataclasses.field(default_factory=list)
    fillers: list[bool] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    evaluations: list[float] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, NDArray[Any]]] = dataclasses.field(default_factory=list)
    magnitudes: list[dict[str, NDArray[Any]]] = dataclasses.field(default_factory=list)
    parameters: dict[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    checkpoint: Any = None

    def all_gradients(self, name: str) -> NDArray[Any]:
        """(updates, …) those of one parameter."""
        return _of_all(self.gradients, name)

    def all_magnitudes(self, name: str) -> NDArray[Any]:
        """(updates, …) those of one parameter."""
        return _of_all(self.magnitudes, name)


def _of_all(updates: list[dict[str, NDArray[Any]]], name: str) -> NDArray[Any]:
    return np.array([update[name] for update in updates if name in update])


class Training:
    """A leg of a job on this rank; every rank makes one and calls :meth:`run`.

    ``checkpoint`` is what the leg before has left.
    """

    def __init__(self, job: Job, checkpoint: Any = None) -> None:
        self.job = job
        self.data = Data(job)
        self.sampler = self.data.sampler()
        self.loader = chronica.DataLoader(self.data, batch_sampler=self.sampler, collate_fn=self.data.collate)
        options = {**job.optimizer, "op": getattr(hvd, job.optimizer["op"])}
        if job.is_compressed:
            options["compression"] = getattr(hvd.Compression, job.optimizer["compression"])
        self.models = networks(job)
        self.optimizers = [
            chronica.DistributedOptimizer(
                trainer(job, model), model.named_parameters(), sampler=self.sampler, **options
            )
            for model in self.models
        ]
        self.trained = Trained()
        self.steps = 0  # of this leg
        self.worked_on = 0  # steps of this update that had backward passes
        if checkpoint is not None:
            checkpoint = copy.deepcopy(checkpoint)  # ranks of one process were given the same
            self.sampler.load_state_dict(checkpoint["sampler"])
            for model, optimizer, (parameters, state) in zip(
                self.models, self.optimizers, checkpoint["networks"], strict=True
            ):
                model.load_state_dict(parameters)
                optimizer.load_state_dict(state)

    def run(self) -> Trained:
        for epoch in range(self.sampler.epoch, self.job.epochs):
            self.sampler.set_epoch(epoch)
            self._epoch(epoch)
            if self.job.stops_in(epoch):
                break
        else:
            if self.job.evaluates:
                self._evaluate()
        for model in self.models:
            self.trained.parameters |= model.values()
        return self.trained

    def _epoch(self, epoch: int) -> None:
        first = self.sampler.plan.steps - len(self.sampler)
        schedule = self.job.schedule(self.steps, len(self.sampler), epoch)
        if self.job.begins_anew and can_begin_anew(self.sampler.plan, first):
            self._break_off()
        begins = True
        for step, (micro_batches, verdict) in enumerate(zip(self._micro_batches(first), schedule, strict=False), first):
            trained_now = [pair for pair in self._pairs() if is_trained(self.job, pair[0], step)]
            if begins:
                self.worked_on = 0
                for model, optimizer in trained_now:
                    # The optimizer's refuses after a loop that was left in the middle of a step.
                    (model if self.job.begins_anew else optimizer).zero_grad(*[False] * self.job.zeroes)
            self.trained.fillers.append(bool(self.sampler.plan.counts[step, hvd.rank()] == 0))
            StepLoop(self, trained_now, verdict).train(micro_batches)
            begins = verdict != "part"
            self.steps += 1
            if step + 1 == first + len(schedule) and self.job.stops_in(epoch):
                self.trained.checkpoint = self._checkpoint()
                return

    def _break_off(self) -> None:
        """Leave the loop after a micro-batch of its first step, and forget the gradients."""
        batch = next(iter(next(iter(self.loader.steps()))))
        for model, optimizer in self._pairs():
            model.zero_grad()  # torch cannot add to what sparse_as_dense has left
            if self.job.amounts is not None:
                optimizer.set_weight(1.0)
            (loss_of(self.data, model, batch) * float("nan")).backward()
            model.zero_grad()

    def _pairs(self) -> list[tuple[Model, Any]]:
        return list(zip(self.models, self.optimizers, strict=True))

    def _checkpoint(self) -> Any:
        states = [(model.state_dict(), optimizer.state_dict()) for model, optimizer in self._pairs()]
        return copy.deepcopy({"sampler": self.sampler.state_dict(), "networks": states})

    def _micro_batches(self, first: int) -> Iterator[Iterable[Batch]]:
        """Return the micro-batches of each step, taken as the job says."""
        if self.job.loop == "steps":
            return self.loader.steps()
        if self.job.loop == "steps_ahead":
            return _read_ahead(list(step) for step in self.loader.steps())
        is_whole = self.sampler.micro_batches == 1
        batches = iter(self.loader) if is_whole else itertools.chain.from_iterable(self.loader.steps())
        if self.job.loop == "ahead":
            batches = _read_ahead(batches)
        plan = self.sampler.plan
        return (itertools.islice(batches, len(plan.batches(step, hvd.rank()))) for step in range(first, plan.steps))

    def _evaluate(self) -> None:
        sampler = self.data.evaluation_sampler()
        loader = chronica.DataLoader(self.data, batch_sampler=sampler, collate_fn=self.data.collate)
        mean = chronica.Mean(sampler)
        with torch.inference_mode():
            for step in loader.steps():
                for batch in step:
                    loss = loss_of(self.data, self.models[0], batch)
                    if self.job.loss_weight == "sum":
                        mean.add(loss / len(batch.indices), amount=len(batch.indices))
                    elif self.job.amounts is not None:
                        mean.add(loss, amount=float(self.data.loss_weights[batch.indices].sum()))
                    else:
                        mean.add(loss)
        self.trained.evaluations.append(mean.result())


def can_begin_anew(plan: chronica.Plan, step: int) -> bool:
    """Whether no gradient of a step is on its way to other ranks after its first micro-batch."""
    return step < plan.steps and min(len(plan.batches(step, rank)) for rank in range(plan.ranks)) > 1


def trained_within(job: Job) -> list[list[Trained]]:
    """Train on ranks of this process; returns what becomes of each leg on each of its ranks."""
    legs: list[list[Trained]] = []
    for leg in job.legs:
        checkpoint = legs[-1][0].checkpoint if legs else None
        legs.append(run_ranks(leg.ranks, functools.partial(_train, leg, checkpoint), seed=job.seed))
    return legs


def _train(job: Job, checkpoint: Any, _: int) -> Trained:
    return Training(job, checkpoint).run()


def loss_of(data: Data, model: Model, batch: Batch) -> torch.Tensor:
    """Return the mean as users compute it, which is NaN where nothing has weight."""
    weights, losses = data.loss_weights[batch.indices], model.losses(batch)
    return losses.sum() if data.job.loss_weight == "sum" else (weights * losses).sum() / weights.sum()


class StepLoop:
    """One step of the loop, for the models that are trained in it."""

    def __init__(self, training: Training, pairs: list[tuple[Model, Any]], verdict: str) -> None:
        self.training = training
        self.job, self.sampler, self.trained = training.job, training.sampler, training.trained
        self.pairs = pairs
        self.verdict = verdict
        self.is_filler = training.trained.fillers[-1]
        self.has_passes = False

    def train(self, micro_batches: Iterable[Batch]) -> None:
        self.trained.taken.append([])
        if self.verdict == "skip":
            self._give_up(micro_batches)
        elif self.job.average == "closure":
            self._close(list(self._noted(micro_batches)))
        else:
            self._work(micro_batches)

    def _noted(self, micro_batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in micro_batches:
            self.trained.taken[-1].append(batch.indices.tolist())
            yield batch

    def _work(self, micro_batches: Iterable[Batch]) -> None:
        losses = []
        for batch in self._noted(micro_batches):
            loss, *_ = [self._backward(model, optimizer, batch) for model, optimizer in self.pairs]
            losses.append(loss)
        self.training.worked_on += self.has_passes
        if self.job.average != "after" or self.verdict == "part":
            self._average(losses)
        if self.verdict == "update":
            for model, optimizer in self.pairs:
                self._refuse_unsent(model, optimizer)
                self._update(optimizer)
            self._note_gradients()
            if self.job.average == "after":
                self._average(losses)

    def _give_up(self, micro_batches: Iterable[Batch]) -> None:
        """Skip the step, in the middle of its micro-batches if the loop has them by steps."""
        for number, batch in enumerate(self._noted(micro_batches)):
            if number < self.job.skips_after:
                for model, optimizer in self.pairs:
                    self._backward(model, optimizer, batch, float("nan"))
            if number + 1 >= self.job.skips_after and "steps" in self.job.loop:
                break
        for _, optimizer in self.pairs:
            optimizer.skip_step()

    def _close(self, batches: list[Batch]) -> None:
        """Make the update by a closure, and with micro-batches return a loss of each."""
        ((model, optimizer),) = self.pairs

        def closure() -> Any:
            (model if self.job.begins_anew else optimizer).zero_grad(set_to_none=not self.job.zeroes)
            return self._value([self._backward(model, optimizer, batch) for batch in batches])

        self.trained.losses.append(float(optimizer.step(closure)))
        self._note_gradients()

    def _backward(self, model: Model, optimizer: Any, batch: Batch, factor: float = 1.0) -> torch.Tensor:
        counts = not self.is_filler
        if self.job.amounts is not None:
            amount = float(self.training.data.loss_weights[batch.indices].sum())
            optimizer.set_weight(amount)
            # The backward pass of a rank's whole batch may be left out, but not that of a part.
            counts = counts and (amount > 0.0 or self.sampler.micro_batches != 1)
        loss = loss_of(self.training.data, model, batch) * (float("nan") if self.is_filler else factor)
        self.has_passes = counts or self.job.fillers != "skipped"
        if self.has_passes:
            for number in range(self.job.losses):  # 1 of 3, 2 of 3: of unlike size
                share = 2.0 * (number + 1) / (self.job.losses * (self.job.losses + 1))
                (share * loss).backward(retain_graph=True)
        return loss.detach()

    def _value(self, losses: list[torch.Tensor]) -> Any:
        return losses[0] if self.sampler.micro_batches == 1 else losses

    def _average(self, losses: list[torch.Tensor]) -> None:
        self.trained.losses.append(chronica.average(self._value(losses), self.sampler).item())

    def _note_gradients(self) -> None:
        for model, _ in self.pairs:
            model.refuse_other_layouts()
        gradients = [model.gradients() for model, _ in self.pairs]
        self.trained.gradients.append({name: value for part in gradients for name, value in part.items()})

    def _refuse_unsent(self, model: Model, optimizer: Any) -> None:
        """Refuse gradients that wait for the update: they are sent in their last backward pass, and overlap with it.

        Where an epoch ends early nobody knows that no further step adds to the update; and parameters may be unused.
        """
        if hvd.size() == 1 or model.other is not None or self.training.worked_on < self.job.steps_per_update:
            return
        sent = [handle for handle, _ in optimizer._handles.values()]
        assert sent
        assert None not in sent, "gradients were not sent in their last backward pass"

    def _update(self, optimizer: Any) -> None:
        if not self.job.clips:
            optimizer.step()
            return
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()


def _read_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield each when the one after it has been read, as wrappers do that copy to a device."""
    return (batch for batch, _ in itertools.pairwise(itertools.chain(batches, [None])))
