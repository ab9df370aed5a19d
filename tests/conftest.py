"""What several test modules share and is made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import standin

#: Promise of docs/guarantees.md → the largest error that the tests of this run saw.
_largest_errors: dict[str, float] = {}


@pytest.fixture(scope="session")
def driver_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stand-in for the CUDA driver lies, compiled."""
    folder = tmp_path_factory.mktemp("driver")
    standin.build(folder)
    return folder


@pytest.fixture(scope="session")
def saw_error() -> Callable[[str, float], None]:
    """Note an error that a test saw of a promise; the largest of each are shown at the end."""

    def note(promise: str, error: float) -> None:
        _largest_errors[promise] = max(error, _largest_errors.get(promise, 0.0))

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _largest_errors:
        terminalreporter.section("largest errors seen, by the promises of docs/guarantees.md")
        for promise, error in sorted(_largest_errors.items()):
            terminalreporter.write_line(f"{error:8.1e}  {promise}")
