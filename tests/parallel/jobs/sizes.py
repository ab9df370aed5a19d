"""Measure sizes on several ranks, to the end or until something ends a rank; write what this rank got and read."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import rank
from measuring import LENGTHS, READ_UNTIL_ENDED

import chronica_hvd
from chronica_hvd import sizes


class Words:
    """A data set that notes what was read, and ends its rank where the scenario says so."""

    def __init__(self, scenario: str) -> None:
        self.scenario = scenario
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, sample: int) -> str:
        if len(self.read) == READ_UNTIL_ENDED:
            if self.scenario == "killed" and hvd.rank() == hvd.size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.scenario == "interrupted" and hvd.rank() == 0:
                raise KeyboardInterrupt
            if self.scenario == "broken" and hvd.rank() == hvd.size() - 1:
                raise OSError(f"no file {sample}")
        self.read.append(sample)
        time.sleep(0.001)
        return "x" * LENGTHS[sample]


def measured(scenario: str, **options: Any) -> dict[str, Any]:
    words = Words(scenario)
    try:
        return {"sizes": chronica_hvd.measure_sizes(words, len, **options).tolist(), "read": words.read}
    except (RuntimeError, ValueError) as error:
        return {"error": [type(error).__name__, str(error)], "read": words.read}


def main() -> None:
    folder = rank.begin(init=False)
    scenario, cache = sys.argv[2], Path(sys.argv[3])
    sizes.ROUND_S, sizes.KEEP_S, sizes.KEEP_TIMES = 0.02, 0.0, 0.0
    if scenario == "apart":
        cache = cache.with_name(f"{cache.name}-of-{os.environ['HOROVOD_RANK']}")
    if scenario == "process-set":
        others = hvd.ProcessSet(range(1, int(os.environ["HOROVOD_SIZE"])))
        hvd.init(process_sets=[others])
        result = measured(scenario, cache=cache, process_set=others) if hvd.rank() > 0 else None
        hvd.barrier()  # a rank that ends shuts Horovod down
    else:
        hvd.init()
        result = measured(scenario, cache=cache)
    rank.write(folder, result)


if __name__ == "__main__":
    main()
