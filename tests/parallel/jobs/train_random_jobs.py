"""Train the jobs of the folder's ``jobs.json``, one after the other; write what became of each on this rank."""

from __future__ import annotations

import json
import pickle

import horovod.torch as hvd
import rank
from job_training import Trained, Training
from random_jobs import Job


def main() -> None:
    folder = rank.begin()
    for number, values in enumerate(json.loads((folder / "jobs.json").read_text())):
        print(f"job {number}", flush=True)  # the last one printed is the one that failed
        legs: list[Trained] = []
        for leg in Job(**values).legs:
            legs.append(Training(leg, legs[-1].checkpoint if legs else None).run())
        (folder / f"{number}.{hvd.rank()}.pickle").write_bytes(pickle.dumps(legs))


if __name__ == "__main__":
    main()
