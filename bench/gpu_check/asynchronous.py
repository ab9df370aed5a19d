"""Block: measuring and harvesting never wait for the device."""

from __future__ import annotations

import functools
import time

import torch

import chronica_hvd as chronica
from gpu_check.block import Outcome, Setting
from gpu_check.comparison import harvest
from gpu_check.device import Device, warm_up

KERNELS = 200  # with two events each they stay below the 1024 entries at which a launch waits
KERNEL_S = 0.01
DRAIN_EVERY = 5
ALLOWED_HOST_S = 0.05


def run(setting: Setting) -> Outcome:
    """Enqueue two seconds of kernels, each measured, and harvest in between, while torch refuses to synchronise."""
    device, timer = Device("cuda"), chronica.StepTimer("cuda")
    spin = functools.partial(device.spin, KERNEL_S)
    warm_up(device, timer, spin)
    torch.cuda.set_sync_debug_mode("error")
    early = 0
    begin = time.perf_counter()
    for number in range(KERNELS):
        timer.start(step=number)
        spin()
        timer.stop()
        if number % DRAIN_EVERY == 0:
            early += len(timer.drain())
    host_s = time.perf_counter() - begin
    was_busy = device.is_busy()
    torch.cuda.set_sync_debug_mode("default")
    device.synchronize()
    device_s = time.perf_counter() - begin
    records = harvest(timer, KERNELS - early)
    measured_s = float(records["elapsed_ns"].sum()) / 1e9
    figures = {
        "host_ms": round(host_s * 1e3, 3),
        "device_ms": round(device_s * 1e3, 3),
        "device_was_busy": was_busy,
        "harvested_meanwhile": early,
        "harvested_after": len(records),
        "measured_after_ms": round(measured_s * 1e3, 3),
        "skipped": timer.skipped,
    }
    return Outcome(
        f"host back after {host_s * 1e3:.1f} ms, device after {device_s * 1e3:.0f} ms",
        figures,
        ok=host_s <= ALLOWED_HOST_S and was_busy and timer.skipped == 0,
    )
