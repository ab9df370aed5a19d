"""Clocks for the timer that are written in Python."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from chronica_hvd import _core


class Interval:
    def __init__(self, start: int) -> None:
        self.start, self.stop = start, -1


class Clock:
    """Advances by one at each beginning and end; before each method it does what ``before`` says."""

    name = "counter"

    def __init__(self) -> None:
        self.now = 0
        self.complete = 1000
        self.refuses = False
        self.before: dict[str, Callable[[], object]] = {}

    def tick(self, method: str) -> int:
        self.before.get(method, lambda: None)()
        self.now += 1
        return self.now

    def begin(self) -> Interval | None:
        now = self.tick("begin")
        return None if self.refuses else Interval(now)

    def end(self, interval: Interval) -> bool:
        interval.stop = self.tick("end")
        return not self.refuses

    def ready(self, interval: Interval) -> bool:
        self.before.get("ready", lambda: None)()
        return interval.stop <= self.complete

    def elapsed_ns(self, interval: Interval) -> Any:
        self.before.get("elapsed_ns", lambda: None)()
        return interval.stop - interval.start


def fail(error: BaseException) -> Callable[[], None]:
    def raise_it() -> None:
        raise error

    return raise_it


def measure(timer: _core.StepTimer, step: int) -> None:
    timer.start(step)
    timer.stop()


def test_it_measures() -> None:
    clock = Clock()
    timer = _core.StepTimer(2, clock=clock)
    assert timer.clock == "counter"
    before = time.monotonic_ns()
    for step in range(3):
        measure(timer, step)  # ends at 2, 4, 6
    timer.extend()  # at 7
    clock.complete = 4
    records = timer.drain()
    assert (records["step"].tolist(), records["elapsed_ns"].tolist()) == ([1], [1])
    assert before <= records["start_ns"][0] <= time.monotonic_ns()
    clock.complete = 7
    assert timer.drain()["elapsed_ns"].tolist() == [2]
    assert (timer.overwritten, timer.skipped, timer.failure) == (1, 0, None)


def test_what_it_refuses_is_skipped() -> None:
    clock = Clock()
    timer = _core.StepTimer(2, clock=clock)
    clock.refuses = True
    measure(timer, 0)
    clock.refuses = False
    timer.start(1)
    clock.refuses = True
    timer.stop()
    assert (timer.skipped, timer.failure, len(timer.drain())) == (2, None, 0)


@pytest.mark.parametrize(("method", "left"), [("begin", [0, 2]), ("end", [0, 2]), ("ready", []), ("elapsed_ns", [])])
def test_an_exception_skips_the_measurement(method: str, left: list[int]) -> None:
    clock = Clock()
    timer = _core.StepTimer(4, clock=clock)
    measure(timer, 0)
    clock.before[method] = fail(ValueError("out of order"))
    measure(timer, 1)
    del clock.before[method]
    if not left:
        clock.before[method] = fail(ValueError("out of order"))
    measure(timer, 2)
    assert timer.drain()["step"].tolist() == left
    assert timer.skipped == 3 - len(left)
    assert "ValueError: out of order" in str(timer.failure)
    assert method in str(timer.failure)  # where it came from


@pytest.mark.parametrize("method", ["begin", "end", "ready", "elapsed_ns"])
def test_an_interrupt_goes_on_to_the_caller(method: str) -> None:
    clock = Clock()
    timer = _core.StepTimer(4, clock=clock)
    measure(timer, 0)
    clock.before[method] = fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        measure(timer, 1)
        timer.drain()
    del clock.before[method]
    measure(timer, 2)
    steps = timer.drain()["step"].tolist()
    assert steps == ([0, 2] if method in ("begin", "end") else [0, 1, 2])
    assert (timer.skipped, timer.failure) == (0, None)


@pytest.mark.parametrize(
    ("attribute", "value", "error"), [("elapsed_ns", 1.5, "TypeError"), ("elapsed_ns", 2**63, "OverflowError")]
)
def test_an_answer_of_the_wrong_type_skips_the_measurement(attribute: str, value: object, error: str) -> None:
    clock = Clock()
    setattr(clock, attribute, lambda interval: value)
    timer = _core.StepTimer(4, clock=clock)
    measure(timer, 0)
    assert len(timer.drain()) == 0
    assert timer.skipped == 1
    assert error in str(timer.failure)


@pytest.mark.parametrize("missing", ["begin", "end", "ready", "elapsed_ns"])
def test_a_clock_needs_all_methods(missing: str) -> None:
    clock = Clock()
    setattr(clock, missing, None)
    with pytest.raises(TypeError, match=rf"a clock needs the methods .*Clock object at .* has no {missing}"):
        _core.StepTimer(4, clock=clock)


def test_a_clock_needs_a_name() -> None:
    clock = Clock()
    clock.name = 5  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"a clock needs a name, a str; that of .* is 5"):
        _core.StepTimer(4, clock=clock)


@pytest.mark.parametrize("method", ["begin", "end", "ready", "elapsed_ns"])
def test_a_clock_that_calls_its_timer_is_told(method: str) -> None:
    clock = Clock()
    timer = _core.StepTimer(4, clock=clock)
    clock.before[method] = timer.drain
    measure(timer, 0)
    assert len(timer.drain()) == 0
    assert timer.skipped == 1
    assert "must not call this timer" in str(timer.failure)


def test_other_threads_wait_for_their_turn() -> None:
    clock = Clock()
    timer = _core.StepTimer(1, clock=clock)
    is_inside, may_leave = threading.Event(), threading.Event()

    def linger() -> None:
        is_inside.set()
        assert may_leave.wait(60)

    measure(timer, 0)
    clock.before["end"] = linger
    timer.start(1)
    threads = [threading.Thread(target=timer.stop)]
    threads[0].start()
    assert is_inside.wait(60)
    drained: list[int] = []
    threads.append(threading.Thread(target=lambda: drained.extend(timer.drain()["step"].tolist())))
    threads[1].start()
    assert drained == []
    may_leave.set()
    for thread in threads:
        thread.join()
    assert drained == [1]  # not before the first was overwritten
    assert timer.overwritten == 1


def test_intervals_and_clock_are_let_go() -> None:
    clock = Clock()
    intervals: list[weakref.ref[Interval]] = []
    begin = clock.begin

    def noted() -> Interval | None:
        interval = begin()
        assert interval is not None
        intervals.append(weakref.ref(interval))
        return interval

    clock.begin = noted  # type: ignore[method-assign]
    timer = _core.StepTimer(2, clock=clock)
    for step in range(5):
        timer.start()  # given up
        measure(timer, step)
    assert [interval() is not None for interval in intervals] == [False] * 7 + [True, False, True]
    timer.drain()
    assert not any(interval() for interval in intervals)
    timer.start()
    del timer
    gc.collect()
    assert not any(interval() for interval in intervals)
