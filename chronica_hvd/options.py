"""The options of a plan, checked once, before anything is computed and long before any collective."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from chronica_hvd import checks

LOSS_WEIGHTS = ("samples", "sizes", "sum")

#: Options whose other values are checked but not built yet: name → the value that works.
NOT_BUILT = {
    "reorder": "batch",
    "micro_batches": 1,
    "max_size": None,
    "pad_to": None,
    "comm": 0.0,
    "min_local_batch": 1,
    "normalize": None,
    "policy": "balanced",
    "first": None,
}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The keyword options of :func:`chronica_hvd.plan`, which documents them.

    Raises
    ------
    TypeError, ValueError
        A value is not allowed, whether or not its option is built.
    """

    indices: Any = None
    cost: Any = None
    padding: str = "max"
    local_batch: str = "free"
    reorder: str = "batch"
    window: int = 64
    max_moved: float = 0.25
    micro_batches: int | str = 1
    max_size: float | None = None
    pad_to: Any = None
    comm: float = 0.0
    min_local_batch: int = 1
    normalize: str | None = None
    shuffle: bool = True
    seed: int = 0
    epoch: int = 0
    drop_last: bool = False
    loss_weight: Any = "samples"
    policy: str = "balanced"
    first: str | None = None

    def __post_init__(self) -> None:
        checks.choice("padding", self.padding, ("max", "none"))
        checks.choice("local_batch", self.local_batch, ("free", "equal"))
        checks.choice("reorder", self.reorder, ("batch", "window"))
        self._keep_integer("window", least=1)
        if checks.real("max_moved", self.max_moved, least=0.0) > 1.0:
            raise ValueError(f"max_moved is a share of the samples, at most 1, not {self.max_moved}")
        if isinstance(self.micro_batches, str):
            checks.choice("micro_batches", self.micro_batches, ("auto",))
        else:
            checks.integer("micro_batches", self.micro_batches, least=1)
        if self.max_size is not None and checks.real("max_size", self.max_size) <= 0:
            raise ValueError(f"max_size must be positive or None, not {self.max_size}")
        self._check_pad_to()
        checks.real("comm", self.comm, least=0.0)
        self._keep_integer("min_local_batch", least=1)
        checks.choice("normalize", self.normalize, (None, "step", "epoch"))
        checks.boolean("shuffle", self.shuffle)
        self._keep_integer("seed", least=-(2**63), most=2**64 - 1)
        self._keep_integer("epoch", least=0, most=checks.LARGEST_INT64)
        checks.boolean("drop_last", self.drop_last)
        if isinstance(self.loss_weight, str):
            checks.choice("loss_weight", self.loss_weight, LOSS_WEIGHTS)
        elif self.loss_weight is None:
            raise TypeError(f"loss_weight must be one of {', '.join(map(repr, LOSS_WEIGHTS))} or an array, not None")
        checks.choice("policy", self.policy, ("balanced", "plain", "static", "dynamic", "guided"))
        checks.choice("first", self.first, (None, "largest"))

    def _keep_integer(self, name: str, least: int, most: int | None = None) -> None:
        """Check an integer and keep it as Python's own: NumPy's overflow in arithmetic."""
        object.__setattr__(self, name, checks.integer(name, getattr(self, name), least, most))

    def _check_pad_to(self) -> None:
        if self.pad_to is None:
            return
        if checks.dimensions("pad_to", self.pad_to) == 0:
            checks.integer("pad_to", self.pad_to, least=1)
            return
        if (checks.non_negative("pad_to", self.pad_to) <= 0).any():
            raise ValueError(f"pad_to must hold positive lengths, not {self.pad_to!r}")

    def refuse_unbuilt(self) -> None:
        """Raise a NotImplementedError for a value that is allowed but not built yet."""
        for name, built in NOT_BUILT.items():
            value = getattr(self, name)
            if value is not built and (isinstance(value, np.ndarray) or value != built):
                raise NotImplementedError(f"{name}={value!r} is not built yet; this version supports {name}={built!r}")

    @classmethod
    def from_keywords(cls, keywords: dict[str, Any]) -> PlanOptions:
        """Build from keyword arguments; an unknown name is a TypeError that lists the known ones."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in keywords if name not in known]
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}; the options of plan are {', '.join(known)}")
        return cls(**keywords)
