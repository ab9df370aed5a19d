"""The timer on a CUDA device: the driver's events against a stand-in, torch's against a fake."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import event_scenarios as scenarios
import pytest
import standin
import torch

import chronica_hvd as chronica
from chronica_hvd import _core


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.measures_and_extends,
        scenarios.the_device_is_asked_for_at_the_first_start,
        scenarios.threads_share_a_timer_and_have_their_own,
        scenarios.a_forked_child_skips_all,
        scenarios.captures_are_left_alone,
        scenarios.errors_of_the_driver_are_counted_and_named,
        scenarios.errors_of_the_functions_it_asks_are_raised,
        scenarios.the_public_timer_asks_torch,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_with_a_standin_driver(driver_folder: Path, scenario: Callable[[], None]) -> None:
    program = f"import event_scenarios; event_scenarios.{scenario.__name__}()"
    finished = standin.run(driver_folder, program)
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((8, 0), {}, "current_stream must be a function of the device .*not None"),
        ((8, None, lambda device: 0), {}, "device must be an int, or a function that returns one, not None"),
        ((8, "0", lambda device: 0), {}, "device must be an int, or a function that returns one, not '0'"),
        ((8, 0, 0), {}, "current_stream must be a function of the device .*not 0"),
        ((8, 0, lambda device: 0), {"clock": object()}, "either device and current_stream, or clock"),
        ((8,), {"clock": object()}, "a clock needs the methods"),
    ],
)
def test_wrong_arguments(arguments: Any, keywords: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        _core.StepTimer(*arguments, **keywords)


def test_a_capacity_is_needed_for_any_clock() -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        _core.StepTimer(0, 0, lambda device: 0)


class FakeStream:
    def __init__(self, device: int) -> None:
        self.device, self.now, self.is_capturing = device, 0.0, False


class FakeEvent:
    """An event of a device that has got to where ``FakeCuda.reached`` says."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.stream: FakeStream | None = None
        self.ms = 0.0

    def record(self, stream: FakeStream) -> None:
        if self.cuda.error is not None:
            raise self.cuda.error
        assert not stream.is_capturing
        self.stream, self.ms = stream, stream.now

    def query(self) -> bool:
        assert not self.cuda.current.is_capturing
        if self.cuda.error is not None:
            raise self.cuda.error
        return self.ms <= self.cuda.reached

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query()
        assert end.query()
        assert end.stream is self.stream
        return end.ms - self.ms


class FakeCuda:
    """As much of ``torch.cuda`` as the fallback uses. What would wait for the device is not there."""

    def __init__(self) -> None:
        self.streams = [FakeStream(0), FakeStream(1)]
        self.current = self.streams[0]
        self.reached = 0.0
        self.error: Exception | None = None
        self.devices = 2

    def current_device(self) -> int:
        return self.current.device

    def current_stream(self, device: int) -> FakeStream:
        return self.current if self.current.device == device else self.streams[device]

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def is_current_stream_capturing(self) -> bool:
        return self.current.is_capturing

    def Event(self, enable_timing: bool) -> FakeEvent:  # noqa: N802
        assert enable_timing
        return FakeEvent(self)

    def is_initialized(self) -> bool:
        return False

    def _device_count_nvml(self) -> int:
        return self.devices

    _device_count_amdsmi = _device_count_nvml


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A torch with CUDA, without a driver that the extension could use."""
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(torch, "version", types.SimpleNamespace(cuda="13.0", hip=None))
    monkeypatch.setattr(_core, "cuda_driver_problem", lambda: "the CUDA driver has no cuEventQuery")
    return fake


@pytest.fixture
def rocm(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(torch, "version", types.SimpleNamespace(cuda=None, hip="7.0"))
    return cuda


def test_without_a_driver_torch_records_and_a_warning_says_so(cuda: FakeCuda) -> None:
    with pytest.warns(
        RuntimeWarning, match="has no cuEventQuery; the timer records torch.cuda.Event instead"
    ) as caught:
        timer = chronica.StepTimer("cuda", 8)
    assert [warning.filename for warning in caught] == [__file__]
    assert (timer.clock, timer.capacity) == ("torch.cuda.Event", 8)


def test_torch_events_measure_without_waiting(rocm: FakeCuda) -> None:
    timer = chronica.StepTimer("cuda", 2)
    for step in range(3):
        timer.start(step)
        rocm.current.now += 1.5 + step
        timer.stop()
    assert timer.overwritten == 1
    assert len(timer.drain()) == 0
    rocm.reached = 5.0  # the first two are over
    rocm.current.now += 0.25
    timer.extend()
    assert timer.drain()["elapsed_ns"].tolist() == [2_500_000]
    rocm.reached = 100.0
    records = timer.drain()
    assert (records["step"].tolist(), records["elapsed_ns"].tolist()) == ([2], [3_750_000])
    assert (timer.skipped, timer.failure) == (0, None)


def test_torch_events_end_on_the_stream_of_the_start(rocm: FakeCuda) -> None:
    timer = chronica.StepTimer("cuda")
    rocm.current = rocm.streams[1]  # current at the first start: the device of the timer from now on
    timer.start()
    rocm.streams[1].now += 2.0
    rocm.current = rocm.streams[0]
    timer.stop()
    timer.start()
    rocm.streams[1].now += 1.0
    timer.stop()
    rocm.reached = 100.0
    assert timer.drain()["elapsed_ns"].tolist() == [2_000_000, 1_000_000]
    assert rocm.current is rocm.streams[0]


def test_torch_events_are_not_recorded_into_a_capture(rocm: FakeCuda) -> None:
    timer = chronica.StepTimer("cuda:0")
    rocm.reached = 100.0
    timer.start(step=0)
    timer.stop()
    timer.start(step=1)
    rocm.current.is_capturing = True
    timer.stop()
    timer.start(step=2)
    timer.stop()
    assert len(timer.drain()) == 0  # an event is not even asked
    assert timer.skipped == 2
    rocm.current.is_capturing = False
    assert timer.drain()["step"].tolist() == [0]
    assert timer.failure is None


def test_errors_of_torch_are_counted(rocm: FakeCuda) -> None:
    timer = chronica.StepTimer("cuda:1")
    rocm.reached = 100.0
    timer.start(step=0)
    timer.stop()
    rocm.error = RuntimeError("CUDA error: device-side assert")
    timer.start(step=1)
    timer.stop()
    assert timer.skipped == 1
    assert "RuntimeError: CUDA error: device-side assert" in str(timer.failure)
    assert len(timer.drain()) == 0
    assert timer.skipped == 2


@pytest.mark.parametrize("device", ["cuda:2", torch.device("cuda", 7)])
def test_a_device_that_does_not_exist(cuda: FakeCuda, device: Any) -> None:
    with pytest.raises(ValueError, match=f"one of the 2 visible, 'cuda:0' to 'cuda:1', not '{device}'"):
        chronica.StepTimer(device)


def test_no_device_is_visible(cuda: FakeCuda) -> None:
    cuda.devices = 0
    with pytest.raises(RuntimeError, match=r"no CUDA device is visible to torch .*StepTimer\(\) times on the host"):
        chronica.StepTimer("cuda")


def test_what_only_initialising_would_tell_is_not_asked(rocm: FakeCuda) -> None:
    rocm.devices = -1
    assert chronica.StepTimer("cuda:7").clock == "torch.cuda.Event"


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "version", types.SimpleNamespace(cuda=None, hip=None))
    with pytest.raises(RuntimeError, match=r"was built without CUDA; StepTimer\(\) times on the host"):
        chronica.StepTimer("cuda")
