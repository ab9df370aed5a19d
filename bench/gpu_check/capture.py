"""Block: CUDA graphs captured while measurements are taken around them and harvested by another thread all the time."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import chronica_hvd as chronica
from gpu_check import runner
from gpu_check.block import Outcome, Setting
from gpu_check.device import Device

MODES = ("global", "thread_local", "relaxed")
CAPTURES, QUICK_CAPTURES = 10, 2  # of each mode and way
#: What the measurements' records say, as their ``step``.
BEFORE, PENDING, AROUND, INSIDE, AFTER = range(5)
OUTSIDE = (BEFORE, PENDING, AROUND, AFTER)
PENDING_S = 0.05  # longer than a capture
SPIN_S = 1e-4
LONGEST_WAIT_S = 1.0  # within a capture, for the other thread to harvest
CONTROL_BUDGET_S = 40.0

Body = Callable[[], None]
Way = Callable[[str, Body], torch.cuda.CUDAGraph]


class Network:
    """What is captured: a fixed input, weights and the output of the last run."""

    def __init__(self) -> None:
        self.inputs = torch.randn(64, 512, device="cuda")
        self.weights = torch.randn(512, 512, device="cuda")
        self.outputs = self.compute()

    def compute(self) -> torch.Tensor:
        """Return the output for the input as it is."""
        return torch.relu(self.inputs @ self.weights)

    def run(self) -> None:
        """Compute the output."""
        self.outputs = self.compute()

    def replays_rightly(self, graph: torch.cuda.CUDAGraph) -> bool:
        """Whether the graph turns another input into its output."""
        captured = self.outputs
        self.inputs.copy_(torch.randn_like(self.inputs))
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        return torch.allclose(captured, self.compute(), rtol=1e-4, atol=1e-4)


class Harvester(threading.Thread):
    """A thread that calls a function all the time, until it is told to stop."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)  # so that it does not outlive an error in the main thread
        self.rounds = 0
        self.error: Exception | None = None
        self._work = work
        self._over = threading.Event()

    def run(self) -> None:
        """Work."""
        while not self._over.is_set():
            try:
                self._work()
            except Exception as error:
                self.error = error
            self.rounds += 1
            time.sleep(0)

    def await_round(self) -> bool:
        """Wait until the function was called and came back; whether it did in time."""
        end = self.rounds + 2  # the first one of them may have been under way
        deadline = time.monotonic() + LONGEST_WAIT_S
        while self.rounds < end and time.monotonic() < deadline:
            time.sleep(1e-4)
        return self.rounds >= end

    def __enter__(self) -> Harvester:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


class Fate(NamedTuple):
    """What became of a capture."""

    error: str | None = None
    is_wrong: bool = False
    was_harvested: bool = False  # by the other thread, within the capture
    had_pending: bool = False  # whether a measurement was on the device all the time


def run(setting: Setting) -> Outcome:
    """Capture in every mode, by torch's context manager and by hand, and count what became of the measurements."""
    device, network = Device("cuda"), Network()
    # An own timer for the measurements around a capture, since a timer has one open at a time.
    timer, around = chronica.StepTimer("cuda"), chronica.StepTimer("cuda")
    harvested: Counter[int] = Counter()

    def drain() -> None:
        for one in (timer, around):
            harvested.update(one.drain()["step"].tolist())

    ways = list(itertools.product(_ways(network).values(), MODES)) * (QUICK_CAPTURES if setting.quick else CAPTURES)
    with _thread_switches_often(), Harvester(drain) as harvester:
        fates = [
            _capture_amid_measurements(device, network, timer, around, harvester, functools.partial(way, mode))
            for way, mode in ways
        ]
    torch.cuda.synchronize()
    drain()
    control = runner.run("gpu_check.capture:control", setting, CONTROL_BUDGET_S, leads_group=False)
    lost = [fate.error for fate in fates if fate.error is not None]
    figures = {
        "captures": len(fates),
        "lost": len(lost),
        "lost_errors": lost[:5],
        "wrong_replays": sum(fate.is_wrong for fate in fates),
        "captures_without_a_harvest_inside": sum(not fate.was_harvested for fate in fates),
        "captures_with_pending_events": sum(fate.had_pending for fate in fates),
        "harvests": harvester.rounds,
        "harvest_error": None if harvester.error is None else str(harvester.error),
        "harvested_outside": [harvested[step] for step in OUTSIDE],
        "harvested_inside": harvested[INSIDE],
        "skipped": timer.skipped,
        "skipped_around": around.skipped,
        "failures": [one.failure for one in (timer, around) if one.failure],
        "control": control.get("error", control.get("summary")),
    }
    return Outcome(
        f"{len(fates)} captures, {len(lost)} lost, {figures['wrong_replays']} wrong; {timer.skipped} measurements "
        f"inside skipped, {sum(harvested[step] for step in OUTSIDE)} of {len(fates) * len(OUTSIDE)} outside harvested",
        figures,
        ok=is_right(figures),
    )


def is_right(figures: dict[str, Any]) -> bool:
    """Whether no capture was lost or wrong, and each measurement was harvested or, inside of a capture, skipped."""
    captures = figures["captures"]
    return (
        figures["lost"] == figures["wrong_replays"] == figures["captures_without_a_harvest_inside"] == 0
        and figures["captures_with_pending_events"] > 0
        and figures["harvested_outside"] == [captures] * len(OUTSIDE)
        and figures["harvested_inside"] == figures["skipped_around"] == 0
        and figures["skipped"] == captures
        and not figures["failures"]
        and figures["harvest_error"] is None
    )


def control(setting: Setting) -> Outcome:
    """Capture while the other thread asks an event of torch's: whether that harms shows what the block can notice."""
    device, network = Device("cuda"), Network()
    way = _ways(network)["by hand"]
    event = torch.cuda.Event()
    lost: list[str] = []
    captures = QUICK_CAPTURES if setting.quick else CAPTURES
    with _thread_switches_often(), Harvester(event.query) as harvester:
        for _ in range(captures):

            def body() -> None:
                network.run()
                harvester.await_round()

            device.spin(PENDING_S)
            event.record()
            try:
                way("global", body)
            except RuntimeError as error:
                lost.append(str(error))
    return Outcome(f"{len(lost)} of {captures} captures lost when the thread calls torch.cuda.Event.query", {})


def _ways(network: Network) -> dict[str, Way]:
    """Return the ways to capture; on the stream of the second one the network has run before, as it must have."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            network.run()
    torch.cuda.synchronize()

    def by_context(mode: str, body: Body) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            body()
        return graph

    def by_hand(mode: str, body: Body) -> torch.cuda.CUDAGraph:
        # Without the synchronisation that the context manager begins with: events are pending while it captures.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode=mode)
            try:
                body()
            finally:
                graph.capture_end()
        return graph

    return {"by context": by_context, "by hand": by_hand}


def _capture_amid_measurements(
    device: Device,
    network: Network,
    timer: Any,
    around: Any,
    harvester: Harvester,
    capture: Callable[[Body], torch.cuda.CUDAGraph],
) -> Fate:
    """Capture the network, with measurements before, around, inside and after, and replay it."""
    was_harvested = False

    def body() -> None:
        nonlocal was_harvested
        timer.start(step=INSIDE)
        network.run()
        timer.stop()
        was_harvested = harvester.await_round()

    _measure(device, timer, BEFORE, SPIN_S)
    _measure(device, timer, PENDING, PENDING_S)
    around.start(step=AROUND)
    try:
        graph = capture(body)
    except RuntimeError as error:
        return Fate(error=str(error))
    finally:
        had_pending = device.is_busy()
        around.stop()
        _measure(device, timer, AFTER, SPIN_S)
    return Fate(None, not network.replays_rightly(graph), was_harvested, had_pending)


def _measure(device: Device, timer: Any, step: int, seconds: float) -> None:
    timer.start(step=step)
    device.spin(seconds)
    timer.stop()


@contextlib.contextmanager
def _thread_switches_often() -> Iterator[None]:
    """Have Python turn to the other thread within the shortest capture."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
