"""Block: torch.compile compiles as often, and computes the same, whether steps are timed or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import chronica_hvd as chronica
from chronica_hvd.timing import Timing, Work
from gpu_check.block import Outcome, Setting
from gpu_check.comparison import harvest
from gpu_check.device import Device
from gpu_check.loop import Loop

WIDTH = 64
BATCH_SIZE = 8
PAD_TO = 64
STEPS = 6
TOLERANCE = 1e-6  # relative
#: inductor compiles for minutes on a small host, and what is compiled is decided before it.
BACKENDS = {"cuda": "inductor", "cpu": "eager"}


def run(setting: Setting) -> Outcome:
    """Train a small model over the padded lengths of a plan, static and dynamic, with and without timing."""
    device = Device(setting.device)
    shapes = _shapes()
    figures: dict[str, Any] = {"backend": BACKENDS[setting.device], "shapes": shapes}
    verdicts = []
    for name, dynamic in (("static", False), ("dynamic", True)):
        plain, plain_graphs = _train(device, shapes, dynamic, None)
        timing = Timing(setting.device)
        timed, timed_graphs = _train(device, shapes, dynamic, timing)
        records = harvest(timing.timer, len(shapes))
        difference = max(_relative_difference(*pair) for pair in zip(timed, plain, strict=True))
        figures[name] = {
            "graphs": plain_graphs,
            "graphs_timed": timed_graphs,
            "largest_relative_difference": difference,
            "records": len(records),
        }
        verdicts.append(plain_graphs == timed_graphs and difference <= TOLERANCE)
    return Outcome(
        ", ".join(
            f"{name}: {figures[name]['graphs_timed']} graphs timed, {figures[name]['graphs']} not, "
            f"results differ by {figures[name]['largest_relative_difference']:.1e}"
            for name in ("static", "dynamic")
        ),
        figures,
        all(verdicts),
    )


def _shapes() -> list[tuple[int, int]]:
    """Return the (samples, length) of a rank's steps as a plan with ``pad_to`` has them."""
    drawn = np.random.default_rng(0).lognormal(3.5, 1.0, 2 * BATCH_SIZE * STEPS)
    sizes = np.clip(drawn, 1, 4 * PAD_TO).astype(int)
    plan = chronica.plan(sizes, ranks=2, batch_size=BATCH_SIZE, pad_to=PAD_TO, local_batch="equal")
    return [(len(plan.batches(step, 0)[0]), int(plan.lengths[plan.part(step, 0).start])) for step in range(plan.steps)]


def _train(
    device: Device, shapes: list[tuple[int, int]], dynamic: bool, timing: Timing | None
) -> tuple[list[Tensor], int]:
    """Return each step's loss and gradients, and how many graphs were compiled."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(device.name)
    compiled: Any = torch.compile(model, dynamic=dynamic, backend=BACKENDS[device.name])
    loop = Loop(model.parameters(), timing)
    results: list[Tensor] = []

    for step, (samples, length) in enumerate(shapes):
        inputs = torch.randn(samples, length, WIDTH, device=device.name)

        def micro_batch(take: Callable[[], None], inputs: Tensor = inputs) -> None:
            take()
            loss = compiled(inputs).square().mean()
            loss.backward()
            results.append(loss.detach())
            results.extend(parameter.grad.clone() for parameter in loop.parameters if parameter.grad is not None)

        loop.step(step, (Work(samples, samples * length, samples * length**2, 0),), micro_batch)
    device.synchronize()
    return results, counters["stats"]["unique_graphs"]


def _relative_difference(one: Tensor, other: Tensor) -> float:
    """Return |one − other| ÷ |other|, norms over all entries."""
    return float((one - other).norm() / other.norm())
