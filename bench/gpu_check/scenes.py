"""The scenes of the block ``threads``; each is played in a fresh process."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch

import chronica_hvd as chronica
from gpu_check.block import Outcome, Setting

MEASUREMENTS = 10
THREADS = 4
FORK_TIMEOUT_S = 25.0


class Work:
    """A backward pass on the device."""

    def __init__(self, setting: Setting) -> None:
        torch.set_num_threads(1)  # a forked child has none of its parent's threads
        self.weight = torch.nn.Parameter(torch.ones(64, 64, device=setting.device))

    def loss(self) -> torch.Tensor:
        """Compute the loss."""
        return (self.weight @ self.weight).sum()


def autograd_hook(setting: Setting) -> Outcome:
    """Stop in a tensor's hook, which autograd calls in a thread of the device's."""
    timer, work, threads = chronica.StepTimer(setting.device), Work(setting), set()

    def stop(_: torch.Tensor) -> None:
        threads.add(threading.get_ident())
        timer.stop()

    work.weight.register_hook(stop)
    _measure(timer, lambda: work.loss().backward(), stops=False)
    is_another = threads != {threading.get_ident()}
    return _outcome(
        setting, timer, MEASUREMENTS, is_another == (setting.device == "cuda"), in_another_thread=is_another
    )


def final_callback(setting: Setting) -> Outcome:
    """Stop in autograd's final callback, as training does."""
    timer, work = chronica.StepTimer(setting.device), Work(setting)
    work.weight.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(timer.stop))
    _measure(timer, lambda: work.loss().backward(), stops=False)
    return _outcome(setting, timer, MEASUREMENTS)


def python_threads(setting: Setting) -> Outcome:
    """Measure in fresh threads, each with a timer of its own and all with one under a lock."""
    work, shared, lock = Work(setting), chronica.StepTimer(setting.device), threading.Lock()
    own = [chronica.StepTimer(setting.device) for _ in range(THREADS)]

    def measure(timer: Any) -> None:
        _measure(timer, work.loss)
        for _ in range(MEASUREMENTS):
            with lock:
                shared.start()
                work.loss()
                shared.stop()

    threads = [threading.Thread(target=measure, args=(timer,)) for timer in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _synchronize(setting)
    taken = [len(timer.drain()) for timer in own]
    return _outcome(setting, shared, THREADS * MEASUREMENTS, taken == [MEASUREMENTS] * THREADS, own_harvested=taken)


def before_cuda(setting: Setting) -> Outcome:
    """Measure before anything else has used CUDA: taken or skipped, but counted, and everything works afterwards."""
    was_in_use = torch.cuda.is_initialized()
    timer = chronica.StepTimer(setting.device)
    timer.start()
    timer.stop()
    early, early_skipped = len(timer.drain()), timer.skipped
    work = Work(setting)
    _synchronize(setting)
    early += len(timer.drain())
    _measure(timer, work.loss)
    is_right = not was_in_use and early + early_skipped == 1
    return _outcome(
        setting, timer, MEASUREMENTS, is_right, early_skipped, early_harvested=early, early_skipped=early_skipped
    )


def fork_after_use(setting: Setting) -> Outcome:
    """Fork a process that has used CUDA: the child can take nothing and must not hang; the parent goes on."""
    timer, work = chronica.StepTimer(setting.device), Work(setting)
    _measure(timer, work.loss)
    _synchronize(setting)
    first = len(timer.drain())
    timer.start()
    timer.stop()  # not harvested before the fork

    def child() -> dict[str, Any]:
        nonlocal timer
        skipped = timer.skipped
        fresh = chronica.StepTimer(setting.device)
        for one in (timer, fresh):
            _measure(one, lambda: None)
        answer = {
            "harvested": len(timer.drain()) + len(fresh.drain()),
            "skipped": timer.skipped - skipped,
            "fresh_skipped": fresh.skipped,
        }
        del timer, fresh, one
        gc.collect()
        return answer

    in_child = _in_fork(child)
    expected = (
        {"harvested": 0, "skipped": MEASUREMENTS, "fresh_skipped": MEASUREMENTS}
        if setting.device == "cuda"
        else {"harvested": 2 * MEASUREMENTS + 1, "skipped": 0, "fresh_skipped": 0}
    )
    # What the parent left pending counts as skipped in the child, if it counts at all.
    slack = in_child.get("skipped", 0) - expected["skipped"]
    is_right = first == MEASUREMENTS and {**in_child, "skipped": expected["skipped"]} == expected and slack in (0, 1)
    _measure(timer, work.loss)
    return _outcome(setting, timer, MEASUREMENTS + 1, is_right, child=in_child)


def fork_before_use(setting: Setting) -> Outcome:
    """Fork a process that has not used CUDA: the child works, and so does the parent afterwards."""
    timer = chronica.StepTimer(setting.device)

    def child() -> dict[str, Any]:
        fresh, work = chronica.StepTimer(setting.device), Work(setting)
        for one in (timer, fresh):
            _measure(one, work.loss)
        _synchronize(setting)
        return {"harvested": len(timer.drain()), "fresh_harvested": len(fresh.drain()), "failure": timer.failure}

    in_child = _in_fork(child)
    expected = {"harvested": MEASUREMENTS, "fresh_harvested": MEASUREMENTS, "failure": None}
    _measure(timer, Work(setting).loss)
    return _outcome(setting, timer, MEASUREMENTS, in_child == expected, child=in_child)


def _measure(timer: Any, work: Callable[[], object], stops: bool = True) -> None:
    for step in range(MEASUREMENTS):
        timer.start(step=step)
        work()
        if stops:
            timer.stop()


def _synchronize(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()


def _outcome(
    setting: Setting, timer: Any, expected: int, is_right: bool = True, skipped: int = 0, **figures: Any
) -> Outcome:
    """Return the outcome of a scene whose timer must yield so many measurements and have skipped so many."""
    _synchronize(setting)
    records = timer.drain()
    figures |= {
        "expected": expected,
        "harvested": len(records),
        "skipped": timer.skipped,
        "failure": timer.failure,
        "clock": timer.clock,
    }
    is_right = is_right and len(records) == expected and timer.skipped == skipped
    return Outcome("", figures, is_right and bool((records["elapsed_ns"] >= 0).all()))


def _in_fork(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what the function returns in a forked child; ``error`` where it raises, crashes or hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = function()
        except BaseException:
            answer = {"error": traceback.format_exc()}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    is_ready, _, _ = select.select([reader], [], [], FORK_TIMEOUT_S)
    answer = json.loads(os.read(reader, 1 << 16) or b'{"error": "crashed"}') if is_ready else {"error": "hung"}
    os.close(reader)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return answer
