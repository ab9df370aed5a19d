"""What it is worth that a rank's largest micro-batch comes last: two ranks, an allreduce of about half the compute.

Horovod sends nothing before the last backward pass of a step. The same micro-batches are trained on in both orders, by
turns, and the medians of the step times are compared with max(T, C + T − d): T the time of all micro-batches, d that of
the last backward pass, C that of the allreduce, all measured alone. Writes bench/results/overlap.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from launch import horovodrun
from torch import nn

RESULTS = Path(__file__).resolve().parent / "results" / "overlap.json"
WIDTH, LAYERS = 1448, 6
SECONDS_PER_SAMPLE = 6e-5  # of a layer's forward pass; its backward pass takes twice as long
ORDERS = {"largest last": (8, 8, 8, 72), "largest first": (72, 8, 8, 8)}  # samples of each micro-batch
STEPS = 40
TIMEOUT_S = 300


class Sleep(torch.autograd.Function):
    """Stands for a layer that an accelerator computes."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Sleep."""
        time.sleep(len(inputs) * SECONDS_PER_SAMPLE)
        ctx.save_for_backward(inputs, weight)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sleep twice as long."""
        inputs, weight = ctx.saved_tensors
        time.sleep(2 * len(inputs) * SECONDS_PER_SAMPLE)
        return gradients[0], torch.zeros_like(weight)


class Layer(nn.Module):
    """A layer of WIDTH² weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs, late."""
        result: torch.Tensor = Sleep.apply(inputs, self.weight)  # type: ignore[no-untyped-call]
        return result


def main() -> None:
    """Launch this file on two ranks."""
    raise SystemExit(horovodrun(2, Path(__file__), "--rank", timeout_s=TIMEOUT_S))


def rank() -> None:
    """Measure on one of the ranks; rank 0 prints and writes."""
    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), backward_passes_per_step=4
    )
    inputs = {samples: torch.randn(samples, 1, requires_grad=True) for samples in (8, 72)}

    def step(order: tuple[int, ...]) -> float:
        hvd.barrier()
        begin = time.perf_counter()
        for samples in order:
            model(inputs[samples]).square().mean().backward()
        optimizer.synchronize()
        seconds = time.perf_counter() - begin
        optimizer.zero_grad()
        return seconds

    def backward(samples: int) -> tuple[float, float]:
        """Return the seconds of a whole micro-batch and of its backward pass, without Horovod's hooks."""
        begin = time.perf_counter()
        loss = model(inputs[samples]).square().mean()
        middle = time.perf_counter()
        torch.autograd.grad(loss, list(model.parameters()))
        end = time.perf_counter()
        return end - begin, end - middle

    gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]

    def allreduce() -> float:
        hvd.barrier()
        begin = time.perf_counter()
        handles = [hvd.allreduce_async_(one, name=f"alone.{i}") for i, one in enumerate(gradients)]
        for handle in handles:
            hvd.synchronize(handle)
        return time.perf_counter() - begin

    alone: dict[int, list[tuple[float, float]]] = {8: [], 72: []}
    steps: dict[str, list[float]] = {name: [] for name in ORDERS}
    wire = []
    for turn in range(STEPS + 2):  # the first two warm up
        wire.append(allreduce())
        for samples, seconds in alone.items():
            seconds.append(backward(samples))
        for name in list(ORDERS) if turn % 2 else list(ORDERS)[::-1]:
            steps[name].append(step(ORDERS[name]))
    comm = median(wire[2:])
    micro = {samples: median(one for one, _ in seconds[2:]) for samples, seconds in alone.items()}
    passes = {samples: median(one for _, one in seconds[2:]) for samples, seconds in alone.items()}
    compute = 3 * micro[8] + micro[72]
    result: dict[str, Any] = {"compute_s": compute, "allreduce_s": comm, "orders": {}}
    for name, order in ORDERS.items():
        predicted = max(compute, comm + compute - passes[order[-1]])
        result["orders"][name] = {"step_s": median(steps[name][2:]), "predicted_s": predicted}
    last, first = (result["orders"][name]["step_s"] for name in ORDERS)
    result["saved"] = 1 - last / first
    if hvd.rank() == 0:
        print(f"compute {compute * 1e3:.1f} ms, allreduce {comm * 1e3:.1f} ms ({comm / compute:.0%} of it)")
        for name, figures in result["orders"].items():
            print(f"{name:<14} {figures['step_s'] * 1e3:7.1f} ms, predicted {figures['predicted_s'] * 1e3:7.1f} ms")
        print(f"saved {result['saved']:.1%} of the step")
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["--rank"] else main()
