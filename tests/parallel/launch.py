"""Start ranks with horovodrun, wait with a time-out, read what they wrote."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
TIMEOUT_S = 180.0
GRACE_S = 20.0  # horovodrun itself waits up to 10 s for its ranks


@dataclass(frozen=True)
class Launch:
    """What became of a job.

    Attributes
    ----------
    status
        Exit status; ``None``: it ran into the time-out and was ended.
    output
        What all ranks printed.
    folder
        Where they wrote their results.
    """

    status: int | None
    output: str
    folder: Path

    def json(self, rank: int) -> Any:
        """Return what a rank wrote as ``<rank>.json``."""
        return json.loads((self.folder / f"{rank}.json").read_text())

    def arrays(self, name: str, rank: int) -> dict[str, np.ndarray]:
        """Return the arrays that a rank wrote as ``<name>.<rank>.npz``; fail with what it wrote instead."""
        error = self.folder / f"{name}.{rank}.error"
        assert not error.exists(), error.read_text()
        with np.load(self.folder / f"{name}.{rank}.npz") as file:
            return dict(file)

    def parameters(self, name: str, rank: int) -> dict[str, np.ndarray]:
        """Return a rank's final parameters by name."""
        arrays = self.arrays(name, rank)
        prefix = "parameter."
        return {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}


def horovodrun(ranks: int, job: str, folder: Path, *arguments: str, timeout_s: float = TIMEOUT_S) -> Launch:
    """Run ``jobs/<job>.py folder arguments…`` on so many ranks of this machine."""
    launcher = str(Path(sys.executable).with_name("horovodrun"))
    return _run([launcher, "-np", str(ranks), *_python(job, folder, arguments)], folder, timeout_s)


def alone(job: str, folder: Path, *arguments: str, timeout_s: float = TIMEOUT_S) -> Launch:
    """Run the job in plain python, without horovodrun."""
    return _run(_python(job, folder, arguments), folder, timeout_s)


def launched_once(job: str, arguments: Callable[[int], Sequence[str]] = lambda ranks: ()) -> Any:
    """Return a fixture that runs a job on a number of ranks, once per module and number; it must end well."""

    @pytest.fixture(scope="module")
    def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Launch]:
        @functools.cache
        def launch(ranks: int) -> Launch:
            folder = tmp_path_factory.mktemp(f"{ranks}-ranks")
            return horovodrun(ranks, job, folder, *arguments(ranks))

        return lambda ranks: succeeded(launch(ranks))

    return launched


def succeeded(launch: Launch) -> Launch:
    """Return the launch if its ranks ended well, else fail with what they printed."""
    if launch.status != 0:
        ending = "ran into the time-out" if launch.status is None else f"ended with status {launch.status}"
        raise AssertionError(f"the ranks' job {ending}:\n{launch.output[-6000:]}")
    return launch


def _python(job: str, folder: Path, arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, str(HERE / "jobs" / f"{job}.py"), str(folder), *arguments]


def _run(command: list[str], folder: Path, timeout_s: float) -> Launch:
    paths = os.pathsep.join(filter(None, [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a process group of its own, so that it can be ended as a whole
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        output = _end(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return Launch(None, output, folder)
    return Launch(process.returncode, output, folder)


def _end(process: subprocess.Popen[str]) -> str:
    """End horovodrun, which ends its ranks when told to or killed; return what was printed."""
    for ending in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, ending)
        try:
            return process.communicate(timeout=GRACE_S)[0]
        except subprocess.TimeoutExpired:
            continue
    return "(it could not be ended)"
