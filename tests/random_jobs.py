"""Random training jobs: what they are made of, and how they are drawn."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
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
        if self.is_rounded:
            return 0.0  # what half precision loses in one step must not add up, so that it can be bounded
        scale = self.ranks if self.optimizer["op"] == "Sum" else 1
        return 0.01 / (scale * (self.batch_size if self.loss_weight == "sum" else 1))

    @property
    def steps_per_update(self) -> int:
        return self.optimizer.get("backward_passes_per_step", 1) // self.losses  # type: ignore[no-any-return]

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


@st.composite
def jobs(draw: st.DrawFn, ranks: int | None = None) -> Job:
    """Draw a job, for so many ranks or for any number from 1 to 5."""
    given_ranks = ranks
    ranks = ranks or draw(st.sampled_from([2, 3, 4, 5, 1, 2, 3, 4, 5, 3]))
    batch_size = draw(st.integers(1, 5))
    global_batch = batch_size * ranks
    is_long = draw(st.integers(0, 29)) == 29  # two blocks of 64 steps
    steps = 65 if is_long else draw(st.integers(1, 8 if batch_size > 1 else 15))
    samples = steps * global_batch - draw(st.integers(0, global_batch - 1))
    seed = draw(st.integers(0, 2**16))
    sizes = drawn_sizes(
        np.random.default_rng(seed), draw(st.sampled_from(["heavy", "heavy", "equal", "zeros"])), samples
    )
    loss_weight = drawn_loss_weight(draw, seed, sizes)
    plan = plan_options(draw, ranks, batch_size, sizes, loss_weight)
    model = draw(st.sampled_from(["dense", "gated", "bag", "sparse", "image"]))
    # torch cannot cast sparse gradients, nor does Horovod gather them in bfloat16.
    dtype = draw(st.sampled_from(["float64", "float64", "float32", "float32"] + ["bfloat16"] * (model != "sparse")))
    loop = draw(st.sampled_from(["plain", "steps", "ahead", "steps_ahead"]))
    optimizer = optimizer_options(draw, model)
    is_ahead = "ahead" in loop
    if is_ahead:
        optimizer["lookahead"] = 1
    passes = optimizer.get("backward_passes_per_step", 1)
    losses = passes if passes > 1 and not is_ahead and draw(st.sampled_from([False, True, False])) else 1
    # Amounts mean nothing to summed losses, come too late for several steps, and may be too small for half precision.
    may_say_amounts = loss_weight != "sum" and passes == 1 and "compression" not in optimizer
    says_amounts = may_say_amounts and draw(st.integers(0, 2)) == 2
    has_closure = passes == 1 and not is_ahead and draw(st.integers(0, 4)) == 4
    epochs = 1 if is_long else draw(st.integers(1, 2))
    skips = (
        draw(st.sets(st.integers(0, steps * epochs - 1), max_size=3))
        if draw(st.sampled_from([False, True, False]))
        else ()
    )
    # Several steps at once are given up with a wrapper that reads ahead when each had its backward passes.
    skips_after = 99 if is_ahead and passes > 1 else draw(st.sampled_from([0, 1, 0, 2, 3]))
    may_have_second = passes == 1 and not has_closure
    # Horovod makes of sparse gradients, and so of their momentum, another kind than one rank has.
    others = [given_ranks] if given_ranks else [1] if model == "sparse" and ranks == 1 else [2, 3, 4, 5]
    others += [1] * (model != "sparse" and given_ranks is None)
    does_resume = draw(st.integers(0, 3)) == 3
    # Where a wrapper reads ahead every step needs its backward pass.
    fillers = draw(st.sampled_from(["nan", "skipped", "skipped"])) if ranks > 1 and not is_ahead else "nan"
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
        speeds=_speeds(draw, ranks),
        plan=plan,
        optimizer=optimizer,
        loop=loop,
        fillers=fillers,
        average="closure" if has_closure else "before" if is_ahead else draw(st.sampled_from(["before", "after"])),
        clips=draw(st.booleans()) and not has_closure,
        losses=losses,
        skips=sorted(skips),
        skips_after=max(1, skips_after) if says_amounts else skips_after,  # for every batch set_weight is called
        zeroes=draw(st.integers(0, 3)) == 3,
        second_every=draw(st.sampled_from([0, 0, 0, 1, 2, 3])) if may_have_second else 0,
        evaluates=draw(st.integers(0, 3)) == 3,
        resumes=_resumes(draw, others, plan, samples, epochs, steps) if does_resume else None,
    )


def _speeds(draw: st.DrawFn, ranks: int) -> list[float] | None:
    return draw(st.none() | st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=ranks, max_size=ranks))


def _resumes(draw: st.DrawFn, ranks: list[int], plan: dict[str, Any], samples: int, epochs: int, steps: int) -> Any:
    world = {
        "ranks": draw(st.sampled_from(ranks)),
        "batch_size": draw(st.integers(plan["min_local_batch"], 5)),
    }
    if plan["drop_last"] and world["ranks"] * world["batch_size"] > samples:
        return None  # nothing at all would be left of an epoch
    place = {"epoch": draw(st.integers(0, epochs - 1)), "steps": draw(st.integers(1, steps))}
    return {**place, **world, "speeds": _speeds(draw, world["ranks"])}


def drawn_jobs(count: int, ranks: int | None = None) -> list[Job]:
    """Return so many different jobs, always the same."""
    drawn: dict[str, Job] = {}

    @settings(max_examples=2 * count, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(jobs(ranks))
    def collect(job: Job) -> None:
        drawn[repr(job)] = job

    collect()
    assert len(drawn) >= count
    return list(drawn.values())[:count]
