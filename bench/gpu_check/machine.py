"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_check.block import Outcome, Setting


def run(setting: Setting) -> Outcome:
    """Ask the machine; what it does not say is ``None``."""
    facts: dict[str, Any] = {
        "gpu": None,
        "gpu_memory_gib": None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
    }
    if setting.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30, 1)}
    return Outcome(f"{facts['gpu'] or facts['cpu']}, torch {facts['torch']}", facts)


def commit(folder: Path) -> str | None:
    """Return the commit that is checked out in a folder, marked where files differ from it; ``None`` without git."""
    head = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return f"{head} with changes" if head and changes else head


def _output(*command: str) -> str | None:
    """Return the first line that a command prints, ``None`` where it fails or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


def _cpu() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
