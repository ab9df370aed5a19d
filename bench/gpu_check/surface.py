"""Block: the time of a micro-batch over its shape, and how well a CostModel fits it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

import chronica_hvd as chronica
from gpu_check.block import Outcome, Setting
from gpu_check.text_step import TextStep

SAMPLES = (1, 2, 4, 8, 16, 32)
LENGTHS = (64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 2048)
QUICK_SAMPLES, QUICK_LENGTHS = (1, 2, 4), (32, 64, 128)
REPEATS, QUICK_REPEATS = 7, 3


def run(setting: Setting) -> Outcome:
    """Time each shape several times, in an order drawn anew each time, and fit the medians."""
    step = TextStep(setting)
    samples, lengths, repeats = (
        (QUICK_SAMPLES, QUICK_LENGTHS, QUICK_REPEATS) if setting.quick else (SAMPLES, LENGTHS, REPEATS)
    )
    shapes = list(itertools.product(samples, lengths))
    # The largest shapes first: then the memory for all others has been had once.
    for shape in sorted(shapes, key=lambda shape: -shape[0] * shape[1]):
        step.measure(0, *step.random_batch(*shape))
    step.records()
    random = np.random.default_rng(0)
    for _ in range(repeats):
        for number in random.permutation(len(shapes)).tolist():
            step.measure(number, *step.random_batch(*shapes[number]))
    typical = medians(step.records(), len(shapes))
    fit = chronica.CostModel.fit(typical)
    errors = relative_errors(fit, typical)
    figures = {
        **step.settings,
        "repeats": repeats,
        "samples": typical["samples"].tolist(),
        "lengths": [length for _, length in shapes],
        "elapsed_us": [round(value / 1e3, 2) for value in typical["elapsed_ns"].tolist()],
        "fit_ns": {name: getattr(fit, name) for name in ("fixed", "per_sample", "per_size", "per_size2")},
        "median_relative_error": float(np.median(errors)),
        "largest_relative_error": float(errors.max()),
    }
    return Outcome(
        f"{len(shapes)} shapes from {min(figures['elapsed_us']) / 1e3:.2f} to {max(figures['elapsed_us']) / 1e3:.2f} "
        f"ms, the fit is off by {np.median(errors):.1%} (median), {errors.max():.1%} (largest)",
        figures,
    )


def medians(records: Any, shapes: int) -> Any:
    """Return one record a shape, in the order of the shapes' numbers, with the median time."""
    chosen = [records[records["step"] == number] for number in range(shapes)]
    typical = np.array([of_shape[0] for of_shape in chosen], dtype=records.dtype)
    typical["elapsed_ns"] = [np.median(of_shape["elapsed_ns"]) for of_shape in chosen]
    return typical


def relative_errors(cost: chronica.CostModel, records: Any) -> Any:
    """Return |predicted − measured| ÷ measured of each record."""
    predicted = cost.predict(records["samples"], records["size"], records["size2"])
    return np.abs(predicted - records["elapsed_ns"]) / records["elapsed_ns"]
