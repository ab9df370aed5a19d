"""Block: StepTimer against torch's events around the same kernels, from 20 us to 10 ms."""

from __future__ import annotations

import functools

import chronica_hvd as chronica
from gpu_check.block import Outcome, Setting
from gpu_check.comparison import compare, outcome
from gpu_check.device import Device, warm_up

REPEATS = {2e-5: 400, 1e-4: 400, 1e-3: 200, 1e-2: 40}  # seconds of a kernel → how often
QUICK_REPEATS = {2e-5: 100, 1e-3: 20}


def run(setting: Setting) -> Outcome:
    """Compare the medians for each duration."""
    device = Device(setting.device)
    timer = chronica.StepTimer(setting.device)
    warm_up(device, timer, functools.partial(device.spin, 1e-3))
    comparisons = {
        f"kernels of {seconds * 1e3:g} ms": compare(device, timer, functools.partial(device.spin, seconds), repeats)
        for seconds, repeats in (QUICK_REPEATS if setting.quick else REPEATS).items()
    }
    return outcome(comparisons, clock=timer.clock)
