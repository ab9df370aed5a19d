"""Random jobs: the options of their plans and optimizers, as they are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

LONGEST = 60  # the size of a sample
POLICIES = ["dynamic", "balanced", "plain", "balanced", "static", "balanced", "guided", "balanced", "balanced"]


def drawn_sizes(random: np.random.Generator, kind: str, samples: int) -> list[int]:
    sizes = np.clip(random.lognormal(2.0, 1.0, samples), 1, LONGEST).astype(int)
    if kind == "equal":
        sizes[:] = sizes[0]
    if kind == "zeros":
        sizes[random.random(samples) < 0.4] = 0
    return sizes.tolist()  # type: ignore[no-any-return]


def drawn_loss_weight(draw: st.DrawFn, seed: int, sizes: list[int]) -> str | list[float]:
    kind = draw(st.sampled_from(["samples", "sizes", "sizes", "array", "sum"]))
    if kind == "sizes" and not any(sizes):
        return "samples"
    if kind != "array":
        return kind
    return [1.0, *drawn_weights(seed, len(sizes) - 1)]


def drawn_weights(seed: int, samples: int) -> list[float]:
    return np.random.default_rng(seed).choice([0.0, 0.5, 1.0, 3.0], samples).tolist()  # type: ignore[no-any-return]


def plan_options(
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
        "policy": draw(st.sampled_from(POLICIES)),
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


def optimizer_options(draw: st.DrawFn, model: str) -> dict[str, Any]:
    options: dict[str, Any] = {"op": draw(st.sampled_from(["Average", "Average", "Sum"]))}
    if model == "sparse":
        options["sparse_as_dense"] = draw(st.booleans())
    # Horovod does not group sparse gradients.
    # Where a layer goes unused on some ranks, groups must be completed.
    if model != "sparse" and draw(st.integers(0, 2)) >= (1 if model == "gated" else 2):
        options["groups"] = draw(st.integers(1, 3))
    elif options["op"] == "Average" and draw(st.booleans()):
        options["gradient_predivide_factor"] = draw(st.sampled_from([0.5, 2.0, 3.0]))
    if draw(st.integers(0, 4)) == 4:
        options["compression"] = "fp16"
    if draw(st.sampled_from([False, True, False])):
        options["backward_passes_per_step"] = draw(st.integers(2, 3))
    return options
