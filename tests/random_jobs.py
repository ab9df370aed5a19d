"""Random training jobs: what they are made of, and how they are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

LONGEST = 60  # the size of a sample


@dataclass(frozen=True)
class Job:
    """A training run, of plain values only: ``dataclasses.asdict`` of it is JSON, and ``Job(**it)`` the job again."""

    ranks: int
    batch_size: int
    sizes: list[int]
    seed: int  # of data and parameters, and of the moments at which ranks take turns
    model: str  # "dense", "gated" (which leaves parameters unused), "bag", "sparse" (whose gradient is)
    dtype: str
    epochs: int
    loss_weight: str | list[float]
    amounts: list[float] | None  # what each sample counts in truth, said by set_weight; None: loss_weight says it
    speeds: list[float] | None
    plan: dict[str, Any]  # options of chronica_hvd.plan; a CostModel as the dict of its arguments
    optimizer: dict[str, Any]  # options of the optimizer; op and compression by their names
    loop: str  # "plain", "steps", "ahead", "steps_ahead"
    fillers: str  # "nan": their loss is; "skipped": they, and batches of true weight 0, have no backward pass
    average: str  # the loss is averaged "before" or "after" the update
    clips: bool  # synchronizes by itself, as for clipping, before it makes the step

    @property
    def is_compressed(self) -> bool:
        return "compression" in self.optimizer

    @property
    def learning_rate(self) -> float:
        """So small that training does not magnify what is lost to rounding, whatever the gradient's scale."""
        if self.is_compressed:
            return 0.0  # what half precision loses in one step must not add up, so that it can be bounded
        scale = self.ranks if self.optimizer["op"] == "Sum" else 1
        return 0.01 / (scale * (self.batch_size if self.loss_weight == "sum" else 1))

    @property
    def steps_per_update(self) -> int:
        return self.optimizer.get("backward_passes_per_step", 1)  # type: ignore[no-any-return]

    @property
    def moves_samples(self) -> bool:
        """Whether samples or steps change their place, so that a step's samples are known from the plan only."""
        return self.plan["reorder"] != "batch" or self.plan["first"] is not None


@st.composite
def jobs(draw: st.DrawFn, ranks: int | None = None) -> Job:
    """Draw a job, for so many ranks or for any number from 1 to 5."""
    ranks = ranks or draw(st.sampled_from([2, 3, 4, 5, 1, 2, 3, 4, 5, 3]))
    batch_size = draw(st.integers(1, 5))
    global_batch = batch_size * ranks
    is_long = draw(st.integers(0, 29)) == 29  # two blocks of 64 steps
    steps = 65 if is_long else draw(st.integers(1, 8 if batch_size > 1 else 15))
    samples = steps * global_batch - draw(st.integers(0, global_batch - 1))
    seed = draw(st.integers(0, 2**16))
    sizes = _sizes(np.random.default_rng(seed), draw(st.sampled_from(["heavy", "heavy", "equal", "zeros"])), samples)
    loss_weight = _loss_weight(draw, seed, sizes)
    plan = _plan_options(draw, ranks, batch_size, sizes, loss_weight)
    model = draw(st.sampled_from(["dense", "gated", "bag", "sparse"]))
    loop = draw(st.sampled_from(["plain", "steps", "ahead", "steps_ahead"]))
    optimizer = _optimizer_options(draw, model)
    if "ahead" in loop:
        optimizer["lookahead"] = 1
    # Where a wrapper reads ahead every step needs its backward pass.
    may_leave_out = ranks > 1 and "ahead" not in loop
    # Amounts mean nothing to summed losses, come too late for several steps, and may be too small for half precision.
    may_say_amounts = loss_weight != "sum" and not {"backward_passes_per_step", "compression"} & optimizer.keys()
    says_amounts = may_say_amounts and draw(st.integers(0, 2)) == 2
    return Job(
        ranks=ranks,
        batch_size=batch_size,
        sizes=sizes,
        seed=seed,
        model=model,
        dtype=draw(st.sampled_from(["float64", "float32"])),
        epochs=1 if is_long else draw(st.integers(1, 2)),
        loss_weight=loss_weight,
        amounts=_weights(seed + 1, samples) if says_amounts else None,
        speeds=draw(st.none() | st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=ranks, max_size=ranks)),
        plan=plan,
        optimizer=optimizer,
        loop=loop,
        fillers=draw(st.sampled_from(["nan", "skipped"])) if may_leave_out else "nan",
        average="before" if "ahead" in loop else draw(st.sampled_from(["before", "after"])),
        clips=draw(st.booleans()),
    )


def _sizes(random: np.random.Generator, kind: str, samples: int) -> list[int]:
    sizes = np.clip(random.lognormal(2.0, 1.0, samples), 1, LONGEST).astype(int)
    if kind == "equal":
        sizes[:] = sizes[0]
    if kind == "zeros":
        sizes[random.random(samples) < 0.4] = 0
    return sizes.tolist()  # type: ignore[no-any-return]


def _loss_weight(draw: st.DrawFn, seed: int, sizes: list[int]) -> str | list[float]:
    kind = draw(st.sampled_from(["samples", "sizes", "sizes", "array", "sum"]))
    if kind == "sizes" and not any(sizes):
        return "samples"
    if kind != "array":
        return kind
    return [1.0, *_weights(seed, len(sizes) - 1)]


def _weights(seed: int, samples: int) -> list[float]:
    return np.random.default_rng(seed).choice([0.0, 0.5, 1.0, 3.0], samples).tolist()  # type: ignore[no-any-return]


def _plan_options(
    draw: st.DrawFn, ranks: int, batch_size: int, sizes: list[int], loss_weight: str | list[float]
) -> dict[str, Any]:
    samples = len(sizes)
    options = {
        "padding": draw(st.sampled_from(["max", "none"])),
        "local_batch": draw(st.sampled_from(["free", "free", "equal"])),
        "reorder": draw(st.sampled_from(["batch", "batch", "window"])),
        "window": draw(st.integers(1, 4)),
        "max_moved": draw(st.sampled_from([0.25, 1.0])),
        "micro_batches": draw(st.sampled_from([1, 1, 2, 3, "auto", "auto"])),
        "comm": draw(st.sampled_from([0.0, 0.0, 10.0])),
        "min_local_batch": draw(st.integers(1, min(3, batch_size))),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 9)),
        "drop_last": draw(st.booleans()) and samples >= batch_size * ranks,
        "policy": draw(st.sampled_from(["balanced"] * 6 + ["plain", "static", "dynamic", "guided"])),
        "first": draw(st.sampled_from([None, None, "largest"])),
    }
    needs_normalize = options["reorder"] == "window" and loss_weight != "samples"
    options["normalize"] = draw(st.sampled_from(["step", "epoch"] + ([] if needs_normalize else [None] * 3)))
    options["cost"] = _cost(draw, ranks, sizes, options["padding"] == "none")
    longest = max(sizes)
    if options["padding"] == "max":
        options["pad_to"] = draw(st.sampled_from([None, None, 8, [1, 20, LONGEST]]))
        longest = -(-longest // 8) * 8 if options["pad_to"] == 8 else LONGEST if options["pad_to"] else longest
    # Elsewhere a plan may be impossible: not all samples of a rank need to fit into so few micro-batches.
    if options["micro_batches"] == "auto" and options["policy"] == "balanced" and options["min_local_batch"] == 1:
        options["max_size"] = draw(st.sampled_from([None, max(1, longest), max(1, 2 * longest)]))
    if not options["drop_last"] and draw(st.integers(0, 9)) == 9:  # a part of the samples, some of them twice
        options["indices"] = [0, *np.random.default_rng(samples).integers(0, samples, samples).tolist()]
        if loss_weight == "sizes" and not any(sizes[index] for index in options["indices"]):
            options["indices"].append(sizes.index(max(sizes)))
    return options


def _cost(draw: st.DrawFn, ranks: int, sizes: list[int], is_unpadded: bool) -> Any:
    kind = draw(st.sampled_from(["size", "size", "model", "scaled"] + ["array"] * is_unpadded))
    if kind == "size":
        return None
    if kind == "array":
        return [float(size) ** 1.5 for size in sizes]
    scale = {"rank_scale": [1.0 + rank % 2 for rank in range(ranks)]} if kind == "scaled" else {}
    return {"fixed": 5.0, "per_sample": 1.0, "per_size": 1.0, "per_size2": 0.1, **scale}


def _optimizer_options(draw: st.DrawFn, model: str) -> dict[str, Any]:
    options: dict[str, Any] = {"op": draw(st.sampled_from(["Average", "Average", "Sum"]))}
    if model == "sparse":
        options["sparse_as_dense"] = draw(st.booleans())
    # Horovod does not group sparse gradients.
    if model != "sparse" and draw(st.integers(0, 2)) == 2:
        options["groups"] = draw(st.integers(1, 3))
    elif options["op"] == "Average" and draw(st.booleans()):
        options["gradient_predivide_factor"] = draw(st.sampled_from([0.5, 2.0, 3.0]))
    if draw(st.integers(0, 4)) == 4:
        options["compression"] = "fp16"
    if draw(st.integers(0, 3)) == 3:
        options["backward_passes_per_step"] = draw(st.integers(2, 3))
    return options


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
