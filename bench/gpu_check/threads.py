"""Block: measurements from autograd's and Python's threads, before CUDA is in use, and after a fork."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from gpu_check import runner
from gpu_check.block import Outcome, Setting

SCENES = ("autograd_hook", "final_callback", "python_threads", "before_cuda", "fork_after_use", "fork_before_use")
BUDGET_S = 60.0  # of each; they run at the same time


def run(setting: Setting) -> Outcome:
    """Play each scene in a process of its own: a fork and a first use can be had only once."""

    def play(scene: str) -> dict[str, object]:
        return runner.run(f"gpu_check.scenes:{scene}", setting, BUDGET_S, leads_group=False)

    with ThreadPoolExecutor(len(SCENES)) as threads:
        entries = dict(zip(SCENES, threads.map(play, SCENES), strict=True))
    bad = [scene for scene, entry in entries.items() if not entry.get("ok", False) or "error" in entry]
    figures = {scene: {name: entry[name] for name in entry if name != "seconds"} for scene, entry in entries.items()}
    return Outcome(
        f"{len(SCENES) - len(bad)} of {len(SCENES)} right; wrong: {', '.join(bad) or 'none'}", figures, not bad
    )
