"""Report: why a model's planned step is not exact, in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The cause, the module it is in, and what to do; see :class:`chronica_hvd.verification.Verification`."""

    cause: str | None = None
    module: str | None = None
    advice: str = ""
