"""Block: an epoch's plans computed for real, rank after rank on the one device; a step takes its slowest rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from stdlib_text import Functions

import chronica_hvd as chronica
from gpu_check.block import Outcome, Setting
from gpu_check.text_step import TextStep

RANKS, QUICK_RANKS = 8, 2
BATCH_SIZE, QUICK_BATCH_SIZE = 32, 4
STEPS, QUICK_STEPS = 8, 2
REPEATS, QUICK_REPEATS = 2, 1
PAD_TO = 64
#: What is planned: name → options of the plan.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"policy": "plain"},
    "one_cut": {"micro_batches": 1},
    "micro_batches": {"micro_batches": "auto"},
    "pad_to_64": {"micro_batches": "auto", "pad_to": PAD_TO},
}


def run(setting: Setting) -> Outcome:
    """Compute every variant's batches by turns, more than once, and compare the sums of the steps' makespans."""
    if "surface" not in setting.figures:
        raise ValueError("the block virtual_ranks plans with the cost that the block surface fits; run that before")
    step = TextStep(setting)
    cost = chronica.CostModel(**setting.figures["surface"]["fit_ns"])
    ranks, batch_size, steps, repeats = (
        (QUICK_RANKS, QUICK_BATCH_SIZE, QUICK_STEPS, QUICK_REPEATS)
        if setting.quick
        else (RANKS, BATCH_SIZE, STEPS, REPEATS)
    )
    dataset = Functions(step.longest, ranks * batch_size * steps)
    plans = {
        name: chronica.plan(dataset.sizes, ranks, batch_size, cost=cost, **options)
        for name, options in VARIANTS.items()
    }
    loads: dict[str, list[Any]] = {name: [] for name in plans}
    for turn in range(repeats + 1):  # the first warms up
        for name, plan in plans.items():
            measured = _measure(step, dataset, plan)
            if turn > 0:
                loads[name].append(measured)
    typical = {name: np.median(measured, axis=0) for name, measured in loads.items()}
    figures: dict[str, Any] = {
        **step.settings,
        "ranks": ranks,
        "batch_size": batch_size,
        "steps": steps,
        "repeats": repeats,
        "variants": {name: _variant(typical[name], typical["plain"], plans[name], plans["plain"]) for name in plans},
    }
    shown = (
        f"{name} {variant['speed_up']:.2f}x (idle {variant['idle_share']:.1%})"
        for name, variant in figures["variants"].items()
    )
    return Outcome(f"speed-up against plain: {', '.join(shown)}", figures)


def _measure(step: TextStep, dataset: Functions, plan: chronica.Plan) -> Any:
    """Return (steps, ranks) nanoseconds, by computing all micro-batches of the plan."""
    for number in range(plan.steps):
        for rank in range(plan.ranks):
            lengths = plan.lengths[plan.part(number, rank)].tolist()
            # All on the device before the first is computed: copying waits for the device, as a loader need not.
            batches = [
                padded([dataset[index] for index in indices.tolist()], int(length), step.device.name)
                for indices, length in zip(plan.batches(number, rank), lengths, strict=True)
            ]
            for batch in batches:
                step.measure(number * plan.ranks + rank, *batch)
    records = step.records()
    sums = np.bincount(records["step"], records["elapsed_ns"], minlength=plan.steps * plan.ranks)
    return sums.reshape(plan.steps, plan.ranks)


def padded(texts: list[torch.Tensor], length: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the texts padded to a length, (samples, length) int64, and their lengths, both on the device."""
    batch = torch.zeros(len(texts), length, dtype=torch.long)
    for row, text in zip(batch, texts, strict=True):
        row[: len(text)] = text
    return batch.to(device), torch.tensor([len(text) for text in texts]).to(device)


def _variant(loads: Any, plain: Any, plan: chronica.Plan, plain_plan: chronica.Plan) -> dict[str, Any]:
    """Return what a variant's measured loads, (steps, ranks) in nanoseconds, come to."""
    makespans = loads.max(axis=1)
    return {
        "speed_up": float(plain.max(axis=1).sum() / makespans.sum()),
        "predicted_speed_up": float(plain_plan.makespans.sum() / plan.makespans.sum()),
        "makespans_ms": [round(value / 1e6, 3) for value in makespans.tolist()],
        "idle_share": float(1.0 - loads.mean(axis=1).sum() / makespans.sum()),
        "predicted_idle_share": 1.0 - 1.0 / plan.imbalance,
        "micro_batches_per_rank": float(np.diff(plan.parts).mean()),
        "padding_share": float(plan.padding_waste),
        "shapes": len(plan.shapes()),
    }
