"""What the ranks train and a single process trains after them: data, models, losses and the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from helpers import recut
from torch import nn
from torch.nn import functional

import chronica_hvd

EPOCHS = 2
FEATURES, VOCABULARY, LONGEST, WIDTH, HEADS = 6, 17, 24, 16, 2
CLIP = 0.05  # below most gradient norms here
INFINITE_STEP = 1  # where "scaler_inf" has an infinite gradient on the last rank


@dataclass(frozen=True)
class Case:
    """One training run; its name is that of its results."""

    name: str
    samples: int
    model: str = "mlp"
    batch_size: int = 4
    loss_weight: str = "samples"  # "uneven", "array": a weight per sample, 0 for some samples and for one whole step
    speeds: tuple[float, ...] | None = None
    plan: dict[str, Any] = field(default_factory=dict)  # options of chronica_hvd.plan
    loader: dict[str, Any] = field(default_factory=dict)  # options of the loader
    optimizer: dict[str, Any] = field(default_factory=dict)  # options of the optimizer; op by its name
    cut: int | None = None  # seed of other cuts into micro-batches than the plan's
    pieces: int | None = None  # so many micro-batches where a cut has enough samples, instead of 1 to 4
    loop: str = "plain"  # or "steps", "ahead", "steps_ahead"
    update: str = "plain"  # or "clip", "scheduler", "skip_fillers", "scaler", "scaler_inf", "closure", "twice"
    inner: str = "sgd"  # the torch optimizer, or "adam", "lbfgs"
    amounts: bool = False  # loss weights known only when a batch is read, other than the planned ones
    accumulate: int = 1  # steps of the sampler in an update
    losses: int = 1  # backward passes of each micro-batch
    set_to_none: bool | None = None  # as given to zero_grad()
    by_hand: bool = False  # num_replicas and rank given, as to torch's DistributedSampler
    broadcast: bool = False  # ranks start apart, rank 0's state is broadcast

    @property
    def limit(self) -> float:
        """Largest relative L2 error of a parameter."""
        if "compression" in self.optimizer:
            return 1e-3  # half precision: a unit in the last place is 2^-11 of a gradient, and less of a parameter
        if self.model == "half":
            return 5e-2  # bfloat16 parameters: up to 2^-8 in each of some ten updates
        if self.inner == "lbfgs":
            return 1e-9  # a line search makes more of last bits
        return 1e-5 if self.model == "transformer" else 1e-12

    @property
    def promise(self) -> str:
        """Which promise of docs/guarantees.md this run is about."""
        kinds = {
            "half-precision compression": "compression" in self.optimizer,
            "bfloat16 gradients": self.model == "half",
            "closures": self.update == "closure",
            "set_weight": self.amounts,
            "several steps or losses in an update": self.accumulate > 1 or self.losses > 1,
            "channels_last gradients": self.model == "convolution",
            "sparse gradients": self.model == "bag",
            "groups, parameters unused on some rank": self.model == "experts" or "groups" in self.optimizer,
            "clipping, GradScaler": self.update in ("clip", "scaler", "scaler_inf"),
            "reading ahead": "ahead" in self.loop,
            "micro-batches": self.loop == "steps" or self.cut is not None,
        }
        kind = next((kind for kind, is_so in kinds.items() if is_so), "splits, weights and options")
        return kind + (" (float32)" if self.model == "transformer" else "")


class Data(torch.utils.data.Dataset):
    """Samples of heavy-tailed sizes; an item is (index, inputs, targets)."""

    def __init__(self, case: Case, ranks: int) -> None:
        random = np.random.default_rng(case.samples)
        self.case = case
        self.ranks = ranks
        self.sizes = np.clip(random.lognormal(1.5, 1.0, case.samples), 1, LONGEST).astype(np.int64)
        self.loss_weights = self._loss_weights(random)
        self.amounts = random.choice([0.0, 1.0, 2.0, 7.0], case.samples) if case.amounts else self.loss_weights
        if case.model == "convolution":
            self.inputs = list(torch.from_numpy(random.normal(size=(case.samples, 3, 5, 5))))
            self.targets = list(torch.from_numpy(random.normal(size=(case.samples, 2))))
        elif case.model in ("mlp", "experts", "half"):
            self.inputs = list(torch.from_numpy(random.normal(size=(case.samples, FEATURES))))
            self.targets = list(torch.from_numpy(random.normal(size=(case.samples, 2))))
        else:
            self.inputs, self.targets = (
                [torch.from_numpy(random.integers(1, VOCABULARY, size)) for size in self.sizes] for _ in range(2)
            )

    def _loss_weights(self, random: np.random.Generator) -> np.ndarray:
        if self.case.loss_weight == "sizes":
            return self.sizes.astype(np.float64)
        if self.case.loss_weight == "uneven":  # the ranks' factors are below 1/64 and above 8
            weights = np.full(self.case.samples, 0.1)
            weights[0] = 100.0
            return weights
        if self.case.loss_weight != "array":
            return np.ones(self.case.samples)
        weights = random.choice([0.0, 0.5, 1.0, 3.0], self.case.samples)
        weights[self.drawn(epoch=0)[1]] = 0.0
        return weights

    def drawn(self, epoch: int) -> list[np.ndarray]:
        """Return the samples of each global batch, as torch's DistributedSampler draws them."""
        generator = torch.Generator().manual_seed(self.case.plan.get("seed", 0) + epoch)
        order = torch.randperm(self.case.samples, generator=generator).numpy()
        steps = np.split(order, range(self.global_batch, len(order), self.global_batch))
        if self.case.plan.get("drop_last") and len(steps[-1]) < self.global_batch:
            steps.pop()
        return steps

    @property
    def global_batch(self) -> int:
        return self.case.batch_size * self.ranks

    @property
    def plan_options(self) -> dict[str, Any]:
        """The options of :func:`chronica_hvd.plan` and BatchSampler."""
        weight = self.loss_weights if self.case.loss_weight in ("array", "uneven") else self.case.loss_weight
        return {**self.case.plan, "loss_weight": weight}

    def plan(self, epoch: int) -> chronica_hvd.Plan:
        """Return the plan that all ranks must follow in this epoch."""
        ranks = self.case.speeds or self.ranks
        plan = chronica_hvd.plan(self.sizes, ranks, self.case.batch_size, epoch=epoch, **self.plan_options)
        return self.recut(plan, epoch)

    def recut(self, plan: chronica_hvd.Plan, epoch: int) -> chronica_hvd.Plan:
        """Cut a plan anew if the case says so."""
        if self.case.cut is None:
            return plan
        weights = "sum" if self.case.loss_weight == "sum" else self.loss_weights
        return recut(plan, weights, self.case.cut + epoch, self.case.pieces)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.inputs[index], self.targets[index]


def collate(items: list[tuple[int, torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Return (indices, inputs, targets) of a batch; sequences are padded with 0."""
    indices, inputs, targets = zip(*items, strict=True)
    join = torch.stack if inputs[0].is_floating_point() else functools.partial(pad, longest=max(map(len, inputs)))
    return torch.tensor(indices), join(inputs), join(targets)


def pad(sequences: list[torch.Tensor], longest: int) -> torch.Tensor:
    return torch.stack([functional.pad(sequence, (0, longest - len(sequence))) for sequence in sequences])


class Mlp(nn.Sequential):
    """float64; a sample's loss is its mean squared error."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
        self.double()

    def losses(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self(inputs) - targets).square().mean(dim=1)


class Half(Mlp):
    """bfloat16, whose gradients Horovod does not send by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def losses(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().losses(inputs.to(torch.bfloat16), targets.to(torch.bfloat16)).float()


class Convolution(nn.Module):
    """float64, channels last, so that gradients are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(3, 4, 3)
        self.out = nn.Linear(36, 2)
        self.double().to(memory_format=torch.channels_last)
        assert not self.convolve.weight.is_contiguous()

    def losses(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        features = self.convolve(inputs.to(memory_format=torch.channels_last)).tanh().flatten(1)
        return (self.out(features) - targets).square().mean(dim=1)


class Experts(nn.Module):
    """float64; a sample goes to one of three experts, so that micro-batches leave parameters without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, 2) for _ in range(3))
        self.double()

    def losses(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        choices = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
        losses = torch.zeros(len(inputs), dtype=torch.float64)
        for choice in choices.unique().tolist():
            chosen = choices == choice
            errors = (self.experts[choice](inputs[chosen]) - targets[chosen]).square().mean(dim=1)
            losses = losses.index_put((chosen.nonzero()[:, 0],), errors)
        return losses


class Transformer(nn.Module):
    """float32, causal, fused attention; a sample's loss is the mean over its tokens (0 is padding)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        batch, length = inputs.shape
        x = self.tokens(inputs) + self.places(torch.arange(length))
        heads = self.query_key_value(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)  # (batch, heads, length, width)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        x = x + self.narrow(functional.gelu(self.wide(self.after(x))))
        return self.out(x)

    def losses(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        every = functional.cross_entropy(self(inputs).transpose(1, 2), targets, ignore_index=0, reduction="none")
        return every.sum(dim=1) / (targets > 0).sum(dim=1)


class Bag(nn.Module):
    """float64 with a sparse gradient: the mean of a sample's vectors is to be 1 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, sparse=True, dtype=torch.float64)

    def losses(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        vectors = self.tokens(inputs) * (targets > 0).unsqueeze(-1)
        means = vectors.sum(dim=1) / (targets > 0).sum(dim=1, keepdim=True)
        return (means - 1.0).square().mean(dim=1)


MODELS: dict[str, Callable[[], Any]] = {
    "mlp": Mlp,
    "transformer": Transformer,
    "bag": Bag,
    "experts": Experts,
    "half": Half,
    "convolution": Convolution,
}


def build(case: Case, seed: int = 7) -> Any:
    torch.manual_seed(seed)
    return MODELS[case.model]()


def sgd(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.inner == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01)
    if case.inner == "lbfgs":
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.3)


def mean(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean; NaN where all weights are 0, as a user's own division gives."""
    return (weights.to(losses.dtype) * losses).sum() / weights.sum().to(losses.dtype)


def reference(case: Case, ranks: int) -> dict[str, np.ndarray]:
    """Train in this process on the same global batches; return the final parameters by name."""
    data = Data(case, ranks)
    model = build(case)
    optimizer = sgd(case, model)
    scheduler = schedule(optimizer)
    if case.broadcast:  # hvd.broadcast_optimizer_state() fills the state by a step with gradients of 0
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for epoch in range(EPOCHS):
        steps = data.drawn(epoch)
        for step, drawn in enumerate(steps):
            if step % case.accumulate == 0:
                optimizer.zero_grad(set_to_none=False)  # as Horovod sends zeros for a parameter that nobody used
            evaluate = functools.partial(_gradient, case, data, model, ranks, drawn)
            if case.update == "closure":
                optimizer.step(lambda evaluate=evaluate: optimizer.zero_grad(set_to_none=False) or evaluate())
                continue
            evaluate()
            if case.update == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            if is_update(case, step, len(steps)) and not (case.update == "scaler_inf" and step == INFINITE_STEP):
                optimizer.step()
        if case.update == "scheduler":
            scheduler.step()
    return {name: parameter.detach().to(dtype_of(case)).numpy() for name, parameter in model.named_parameters()}


def _gradient(case: Case, data: Data, model: nn.Module, ranks: int, drawn: np.ndarray) -> torch.Tensor:
    """Add the gradient of a global batch's loss to the model's, and return the loss."""
    indices, inputs, targets = collate([data[index] for index in drawn])
    weights = torch.from_numpy(data.amounts)[indices]
    losses = model.losses(inputs, targets)
    loss = mean(losses, weights) if weights.any() else (losses * 0.0).sum()
    if case.plan.get("normalize") == "epoch":
        loss = loss * (weights.sum() / (data.loss_weights.sum() / len(data.drawn(0))))
    if case.loss_weight == "sum":
        loss = losses.sum() / ranks
    if case.optimizer.get("op") == "Sum":
        loss = loss * ranks
    loss.backward()
    return loss


def is_update(case: Case, step: int, steps: int) -> bool:
    """Whether an update follows this step of the sampler; the last one of an epoch may hold fewer."""
    return (step + 1) % case.accumulate == 0 or step == steps - 1


def dtype_of(case: Case) -> torch.dtype:
    """Return what parameters are compared in: NumPy has no bfloat16."""
    return torch.float32 if case.model in ("half", "transformer") else torch.float64


def relative_errors(parameters: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Return ‖parameter − expected‖ / ‖expected‖ by name; NaN where a parameter is not finite."""
    assert parameters.keys() == expected.keys()
    return {
        name: float(np.linalg.norm(parameters[name] - value) / np.linalg.norm(value))
        for name, value in expected.items()
    }
