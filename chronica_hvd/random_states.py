"""Model: the random states of a process, left alone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def kept_random_states() -> Iterator[None]:
    """Leave the random states of Python, numpy and torch as they were."""
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if used else ()
    python, legacy_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy_numpy)
