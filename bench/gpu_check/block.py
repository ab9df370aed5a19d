"""What a block of the check is told, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setting:
    """What a block is told.

    Attributes
    ----------
    device
        ``"cuda"`` or ``"cpu"``, where the check itself is tried.
    quick
        Whether small sizes will do.
    package
        The folder that the block ``build`` builds the package into, for the others; ``None``: it is installed.
    figures
        Those of the blocks before, by name.
    """

    device: str
    quick: bool = False
    package: Path | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a block answers.

    Attributes
    ----------
    summary
        A line for the reader.
    figures
        What was measured, ready for JSON, units in the names.
    ok
        Whether the block's criterion holds; ``None`` where there is none.
    """

    summary: str
    figures: dict[str, Any]
    ok: bool | None = None
