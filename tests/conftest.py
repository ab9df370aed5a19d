"""What several test modules share and is made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import standin


@pytest.fixture(scope="session")
def driver_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stand-in for the CUDA driver lies, compiled."""
    folder = tmp_path_factory.mktemp("driver")
    standin.build(folder)
    return folder
