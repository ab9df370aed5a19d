"""The same plan on every machine, on any number of threads, from any kind of array, and for any costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from helpers import check, distributed_sampler_steps, lognormal

import chronica_hvd as chronica

MODES: list[dict[str, Any]] = [
    {"padding": "none"},
    {"padding": "none", "local_batch": "equal", "max_size": 40_000, "micro_batches": "auto"},
    {},
    {"micro_batches": "auto", "loss_weight": "sizes"},
    {"micro_batches": 3, "comm": 3000.0, "min_local_batch": 3},
    {"reorder": "window", "window": 7, "pad_to": 32, "first": "largest"},
    {"policy": "dynamic", "reorder": "window"},
]
PROGRAM = """
import json, sys
import numpy as np
import chronica_hvd as chronica
engine = np.random.default_rng(5)
sizes = engine.lognormal(5, 1, 5000)  # floats: any other order of summation would show
weights = engine.random(5000)
cost = chronica.CostModel(fixed=31.7, per_sample=0.3, per_size=1.1, per_size2=0.0017)
plans = []
for mode in json.loads(sys.argv[1]):
    if mode.get("loss_weight"):
        mode["loss_weight"] = weights
    plans.append(chronica.plan(sizes, [1, 0.9, 1, 0.35], 16, cost=cost, **mode).fingerprint)
print(json.dumps(plans))
"""


def fingerprints(**environment: str) -> list[str]:
    """Plan in another process under this environment."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(MODES)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout)


def test_threads_and_vector_instructions_change_nothing() -> None:
    expected = fingerprints()
    assert len(set(expected)) == len(MODES)
    for threads in ("2", "3", "16"):
        assert fingerprints(CHRONICA_THREADS=threads) == expected
    # NumPy and the C library choose their code by the processor; without its wide vectors they must come to the same.
    disabled = np.show_config(mode="dicts")["SIMD Extensions"]["found"]  # type: ignore[index]
    assert fingerprints(NPY_DISABLE_CPU_FEATURES=" ".join(disabled)) == expected
    masked = "-AVX512F,-AVX512VL,-AVX2_Usable,-AVX2,-FMA,-FMA_Usable,-AVX"
    assert fingerprints(GLIBC_TUNABLES=f"glibc.cpu.hwcaps={masked}") == expected


@pytest.mark.parametrize("threads", ["0", "-1", "many", "1.5", "", "2000"])
def test_bad_numbers_of_threads(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHRONICA_THREADS", threads)
    with pytest.raises(ValueError, match=f"CHRONICA_THREADS must be a number from 1 to 1024, not '{threads}'"):
        chronica.plan([1, 2, 3], 2, 1)


@pytest.mark.parametrize("mode", [mode for mode in MODES if "reorder" not in mode], ids=str)
def test_blocks_are_planned_on_their_own(mode: dict[str, Any]) -> None:
    """An epoch begins with the plan of its first block, whatever comes after."""
    mode = {**mode, "shuffle": False, "max_size": mode.get("max_size", 1e6)}
    sizes = lognormal(64 * 130)
    cost = chronica.CostModel(fixed=40, per_size=1, per_size2=0.001)
    whole, first = (chronica.plan(sizes[:count], 4, 16, cost=cost, **mode) for count in (64 * 130, 64 * 64))
    assert whole.loads[:64].tolist() == first.loads.tolist()
    np.testing.assert_array_equal(whole.indices[: first.indices.size], first.indices)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        np.geomspace(1, 2**62, 4000).astype(np.int64),
        np.array([1] * 3999 + [2**40]),
        np.full(4000, 2**63 - 1),
        np.full(20_000, 7),
        np.zeros(4000, dtype=np.int64),
        np.array([3, 900] * 2000),
        np.arange(4000),
        np.arange(4000)[::-1],
        np.array([5e-324] * 2000 + [1e-300] * 2000),
        lognormal(4000) / 1e9,
    ],
    ids=["whole-range", "giant", "largest", "equal", "zero", "two", "ascending", "descending", "tiny", "seconds"],
)
def test_extreme_sizes(mode: dict[str, Any], sizes: np.ndarray) -> None:
    mode = {key: value for key, value in mode.items() if key != "max_size"}
    if mode.get("loss_weight") and not sizes.any():
        return
    cost = chronica.CostModel(
        fixed=float(sizes.astype(float).mean()) / 3, per_size=1, per_size2=1 / (1.0 + float(sizes.max()))
    )
    plan = chronica.plan(sizes, 8, 8, cost=cost, shuffle=False, **mode)
    drawn = distributed_sampler_steps(sizes.size, 8, 8, shuffle=False, seed=0, epoch=0)
    if "window" in str(mode):
        drawn = [sorted(np.concatenate([b for r in range(8) for b in plan.batches(k, r)])) for k in range(plan.steps)]
        assert sorted(np.concatenate(drawn)) == list(range(sizes.size))
    check(plan, sizes, 8, drawn, mode.get("min_local_batch", 1))
    assert np.isfinite(plan.loads).all()
    if not sizes.any():
        assert (plan.imbalance, plan.optimality) == (1.0, 1.0)
    if (sizes == sizes[0]).all() and mode.get("policy") is None and not mode.get("pad_to"):
        assert plan.imbalance <= 1.001


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_million_equal_sizes(mode: dict[str, Any]) -> None:
    mode = {key: value for key, value in mode.items() if key != "max_size"}
    plan = chronica.plan(np.full(1_000_000, 7, dtype=np.int32), 32, 32, **mode)
    assert plan.counts.sum() == 1_000_000
    assert plan.optimality <= 1.001
