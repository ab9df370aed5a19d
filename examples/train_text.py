"""Train a small byte-level language model on the functions of the Python standard library, on several ranks.

    horovodrun -np 2 python examples/train_text.py                      # balanced by chronica_hvd, in micro-batches
    horovodrun -np 2 python examples/train_text.py --mode plain         # the same training with plain Horovod
    horovodrun -np 2 python examples/train_text.py --mode by-length     # plain Horovod, batches grouped by length

The first two train on the same global batches; the lines that differ are in ``main``. The loss is the mean over samples
of each sample's mean loss per byte.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from measuring import Run, calibrate
from stdlib_text import Functions
from text_model import ByteTransformer, mean_loss
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from tqdm import tqdm

import chronica_hvd as chronica

FINAL_LINE = (
    "loss {final_loss:.4f}, {steps_per_s:.3f} steps/s, {tokens_per_s:.0f} tokens/s, compute {compute_share:.1%}, "
    "idle {idle_share:.1%} (predicted {predicted_idle_share:.1%}), padding {padding_share:.1%}"
)


MODES = ("balanced", "plain", "by-length")
HEADS = 2


def pad(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the texts padded to the longest, (batch, max) int64, and their lengths, (batch,)."""
    lengths = torch.tensor([len(text) for text in texts])
    return nn.utils.rnn.pad_sequence(texts, batch_first=True).long(), lengths


def train(model: nn.Module, optimizer: Any, steps: Iterable[Any], mean: Callable[[list[Tensor]], float]) -> Run:
    """Train for an epoch of steps of one or more micro-batches; ``mean`` makes their mean over the global batch."""
    timer = chronica.StepTimer(capacity=1 << 16)
    losses, tokens = [], 0
    hvd.barrier()
    begin = time.perf_counter()
    with tqdm(steps, disable=hvd.rank() > 0) as bar:
        for number, step in enumerate(bar):
            optimizer.zero_grad()
            of_step = []
            for text, lengths in step:
                samples, longest = text.shape
                timer.start(step=number, samples=samples, size=samples * longest, size2=samples * longest**2)
                loss = mean_loss(model, text, lengths)
                loss.backward()
                timer.stop()
                of_step.append(loss.detach())
                tokens += int(lengths.sum())
            optimizer.step()
            losses.append(mean(of_step))
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
    seconds = time.perf_counter() - begin
    return Run(losses, tokens, seconds, timer.drain())


def noise_floor(model: nn.Module, dataset: Functions, plan: chronica.Plan, steps: int) -> float:
    """Return the idle share when all ranks compute the same batches: the machine's part of it, not the plan's."""
    timer = chronica.StepTimer(capacity=1 << 16)
    model = copy.deepcopy(model)
    for number in range(min(steps, plan.steps)):
        hvd.barrier()
        for indices in plan.batches(number, number % plan.ranks):
            text, lengths = pad([dataset[index] for index in indices])
            timer.start(step=number)
            mean_loss(model, text, lengths).backward()
            timer.stop()
    return Run([], 0, 0.0, timer.drain()).idle_share()


class ByLength(torch.utils.data.Sampler[list[int]]):
    """group_by_length: the drawn order in stretches of 50 global batches, each sorted by length, the longest first."""

    def __init__(self, sizes: list[int], batch_size: int, seed: int) -> None:
        self.sizes, self.batch_size, self.seed, self.epoch = torch.tensor(sizes), batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sizes) // (self.batch_size * hvd.size())

    def __iter__(self) -> Iterator[list[int]]:
        drawn = torch.randperm(len(self.sizes), generator=torch.Generator().manual_seed(self.seed + self.epoch))
        global_batch = self.batch_size * hvd.size()
        stretches = (
            stretch[self.sizes[stretch].argsort(descending=True)] for stretch in drawn.split(50 * global_batch)
        )
        for batch in torch.cat(list(stretches)).split(global_batch)[: len(self)]:
            yield batch[hvd.rank() :: hvd.size()].tolist()


def pin_to_core() -> None:
    """Give each rank of this host a core of its own; before hvd.init(), so that Horovod's threads stay there too."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ.get("HOROVOD_LOCAL_RANK", "0")) % len(cores)]})


def show(report: chronica.EpochReport) -> None:
    """Say where the time of an epoch went, and for whom the others waited."""
    if hvd.rank() == 0:
        print(report)


def positive(text: str) -> int:
    """Read a number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default=MODES[0], help=f"default: {MODES[0]}")
    parser.add_argument("--micro-batches", default="auto", help='at most so many per rank and step (default: "auto")')
    parser.add_argument("--batch-size", type=positive, default=32, help="samples per rank (default: 32)")
    parser.add_argument("--epochs", type=positive, default=1, help="epochs to train; the figures are of the last")
    parser.add_argument("--samples", type=positive, help="train on this many functions (default: all, about 14000)")
    parser.add_argument("--cut", type=positive, default=2048, help="cut the texts at this many bytes (default: 2048)")
    parser.add_argument("--width", type=positive, default=32, help="width of the model, even (default: 32)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pin", action="store_true", help="pin each rank to a core of its own")
    parser.add_argument(
        "--noise-floor", type=int, default=0, metavar="STEPS", help="measure the machine's idle share too"
    )
    parser.add_argument("--summary", type=Path, help="write the run's figures and losses to this JSON file")
    options = parser.parse_args()
    if options.cut < 2:
        parser.error("--cut must be at least 2: the first byte of a text predicts the second")
    if options.width % HEADS:
        parser.error(f"--width must be a multiple of {HEADS}, the number of attention heads")
    if options.mode != "balanced" and options.noise_floor:
        parser.error("--noise-floor repeats batches of a plan, and only --mode balanced has one")
    if options.micro_batches != "auto":
        options.micro_batches = int(options.micro_batches)
    return options


def main() -> None:
    options = arguments()
    if options.pin:
        pin_to_core()
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(options.seed)
    dataset = Functions(options.cut, options.samples)
    if options.mode == "by-length" and len(dataset) < options.batch_size * hvd.size():
        raise SystemExit(f"--mode by-length needs a whole global batch of {options.batch_size * hvd.size()} functions")
    model = ByteTransformer(options.width, HEADS, longest=options.cut)
    cost = calibrate(lambda text, lengths: mean_loss(model, text, lengths), dataset.sizes, options.batch_size)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=options.lr)

    sampler: Any
    loader: Any
    if options.mode == "balanced":
        sampler = chronica.BatchSampler(
            dataset.sizes,
            options.batch_size,
            seed=options.seed,
            cost=chronica.Measured(cost),  # a good start; from the second epoch on it follows what training takes
            micro_batches=options.micro_batches,
            on_report=show,
        )
        loader = chronica.DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)
        optimizer = chronica.DistributedOptimizer(optimizer, model.named_parameters(), sampler=sampler)
    elif options.mode == "plain":
        sampler = DistributedSampler(dataset, hvd.size(), hvd.rank(), seed=options.seed)
        loader = torch.utils.data.DataLoader(dataset, options.batch_size, sampler=sampler, collate_fn=pad)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        sampler = ByLength(dataset.sizes, options.batch_size, options.seed)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def mean(losses: list[Tensor]) -> float:
        """Mean over the global batch."""
        if options.mode == "balanced":
            return float(chronica.average(losses, sampler))
        return float(hvd.allreduce(losses[0], name="loss"))

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        steps = loader.steps() if options.mode == "balanced" else ([batch] for batch in loader)
        run = train(model, optimizer, steps, mean)
    summary = run.summary(cost)
    if options.noise_floor:
        summary["noise_floor"] = noise_floor(model, dataset, sampler.plan, options.noise_floor)
    if hvd.rank() == 0:
        print(FINAL_LINE.format(**summary))
        if options.summary:
            options.summary.parent.mkdir(parents=True, exist_ok=True)
            options.summary.write_text(json.dumps({**summary, "cost": vars(cost)}, indent=1))


if __name__ == "__main__":
    main()
