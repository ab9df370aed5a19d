"""The stand-in for the CUDA driver (``tests/cpp/standin_cuda.cpp``) in a process whose search path leads to it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUCCESS = 0
GLOBAL = 0


def build(folder: Path) -> None:
    """Compile it into a folder, as ``libcuda.so.1``."""
    command = [*os.environ.get("CXX", "c++").split(), "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"]
    command += [f"-I{ROOT / 'csrc'}", str(ROOT / "tests/cpp/standin_cuda.cpp"), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True)


def run(folder: Path, program: str, *places: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python program that finds the stand-in in the folder, and modules beside this one and in the places."""
    environment = dict(os.environ)
    for variable, first in (("LD_LIBRARY_PATH", (folder,)), ("PYTHONPATH", (ROOT / "tests", *places))):
        environment[variable] = os.pathsep.join([*map(str, first), *filter(None, [environment.get(variable)])])
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


class Driver:
    """The library's ``standin_`` functions by their names without that prefix; see ``tests/cpp/standin_cuda.hpp``."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def _function(self, name: str, result: type | None, *parameters: type) -> ctypes._CFuncPtr:
        function = self.library[f"standin_{name}"]
        function.restype, function.argtypes = result, parameters
        return function

    def stream(self, device: int = 0) -> int:
        handle = self._function("stream", ctypes.c_void_p, ctypes.c_int, ctypes.c_int)(device, 0)
        assert isinstance(handle, int)
        return handle

    def advance(self, ns: int) -> int:
        """Let time pass on the device; return what it is then."""
        return int(self._function("advance", ctypes.c_int64, ctypes.c_int64)(ns))

    def enqueue(self, stream: int, ns: int) -> None:
        self._function("enqueue", None, ctypes.c_void_p, ctypes.c_int64)(stream, ns)

    def begin_capture(self, stream: int, mode: int = GLOBAL) -> None:
        self._function("begin_capture", None, ctypes.c_void_p, ctypes.c_int)(stream, mode)

    def end_capture(self, stream: int) -> int:
        return int(self._function("end_capture", ctypes.c_int, ctypes.c_void_p)(stream))

    def fail(self, function: str, nth: int, times: int, result: int) -> None:
        types = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
        self._function("fail", None, *types)(function.encode(), nth, times, result)

    def calls(self, function: str) -> int:
        return int(self._function("calls", ctypes.c_int64, ctypes.c_char_p)(function.encode()))

    def retains(self, device: int) -> int:
        return int(self._function("retains", ctypes.c_int, ctypes.c_int)(device))

    def live_events(self) -> int:
        return int(self._function("live_events", ctypes.c_int64)())

    def violations(self) -> int:
        """Return how often something was done that a real driver punishes."""
        return int(self._function("violations", ctypes.c_int64)())

    def assert_unharmed(self) -> None:
        assert self.violations() == 0, self._function("violation", ctypes.c_char_p)()
