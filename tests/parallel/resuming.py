"""The training runs that stop and go on."""

from __future__ import annotations

from cases import base, micro_batched
from training import Case

import chronica_hvd

#: With 151 samples the last step of the launches that follow each other has one sample, so a rank holds a filler.
SAMPLES = 151


def resuming(ranks: int) -> list[Case]:
    """Return the runs for this number of ranks."""
    automatic = {"micro_batches": "auto"}
    window = {"reorder": "window", "window": 4, "policy": "dynamic", "local_batch": "equal", "normalize": "epoch"}
    # By squares the largest samples outweigh a rank's share, so a window gathers them.
    squares = chronica_hvd.CostModel(per_sample=1.0, per_size2=1.0)
    gathering = {"reorder": "window", "window": 1000, "max_moved": 1.0, "cost": squares}
    workers = {"num_workers": 2, "prefetch_factor": 4}
    ahead = {"lookahead": 1}
    runs = [
        base(ranks, "plain"),
        base(ranks, "workers", loader=workers),
        base(ranks, "ahead", loop="ahead", optimizer=ahead),
        base(ranks, "speeds", speeds=(1.0, 0.5, 2.0)[:ranks]),
        base(ranks, "drop-last", plan={"drop_last": True}),
        base(ranks, "first", plan={"first": "largest"}),
        base(ranks, "window", plan=window),
        base(ranks, "window-micro", plan={**gathering, **automatic}, loop="steps", loss_weight="samples"),
        micro_batched(ranks, "micro", cut=None, loader=workers),
        micro_batched(ranks, "micro-ahead", cut=None, loop="steps_ahead", optimizer=ahead),
    ]
    return [Case(**{**vars(case), "samples": SAMPLES}) for case in runs]
