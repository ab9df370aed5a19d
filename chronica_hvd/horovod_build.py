"""Build Horovod against the installed torch and keep the wheel in a user cache.

``pip install horovod`` fails on today's torch and CMake: its last release, 0.28.1 (2023), compiles as C++14 where
torch's headers want C++17, and asks for a policy version that CMake 4 no longer knows. This module downloads that
release's source, raises the language standards, and builds the wheel once per machine, Python, torch
and set of options.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HOROVOD_VERSION = "0.28.1"

#: Raised language standards: (file in Horovod's source, pattern, replacement).
PATCHES = (
    ("CMakeLists.txt", r"CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 17"),
    ("horovod/torch/CMakeLists.txt", r"CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 17"),
    ("horovod/common/ops/cuda/CMakeLists.txt", r"CMAKE_CUDA_STANDARD 11", "CMAKE_CUDA_STANDARD 17"),
)

#: Build options where the environment does not say otherwise: torch only, Gloo on the CPU. For NVIDIA GPUs set
#: ``HOROVOD_GPU_OPERATIONS=NCCL`` and its companions, as Horovod's installation guide describes.
DEFAULT_OPTIONS = {
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}

#: What Horovod's build (``--no-build-isolation``: it must see the installed torch) and Horovod itself import:
#: module → what to install.
NEEDED = {
    "torch": "torch",
    "cmake": "cmake",
    "setuptools": "'setuptools<81'",
    "wheel": "wheel",
    "cloudpickle": "cloudpickle",
    "packaging": "packaging",
    "psutil": "psutil",
    "yaml": "pyyaml",
}


class BuildError(RuntimeError):
    """Horovod cannot be built here; the message is one sentence that says what is missing or what failed."""


def build_options() -> dict[str, str]:
    """Return the environment variables that shape the build: the defaults, overridden by the caller's environment."""
    given = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
    options = {**DEFAULT_OPTIONS, **given}
    if "HOROVOD_WITH_MPI" in given:
        del options["HOROVOD_WITHOUT_MPI"]
    return options


def cached_wheel(options: dict[str, str], cache: Path | None = None) -> Path:
    """Return the folder that holds (or will hold) the wheel for these options, this Python and the installed torch."""
    root = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chronica-hvd" / "horovod"
    recipe = repr((HOROVOD_VERSION, PATCHES, sorted(options.items())))
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    torch_version = importlib.metadata.version("torch")
    python = f"{sys.implementation.cache_tag}-{platform.machine()}"
    return root / f"{HOROVOD_VERSION}-torch{torch_version}-{python}-{digest}"


def check_modules() -> None:
    """Raise :class:`BuildError` naming the Python modules that are missing."""
    missing = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        packages = " ".join(NEEDED[module] for module in missing)
        raise BuildError(f"Horovod needs {', '.join(missing)} in this Python: pip install {packages}")


def check_tools() -> None:
    """Raise :class:`BuildError` if there is no C++ compiler or no make."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise BuildError(f"no C++ compiler: {compiler!r} is not on PATH; install g++ or clang++, or set CXX to yours")
    if shutil.which("make") is None:
        raise BuildError("make is not on PATH; Horovod's build needs it: install make")


def build(log: Path, options: dict[str, str], destination: Path) -> Path:
    """Download, patch and build Horovod's wheel into ``destination``; the tools' output goes to the file ``log``."""
    pip = [sys.executable, "-m", "pip"]
    with tempfile.TemporaryDirectory(prefix="chronica-horovod-") as scratch, log.open("w") as output:

        def run(*command: str, cwd: str = scratch) -> None:
            environment = {**os.environ, **options}
            done = subprocess.run(command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)
            if done.returncode != 0:
                raise BuildError(f"`{' '.join(command)}` failed with status {done.returncode}; its output is in {log}")

        requirement = f"horovod=={HOROVOD_VERSION}"
        run(*pip, "download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod", requirement)
        (archive,) = Path(scratch).glob("horovod-*.tar.gz")
        with tarfile.open(archive) as source:
            if hasattr(tarfile, "data_filter"):
                source.extractall(scratch, filter="data")
            else:
                source.extractall(scratch)
        tree = Path(scratch) / f"horovod-{HOROVOD_VERSION}"
        for name, pattern, replacement in PATCHES:
            text, count = re.subn(pattern, replacement, (tree / name).read_text())
            if count == 0:
                raise BuildError(f"Horovod's {name} has no {pattern!r} to raise: is this really {HOROVOD_VERSION}?")
            (tree / name).write_text(text)
        run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "wheel", str(tree))
        (wheel,) = (Path(scratch) / "wheel").glob("horovod-*.whl")

        # Renamed into place last: an interrupted build never leaves half a wheel in the cache.
        destination.mkdir(parents=True, exist_ok=True)
        partial = destination / f".{os.getpid()}.part"
        shutil.copyfile(wheel, partial)
        return partial.replace(destination / wheel.name)


def provide_wheel(cache: Path | None = None) -> Path:
    """Return the path of a Horovod wheel for the installed torch, building it where the cache has none.

    Raises
    ------
    BuildError
        A tool is missing or a step failed.
    """
    check_modules()
    options = build_options()
    folder = cached_wheel(options, cache)
    wheels = sorted(folder.glob("horovod-*.whl"))
    if wheels:
        return wheels[0]
    check_tools()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    print(f"building Horovod {HOROVOD_VERSION}: two to four minutes, once per machine (log: {log})", flush=True)
    return build(log, options, folder)


def is_usable() -> bool:
    """Say whether ``horovod.torch`` works in a fresh interpreter.

    A half install imports without an error and exports nothing (horovod/torch/__init__.py), so this looks for ``init``.
    """
    probe = "import horovod.torch as hvd; raise SystemExit(not hasattr(hvd, 'init'))"
    return subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0


def install(cache: Path | None = None) -> Path:
    """Install Horovod for the installed torch into this Python; return the wheel's path.

    Raises
    ------
    BuildError
        The wheel cannot be built, or what was installed does not import.
    """
    wheel = provide_wheel(cache)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", str(wheel)]
    if subprocess.run(command).returncode != 0:
        raise BuildError(f"pip could not install {wheel}; if it is damaged, delete that file and build again")
    if not is_usable():
        raise BuildError(f"{wheel} is installed but horovod.torch does not import; delete that file and build again")
    return wheel
