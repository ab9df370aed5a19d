"""Plan: which step a sample goes to, and for a fixed policy which rank, before the steps are assigned."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chronica_hvd import _core
from chronica_hvd.options import PlanOptions
from chronica_hvd.workload import Workload


def reordered(
    costs: NDArray[np.float64], work: Workload, options: PlanOptions, global_batch: int, seed: int
) -> NDArray[np.int64] | None:
    """Return the places in the drawn order, in the order in which the steps take them; ``None`` if that is the same.

    Parameters
    ----------
    costs
        (samples,) of the samples in drawn order.
    seed
        Of this epoch, for the policies that draw.
    """
    # A window that is larger than the epoch is the epoch.
    steps = min(options.window, -(-costs.size // global_batch)) if options.reorder == "window" else 1
    pool = steps * global_batch
    if options.policy == "plain":
        return _in_turn(costs.size, work.ranks, global_batch)
    if options.policy != "balanced":
        dealt = [
            begin
            + _core.deal(
                costs[begin : begin + pool],
                work.effective_speeds,
                policy=options.policy,
                fixed_cost=work.fixed_cost,
                global_batch=global_batch,
                seed=(seed + begin) % 2**64,
            )
            for begin in range(0, costs.size, pool)
        ]
        return np.concatenate(dealt)
    if options.reorder == "batch":
        return None
    places = np.arange(costs.size)
    full = costs.size // global_batch * global_batch  # the short last step is left alone
    for begin in range(0, full, pool):
        of_window = slice(begin, min(begin + pool, full))
        window = costs[of_window]
        places[of_window] = begin + _core.regroup(
            window,
            work.effective_speeds,
            fixed_cost=work.fixed_cost,
            global_batch=global_batch,
            most_moved=int(options.max_moved * window.size),
        )
    return places


def _in_turn(samples: int, ranks: int, global_batch: int) -> NDArray[np.int64]:
    """Return the places rank by rank in each step, rank r having every ranks-th one from the r-th on."""
    places = np.arange(samples)
    full = samples // global_batch * global_batch
    in_turn = places[:full].reshape(-1, global_batch // ranks, ranks).transpose(0, 2, 1).ravel()
    short = [places[full + rank :: ranks] for rank in range(min(ranks, samples - full))]
    return np.concatenate([in_turn, *short])
