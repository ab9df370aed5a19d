"""A rank that waits long for others says so, once, and in what it waits."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from chronica_hvd import waiting


def wait_for(seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    """Wait so long, but no longer than for a message."""
    with waiting._Watch().waits_for("the comparison of plans of step 7"):
        end = time.monotonic() + seconds
        while time.monotonic() < end and not caplog.records:
            time.sleep(0.01)
        if caplog.records:
            time.sleep(0.2)  # for a second one, which must not come


def test_a_long_wait_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.06)
    with caplog.at_level(logging.WARNING, "chronica_hvd"):
        wait_for(30.0, caplog)
    [record] = caplog.records
    assert "waiting for the others for" in record.getMessage()
    assert "in the comparison of plans of step 7. Every rank must" in record.getMessage()


def test_short_waits_are_not_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_S", 3600.0)
    with caplog.at_level(logging.WARNING, "chronica_hvd"):
        wait_for(0.1, caplog)
    assert not caplog.records


def test_many_waits_have_one_thread() -> None:
    watch = waiting._Watch()
    before = threading.active_count()
    for _ in range(100):
        with watch.waits_for("anything"):
            pass
    assert threading.active_count() == before + 1  # type: ignore[attr-defined]
