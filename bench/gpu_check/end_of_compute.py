"""Block: a micro-batch's record ends with its backward pass, whatever the loop does before ``step()``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from chronica_hvd.timing import Timing, Work
from gpu_check.block import Outcome, Setting
from gpu_check.comparison import SLACK_NS, Comparison, agree, harvest
from gpu_check.device import Device, Reference
from gpu_check.loop import Loop

STEPS, QUICK_STEPS = 12, 3
MICRO_BATCHES = 2
PAUSE_S = 0.05  # between backward() and step()
HOLD_S = 0.005
#: On the host the reference is read by Python code a little later than ours, and by turns with other processes.
HOST_SLACK_NS = 1e6


def run(setting: Setting) -> Outcome:
    """Train with a pause behind each backward pass, with and without asking for the loss before."""
    device = Device(setting.device)
    width, samples, layers = (128, 256, 3) if setting.quick else (2048, 4096, 6)
    inputs = torch.randn(samples, width, device=setting.device)
    steps = QUICK_STEPS if setting.quick else STEPS
    figures: dict[str, Any] = {"pause_ms": PAUSE_S * 1e3}
    verdicts = []
    for name, asks_for_loss in (("without loss.item()", False), ("with loss.item()", True)):
        # A new model each time: the first one's gradients go on being weighed by the loop it was trained in.
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(setting.device)
        comparison = _train(device, model, inputs, steps, asks_for_loss)
        leaves_pause_out = bool(comparison.differences_ns.max() < PAUSE_S * 1e9 / 2)
        figures[name] = {**comparison.figures(), "leaves_pause_out": leaves_pause_out}
        verdicts.append(agree([comparison]) and leaves_pause_out)
    differences = ", ".join(f"{figures[name]['median_difference_us']:+.1f} us {name}" for name in list(figures)[1:])
    milliseconds = figures["with loss.item()"]["other_median_ms"]
    return Outcome(f"records of {milliseconds:.2f} ms differ by {differences}", figures, all(verdicts))


def _train(device: Device, model: nn.Module, inputs: torch.Tensor, steps: int, asks_for_loss: bool) -> Comparison:
    timing = Timing(device.name)
    loop = Loop(model.parameters(), timing)
    references: list[Reference] = []

    def micro_batch(take: Callable[[], None]) -> None:
        device.hold(HOLD_S)
        take()
        references.append(device.reference())
        references[-1].start()
        loss = model(inputs).square().mean()
        loss.backward()
        references[-1].stop()
        if asks_for_loss:
            loss.item()
        time.sleep(PAUSE_S)

    work = (Work(len(inputs), len(inputs), len(inputs), 0),) * MICRO_BATCHES
    for step in range(steps + 1):
        loop.step(step, work, micro_batch)
    device.synchronize()
    first = MICRO_BATCHES  # the first step warms up
    ours_ns = harvest(timing.timer, (steps + 1) * MICRO_BATCHES)["elapsed_ns"][first:].tolist()
    slack_ns = SLACK_NS if device.is_cuda else HOST_SLACK_NS
    return Comparison(ours_ns, [reference.elapsed_ns() for reference in references[first:]], slack_ns)
