"""Measure: how long the compute of a step takes, at the cost of reading a clock twice."""

from __future__ import annotations

from typing import Any

from chronica_hvd import _core, checks


class StepTimer(_core.StepTimer):
    """A ring of measurements on the host's steady clock.

    ``start(step=0, samples=0, size=0, size2=0, flops=0)`` begins one and says what work it covers: the number of
    samples, S1 = Σ size and S2 = Σ size² (of padded work: n · max and n · max²). ``stop()`` ends it; a measurement
    begun and never stopped is given up by the next ``start``. Neither allocates nor waits.

    ``drain()`` returns the finished ones, oldest first, as a structured array of int64 ``step, samples, size, size2,
    flops, start_ns, elapsed_ns``, and forgets them. ``overwritten`` counts those lost because the ring was full.

    Parameters
    ----------
    device
        ``None`` or a CPU device: the host's clock. CUDA devices need device events, which are not built yet.
    capacity
        How many finished measurements are kept until ``drain``.

    Raises
    ------
    RuntimeError
        From ``stop()``, when nothing was started.
    """

    def __init__(self, device: Any = None, capacity: int = 4096) -> None:
        kind = "cpu" if device is None else str(device).split(":")[0]
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"device must be None, 'cpu' or 'cuda', not {device!r}")
        capacity = checks.integer("capacity", capacity, least=1, most=2**24)
        if kind == "cuda":
            raise NotImplementedError(
                "timing on a CUDA device is not built yet; StepTimer() times on the host, "
                "which measures the device only where the code synchronises"
            )
        super().__init__(capacity)
