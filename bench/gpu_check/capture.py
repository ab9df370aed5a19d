"""Block: CUDA graphs captured while measurements are taken around them and harvested by another thread all the time."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

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
GLIMPSE_S = 0.003  # within a capture, for the other thread
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
        super().__init__(daemon=True)
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

    def __enter__(self) -> Harvester:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def run(setting: Setting) -> Outcome:
    """Capture in every mode, by torch's context manager and by hand, and count what became of the measurements."""
    device, network = Device("cuda"), Network()
    # An own timer for the measurements around a capture, since a timer has one open at a time.
    timer, around = chronica.StepTimer("cuda"), chronica.StepTimer("cuda")
    harvested: Counter[int] = Counter()

    def drain() -> None:
        for one in (timer, around):
            harvested.update(one.drain()["step"].tolist())

    captures = QUICK_CAPTURES if setting.quick else CAPTURES
    figures: dict[str, Any] = {}
    lost: list[str] = []
    wrong = unobserved = total = 0
    with _thread_switches_often(), Harvester(drain) as harvester:
        for (name, way), mode in ((way, mode) for way in _ways(network).items() for mode in MODES):
            for _ in range(captures):
                total += 1
                seen = 0

                def body() -> None:
                    nonlocal seen
                    timer.start(step=INSIDE)
                    network.run()
                    timer.stop()
                    rounds = harvester.rounds
                    time.sleep(GLIMPSE_S)
                    seen = harvester.rounds - rounds

                try:
                    graph = _capture_amid_measurements(device, timer, around, lambda: way(mode, body))  # noqa: B023
                except RuntimeError as error:
                    lost.append(f"{name}, {mode}: {error}")
                    continue
                wrong += not network.replays_rightly(graph)
                unobserved += seen == 0
    torch.cuda.synchronize()
    drain()
    control = runner.run("gpu_check.capture:control", setting, CONTROL_BUDGET_S, leads_group=False)
    figures |= {
        "captures": total,
        "lost": len(lost),
        "lost_errors": lost[:5],
        "wrong_replays": wrong,
        "captures_without_a_harvest_inside": unobserved,
        "harvests": harvester.rounds,
        "harvest_error": None if harvester.error is None else str(harvester.error),
        "harvested_outside": [harvested[step] for step in OUTSIDE],
        "harvested_inside": harvested[INSIDE],
        "skipped": timer.skipped,
        "skipped_around": around.skipped,
        "failures": [one.failure for one in (timer, around) if one.failure],
        "control": {key: control.get(key) for key in ("summary", "error")},
    }
    return Outcome(
        f"{total} captures, {len(lost)} lost, {wrong} wrong; {timer.skipped} measurements inside skipped, "
        f"{sum(harvested[step] for step in OUTSIDE)} of {total * len(OUTSIDE)} outside harvested",
        figures,
        ok=is_right(figures),
    )


def is_right(figures: dict[str, Any]) -> bool:
    """Whether no capture was lost or wrong, and each measurement was harvested or, inside of a capture, skipped."""
    captures = figures["captures"]
    return (
        figures["lost"] == figures["wrong_replays"] == figures["captures_without_a_harvest_inside"] == 0
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
    with _thread_switches_often(), Harvester(event.query):
        for _ in range(captures):

            def body() -> None:
                network.run()
                time.sleep(GLIMPSE_S)

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
    device: Device, timer: Any, around: Any, capture: Callable[[], torch.cuda.CUDAGraph]
) -> torch.cuda.CUDAGraph:
    """Measure before, around and after a capture, the one before once so that it is pending meanwhile."""
    _measure(device, timer, BEFORE, SPIN_S)
    _measure(device, timer, PENDING, PENDING_S)
    around.start(step=AROUND)
    try:
        return capture()
    finally:
        around.stop()
        _measure(device, timer, AFTER, SPIN_S)


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
