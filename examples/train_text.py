"""Train a small byte-level language model on the functions of the Python standard library, on several ranks.

    horovodrun -np 2 python examples/train_text.py            # balanced by chronica_hvd
    horovodrun -np 2 python examples/train_text.py --plain    # the same training with plain Horovod

Both train on the same global batches; the lines that differ are in ``main``. The loss is the mean over samples of each
sample's mean loss per byte.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F  # noqa: N812
from measuring import Run, calibrate, gather
from stdlib_text import Functions
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from tqdm import tqdm

import chronica_hvd as chronica

FINAL_LINE = (
    "loss {final_loss:.4f}, {steps_per_s:.3f} steps/s, {tokens_per_s:.0f} tokens/s, compute {compute_share:.1%}, "
    "idle {idle_share:.1%} (predicted {predicted_idle_share:.1%}), padding {padding_share:.1%}"
)


class ByteTransformer(nn.Module):
    """A causal transformer of one layer over bytes: (batch, length) → (batch, length, 256) logits."""

    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads = heads
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(longest, width)
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text: Tensor) -> Tensor:
        batch, length = text.shape
        x = self.bytes(text) + self.places.weight[:length]
        # (batch, length, 3 · width) → three of (batch, heads, length, width / heads)
        q, k, v = (
            self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, -1))
        x = x + self.mlp(x)
        return self.head(x)


def pad(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the texts padded to the longest, (batch, max) int64, and their lengths, (batch,)."""
    lengths = torch.tensor([len(text) for text in texts])
    return nn.utils.rnn.pad_sequence(texts, batch_first=True).long(), lengths


def mean_loss(model: nn.Module, text: Tensor, lengths: Tensor) -> Tensor:
    """Mean over the samples of each one's mean loss per predicted byte; padding does not count."""
    logits = model(text[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="none").view(len(text), -1)
    counts = (lengths - 1).clamp(min=1)
    is_real = torch.arange(losses.shape[1]) < (lengths - 1)[:, None]
    return ((losses * is_real).sum(1) / counts).mean()


def train(model: nn.Module, optimizer: Any, loader: Iterable[Any], mean: Callable[[Tensor], float]) -> Run:
    """Train for an epoch; ``mean`` makes the mean over the global batch of a loss."""
    timer = chronica.StepTimer(capacity=1 << 16)
    losses, tokens = [], 0
    hvd.barrier()
    begin = time.perf_counter()
    with tqdm(loader, disable=hvd.rank() > 0) as bar:
        for step, (text, lengths) in enumerate(bar):
            samples, longest = text.shape
            timer.start(step=step, samples=samples, size=samples * longest, size2=samples * longest**2)
            optimizer.zero_grad()
            loss = mean_loss(model, text, lengths)
            loss.backward()
            timer.stop()
            optimizer.step()
            losses.append(mean(loss))
            tokens += int(lengths.sum())
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
    seconds = time.perf_counter() - begin
    return Run(losses, tokens, seconds, gather(timer.drain(), "records"))


def noise_floor(model: nn.Module, dataset: Functions, plan: chronica.Plan, steps: int) -> float:
    """Return the idle share when all ranks compute the same batches: the machine's part of it, not the plan's."""
    batches = [plan.batches(step, step % plan.ranks)[0].tolist() for step in range(min(steps, plan.steps))]
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches, collate_fn=pad)
    model = copy.deepcopy(model)
    names = [(f"noise_floor.{name}", parameter) for name, parameter in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), names)
    return train(model, optimizer, loader, mean=lambda loss: loss.item()).idle_share


def pin_to_core() -> None:
    """Give each rank of this host a core of its own; before hvd.init(), so that Horovod's threads stay there too."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ.get("HOROVOD_LOCAL_RANK", "0")) % len(cores)]})


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="plain Horovod instead of chronica_hvd")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank (default: 32)")
    parser.add_argument("--epochs", type=int, default=1, help="epochs to train; the figures are of the last")
    parser.add_argument("--samples", type=int, help="train on this many functions (default: all, about 14000)")
    parser.add_argument("--cut", type=int, default=2048, help="cut the texts at this many bytes (default: 2048)")
    parser.add_argument("--width", type=int, default=32, help="width of the model (default: 32)")
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
    if options.plain and options.noise_floor:
        parser.error("--noise-floor repeats batches of a plan, and --plain has none")
    return options


def main() -> None:
    options = arguments()
    if options.pin:
        pin_to_core()
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(options.seed)
    dataset = Functions(options.cut, options.samples)
    model = ByteTransformer(options.width, heads=2, longest=options.cut)
    cost = calibrate(lambda text, lengths: mean_loss(model, text, lengths), dataset.sizes, options.batch_size)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=options.lr)

    sampler: Any
    loader: Any
    if options.plain:
        sampler = DistributedSampler(dataset, hvd.size(), hvd.rank(), seed=options.seed)
        loader = torch.utils.data.DataLoader(dataset, options.batch_size, sampler=sampler, collate_fn=pad)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        sampler = chronica.BatchSampler(dataset.sizes, options.batch_size, seed=options.seed, cost=cost)
        loader = chronica.DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)
        optimizer = chronica.DistributedOptimizer(optimizer, model.named_parameters(), sampler=sampler)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def mean(loss: Tensor) -> float:
        """Mean over the global batch."""
        return float(hvd.allreduce(loss.detach(), name="loss") if options.plain else chronica.average(loss, sampler))

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        run = train(model, optimizer, loader, mean)
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
