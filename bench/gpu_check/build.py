"""Block: the extension built out of tree, as on a machine that compiles for itself."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu_check.block import Outcome, Setting

ROOT = Path(__file__).resolve().parents[2]
SHOWN_LINES = 15
TIMEOUT_S = 170


def run(setting: Setting) -> Outcome:
    """Build into the folder ``setting.package``, and look at what came out."""
    if setting.package is None:
        raise ValueError("there is no folder to build into")
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        _pip_install(setting.package, Path(folder))
        seconds = time.monotonic() - begin
        has_checked_prototypes = any(Path(folder).rglob("cuda_prototypes*.o"))
        has_header = _found_header(Path(folder))
    (library,) = (setting.package / "chronica_hvd").glob("_core*.so")
    linked = needed(library)
    of_cuda = [name for name in linked if name.startswith("libcu")]
    figures = {
        "build_s": round(seconds, 2),
        "extension_bytes": library.stat().st_size,
        "linked_libraries": linked,
        "linked_cuda_libraries": of_cuda,
        "cuda_header_found": has_header,
        "prototypes_checked": has_checked_prototypes,
    }
    return Outcome(
        f"{library.stat().st_size / 1024:.0f} KiB, linked to {len(of_cuda)} CUDA libraries, "
        f"prototypes {'' if has_checked_prototypes else 'not '}compared with cuda.h",
        figures,
        ok=not of_cuda and has_checked_prototypes == has_header,
    )


def needed(library: Path) -> list[str]:
    """Return the names of the libraries that a shared library is linked to."""
    shown = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", shown)


def _pip_install(package: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command += ["--no-build-isolation", "--no-deps", "--no-compile", "--upgrade", "--target", str(package), str(ROOT)]
    command += ["--config-settings", f"build-dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-SHOWN_LINES:])
        raise RuntimeError(f"pip could not build the package; its last lines:\n{last}")


def _found_header(folder: Path) -> bool:
    """Whether CMake found cuda.h, by what it noted of its search for the folder."""
    noted = re.findall(r"^\w*CUDA_INCLUDE\w*:PATH=(.*)$", (folder / "CMakeCache.txt").read_text(), flags=re.MULTILINE)
    return any((Path(path) / "cuda.h").exists() for path in noted)
