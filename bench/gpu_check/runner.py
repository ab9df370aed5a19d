"""Runs a function in a process of its own, so that a crash, a hang or a broken CUDA context stays there."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gpu_check.block import Outcome, Setting

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
#: How long a process may take to end after it has answered.
ENDING_S = 15.0
SHOWN_LINES = 12


def run(target: str, setting: Setting, budget_s: float, leads_group: bool = True) -> dict[str, Any]:
    """Call ``module:function`` with the setting, in a fresh process; kill it when the time is over.

    Returns the entry for the report: ``seconds``, and either ``error`` or ``summary``, ``figures`` and, where the
    function has a criterion, ``ok``. With ``leads_group`` whatever the process has started and left behind is killed
    too.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_work, args=(sender, target, setting, leads_group))
    begin = time.monotonic()
    process.start()
    sender.close()
    try:
        entry = _answer(receiver, process, budget_s)
    finally:
        _end(process, leads_group)
        receiver.close()
    return {"seconds": round(time.monotonic() - begin, 3), **entry}


def _answer(receiver: Connection, process: Any, budget_s: float) -> dict[str, Any]:
    if not receiver.poll(budget_s):
        return {"error": f"not through after {budget_s:.0f} s"}
    entry: dict[str, Any]
    try:
        entry = json.loads(receiver.recv())
    except EOFError:
        process.join(ENDING_S)
        return {"error": f"its process ended with status {process.exitcode} before it answered"}
    process.join(ENDING_S)
    # A crash on the way out, in a destructor say, is a fault as well.
    if process.exitcode != 0 and "error" not in entry:
        entry["error"] = (
            f"its process did not end within {ENDING_S:.0f} s of its answer"
            if process.exitcode is None
            else f"its process ended with status {process.exitcode} after it had answered"
        )
    return entry


def _end(process: Any, leads_group: bool) -> None:
    if leads_group:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _work(sender: Connection, target: str, setting: Setting, leads_group: bool) -> None:
    if leads_group:
        os.setsid()
    sys.path.insert(0, str(EXAMPLES))
    if setting.package is not None:
        sys.path.insert(0, str(setting.package))
        # Python's own finders come first: an editable install of the package has one that would be asked before them.
        sys.meta_path[:0] = [BuiltinImporter, FrozenImporter, PathFinder]
    module, _, function = target.partition(":")
    try:
        call: Callable[[Setting], Outcome] = getattr(importlib.import_module(module), function)
        outcome = call(setting)
        entry: dict[str, Any] = {"summary": outcome.summary, "figures": outcome.figures}
        if outcome.ok is not None:
            entry["ok"] = bool(outcome.ok)
        answer = json.dumps(entry)
    except Exception as error:
        lines = traceback.format_exc().splitlines()[-SHOWN_LINES:]
        answer = json.dumps({"error": f"{type(error).__name__}: {error}", "traceback": lines})
    sender.send(answer)
