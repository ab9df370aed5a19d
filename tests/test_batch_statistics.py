"""Layers that normalise, on batches split as a plan splits them: which gradients are those of the global batch.

All ranks' micro-batches are computed in this process, and combined as the optimizer and Horovod do.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lognormal
from torch import Tensor, nn

import chronica_hvd as chronica

GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"
SAMPLES, RANKS, BATCH, CHANNELS, WIDTH, LENGTH = 50, 3, 8, 4, 6, 5  # two full steps and one of two samples
SIZES = lognormal(SAMPLES, mean=2.0, largest=60)
LOSS_WEIGHTS = np.random.default_rng(0).choice([0.5, 1.0, 3.0], SAMPLES)


def plan(**options: Any) -> chronica.Plan:
    return chronica.plan(SIZES, RANKS, BATCH, **{"micro_batches": "auto", "loss_weight": LOSS_WEIGHTS, **options})


def samples(length: Callable[[int], int]) -> list[Tensor]:
    """Return (CHANNELS, length) of every sample; their statistics vary with the size."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(CHANNELS, length(size), generator=generator, dtype=torch.float64) * (1 + size) / 4 + size / 8
        for size in SIZES.tolist()
    ]


EVEN, UNEVEN = samples(lambda size: LENGTH), samples(lambda size: size)


class Model(nn.Module):
    """Pointwise convolutions around a layer that normalises; a sample's output is the mean over its positions."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Conv1d(CHANNELS, WIDTH, 1), nn.Conv1d(WIDTH, 2, 1)
        self.norm = norm()
        for parameter in self.norm.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        self.double()

    def losses(self, indices: list[int], data: list[Tensor]) -> Tensor:
        """Return (samples,) the loss of each."""
        longest = max(data[i].shape[1] for i in indices)
        batch = torch.stack([nn.functional.pad(data[i], (0, longest - data[i].shape[1])) for i in indices])
        is_real = torch.tensor([[place < data[i].shape[1] for place in range(longest)] for i in indices])
        outputs = self.after(torch.tanh(self.norm(self.before(batch)))) * is_real[:, None]
        targets = torch.tensor([[i % 3 - 1.0, i % 5 - 2.0] for i in indices], dtype=torch.float64)
        return (outputs.sum(dim=2) / is_real.sum(dim=1)[:, None] - targets).square().mean(dim=1)

    def loss(self, indices: list[int], data: list[Tensor]) -> Tensor:
        """Return the weighted mean over the samples, as a user's loss does."""
        return weighted_mean(self.losses(indices, data), indices)


def weighted_mean(losses: Tensor, indices: list[int]) -> Tensor:
    weights = torch.from_numpy(LOSS_WEIGHTS[indices])
    return (losses * weights).sum() / weights.sum()


def gradient(model: Model, loss: Tensor) -> Tensor:
    return torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, list(model.parameters()))])


def errors(model: Model, data: list[Tensor], split: chronica.Plan) -> list[float]:
    """Return how far the planned gradient of each step is from that of the global batch, relative L2."""
    found = []
    for step in range(split.steps):
        planned: Any = 0.0
        real: list[int] = []
        for rank in range(split.ranks):
            batches = split.batches(step, rank)
            for batch, weight in zip(batches, split.micro_weights(step, rank).tolist(), strict=True):
                planned = planned + weight / split.ranks * gradient(model, model.loss(batch.tolist(), data))
                real += batch.tolist() if split.counts[step, rank] > 0 else []
        whole = gradient(model, model.loss(real, data))
        found.append(float((planned - whole).norm() / whole.norm()))
    return found


class Frozen(nn.BatchNorm1d):
    """BatchNorm in eval mode, with statistics from before."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.running_mean = torch.linspace(-1, 1, WIDTH)
        self.running_var = torch.linspace(0.5, 2, WIDTH)
        self.eval()


class OverChannels(nn.LayerNorm):
    """LayerNorm over the features of a position."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.mT).mT


NORMS: dict[str, Callable[[], nn.Module]] = {
    "frozen": Frozen,
    "over_channels": OverChannels,
    "group": lambda: nn.GroupNorm(2, WIDTH),
    "instance": lambda: nn.InstanceNorm1d(WIDTH, affine=True),
    "over_positions": lambda: nn.LayerNorm([WIDTH, LENGTH]),
    "batch": lambda: nn.BatchNorm1d(WIDTH),
}


@pytest.mark.parametrize("micro_batches", [1, "auto"])
@pytest.mark.parametrize("norm", ["frozen", "over_channels", "group", "instance", "over_positions"])
def test_exact_without_padding(norm: str, micro_batches: int | str) -> None:
    assert max(errors(Model(NORMS[norm]), EVEN, plan(padding="none", micro_batches=micro_batches))) <= 1e-12


@pytest.mark.parametrize("norm", ["frozen", "over_channels"])
def test_exact_with_padding(norm: str) -> None:
    assert max(errors(Model(NORMS[norm]), UNEVEN, plan())) <= 1e-12


@pytest.mark.parametrize("norm", ["group", "instance"])
def test_statistics_over_padded_positions_depend_on_the_split(norm: str) -> None:
    assert min(errors(Model(NORMS[norm]), UNEVEN, plan())[:2]) > 1e-3


@pytest.mark.parametrize("local_batch", ["free", "equal"])
@pytest.mark.parametrize("data", ["even", "uneven"])
def test_batch_statistics_depend_on_the_split(data: str, local_batch: str) -> None:
    """What the guide says is not covered."""
    split = plan(local_batch=local_batch, padding="none" if data == "even" else "max", micro_batches=1)
    assert min(errors(Model(NORMS["batch"]), EVEN if data == "even" else UNEVEN, split)[:2]) > 1e-2


def test_equal_counts_are_those_of_plain_batches_with_other_mates() -> None:
    equal, plain = plan(local_batch="equal", micro_batches=1), plan(policy="plain", micro_batches=1)
    assert equal.counts.tolist() == plain.counts.tolist()
    assert all(
        set(equal.batches(step, rank)[0].tolist()) != set(plain.batches(step, rank)[0].tolist())
        for step in range(2)
        for rank in range(RANKS)
    )


# SyncBatchNorm --------------------------------------------------------------------------------------------------------


def synchronized_error(split: chronica.Plan, step: int, *, is_loss_weighed: bool) -> float:
    """Return how far a step's gradient is from that of the global batch, where statistics are those of all ranks.

    As with Horovod's SyncBatchNorm: what reaches a rank's samples is the gradient of the sum of all ranks' losses. The
    weight is on the loss, or is multiplied with what the rank's backward pass gives its parameters.
    """
    model = Model(NORMS["batch"])
    of_ranks = [split.batches(step, rank)[0].tolist() for rank in range(RANKS)]
    weights = split.weights[step].tolist()
    every = [i for indices in of_ranks for i in indices]
    hidden: list[Tensor] = []
    model.before.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    of_samples = model.losses(every, EVEN).split([len(indices) for indices in of_ranks])
    losses = [weighted_mean(own, indices) for own, indices in zip(of_samples, of_ranks, strict=True)]
    factors = weights if is_loss_weighed else [1.0] * RANKS
    total = sum(factor * loss for factor, loss in zip(factors, losses, strict=True))
    assert isinstance(total, Tensor)
    (reaching,) = torch.autograd.grad(total, hidden[:1])
    combined: Any = 0.0
    for rank, own in enumerate(reaching.split([len(indices) for indices in of_ranks])):
        inputs = torch.stack([EVEN[i] for i in of_ranks[rank]])
        parts = torch.autograd.grad(model.before(inputs), list(model.before.parameters()), own)
        factor = 1.0 if is_loss_weighed else weights[rank]
        combined = combined + factor / RANKS * torch.cat([part.reshape(-1) for part in parts])
    whole = model.loss(every, EVEN)
    expected = torch.cat([part.reshape(-1) for part in torch.autograd.grad(whole, list(model.before.parameters()))])
    return float((combined - expected).norm() / expected.norm())


@pytest.mark.parametrize("step", [0, 1])
def test_statistics_of_all_ranks_need_the_weight_on_the_loss(step: int) -> None:
    split = plan(padding="none", micro_batches=1)
    assert synchronized_error(split, step, is_loss_weighed=True) <= 1e-12
    assert synchronized_error(split, step, is_loss_weighed=False) > 1e-2


def test_a_filler_is_in_the_statistics_of_all_ranks() -> None:
    split = plan(padding="none", micro_batches=1)
    assert (split.counts[2] == 0).any()
    # Beside the real samples alone; the reference here holds the filler's twice.
    of_ranks = [split.batches(2, rank)[0].tolist() for rank in range(RANKS)]
    held = [i for indices in of_ranks for i in indices]
    real = sorted(set(held))
    assert len(held) > len(real)
    model = Model(NORMS["batch"])
    with torch.no_grad():
        with_filler = model.norm(model.before(torch.stack([EVEN[i] for i in held])))
        without = model.norm(model.before(torch.stack([EVEN[i] for i in real])))
    assert (with_filler[held.index(real[0])] - without[0]).abs().max() > 1e-2


def test_weights_of_equal_counts_are_one_as_the_guide_says() -> None:
    equal = plan(local_batch="equal", loss_weight="samples", micro_batches=1)
    np.testing.assert_array_equal(equal.weights[:2], 1.0)
    assert (plan(local_batch="equal", micro_batches=1).weights[:2] != 1.0).any()


# Running statistics ---------------------------------------------------------------------------------------------------


class StandIn:
    """Stands for Horovod, in the calls of one rank after the other: first it is told all values, then it adds them."""

    Sum = "sum"

    def __init__(self) -> None:
        self.told: dict[str, list[Tensor]] = {}
        self.is_complete = False

    def allreduce(self, tensor: Tensor, *, op: str, name: str) -> Tensor:
        assert op == self.Sum
        if self.is_complete:
            return torch.stack(self.told[name]).sum(dim=0)
        self.told.setdefault(name, []).append(tensor)
        return tensor


def test_shared_running_statistics_are_those_of_all_samples() -> None:
    """The function of the guide."""
    samplers = [
        chronica.BatchSampler(SIZES, BATCH, num_replicas=RANKS, rank=rank, padding="none") for rank in range(RANKS)
    ]
    counts = samplers[0].plan.counts
    assert len(set(counts.sum(axis=0))) > 1
    of_ranks = []
    for rank in range(RANKS):
        steps = [step for step in range(len(counts)) if counts[step, rank] > 0]
        own = [EVEN[i] for step in steps for batch in samplers[rank].plan.batches(step, rank) for i in batch]
        batch = torch.stack(own)
        module = nn.BatchNorm1d(CHANNELS).double()
        module.running_mean = batch.mean(dim=(0, 2))
        module.running_var = batch.var(dim=(0, 2), correction=0)
        without = nn.BatchNorm1d(CHANNELS, track_running_stats=False)
        of_ranks.append(nn.Sequential(module, without, nn.Linear(2, 2)))
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (program,) = (block for block in blocks if "def share_running_statistics" in block)
    hvd = StandIn()
    names: dict[str, Any] = {"hvd": hvd, "torch": torch}
    exec(program, names)
    for model, sampler in zip(of_ranks, samplers, strict=True):
        names["share_running_statistics"](copy.deepcopy(model), sampler)
    hvd.is_complete = True
    everything = torch.stack(EVEN)
    for model, sampler in zip(of_ranks, samplers, strict=True):
        names["share_running_statistics"](model, sampler)
        torch.testing.assert_close(model[0].running_mean, everything.mean(dim=(0, 2)), rtol=1e-13, atol=1e-13)
        expected = everything.var(dim=(0, 2), correction=0)
        torch.testing.assert_close(model[0].running_var, expected, rtol=1e-13, atol=1e-13)
