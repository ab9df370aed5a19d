from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch

import chronica_hvd as chronica

FIELDS = ("step", "samples", "size", "size2", "flops", "start_ns", "elapsed_ns")


def work(record: Any) -> list[int]:
    return [int(record[name]) for name in FIELDS[:5]]


def test_records_are_what_was_said() -> None:
    timer = chronica.StepTimer()
    for step in range(3):
        timer.start(step=step, size=10 * step)
        timer.stop()
    records = timer.drain()
    assert records.dtype.names == FIELDS
    assert {records.dtype[name] for name in FIELDS} == {np.dtype("<i8")}
    assert records["step"].tolist() == [0, 1, 2]
    assert records["size"].tolist() == [0, 10, 20]
    assert (records["elapsed_ns"] >= 0).all()
    assert (np.diff(records["start_ns"]) > 0).all()
    assert len(timer.drain()) == 0
    assert timer.overwritten == 0


@pytest.mark.parametrize(
    ("arguments", "keywords", "expected"),
    [
        ((), {}, [0, 0, 0, 0, 0]),
        ((1, 2, 3, 4, 5), {}, [1, 2, 3, 4, 5]),
        ((1,), {"flops": 5, "samples": 2}, [1, 2, 0, 0, 5]),
        ((np.int32(7), np.uint8(8)), {"size2": np.int64(2**62)}, [7, 8, 0, 2**62, 0]),
        ((-1,), {"size": -(2**63)}, [-1, 0, -(2**63), 0, 0]),
        ((), {"".join(["st", "ep"]): True}, [1, 0, 0, 0, 0]),
    ],
)
def test_arguments(arguments: tuple[Any, ...], keywords: dict[str, Any], expected: list[int]) -> None:
    timer = chronica.StepTimer()
    timer.start(*arguments, **keywords)
    timer.stop()
    assert work(timer.drain()[0]) == expected


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        ((1, 2, 3, 4, 5, 6), {}, TypeError, "at most 5 arguments .*6 were given"),
        ((1,), {"step": 2}, TypeError, "got step twice"),
        ((1, 2, 3, 4, 5), {"flops": 5}, TypeError, "got flops twice"),
        ((1, 2, 3, 4, 5), {"extra": 6}, TypeError, "no argument 'extra'; it takes step, samples"),
        ((), {"flops": 1.0}, TypeError, "flops must be an integer, not 1.0 of type float"),
        ((np.float64(1),), {}, TypeError, "step must be an integer, not .*float64"),
        ((), {"steps": 2}, TypeError, "no argument 'steps'; it takes step, samples"),
        ((1.0,), {}, TypeError, "step must be an integer, not 1.0 of type float"),
        ((0, "1"), {}, TypeError, "samples must be an integer, not '1' of type str"),
        ((None,), {}, TypeError, "step must be an integer, not None of type NoneType"),
        ((), {"size": 2**63}, ValueError, "size is too large for an int64: 9223372036854775808"),
        ((), {"size2": -(2**63) - 1}, ValueError, "size2 is too large for an int64: -9223372036854775809"),
        ((np.uint64(2**63),), {}, ValueError, "step is too large for an int64"),
    ],
)
def test_bad_arguments(arguments: Any, keywords: Any, error: type[Exception], message: str) -> None:
    timer = chronica.StepTimer()
    with pytest.raises(error, match=message):
        timer.start(*arguments, **keywords)
    with pytest.raises(RuntimeError, match=r"stop\(\) without start\(\)"):
        timer.stop()


def test_stop_needs_a_start() -> None:
    timer = chronica.StepTimer()
    timer.start(step=1)
    timer.start(step=2)  # the first is given up
    timer.stop()
    with pytest.raises(RuntimeError, match=r"stop\(\) without start\(\)"):
        timer.stop()
    assert timer.drain()["step"].tolist() == [2]


def test_a_full_ring_overwrites_the_oldest_and_counts() -> None:
    timer = chronica.StepTimer(capacity=4)
    for step in range(10):
        timer.start(step)
        timer.stop()
    assert timer.overwritten == 6
    assert timer.drain()["step"].tolist() == [6, 7, 8, 9]


def test_a_drained_ring_is_empty_wherever_it_stands() -> None:
    timer = chronica.StepTimer(capacity=4)
    for first in (0, 3, 6):
        for step in range(first, first + 3):
            timer.start(step)
            timer.stop()
        assert timer.drain()["step"].tolist() == [first, first + 1, first + 2]
    assert timer.overwritten == 0


def test_what_is_under_way_survives_drain() -> None:
    timer = chronica.StepTimer(capacity=1)
    timer.start(step=5)
    assert len(timer.drain()) == 0
    timer.stop()
    assert timer.drain()["step"].tolist() == [5]


def test_timers_are_independent() -> None:
    timers = [chronica.StepTimer() for _ in range(2)]
    for step, timer in enumerate(timers):
        timer.start(step)
    for timer in reversed(timers):
        timer.stop()
    assert [timer.drain()["step"].tolist() for timer in timers] == [[0], [1]]


def test_the_last_measurement_is_extended() -> None:
    timer = chronica.StepTimer()
    timer.extend()  # nothing was stopped
    timer.start(step=1)
    timer.stop()
    timer.start(step=2)
    time.sleep(0.01)
    timer.extend()  # the one stopped last, though another has begun
    timer.stop()
    first, second = timer.drain()
    assert (first["step"], second["step"]) == (1, 2)
    assert first["elapsed_ns"] >= 10_000_000
    assert first["start_ns"] + first["elapsed_ns"] >= second["start_ns"] + 10_000_000
    timer.extend()  # it was drained
    assert len(timer.drain()) == 0


def test_the_host_clock_fails_never() -> None:
    timer = chronica.StepTimer()
    timer.start()
    timer.stop()
    assert (timer.clock, timer.skipped, timer.failure) == ("steady clock", 0, None)


def test_it_measures_time() -> None:
    timer, other = chronica.StepTimer(), chronica.StepTimer()
    timer.start()
    time.sleep(0.01)
    timer.stop()
    (record,) = timer.drain()
    assert record["elapsed_ns"] >= 10_000_000
    assert abs(time.monotonic_ns() - record["start_ns"]) < 60_000_000_000
    assert len(other.drain()) == 0


def test_records_outlive_the_timer() -> None:
    timer = chronica.StepTimer()
    timer.start(step=41)
    timer.stop()
    records = timer.drain()
    del timer
    assert records["step"].tolist() == [41]
    records["step"] += 1
    assert records["step"].tolist() == [42]


def test_misuse_of_the_type_does_not_crash() -> None:
    class Unfinished(chronica.StepTimer):
        def __init__(self) -> None:
            pass

    with pytest.raises(TypeError, match="__init__"):
        Unfinished()
    bare = chronica.StepTimer.__new__(chronica.StepTimer)
    for method in (bare.start, bare.stop, bare.extend):
        with pytest.raises(RuntimeError, match="__init__"):
            method()
    methods = (chronica.StepTimer.start, chronica.StepTimer.stop, chronica.StepTimer.extend, chronica.StepTimer.drain)
    for function in methods:
        with pytest.raises(TypeError, match="StepTimer"):
            function(object())  # type: ignore[arg-type]


NOT_INITIALISED = """
import chronica_hvd as chronica
bare = chronica.StepTimer.__new__(chronica.StepTimer)
try:
    bare.{first}
except (RuntimeError, TypeError) as error:
    assert "__init__" in str(error), error
else:
    raise SystemExit("no error")
try:
    bare.start()
except RuntimeError as error:
    assert "__init__" in str(error), error
"""


@pytest.mark.parametrize("first", ["extend()", "drain()", "overwritten", "skipped", "failure", "clock", "capacity"])
def test_nothing_is_read_before_init(first: str) -> None:
    # In a process of its own: what is read without a check is memory that nobody has written.
    program = NOT_INITIALISED.format(first=first)
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_host_devices(device: Any) -> None:
    assert chronica.StepTimer(device, 8).capacity == 8


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "cuda:"}, ValueError, "device must be None, 'cpu' or 'cuda', not 'cuda:'; one of several is"),
        ({"device": "cuda:-1"}, ValueError, "device must be None, 'cpu' or 'cuda', not 'cuda:-1'"),
        ({"device": "cuda:one"}, ValueError, "device must be None, 'cpu' or 'cuda', not 'cuda:one'"),
        ({"device": "tpu"}, ValueError, "device must be None, 'cpu' or 'cuda', not 'tpu'"),
        ({"device": 3}, ValueError, "device must be None, 'cpu' or 'cuda', not 3"),
        ({"device": "CPU"}, ValueError, "device must be None, 'cpu' or 'cuda', not 'CPU'"),
        ({"device": torch.device("meta")}, ValueError, "device must be None, 'cpu' or 'cuda', not .*meta"),
        ({"capacity": "8"}, TypeError, "capacity must be an integer, not '8'"),
        ({"capacity": None}, TypeError, "capacity must be an integer, not None"),
        ({"capacity": -1}, ValueError, "capacity must be at least 1, not -1"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1, not 0"),
        ({"capacity": 2**40}, ValueError, "capacity must be at most 16777216, not 1099511627776"),
        ({"capacity": 1.5}, TypeError, "capacity must be an integer, not 1.5"),
        ({"capacity": True}, TypeError, "capacity must be an integer, not True"),
        ({"capacity": -1, "device": "cuda"}, ValueError, "capacity must be at least 1, not -1"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        chronica.StepTimer(**options)
