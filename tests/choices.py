"""Choices by a number: the same ones for the same number, each independent of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Choices:
    """Draws from one random generator, so that nothing but the seed says what is drawn."""

    def __init__(self, *seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def of(self, values: Sequence[Any]) -> Any:
        """Return one of the values; one that is there twice is drawn twice as often."""
        return values[self.integer(0, len(values) - 1)]

    def integer(self, least: int, largest: int) -> int:
        return int(self._random.integers(least, largest + 1))

    def chance(self, probability: float) -> bool:
        return bool(self._random.random() < probability)
