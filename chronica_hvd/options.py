"""The options of a plan, checked once, before anything is computed and long before any collective."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from chronica_hvd import checks

LOSS_WEIGHTS = ("samples", "sizes", "sum")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The keyword options of :func:`chronica_hvd.plan`, which documents them.

    Raises
    ------
    TypeError, ValueError
        A value, or two together, are not allowed.
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
        self._keep_real("max_moved", least=0.0)
        if self.max_moved > 1.0:
            raise ValueError(f"max_moved is a share of the samples, at most 1, not {self.max_moved}")
        if isinstance(self.micro_batches, str):
            if self.micro_batches != "auto":
                raise ValueError(f"micro_batches must be a positive integer or 'auto', not {self.micro_batches!r}")
        else:
            self._keep_integer("micro_batches", least=1, most=2**40)
        if self.max_size is not None:
            self._keep_real("max_size")
            if self.max_size <= 0:
                raise ValueError(f"max_size must be positive or None, not {self.max_size}")
        self._check_pad_to()
        self._keep_real("comm", least=0.0)
        self._keep_integer("min_local_batch", least=1, most=2**40)
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
        self._check_normalize()

    def _keep_integer(self, name: str, least: int, most: int | None = None) -> None:
        """Check an integer and keep it as Python's own: NumPy's overflow in arithmetic."""
        object.__setattr__(self, name, checks.integer(name, getattr(self, name), least, most))

    def _keep_real(self, name: str, least: float = -math.inf) -> None:
        """Check a number and keep it as Python's own float."""
        object.__setattr__(self, name, checks.real(name, getattr(self, name), least))

    def _check_normalize(self) -> None:
        if self.reorder == "batch" or self.normalize is not None:
            return
        if not isinstance(self.loss_weight, str) or self.loss_weight != "samples":
            raise ValueError(
                'reorder="window" gathers the long samples in few steps, and with a loss_weight other than "samples" '
                "each step divides by its own total, so that these samples would count less than in plain batches. "
                'Say what you want: normalize="epoch" (every step divides by the epoch\'s mean total: each unit of '
                'weight counts alike) or normalize="step" (accept it)'
            )

    def _check_pad_to(self) -> None:
        if self.pad_to is None:
            return
        if self.padding == "none":
            raise ValueError('pad_to needs padding="max": with padding="none" no sample is padded')
        if checks.dimensions("pad_to", self.pad_to) == 0:
            self._keep_integer("pad_to", least=1, most=checks.LARGEST_INT64)
            return
        lengths = checks.non_negative("pad_to", self.pad_to)
        if (lengths <= 0).any():
            raise ValueError(f"pad_to must hold positive lengths, not {self.pad_to!r}")
        object.__setattr__(self, "pad_to", lengths)

    @classmethod
    def from_keywords(cls, keywords: dict[str, Any]) -> PlanOptions:
        """Build from keyword arguments; an unknown name is a TypeError that lists the known ones."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in keywords if name not in known]
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}; the options of plan are {', '.join(known)}")
        return cls(**keywords)
