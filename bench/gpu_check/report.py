"""The report: a JSON file that is whole at any moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Report:
    """What has been found so far, written anew after every change.

    Parameters
    ----------
    path
        The file; its folder is made, what it held is replaced at once or not at all.
    heading
        What stands above the blocks.
    """

    def __init__(self, path: Path, heading: dict[str, Any]) -> None:
        self._path = path
        self.content: dict[str, Any] = {**heading, "finished": False, "passed": False, "blocks": {}}
        self._write()

    def put(self, name: str, value: Any) -> None:
        """Set an entry above the blocks."""
        self.content[name] = value
        self._write()

    def begin(self, name: str) -> None:
        """Note that a block begins, so that a report cut short says where."""
        self.add(name, {"error": "was interrupted"})

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Set the entry of a block."""
        self.content["blocks"][name] = entry
        self._write()

    def finish(self) -> bool:
        """Note that nothing is left to do; returns whether every block ran and every criterion holds."""
        entries = self.content["blocks"].values()
        passed = all("error" not in entry and entry.get("ok", True) for entry in entries)
        self.content.update(finished=True, passed=passed)
        self._write()
        return passed

    def figures(self) -> dict[str, Any]:
        """Return the figures of the blocks that ran, by name."""
        blocks = self.content["blocks"].items()
        return {name: entry["figures"] for name, entry in blocks if "error" not in entry}

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_name(self._path.name + ".part")
        unfinished.write_text(json.dumps(self.content, indent=1) + "\n")
        unfinished.replace(self._path)
