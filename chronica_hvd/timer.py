"""Measure: how long the compute of a step takes, at the cost of reading a clock twice."""

from __future__ import annotations

from typing import Any

from chronica_hvd import _core, checks


class StepTimer(_core.StepTimer):
    """A ring of measurements, on the host's steady clock or by events on a CUDA device.

    ``start(step=0, samples=0, size=0, size2=0, flops=0)`` begins one and says what work it covers: the number of
    samples, S1 = Σ size and S2 = Σ size² (of padded work: n · max and n · max²). ``stop()`` ends it; a measurement
    begun and never stopped is given up by the next ``start``. ``extend()`` lets the measurement stopped last end now
    instead, whether or not another was started since. None of them waits.

    ``drain()`` returns the finished ones, oldest first, as a structured array of int64 ``step, samples, size, size2,
    flops, start_ns, elapsed_ns``, and forgets them; what the device has not finished stays for the next call.
    ``start_ns`` is the host's steady clock at ``start()``. ``overwritten`` counts those lost because the ring was full.

    A CUDA device is timed from the first ``start()`` on, on the stream that is current then and in each later
    ``start()``; ``stop()`` and ``extend()`` record on the stream of their ``start()``, from any thread. What cannot be
    measured is left out and counted as ``skipped``: while the stream is captured into a CUDA graph, in a process forked
    from one that timed a device, or when the driver reports an error, which is then the text of ``failure`` (``None``
    if there was none). ``clock`` says what is measured with.

    Parameters
    ----------
    device
        ``None`` or a CPU device: the host's clock. ``"cuda:1"`` or a ``torch.device``: that device; ``"cuda"``: the one
        that is current at the first ``start()``.
    capacity
        How many finished measurements are kept until ``drain``.

    Raises
    ------
    ValueError
        The device is of another kind, or there is no such device.
    RuntimeError
        torch was built without CUDA or sees no device. From ``stop()``, when nothing was started.
    """

    def __init__(self, device: Any = None, capacity: int = 4096) -> None:
        kind, index = _parse(device)
        capacity = checks.integer("capacity", capacity, least=1, most=2**24)
        if kind == "cpu":
            super().__init__(capacity)
            return
        # torch is only needed for, and only imported by, those who have a CUDA device.
        from chronica_hvd import torch_events

        torch_events.require_device(index)
        if torch_events.has_driver():
            super().__init__(capacity, torch_events.device(index), torch_events.current_stream())
        else:
            super().__init__(capacity, clock=torch_events.TorchEventClock(index))


def _parse(device: Any) -> tuple[str, int | None]:
    """Return the kind of a device, and its index if it has one."""
    kind, colon, index = ("cpu" if device is None else str(device)).partition(":")
    if kind not in ("cpu", "cuda") or (colon and not index.isdecimal()):
        raise ValueError(f"device must be None, 'cpu' or 'cuda', not {device!r}; one of several is 'cuda:1'")
    return kind, int(index) if colon else None
