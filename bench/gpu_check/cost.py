"""Block: what the host pays for a measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import chronica_hvd as chronica
from gpu_check.block import Outcome, Setting
from gpu_check.device import Device

PAIRS = 50  # timed at once; what they enqueue stays far below the 1024 entries at which a launch waits
ROUNDS, QUICK_ROUNDS = 60, 10
HOLD_S = 0.03  # longer than the host needs for a round
OURS = "ours_pair"
RIVALS = ("torch_reused_pair", "torch_new_pair")

Variants = dict[str, Callable[[], None]]


def run(setting: Setting) -> Outcome:
    """Time all variants by turns, with the device idle and with a queue that is never empty."""
    device = Device(setting.device)
    timer = chronica.StepTimer(setting.device)
    variants = {OURS: _pairs(timer), "host_clock_pair": _pairs(chronica.StepTimer())}
    variants |= _of_torch() if device.is_cuda else {"perf_counter_pair": _perf_counter_pairs}
    rounds = QUICK_ROUNDS if setting.quick else ROUNDS
    measure(device, timer, variants, 2, hold_s=0.0)
    figures: dict[str, Any] = {
        "clock": timer.clock,
        "idle": measure(device, timer, variants, rounds, hold_s=0.0),
        "long_queue": measure(device, timer, variants, rounds, hold_s=HOLD_S),
    }
    medians = ", ".join(f"{name} {figures['long_queue'][name]['median_us']:.2f} us" for name in variants)
    ok = all(is_cheapest(figures[state], OURS, RIVALS) for state in ("idle", "long_queue")) if device.is_cuda else None
    return Outcome(f"with a long queue: {medians}", figures, ok)


def measure(device: Device, timer: Any, variants: Variants, rounds: int, hold_s: float) -> dict[str, Any]:
    """Return median and quartiles of one pair or look-up of each variant, and how often the held queue ran empty."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    ran_empty = 0
    names = list(variants)
    for turn in range(rounds):
        device.synchronize()
        timer.drain()
        if hold_s > 0.0:
            device.hold(hold_s)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = time.perf_counter()
            variants[name]()
            seconds[name].append((time.perf_counter() - begin) / PAIRS)
        ran_empty += hold_s > 0.0 and device.is_cuda and not device.is_busy()
    device.synchronize()
    figures: dict[str, Any] = {}
    for name, values in seconds.items():
        low, middle, high = (round(float(value) * 1e6, 4) for value in np.percentile(values, (25, 50, 75)))
        figures[name] = {"median_us": middle, "quartiles_us": [low, high]}
    return {**figures, "rounds": rounds, "rounds_whose_queue_ran_empty": ran_empty}


def is_cheapest(figures: dict[str, Any], name: str, rivals: tuple[str, ...]) -> bool:
    """Whether the median is below that of every rival."""
    return all(figures[name]["median_us"] < figures[rival]["median_us"] for rival in rivals)


def _pairs(timer: Any) -> Callable[[], None]:
    start, stop = timer.start, timer.stop

    def pairs() -> None:
        for step in range(PAIRS):
            start(step=step, samples=32, size=32 * 512, size2=32 * 512 * 512)
            stop()

    return pairs


def _perf_counter_pairs() -> None:
    clock = time.perf_counter_ns
    for _ in range(PAIRS):
        clock()
        clock()


def _of_torch() -> Variants:
    """Return torch's own ways to the same, and the two ways to ask for the stream."""
    index = torch.cuda.current_device()
    raw_stream, stream = torch._C._cuda_getCurrentRawStream, torch.cuda.current_stream
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def reused() -> None:
        for _ in range(PAIRS):
            begin.record()
            end.record()

    def new() -> None:
        for _ in range(PAIRS):
            first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            second.record()

    def raw_look_up() -> None:
        for _ in range(PAIRS):
            raw_stream(index)

    def look_up() -> None:
        for _ in range(PAIRS):
            stream()

    return {
        "torch_reused_pair": reused,
        "torch_new_pair": new,
        "raw_stream_look_up": raw_look_up,
        "current_stream_look_up": look_up,
    }
