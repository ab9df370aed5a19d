"""Random jobs: the options of their plans and optimizers, as they are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
from choices import Choices

LONGEST = 60  # the size of a sample


def drawn_sizes(random: np.random.Generator, kind: str, samples: int) -> list[int]:
    sizes = np.clip(random.lognormal(2.0, 1.0, samples), 1, LONGEST).astype(int)
    if kind == "equal":
        sizes[:] = sizes[0]
    if kind == "zeros":
        sizes[random.random(samples) < 0.4] = 0
    return sizes.tolist()  # type: ignore[no-any-return]


def drawn_loss_weight(choices: Choices, seed: int, sizes: list[int]) -> str | list[float]:
    kind: str = choices.of(["samples", "sizes", "array", "sum"])
    if kind == "sizes" and not any(sizes):
        return "samples"
    if kind != "array":
        return kind
    return drawn_weights(seed, len(sizes))


def drawn_weights(seed: int, samples: int) -> list[float]:
    """Return weights, not all 0, of which a quarter is 0, or two thirds, so that whole steps may count nothing."""
    random = np.random.default_rng(seed)
    zeros = [0.0] * random.choice([1, 6])
    return [1.0, *random.choice([*zeros, 0.5, 1.0, 3.0], samples - 1).tolist()]


def plan_options(
    choices: Choices, ranks: int, batch_size: int, sizes: list[int], loss_weight: str | list[float]
) -> dict[str, Any]:
    samples = len(sizes)
    options = {
        "padding": choices.of(["max", "max", "none"]),  # without padding few steps are split
        "local_batch": choices.of(["free", "free", "equal"]),
        "reorder": choices.of(["batch", "batch", "window"]),
        "window": choices.integer(1, 4),
        "max_moved": choices.of([0.25, 1.0]),
        "micro_batches": choices.of([1, 2, 3, "auto", "auto"]),
        "comm": choices.of([0.0, 0.0, 10.0]),
        "min_local_batch": choices.integer(1, min(3, batch_size)),
        "shuffle": choices.chance(0.5),
        "seed": choices.integer(0, 9),
        "drop_last": choices.chance(0.15) and samples >= batch_size * ranks,
        "policy": choices.of(["balanced"] * 4 + ["plain", "static", "dynamic", "guided"]),
        "first": choices.of([None, None, "largest"]),
    }
    # Where samples move, a step's are known from the plan only; elsewhere plans may follow what is measured.
    options["refresh"] = "epoch" if options["reorder"] == "batch" and options["first"] is None else None
    needs_normalize = options["reorder"] == "window" and loss_weight != "samples"
    options["normalize"] = choices.of(["step", "epoch"] + ([] if needs_normalize else [None] * 3))
    options["cost"] = _cost(choices, ranks, sizes, options["padding"] == "none")
    longest = max(sizes)
    if options["padding"] == "max":
        options["pad_to"] = choices.of([None, None, 8, [1, 20, LONGEST]])
        longest = -(-longest // 8) * 8 if options["pad_to"] == 8 else LONGEST if options["pad_to"] else longest
    # Elsewhere a plan may be impossible: not all samples of a rank need to fit into so few micro-batches.
    if options["micro_batches"] == "auto" and options["policy"] == "balanced" and options["min_local_batch"] == 1:
        options["max_size"] = choices.of([None, max(1, longest), max(1, 2 * longest)])
    if not options["drop_last"] and choices.chance(0.15):  # a part of the samples, some of them twice
        options["indices"] = [0, *np.random.default_rng(samples).integers(0, samples, samples).tolist()]
        if loss_weight == "sizes" and not any(sizes[index] for index in options["indices"]):
            options["indices"].append(sizes.index(max(sizes)))
    return options


def _cost(choices: Choices, ranks: int, sizes: list[int], is_unpadded: bool) -> Any:
    kind = choices.of(["size", "size", "model", "scaled"] + ["array"] * is_unpadded)
    if kind == "size":
        return None
    if kind == "array":
        return [float(size) ** 1.5 for size in sizes]
    scale = {"rank_scale": [1.0 + rank % 2 for rank in range(ranks)]} if kind == "scaled" else {}
    return {"fixed": 5.0, "per_sample": 1.0, "per_size": 1.0, "per_size2": 0.1, **scale}


def optimizer_options(choices: Choices, model: str) -> dict[str, Any]:
    options: dict[str, Any] = {"op": choices.of(["Average", "Average", "Sum"])}
    if model == "sparse":
        options["sparse_as_dense"] = choices.chance(0.2)
    # Horovod does not group sparse gradients.
    # Where a layer goes unused on some ranks, groups must be completed.
    if model != "sparse" and choices.chance(0.6 if model == "gated" else 0.3):
        options["groups"] = choices.integer(1, 3)
    elif options["op"] == "Average" and choices.chance(0.5):
        options["gradient_predivide_factor"] = choices.of([0.5, 2.0, 3.0])
    if choices.chance(0.2):
        options["compression"] = "fp16"
    if choices.chance(0.55):
        options["backward_passes_per_step"] = choices.of([2, 2, 3, 4])
    return options
