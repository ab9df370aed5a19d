"""The stand-in for the CUDA driver (``tests/cpp/standin_cuda.cpp``) in a process whose search path leads to it."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUCCESS, CAPTURE_INVALIDATED = 0, 901
GLOBAL = 0


def build(folder: Path) -> None:
    """Compile it into a folder, as ``libcuda.so.1``."""
    command = [*os.environ.get("CXX", "c++").split(), "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"]
    command += [f"-I{ROOT / 'csrc'}", str(ROOT / "tests/cpp/standin_cuda.cpp"), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True)


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

    def advance(self, ns: int) -> None:
        self._function("advance", ctypes.c_int64, ctypes.c_int64)(ns)

    def enqueue(self, stream: int, ns: int) -> None:
        self._function("enqueue", None, ctypes.c_void_p, ctypes.c_int64)(stream, ns)

    def begin_capture(self, stream: int) -> None:
        self._function("begin_capture", None, ctypes.c_void_p, ctypes.c_int)(stream, GLOBAL)

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

    def assert_unharmed(self) -> None:
        """Nothing was done that a real driver punishes."""
        violation = self._function("violation", ctypes.c_char_p)()
        assert self._function("violations", ctypes.c_int64)() == 0, violation
