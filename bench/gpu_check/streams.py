"""Block: measurements on other streams than the default one, against torch's events."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

import chronica_hvd as chronica
from gpu_check.block import Outcome, Setting
from gpu_check.comparison import Comparison, compare, outcome
from gpu_check.device import Device, warm_up

SPIN_S = 1e-3
WIDTH, QUICK_WIDTH = 2048, 64  # of the matrices of a backward pass
REPEATS, QUICK_REPEATS = 100, 20


class EndedByAutograd(chronica.StepTimer):
    """A timer that the end of a backward pass stops, on whatever stream autograd calls back."""

    def stop(self) -> None:
        """Do nothing: the backward pass does."""

    def end(self) -> None:
        """Stop."""
        super().stop()


def run(setting: Setting) -> Outcome:
    """Compare on each kind of stream."""
    device = Device("cuda")
    repeats = QUICK_REPEATS if setting.quick else REPEATS
    spin = functools.partial(device.spin, SPIN_S)
    timer = chronica.StepTimer("cuda")
    warm_up(device, timer, spin)
    main, side, urgent = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)

    def unjoined() -> None:
        with torch.cuda.stream(side):
            spin()

    def joined() -> None:
        side.wait_stream(main)
        unjoined()
        main.wait_stream(side)

    def on_main() -> None:
        with torch.cuda.stream(main):
            spin()

    comparisons: dict[str, dict[str, Comparison]] = {}
    for name, stream in (("another stream", side), ("a stream of high priority", urgent)):
        with torch.cuda.stream(stream):
            comparisons[name] = compare(device, timer, spin, repeats)
            comparisons[f"backward passes on {name}"] = _backward(
                device, repeats, QUICK_WIDTH if setting.quick else WIDTH
            )
    comparisons["a side stream, not joined"] = compare(device, timer, unjoined, repeats)
    comparisons["a side stream, joined"] = compare(device, timer, joined, repeats)
    comparisons["stopped while another stream is current"] = compare(
        device, timer, on_main, repeats, aside=lambda: torch.cuda.stream(side)
    )
    return outcome(comparisons)


def _backward(device: Device, repeats: int, width: int) -> dict[str, Comparison]:
    """Compare on the current stream, our measurements stopped by autograd's final callback."""
    timer = EndedByAutograd("cuda")
    weight = torch.nn.Parameter(torch.randn(width, width, device="cuda"))
    queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
    weight.register_hook(lambda _: queue(timer.end))

    def step() -> None:
        (weight @ weight).square().mean().backward()
        weight.grad = None

    warm_up(device, timer, step)
    return compare(device, timer, step, repeats)
