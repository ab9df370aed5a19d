"""Blocks for the tests of bench/gpu_check, each with a fate of its own."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import time

from gpu_check.block import Outcome, Setting


def good(setting: Setting) -> Outcome:
    return Outcome("well", {"device": setting.device}, ok=True)


def without_criterion(setting: Setting) -> Outcome:
    return Outcome("so it is", dict(setting.figures))


def wrong(setting: Setting) -> Outcome:
    return Outcome("not well", {"distance_m": 5}, ok=False)


def raising(setting: Setting) -> Outcome:
    raise ValueError("no such thing")


def crashing(setting: Setting) -> Outcome:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def crashing_at_exit(setting: Setting) -> Outcome:
    atexit.register(os._exit, 7)
    return Outcome("well", {})


def hanging(setting: Setting) -> Outcome:
    child = subprocess.Popen(["sleep", "600"])
    assert setting.package is not None
    (setting.package / "child").write_text(str(child.pid))
    time.sleep(600)
    raise AssertionError
