"""What the ranks measure: used by the job and its tests."""

from __future__ import annotations

from helpers import lognormal

LENGTHS: list[int] = lognormal(400, largest=500).tolist()
READ_UNTIL_ENDED = 90
