"""Balanced Horovod training for samples that differ in work, with exact gradients.

Three lines of a Horovod script change::

    sampler = chronica_hvd.BatchSampler(sizes, batch_size=32)
    loader = chronica_hvd.DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)
    optimizer = chronica_hvd.DistributedOptimizer(optimizer, model.named_parameters(), sampler=sampler)

Planning needs neither torch nor Horovod:

>>> import chronica_hvd
>>> sizes = [900, 100, 200, 300, 140, 60, 100, 90]
>>> plan = chronica_hvd.plan(sizes, ranks=2, batch_size=4, shuffle=False, padding="none")
>>> plan.loads.tolist(), plan.counts.tolist(), plan.weights.tolist()
([[960.0, 930.0]], [[2, 6]], [[0.5, 1.5]])
>>> [batch.tolist() for rank in range(plan.ranks) for batch in plan.batches(0, rank)]
[[0, 5], [3, 2, 4, 1, 6, 7]]
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("chronica_hvd._core") is None:
    raise ImportError(
        f"{__path__[0]} has no compiled extension, chronica_hvd._core: it is the source folder, not the installed "
        "package. Run from another folder, or install for development: pip install --editable ."
    )

from chronica_hvd.cost import CostModel, FittedCost
from chronica_hvd.measured import Measured
from chronica_hvd.planner import plan
from chronica_hvd.plans import Plan
from chronica_hvd.report import EpochReport
from chronica_hvd.sizes import measure_sizes
from chronica_hvd.timer import StepTimer
from chronica_hvd.world import World

if TYPE_CHECKING:
    from chronica_hvd import flops
    from chronica_hvd.gather import average
    from chronica_hvd.loader import DataLoader
    from chronica_hvd.mean import Mean
    from chronica_hvd.optimizer import DistributedOptimizer
    from chronica_hvd.sampler import BatchSampler
    from chronica_hvd.verification import verify

__all__ = [
    "BatchSampler",
    "CostModel",
    "DataLoader",
    "DistributedOptimizer",
    "EpochReport",
    "FittedCost",
    "Mean",
    "Measured",
    "Plan",
    "StepTimer",
    "World",
    "average",
    "flops",
    "measure_sizes",
    "plan",
    "verify",
]

#: Names that need torch, imported when first asked for: name → module (the module itself where they are the same).
_NEEDS_TORCH = {
    "BatchSampler": "sampler",
    "DataLoader": "loader",
    "DistributedOptimizer": "optimizer",
    "Mean": "mean",
    "average": "gather",
    "flops": "flops",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_NEEDS_TORCH[name]}")
    except ImportError as error:
        raise ImportError(f"{__name__}.{name} needs torch, which does not import here: {error}") from error
    value = module if name == _NEEDS_TORCH[name] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
