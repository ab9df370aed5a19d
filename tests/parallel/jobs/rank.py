"""What every job of the ranks begins and ends with."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch


def begin(*, init: bool = True) -> Path:
    """Start Horovod, with warnings as errors; return the folder for the results."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    if init:
        hvd.init()
    return Path(sys.argv[1])


def write(folder: Path, result: Any) -> None:
    """Write this rank's result as ``<rank>.json``."""
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(result))
