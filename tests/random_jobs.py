"""Random training jobs: what they are made of, and how they are drawn."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from choices import Choices
from job_options import drawn_loss_weight, drawn_sizes, drawn_weights, optimizer_options, plan_options


@dataclass(frozen=True)
class Job:
    """A training run, of plain values only: ``dataclasses.asdict`` of it is JSON, and ``Job(**it)`` the job again."""

    ranks: int
    batch_size: int
    sizes: list[int]
    seed: int  # of data and parameters, and of the moments at which ranks take turns
    model: str  # "dense", "gated" (which leaves parameters unused), "bag", "sparse" (whose gradient is), "image"
    dtype: str  # of the parameters; bfloat16 ones compute in float64, so that only their gradients are rounded
    epochs: int
    loss_weight: str | list[float]
    amounts: list[float] | None  # what each sample counts in truth, said by set_weight; None: loss_weight says it
    speeds: list[float] | None
    plan: dict[str, Any]  # options of chronica_hvd.plan; a CostModel as the dict of its arguments
    optimizer: dict[str, Any]  # options of the optimizer; op and compression by their names
    loop: str  # "plain", "steps", "ahead", "steps_ahead"
    fillers: str  # "nan": their loss is; "skipped": they, and batches of true weight 0, have no backward pass
    average: str  # the loss is averaged "before" or "after" the update, or a closure's by the "closure" update
    clips: bool  # synchronizes by itself, as for clipping, before it makes the step
    losses: int = 1  # of each micro-batch; each has its backward pass
    skips: list[int] = dataclasses.field(default_factory=list)  # numbers of the steps that all ranks give up
    skips_after: int = 0  # so many micro-batches had a backward pass, with NaN gradients
    zeroes: bool = False  # zero_grad(set_to_none=False)
    begins_anew: bool = False  # leaves the loop in the middle of its first step, where nothing is sent, and begins anew
    second_every: int = 0  # a second optimizer, on the same sampler, trains every n-th step; 0: there is none
    evaluates: bool = False  # the mean loss over the data set, at last
    resumes: dict[str, Any] | None = (
        None  # after some "steps" of an "epoch", with other "ranks", "batch_size", "speeds"
    )

    @property
    def is_compressed(self) -> bool:
        return "compression" in self.optimizer

    @property
    def is_rounded(self) -> bool:
        """Whether gradients lose more than the order of summation explains."""
        return self.is_compressed or self.dtype == "bfloat16"

    @property
    def learning_rate(self) -> float:
        """So small that training does not magnify what is lost to rounding, whatever the gradient's scale."""
        is_long = len(self.sizes) > 16 * self.ranks * self.batch_size
        if self.is_rounded or (is_long and self.dtype == "float32"):
            return 0.0  # what low precision loses in one step must not add up, so that it can be bounded
        scale = self.ranks if self.optimizer["op"] == "Sum" else 1
        return 0.01 / (scale * (self.batch_size if self.loss_weight == "sum" else 1))

    @property
    def steps_per_update(self) -> int:
        return self.optimizer.get("backward_passes_per_step", 1) // self.losses  # type: ignore[no-any-return]

    @property
    def follows_times(self) -> bool:
        """Whether later epochs are planned by what the ranks measure."""
        return self.plan["refresh"] is not None and self.plan["cost"] is None

    @property
    def moves_samples(self) -> bool:
        """Whether samples or steps change their place, so that a step's samples are known from the plan only."""
        return self.plan["reorder"] != "batch" or self.plan["first"] is not None

    @property
    def legs(self) -> list[Job]:
        """The job in each of its worlds, one after the other."""
        if self.resumes is None:
            return [self]
        world = {name: self.resumes[name] for name in ("ranks", "batch_size", "speeds")}
        plan = dict(self.plan)
        if isinstance(plan["cost"], dict) and "rank_scale" in plan["cost"]:
            plan["cost"] = {**plan["cost"], "rank_scale": [1.0 + rank % 2 for rank in range(world["ranks"])]}
        return [self, dataclasses.replace(self, **world, plan=plan, resumes=None)]

    def schedule(self, first: int, steps: int, epoch: int) -> list[str]:
        """Return what becomes of each step of an epoch, the leg's step number ``first`` and so on.

        "part" of an update, its end ("update"), or "skip" for the whole update. A leg that another follows ends early,
        after an update.
        """
        schedule: list[str] = []
        in_update = 0
        for step in range(steps):
            in_update += 1
            ends = in_update == self.steps_per_update or step + 1 == steps
            schedule.append("skip" if first + step in self.skips else "update" if ends else "part")
            if schedule[-1] != "part":
                in_update = 0
                if self.stops_in(epoch) and len(schedule) >= self.resumes["steps"]:  # type: ignore[index]
                    break
        return schedule

    def stops_in(self, epoch: int) -> bool:
        return self.resumes is not None and self.resumes["epoch"] == epoch


def random_job(number: int, ranks: int | None = None) -> Job:
    """Return the job of this number, for so many ranks or for any number from 1 to 5."""
    choices = Choices(number, ranks or 0)
    given_ranks = ranks
    ranks = ranks or choices.of([1, 2, 2, 3, 3, 3, 4, 5])
    batch_size = choices.of([1, 2, 3, 4, 6, 8])
    model = choices.of(["dense", "gated", "bag", "sparse", "image"])
    optimizer = optimizer_options(choices, model)
    passes = optimizer.get("backward_passes_per_step", 1)
    loop = choices.of(["plain", "plain", "steps", "steps", "steps", "ahead", "steps_ahead"])
    is_ahead = "ahead" in loop
    if is_ahead:
        optimizer["lookahead"] = 1
    losses = choices.of([1, 2 if passes == 4 else passes]) if not is_ahead else 1
    is_long = choices.chance(0.08)  # two blocks of 64 steps
    epochs = 1 if is_long else choices.integer(1, 2)
    steps = 65 if is_long else choices.integer(min(passes, 2), 8)
    samples = _samples(choices, ranks, batch_size, steps, often_few=passes > 1)
    seed = choices.integer(0, 2**16)
    kind = choices.of(["heavy", "heavy", "heavy", "equal", "zeros", "zeros"])
    sizes = drawn_sizes(np.random.default_rng(seed), kind, samples)
    loss_weight = drawn_loss_weight(choices, seed, sizes)
    plan = plan_options(choices, ranks, batch_size, sizes, loss_weight)
    # torch cannot cast sparse gradients, nor does Horovod gather them in bfloat16.
    dtype = choices.of(["float64", "float64", "float32", "float32"] + ["bfloat16"] * (model != "sparse"))
    # Amounts mean nothing to summed losses, come too late for several steps, and may be too small for half precision.
    may_say_amounts = loss_weight != "sum" and passes == 1 and "compression" not in optimizer
    # Where an epoch's planned weights are all 0 its planned divisor says nothing of true amounts.
    may_say_amounts &= plan["normalize"] != "epoch" or loss_weight == "samples"
    says_amounts = may_say_amounts and choices.chance(0.8)
    has_closure = passes == 1 and not is_ahead and choices.chance(0.4)
    skips = {choices.integer(0, steps * epochs - 1) for _ in range(choices.of([0, 0, 1, 2, 3]))}
    # Several steps at once are given up with a wrapper that reads ahead when each had its backward passes.
    skips_after = 99 if is_ahead and passes > 1 else choices.of([0, 1, 1, 1, 2])
    # Where a wrapper reads ahead nobody may leave steps out, and every step needs its backward pass.
    has_second = passes == 1 and not has_closure and choices.chance(0.7)
    fillers = choices.of(["nan", "skipped", "skipped", "skipped", "skipped"]) if ranks > 1 and not is_ahead else "nan"
    # Horovod makes of sparse gradients, and so of their momentum, another kind than one rank has.
    others = [given_ranks] if given_ranks else [1] if model == "sparse" and ranks == 1 else [2, 3, 4, 5]
    others += [1] * (model != "sparse" and given_ranks is None)
    return Job(
        ranks=ranks,
        batch_size=batch_size,
        sizes=sizes,
        seed=seed,
        model=model,
        dtype=dtype,
        epochs=epochs,
        loss_weight=loss_weight,
        amounts=drawn_weights(seed + 1, samples) if says_amounts else None,
        speeds=_speeds(choices, ranks),
        plan=plan,
        optimizer=optimizer,
        loop=loop,
        fillers=fillers,
        average="closure" if has_closure else "before" if is_ahead else choices.of(["before", "after"]),
        clips=choices.chance(0.5) and not has_closure,
        losses=losses,
        skips=sorted(skips),
        skips_after=max(1, skips_after) if says_amounts else skips_after,  # for every batch set_weight is called
        zeroes=choices.chance(0.25),
        second_every=(1 if is_ahead else choices.of([1, 2, 3])) if has_second else 0,
        evaluates=choices.chance(0.25),
        begins_anew=choices.chance(0.5) and not is_ahead,
        resumes=_resumes(choices, others, plan, samples, epochs, steps) if choices.chance(0.25) else None,
    )


def _samples(choices: Choices, ranks: int, batch_size: int, steps: int, often_few: bool) -> int:
    """Return how many samples make so many steps; often the last one has so few that some ranks hold fillers."""
    most = batch_size * ranks
    if ranks > 1 and choices.chance(0.95 if often_few else 0.8):
        most = ranks - 1
    return (steps - 1) * batch_size * ranks + choices.integer(1, most)


def _speeds(choices: Choices, ranks: int) -> list[float] | None:
    return [choices.of([0.5, 1.0, 3.0]) for _ in range(ranks)] if choices.chance(0.5) else None


def _resumes(
    choices: Choices, ranks: list[int], plan: dict[str, Any], samples: int, epochs: int, steps: int
) -> dict[str, Any] | None:
    world = {"ranks": choices.of(ranks), "batch_size": choices.integer(plan["min_local_batch"], 5)}
    if plan["drop_last"] and world["ranks"] * world["batch_size"] > samples:
        return None  # nothing at all would be left of an epoch
    place = {"epoch": choices.integer(0, epochs - 1), "steps": choices.integer(1, steps)}
    return {**place, **world, "speeds": _speeds(choices, world["ranks"])}
