"""What ``test_event_timer.py`` runs, each in a process of its own where the driver is the stand-in."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from standin import SUCCESS, Driver

import chronica_hvd as chronica
from chronica_hvd import _core


def in_a_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def measures_and_extends() -> None:
    driver = Driver()
    stream, asked = driver.stream(), []

    def current_stream(device: int) -> int:
        asked.append(device)
        return stream

    assert _core.cuda_driver_problem() is None
    timer = _core.StepTimer(8, 0, current_stream)
    assert (timer.clock, timer.capacity) == ("CUDA events", 8)
    assert driver.calls("cuInit") == 0  # the process may still fork
    timer.start(step=4, samples=3, size=2, size2=1, flops=5)
    driver.enqueue(stream, 2_000_000)
    timer.stop()
    assert len(timer.drain()) == 0
    driver.advance(2_000_000)
    driver.enqueue(stream, 500_000)
    timer.extend()
    assert len(timer.drain()) == 0
    driver.advance(500_000)
    assert asked == [0]
    (record,) = timer.drain()
    assert [int(record[name]) for name in record.dtype.names if name != "start_ns"] == [4, 3, 2, 1, 5, 2_500_000]
    with pytest.raises(RuntimeError, match=r"stop\(\) without start\(\)"):
        timer.stop()
    assert (timer.skipped, timer.failure, timer.overwritten) == (0, None, 0)
    del timer
    assert driver.live_events() == 0
    driver.assert_unharmed()


def the_device_is_asked_for_at_the_first_start() -> None:
    driver = Driver()
    asked: list[str] = []

    def current_device() -> int:
        asked.append("device")
        return 1

    def current_stream(device: int) -> int:
        asked.append(f"stream of {device}")
        return 0

    timer = _core.StepTimer(8, current_device, current_stream)
    assert asked == []
    for _ in range(2):
        timer.start()
        timer.stop()
    assert asked == ["device", "stream of 1", "stream of 1"]
    assert (driver.retains(0), driver.retains(1)) == (0, 1)
    assert len(timer.drain()) == 2
    driver.assert_unharmed()


def threads_share_a_timer_and_have_their_own() -> None:
    driver = Driver()
    shared = _core.StepTimer(8, 0, lambda device: 0)
    shared.start(step=1)
    in_a_thread(shared.stop)
    drained: list[int] = []
    in_a_thread(lambda: drained.extend(shared.drain()["step"].tolist()))
    assert drained == [1]

    counts: list[int] = []

    def measure(device: int) -> None:
        timer, stream, count = _core.StepTimer(8, device, lambda _: stream), driver.stream(device), 0
        for step in range(500):
            timer.start(step)
            timer.stop()
            count += len(timer.drain())
        assert timer.failure is None
        counts.append(count)

    threads = [threading.Thread(target=measure, args=(device,)) for device in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [500] * 4
    driver.assert_unharmed()


def a_forked_child_skips_all() -> None:
    driver = Driver()
    timer = _core.StepTimer(8, 0, lambda device: 0)
    child = os.fork()
    if child == 0:  # the driver has not been used yet
        timer.start()
        timer.stop()
        os._exit(int(len(timer.drain()) != 1))
    assert os.waitpid(child, 0)[1] == 0

    timer.start(step=1)
    timer.stop()
    timer.start(step=2)
    child = os.fork()
    if child == 0:
        calls = driver.calls("cuCtxGetCurrent")
        timer.stop()
        timer.start()
        timer.stop()
        timer.extend()
        drained, skipped, failure = len(timer.drain()), timer.skipped, timer.failure
        fresh = _core.StepTimer(8, torch.cuda.current_device, torch.cuda.current_stream)  # which must not be asked
        fresh.start()
        fresh.stop()
        skipped += fresh.skipped
        del timer, fresh
        driver.assert_unharmed()
        ok = (drained, skipped, driver.calls("cuCtxGetCurrent") - calls) == (0, 4, 0) and "forked" in str(failure)
        os._exit(int(not ok))
    assert os.waitpid(child, 0)[1] == 0
    timer.stop()
    assert timer.drain()["step"].tolist() == [1, 2]
    driver.assert_unharmed()


def captures_are_left_alone() -> None:
    driver = Driver()
    timed, captured = driver.stream(), driver.stream()
    current = timed
    timer = _core.StepTimer(8, 0, lambda device: current)
    timer.start(step=1)
    timer.stop()
    driver.begin_capture(captured)
    drained: list[int] = []
    in_a_thread(lambda: drained.extend(timer.drain()["step"].tolist()))
    assert drained == [1]
    current = captured
    timer.start(step=2)
    timer.stop()  # of a skipped start: no error
    assert (timer.skipped, timer.failure) == (1, None)
    assert len(timer.drain()) == 0
    assert driver.end_capture(captured) == SUCCESS
    timer.start(step=3)
    timer.stop()
    assert timer.drain()["step"].tolist() == [3]
    driver.assert_unharmed()


def errors_of_the_driver_are_counted_and_named() -> None:
    driver = Driver()
    timer = _core.StepTimer(8, 0, lambda device: 0)
    driver.fail("cuEventRecord", 2, 1, 201)
    for step in range(3):
        timer.start(step)
        timer.stop()
    assert timer.drain()["step"].tolist() == [1, 2]
    assert (timer.skipped, timer.failure) == (1, "cuEventRecord: CUDA_ERROR_INVALID_CONTEXT (201)")

    absent = _core.StepTimer(8, 9, lambda device: 0)
    absent.start()
    absent.stop()
    assert (absent.skipped, absent.failure) == (1, "cuDeviceGet: CUDA_ERROR_INVALID_DEVICE (101)")
    driver.assert_unharmed()


def errors_of_the_functions_it_asks_are_raised() -> None:
    def fail(*_: object) -> int:
        raise KeyError("no stream")

    for device, current_stream, error, message in (
        (0, fail, KeyError, "no stream"),
        (0, lambda device: "1", TypeError, "int"),
        (0, lambda device: 2**64, OverflowError, "int"),
        (0, lambda: 1, TypeError, "argument"),
        (fail, lambda device: 0, KeyError, "no stream"),
        (lambda: None, lambda device: 0, TypeError, "int"),
        (2**40, lambda device: 0, ValueError, "index of a device, not 1099511627776"),
        (2**70, lambda device: 0, OverflowError, "int"),
    ):
        timer = _core.StepTimer(8, device, current_stream)  # type: ignore[arg-type]
        for _ in range(2):
            with pytest.raises(error, match=message):
                timer.start()
        with pytest.raises(RuntimeError, match=r"stop\(\) without start\(\)"):
            timer.stop()
        assert (timer.skipped, timer.failure) == (0, None)


def the_public_timer_asks_torch() -> None:
    driver = Driver()
    streams = [driver.stream(0), driver.stream(1)]
    with (
        mock.patch.object(torch.version, "cuda", "13.0"),
        mock.patch.object(torch.cuda, "_device_count_nvml", return_value=2, create=True),
        mock.patch.object(torch.cuda, "current_device", return_value=1) as current_device,
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", side_effect=streams.__getitem__, create=True) as raw,
    ):
        bare, named = chronica.StepTimer("cuda"), chronica.StepTimer(torch.device("cuda", 0), 16)
        assert (bare.clock, named.clock, named.capacity) == ("CUDA events", "CUDA events", 16)
        assert not current_device.called
        assert driver.calls("cuInit") == 0
        for timer, device in ((bare, 1), (bare, 1), (named, 0)):
            timer.start(step=device)
            driver.enqueue(streams[device], 1000)
            timer.stop()
            assert raw.call_args == mock.call(device)
        driver.advance(2000)
        assert bare.drain()["elapsed_ns"].tolist() == [1000, 1000]
        assert named.drain()["step"].tolist() == [0]
        assert current_device.call_count == 1
    driver.assert_unharmed()
