from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import standin
import torch

import chronica_hvd as chronica
from chronica_hvd import _core

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "bench"), str(ROOT / "examples")]

from gpu_check import build, capture, cost, runner, surface, threads, virtual_ranks  # noqa: E402
from gpu_check.__main__ import BLOCKS, Block, main  # noqa: E402
from gpu_check.block import Outcome, Setting  # noqa: E402
from gpu_check.comparison import Comparison, agree, harvest  # noqa: E402

ON_CPU = ("--device", "cpu", "--installed")
#: The block threads has a test of its own: its processes, each with torch, would take most of the time.
ON_THE_HOST = [block.name for block in BLOCKS if not block.needs_cuda and block.name != "threads"]


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "gpu_check", *ON_CPU, "--quick", *options]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "bench")}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """All blocks that do not need a GPU, small, on the host."""
    folder = tmp_path_factory.mktemp("check")
    options = ("--blocks", *ON_THE_HOST, "capture", "--output", "new/report.json")
    done = subprocess.run(command(*options), cwd=folder, env=environment(), capture_output=True, text=True)
    return done, json.loads((folder / "new" / "report.json").read_text())


def test_the_report_holds_what_was_asked_for(checked: tuple[Any, dict[str, Any]]) -> None:
    done, report = checked
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["finished"]
    assert report["passed"]
    assert report["left_out"] == ["capture"]
    assert report["device"] == "cpu"
    assert report["machine"]["torch"]
    assert report["machine"]["cpu"]
    assert list(report["blocks"]) == ON_THE_HOST
    for name, entry in report["blocks"].items():
        assert entry["seconds"] > 0
        assert entry["figures"]
        assert any(line.startswith(name) and entry["summary"] in line for line in done.stdout.splitlines())
    judged = [name for name, entry in report["blocks"].items() if "ok" in entry]
    assert judged == ["accuracy", "end_of_compute", "compiling"]


def test_what_the_blocks_measure_makes_sense(checked: tuple[Any, dict[str, Any]]) -> None:
    figures = {name: entry["figures"] for name, entry in checked[1]["blocks"].items()}
    assert figures["accuracy"]["kernels of 1 ms"]["ours_inside"]["ours_median_ms"] >= 1.0
    assert figures["accuracy"]["clock"] == "steady clock"
    assert figures["cost"]["idle"]["ours_pair"]["median_us"] > 0.0
    assert figures["end_of_compute"]["with loss.item()"]["leaves_pause_out"]
    assert figures["compiling"]["static"]["graphs_timed"] == len(set(map(tuple, figures["compiling"]["shapes"]))) > 1
    assert figures["compiling"]["dynamic"]["graphs_timed"] == 1
    assert len(figures["surface"]["elapsed_us"]) == len(figures["surface"]["lengths"]) == 9
    variants = figures["virtual_ranks"]["variants"]
    assert variants["plain"]["speed_up"] == variants["plain"]["predicted_speed_up"] == 1.0
    assert all(0.0 <= variant["idle_share"] < 0.5 for variant in variants.values())
    assert len(variants["pad_to_64"]["makespans_ms"]) == figures["virtual_ranks"]["steps"]


def test_scenes_are_played_and_wrong_ones_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SCENES", ("fork_after_use", "no_such_scene"))
    outcome = threads.run(Setting("cpu", quick=True))
    assert outcome.ok is False
    assert outcome.summary == "1 of 2 right; wrong: no_such_scene"
    assert outcome.figures["fork_after_use"]["figures"]["child"] == {"harvested": 21, "skipped": 0, "fresh_skipped": 0}
    assert "no_such_scene" in outcome.figures["no_such_scene"]["error"]


def run_with_standin(driver_folder: Path, target: str) -> tuple[Outcome, int]:
    """Return the outcome of a block for a GPU, in a process of its own, and how often it harmed the driver."""
    module, function = target.split(":")
    program = f"""if True:
        import dataclasses, fake_cuda, json
        fake_cuda.install()
        from gpu_check import {module}
        from gpu_check.block import Outcome, Setting
        outcome = {module}.{function}(Setting("cuda", quick=True))
        print(json.dumps([dataclasses.asdict(outcome), fake_cuda.driver.violations()]))
    """
    done = standin.run(driver_folder, program, ROOT / "bench")
    assert done.returncode == 0, done.stderr
    outcome, violations = json.loads(done.stdout)
    return Outcome(**outcome), violations


@pytest.mark.parametrize(
    "target",
    [
        "accuracy:run",
        "capture:run",
        "streams:run",
        "scenes:final_callback",
        "scenes:python_threads",
        "scenes:before_cuda",
        "scenes:fork_after_use",
        "scenes:fork_before_use",
    ],
)
def test_blocks_for_a_gpu_are_right_with_a_standin_driver(driver_folder: Path, target: str) -> None:
    outcome, violations = run_with_standin(driver_folder, target)
    assert outcome.ok, outcome
    assert violations == 0


def test_nothing_waits_for_a_standin_driver(driver_folder: Path) -> None:
    outcome, violations = run_with_standin(driver_folder, "asynchronous:run")
    assert outcome.figures["harvested_meanwhile"] + outcome.figures["harvested_after"] == 200
    assert outcome.figures["device_was_busy"]
    assert outcome.figures["skipped"] == 0
    assert violations == 0


def test_what_is_paid_for_a_standin_driver_is_told(driver_folder: Path) -> None:
    outcome, _ = run_with_standin(driver_folder, "cost:run")
    assert outcome.ok is not None
    for state in ("idle", "long_queue"):
        for name in (cost.OURS, *cost.RIVALS, "raw_stream_look_up", "current_stream_look_up", "host_clock_pair"):
            assert outcome.figures[state][name]["median_us"] > 0


def test_a_harvest_that_disturbs_captures_is_noticed(driver_folder: Path) -> None:
    outcome, violations = run_with_standin(driver_folder, "capture:control")
    assert outcome.summary.startswith("2 of 2 captures lost")
    assert violations > 0


def test_a_block_that_fails_is_recorded_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("good", "raising", "crashing", "crashing_at_exit", "wrong", "without_criterion")
    output = tmp_path / "report.json"
    blocks = [Block(name, f"gpu_check_blocks:{name}", 60) for name in names]
    assert main([*ON_CPU, "--output", str(output)], blocks) == 1
    report = json.loads(output.read_text())
    assert report["finished"]
    assert not report["passed"]
    entries = report["blocks"]
    assert list(entries) == list(names)
    assert entries["good"]["ok"]
    assert entries["raising"]["error"] == "ValueError: no such thing"
    assert 'raise ValueError("no such thing")' in "".join(entries["raising"]["traceback"])
    assert entries["crashing"]["error"] == "its process ended with status -11 before it answered"
    assert entries["crashing_at_exit"]["error"] == "its process ended with status 7 after it had answered"
    assert entries["wrong"]["ok"] is False
    assert entries["without_criterion"]["figures"] == {"good": {"device": "cpu"}, "wrong": {"distance_m": 5}}
    verdicts = ["ok", "ERROR", "ERROR", "ERROR", "WRONG", "-"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:-1]] == [list(pair) for pair in zip(names, verdicts, strict=True)]
    assert lines[-1].startswith("NOT PASSED")


@pytest.mark.parametrize(("names", "status"), [((), 0), (("good", "without_criterion"), 0), (("good", "wrong"), 1)])
def test_the_exit_status_says_whether_all_is_well(tmp_path: Path, names: tuple[str, ...], status: int) -> None:
    blocks = [Block(name, f"gpu_check_blocks:{name}", 60) for name in names]
    assert main([*ON_CPU, "--output", str(tmp_path / "report.json")], blocks) == status
    assert json.loads((tmp_path / "report.json").read_text())["passed"] == (status == 0)


def test_without_a_gpu_nothing_else_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    output = tmp_path / "report.json"
    assert main(["--installed", "--output", str(output)], [Block("good", "gpu_check_blocks:good", 60)]) == 1
    report = json.loads(output.read_text())
    assert "CUDA" in report["machine"]["error"]
    assert not report["blocks"]
    assert not report["finished"]


def test_what_there_is_no_time_for_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_check.__main__.LEAST_S", 1e9)
    output = tmp_path / "report.json"
    blocks = [Block("good", "gpu_check_blocks:good", 60)]
    assert main([*ON_CPU, "--output", str(output)], blocks) == 1
    assert json.loads(output.read_text())["blocks"]["good"]["error"] == "no time is left of the 300 s"


def test_a_block_that_hangs_is_ended_with_all_it_has_started(tmp_path: Path) -> None:
    entry = runner.run("gpu_check_blocks:hanging", Setting("cpu", package=tmp_path), 12)
    assert entry["error"] == "not through after 12 s"
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not is_alive(child))  # it has been sent its signal, and dies when it is scheduled


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_package_that_was_built_is_the_one_that_is_checked(tmp_path: Path) -> None:
    (tmp_path / "chronica_hvd").mkdir()
    program = "from gpu_check.block import Outcome\nrun = lambda setting: Outcome(__file__, {})\n"
    (tmp_path / "chronica_hvd" / "__init__.py").write_text(program)
    entry = runner.run("chronica_hvd:run", Setting("cpu", package=tmp_path), 60)
    assert entry["summary"] == str(tmp_path / "chronica_hvd" / "__init__.py")


def test_ended_from_outside_the_report_is_whole(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    options = ("--blocks", "accuracy", "end_of_compute", "--output", str(output))
    process = subprocess.Popen(command(*options), cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL)
    wait_until(lambda: output.exists() and "accuracy" in json.loads(output.read_text())["blocks"])
    assert process.poll() is None
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    report = json.loads(output.read_text())
    assert not report["finished"]
    assert not report["passed"]
    assert "was interrupted" in [entry.get("error") for entry in report["blocks"].values()]


def test_what_the_script_needs_and_lacks_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    script = ROOT / "scripts" / "gpu_check.sh"
    done = subprocess.run([script], env={**os.environ, "PYTHON": str(bare)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"for {bare} is missing: torch, numpy, pip, pybind11, scikit_build_core; install it" in done.stderr


@pytest.mark.parametrize(
    ("difference_ns", "median_ns", "holds"),
    [(0, 0, True), (5_000, 0, True), (5_001, 0, False), (-15_000, 10**6, True), (-15_001, 10**6, False)],
)
def test_clocks_may_differ_by_one_percent_and_five_microseconds(
    difference_ns: float, median_ns: float, holds: bool
) -> None:
    other_ns = [0.0, median_ns, 1e12]
    comparison = Comparison([value + difference_ns for value in other_ns], other_ns)
    assert agree([comparison]) == holds
    assert comparison.figures()["median_difference_us"] == difference_ns / 1e3


def test_what_one_clock_adds_to_the_other_cancels() -> None:
    outside, inside = Comparison([108e3], [100e3]), Comparison([100e3], [107e3])
    assert not agree([outside])
    assert not agree([inside])
    assert agree([outside, inside])
    assert not agree([outside, outside])


def test_a_missing_measurement_is_an_error() -> None:
    timer = chronica.StepTimer()
    timer.start()
    timer.stop()
    with pytest.raises(RuntimeError, match="1 of 2 measurements came back; 0 were skipped"):
        harvest(timer, 2)


def test_the_cost_must_be_below_every_rivals() -> None:
    figures = {name: {"median_us": value} for name, value in (("ours", 1.0), ("one", 2.0), ("other", 1.0))}
    assert cost.is_cheapest(figures, "ours", ("one",))
    assert not cost.is_cheapest(figures, "ours", ("one", "other"))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"lost": 1},
        {"wrong_replays": 1},
        {"captures_without_a_harvest_inside": 1},
        {"captures_with_pending_events": 0},
        {"harvested_outside": [6, 6, 6, 5]},
        {"harvested_inside": 1},
        {"skipped": 5},
        {"skipped_around": 1},
        {"failures": ["cuEventQuery: CUDA_ERROR_UNKNOWN (999)"]},
        {"harvest_error": "no"},
    ],
)
def test_a_capture_is_right_only_if_everything_is(change: dict[str, Any]) -> None:
    figures = {
        "captures": 6,
        "lost": 0,
        "wrong_replays": 0,
        "captures_without_a_harvest_inside": 0,
        "captures_with_pending_events": 3,
        "harvested_outside": [6, 6, 6, 6],
        "harvested_inside": 0,
        "skipped": 6,
        "skipped_around": 0,
        "failures": [],
        "harvest_error": None,
    }
    assert capture.is_right({**figures, **change}) == (not change)


def test_the_surface_takes_each_shapes_median() -> None:
    timer = chronica.StepTimer()
    for number in (1, 0, 1, 0, 0, 1):
        timer.start(step=number, samples=number + 1)
        timer.stop()
    records = timer.drain()
    records["elapsed_ns"] = [10, 100, 30, 300, 200, 20]
    typical = surface.medians(records, 2)
    assert typical["elapsed_ns"].tolist() == [200, 20]
    assert typical["samples"].tolist() == [1, 2]
    exact = chronica.CostModel(fixed=380.0, per_sample=-0.0, per_size=0.0)
    np.testing.assert_allclose(surface.relative_errors(exact, typical), [0.9, 18.0])


def test_texts_are_padded_to_the_planned_length() -> None:
    texts = [torch.tensor([5, 6, 7], dtype=torch.uint8), torch.tensor([8], dtype=torch.uint8)]
    batch, lengths = virtual_ranks.padded(texts, 4, "cpu")
    assert batch.tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert lengths.tolist() == [3, 1]


def test_what_the_extension_is_linked_to() -> None:
    linked = build.needed(Path(_core.__file__))
    assert any(name.startswith("libstdc++") for name in linked)
    assert not any(name.startswith("libcu") for name in linked)
