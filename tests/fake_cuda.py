"""As much of ``torch.cuda`` as the check of the GPU uses, on the stand-in for the driver.

The device's time is the host's: a spinning kernel keeps its stream busy for as long as it says. Tensors live and
compute on the host, at once. A process installs it once; the search path leads to the stand-in.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from standin import SUCCESS, Driver
from torch.overrides import TorchFunctionMode

CYCLES_PER_NS = 1.5
NOT_READY = 600
TICK_S = 5e-4
MODES = {"global": 0, "thread_local": 1, "relaxed": 2}
HANDLE, INT = ctypes.c_void_p, ctypes.c_int
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "cuInit": (INT, (ctypes.c_uint,)),
    "cuEventCreate": (INT, (HANDLE, ctypes.c_uint)),
    "cuEventRecord": (INT, (HANDLE, HANDLE)),
    "cuEventQuery": (INT, (HANDLE,)),
    "cuEventElapsedTime": (INT, (HANDLE, HANDLE, HANDLE)),
    "standin_primary": (HANDLE, (INT,)),
    "standin_current": (HANDLE, ()),
    "standin_set_current": (None, (HANDLE,)),
}

driver = Driver()
library = driver.library
for name, (result_type, parameter_types) in SIGNATURES.items():
    getattr(library, name).restype, getattr(library, name).argtypes = result_type, parameter_types
is_initialized = False
streams: list[Stream] = []
graphs: list[CUDAGraph] = []  # being captured
of_thread = threading.local()


def initialize() -> None:
    """Have the driver initialised and the device's context current in this thread, as torch does before any call."""
    global is_initialized
    if not is_initialized:
        is_initialized = True
        succeed(library.cuInit(0))
        threading.Thread(target=_keep_time, daemon=True).start()
    if not library.standin_current():
        library.standin_set_current(library.standin_primary(0))


def succeed(result: int) -> None:
    """Raise what torch raises if a call of the driver failed."""
    if result != SUCCESS:
        raise RuntimeError(f"CUDA error {result}")


def _keep_time() -> None:
    begin, passed = time.monotonic_ns(), 0
    while True:
        time.sleep(TICK_S)
        now = time.monotonic_ns() - begin
        driver.advance(now - passed)
        passed = now


class Stream:
    """A stream; handle 0 is the default one."""

    def __init__(self, handle: int | None = None, priority: int = 0) -> None:
        if handle is None:
            initialize()
            handle = driver.stream()
        self.cuda_stream = handle
        self._busy_until_ns = 0
        streams.append(self)

    def spin(self, ns: int) -> None:
        """Enqueue a kernel that takes so long."""
        initialize()
        self._busy_until_ns = max(self._busy_until_ns, driver.advance(0)) + ns
        driver.enqueue(self.cuda_stream, ns)

    def query(self) -> bool:
        return driver.advance(0) >= self._busy_until_ns

    def wait_stream(self, other: Stream) -> None:
        ahead_ns = other._busy_until_ns - max(self._busy_until_ns, driver.advance(0))
        if ahead_ns > 0:
            self.spin(ahead_ns)


DEFAULT = Stream(handle=0)


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._handle = HANDLE()

    def record(self, stream: Stream | None = None) -> None:
        initialize()
        if not self._handle:
            succeed(library.cuEventCreate(ctypes.byref(self._handle), 0))
        succeed(library.cuEventRecord(self._handle, (stream or current_stream()).cuda_stream))

    def query(self) -> bool:
        initialize()
        result = library.cuEventQuery(self._handle)
        if result == NOT_READY:
            return False
        succeed(result)
        return True

    def elapsed_time(self, end: Event) -> float:
        milliseconds = ctypes.c_float()
        succeed(library.cuEventElapsedTime(ctypes.byref(milliseconds), self._handle, end._handle))
        return milliseconds.value


class CUDAGraph:
    """Notes what is called while it captures, and on replay does so again, into the same results."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []

    def capture_begin(self, capture_error_mode: str) -> None:
        initialize()
        assert current_stream() is not DEFAULT
        driver.begin_capture(current_stream().cuda_stream, MODES[capture_error_mode])
        graphs.append(self)

    def capture_end(self) -> None:
        graphs.remove(self)
        succeed(driver.end_capture(current_stream().cuda_stream))

    def replay(self) -> None:
        for result, call in self.calls:
            result.copy_(call())


class _OnTheHost(TorchFunctionMode):
    """Takes the host for the device, and notes what is captured."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = dict(keywords or {})
        if str(keywords.get("device")).startswith("cuda"):
            initialize()
            keywords["device"] = "cpu"
        result = function(*arguments, **keywords)
        if graphs and isinstance(result, torch.Tensor):
            graphs[-1].calls.append((result, lambda: function(*arguments, **keywords)))
        return result


def current_stream(device: int = 0) -> Stream:
    return getattr(of_thread, "stream", DEFAULT)


@contextlib.contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before = current_stream()
    of_thread.stream = chosen
    try:
        yield
    finally:
        of_thread.stream = before


@contextlib.contextmanager
def graph(captured: CUDAGraph, capture_error_mode: str = "global") -> Iterator[None]:
    synchronize()
    with stream(Stream()):
        captured.capture_begin(capture_error_mode=capture_error_mode)
        try:
            yield
        finally:
            captured.capture_end()


def synchronize() -> None:
    initialize()
    while not all(one.query() for one in streams):
        time.sleep(TICK_S)


def current_device() -> int:
    initialize()
    return 0


def install() -> None:
    """Put all this in the place of torch's, for the rest of the process."""
    torch.set_num_threads(1)
    torch.version.cuda = "13.0"
    torch._C._cuda_getCurrentRawStream = lambda device: current_stream().cuda_stream  # type: ignore[attr-defined]
    for one in (Stream, Event, CUDAGraph, current_stream, stream, graph, synchronize, current_device):
        setattr(torch.cuda, one.__name__, one)
    torch.cuda.is_initialized = lambda: is_initialized
    torch.cuda.device_count = torch.cuda._device_count_nvml = lambda: 1
    torch.cuda.set_sync_debug_mode = lambda mode: None
    torch.cuda._sleep = lambda cycles: current_stream().spin(int(cycles / CYCLES_PER_NS))
    _OnTheHost().__enter__()
