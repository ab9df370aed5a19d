"""Warnings that point to the user's own line."""

from __future__ import annotations

import sys
import warnings

_OURS = ("chronica_hvd", "horovod", "torch", "contextlib")


def warn(message: str) -> None:
    """Warn of what the user's code does, at the line of it that led here."""
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=depth)
