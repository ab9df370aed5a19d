"""Start a script on ranks of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

_TUNABLES = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_threshold": 1 << 32,
    "glibc.malloc.trim_threshold": 1 << 33,
    "glibc.malloc.top_pad": 1 << 30,
}
#: Long texts allocate tens of megabytes at a time. By default glibc returns such memory to the system after every use,
#: and ranks spend much of their time on page faults, by chance more on one than on another. For ``env``.
KEEP_MEMORY = {"GLIBC_TUNABLES": ":".join(f"{name}={value}" for name, value in _TUNABLES.items())}


def horovodrun(
    ranks: int, script: Path, *options: str, timeout_s: float, log: IO[str] | None = None, **env: Any
) -> int:
    """Run a script under horovodrun, one thread a rank; return its exit status.

    ``log`` takes its output, else it appears here; ``env`` are further variables of its environment.
    """
    launcher = [str(Path(sys.executable).parent / "horovodrun"), "-np", str(ranks)]
    run = subprocess.Popen(
        [*launcher, sys.executable, str(script), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=log,
        stderr=None if log is None else subprocess.STDOUT,
        # A session of its own: when this process is interrupted, the launcher and its ranks end with it.
        start_new_session=True,
    )
    try:
        return run.wait(timeout_s)
    except BaseException:
        os.killpg(run.pid, signal.SIGTERM)
        run.wait()
        raise
