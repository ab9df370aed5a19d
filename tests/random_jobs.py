"""Random training jobs: drawn, trained on ranks, trained again by one process, and compared."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from helpers import distributed_sampler_steps, step_samples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

import chronica_hvd as chronica

FEATURES, WIDTH, VOCABULARY, LONGEST = 4, 5, 11, 60
DTYPES = {"float64": torch.float64, "float32": torch.float32}
LIMITS = {"float64": 1e-12, "float32": 1e-5}  # on relative L2 errors: what another order of summation costs


@dataclass(frozen=True)
class Job:
    """A training run, of plain values only: ``dataclasses.asdict`` of it is JSON, and ``Job(**it)`` the job again."""

    ranks: int
    batch_size: int
    sizes: list[int]
    seed: int  # of data and parameters, and of the moments at which ranks take turns
    model: str  # "dense", "gated" (which leaves parameters unused), "bag", "sparse" (whose gradient is)
    dtype: str
    epochs: int
    loss_weight: str | list[float]
    amounts: list[float] | None  # what each sample counts in truth, said by set_weight; None: loss_weight says it
    speeds: list[float] | None
    plan: dict[str, Any]  # options of chronica_hvd.plan; a CostModel as the dict of its arguments
    optimizer: dict[str, Any]  # options of the optimizer; op and compression by their names
    loop: str  # "plain", "steps", "ahead", "steps_ahead"
    fillers: str  # "nan": their loss is; "skipped": they have no backward pass
    average: str  # the loss is averaged "before" or "after" the update
    clips: bool  # synchronizes by itself, as for clipping, before it makes the step

    @property
    def is_compressed(self) -> bool:
        return "compression" in self.optimizer

    @property
    def learning_rate(self) -> float:
        """So small that training does not magnify what is lost to rounding, whatever the gradient's scale."""
        if self.is_compressed:
            return 0.0  # what half precision loses in one step must not add up, so that it can be bounded
        scale = self.ranks if self.optimizer["op"] == "Sum" else 1
        return 0.01 / (scale * (self.batch_size if self.loss_weight == "sum" else 1))

    @property
    def steps_per_update(self) -> int:
        return self.optimizer.get("backward_passes_per_step", 1)  # type: ignore[no-any-return]

    @property
    def moves_samples(self) -> bool:
        """Whether samples or steps change their place, so that a step's samples are known from the plan only."""
        return self.plan["reorder"] != "batch" or self.plan["first"] is not None


@st.composite
def jobs(draw: st.DrawFn, ranks: int | None = None) -> Job:
    """Draw a job, for so many ranks or for any number from 1 to 5."""
    ranks = ranks or draw(st.sampled_from([2, 3, 4, 5, 1, 2, 3, 4, 5, 3]))
    batch_size = draw(st.integers(1, 5))
    global_batch = batch_size * ranks
    is_long = draw(st.integers(0, 29)) == 29  # two blocks of 64 steps
    steps = 65 if is_long else draw(st.integers(1, 8 if batch_size > 1 else 15))
    samples = steps * global_batch - draw(st.integers(0, global_batch - 1))
    seed = draw(st.integers(0, 2**16))
    sizes = _sizes(np.random.default_rng(seed), draw(st.sampled_from(["heavy", "heavy", "equal", "zeros"])), samples)
    loss_weight = _loss_weight(draw, seed, sizes)
    plan = _plan_options(draw, ranks, batch_size, sizes, loss_weight)
    model = draw(st.sampled_from(["dense", "gated", "bag", "sparse"]))
    loop = draw(st.sampled_from(["plain", "steps", "ahead", "steps_ahead"]))
    optimizer = _optimizer_options(draw, model)
    if "ahead" in loop:
        optimizer["lookahead"] = 1
        optimizer.pop("backward_passes_per_step", None)  # average() gives another step's: see test_random_jobs.py
    # With several steps per update, ranks that skip a filler lose count: see test_random_jobs.py.
    may_skip = "ahead" not in loop and "backward_passes_per_step" not in optimizer
    # Losses are summed, and steps added up, before a true amount could be known.
    may_say_amounts = loss_weight != "sum" and not {"backward_passes_per_step", "compression"} & optimizer.keys()
    says_amounts = may_say_amounts and draw(st.integers(0, 2)) == 2
    return Job(
        ranks=ranks,
        batch_size=batch_size,
        sizes=sizes,
        seed=seed,
        model=model,
        dtype=draw(st.sampled_from(list(DTYPES))),
        epochs=1 if is_long else draw(st.integers(1, 2)),
        loss_weight=loss_weight,
        amounts=_weights(seed + 1, samples) if says_amounts else None,
        speeds=draw(st.none() | st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=ranks, max_size=ranks)),
        plan=plan,
        optimizer=optimizer,
        loop=loop,
        fillers=draw(st.sampled_from(["nan", "skipped"])) if may_skip else "nan",
        average="before" if "ahead" in loop else draw(st.sampled_from(["before", "after"])),
        clips=draw(st.booleans()),
    )


def _sizes(random: np.random.Generator, kind: str, samples: int) -> list[int]:
    sizes = np.clip(random.lognormal(2.0, 1.0, samples), 1, LONGEST).astype(int)
    if kind == "equal":
        sizes[:] = sizes[0]
    if kind == "zeros":
        sizes[random.random(samples) < 0.4] = 0
    return sizes.tolist()  # type: ignore[no-any-return]


def _loss_weight(draw: st.DrawFn, seed: int, sizes: list[int]) -> str | list[float]:
    kind = draw(st.sampled_from(["samples", "sizes", "sizes", "array", "sum"]))
    if kind == "sizes" and not any(sizes):
        return "samples"
    if kind != "array":
        return kind
    return [1.0, *_weights(seed, len(sizes) - 1)]


def _weights(seed: int, samples: int) -> list[float]:
    return np.random.default_rng(seed).choice([0.0, 0.5, 1.0, 3.0], samples).tolist()  # type: ignore[no-any-return]


def _plan_options(
    draw: st.DrawFn, ranks: int, batch_size: int, sizes: list[int], loss_weight: str | list[float]
) -> dict[str, Any]:
    samples = len(sizes)
    options = {
        "padding": draw(st.sampled_from(["max", "none"])),
        "local_batch": draw(st.sampled_from(["free", "free", "equal"])),
        "reorder": draw(st.sampled_from(["batch", "batch", "window"])),
        "window": draw(st.integers(1, 4)),
        "max_moved": draw(st.sampled_from([0.25, 1.0])),
        "micro_batches": draw(st.sampled_from([1, 1, 2, 3, "auto", "auto"])),
        "comm": draw(st.sampled_from([0.0, 0.0, 10.0])),
        "min_local_batch": draw(st.integers(1, min(3, batch_size))),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 9)),
        "drop_last": draw(st.booleans()) and samples >= batch_size * ranks,
        "policy": draw(st.sampled_from(["balanced"] * 6 + ["plain", "static", "dynamic", "guided"])),
        "first": draw(st.sampled_from([None, None, "largest"])),
    }
    needs_normalize = options["reorder"] == "window" and loss_weight != "samples"
    options["normalize"] = draw(st.sampled_from(["step", "epoch"] + ([] if needs_normalize else [None] * 3)))
    options["cost"] = _cost(draw, ranks, sizes, options["padding"] == "none")
    longest = max(sizes)
    if options["padding"] == "max":
        options["pad_to"] = draw(st.sampled_from([None, None, 8, [1, 20, LONGEST]]))
        longest = -(-longest // 8) * 8 if options["pad_to"] == 8 else LONGEST if options["pad_to"] else longest
    # Elsewhere a plan may be impossible: not all samples of a rank need to fit into so few micro-batches.
    if options["micro_batches"] == "auto" and options["policy"] == "balanced" and options["min_local_batch"] == 1:
        options["max_size"] = draw(st.sampled_from([None, max(1, longest), max(1, 2 * longest)]))
    if not options["drop_last"] and draw(st.integers(0, 9)) == 9:  # a part of the samples, some of them twice
        options["indices"] = [0, *np.random.default_rng(samples).integers(0, samples, samples).tolist()]
        if loss_weight == "sizes" and not any(sizes[index] for index in options["indices"]):
            options["indices"].append(sizes.index(longest))
    return options


def _cost(draw: st.DrawFn, ranks: int, sizes: list[int], is_unpadded: bool) -> Any:
    kind = draw(st.sampled_from(["size", "size", "model", "scaled"] + ["array"] * is_unpadded))
    if kind == "size":
        return None
    if kind == "array":
        return [float(size) ** 1.5 for size in sizes]
    scale = {"rank_scale": [1.0 + rank % 2 for rank in range(ranks)]} if kind == "scaled" else {}
    return {"fixed": 5.0, "per_sample": 1.0, "per_size": 1.0, "per_size2": 0.1, **scale}


def _optimizer_options(draw: st.DrawFn, model: str) -> dict[str, Any]:
    options: dict[str, Any] = {"op": draw(st.sampled_from(["Average", "Average", "Sum"]))}
    if model == "sparse":
        options["sparse_as_dense"] = draw(st.booleans())
    # Horovod does not group sparse gradients.
    if model != "sparse" and draw(st.integers(0, 2)) == 2:
        options["groups"] = draw(st.integers(1, 3))
    elif options["op"] == "Average" and draw(st.booleans()):
        options["gradient_predivide_factor"] = draw(st.sampled_from([0.5, 2.0, 3.0]))
    if draw(st.integers(0, 4)) == 4:
        options["compression"] = "fp16"
    if draw(st.integers(0, 3)) == 3:
        options["backward_passes_per_step"] = draw(st.integers(2, 3))
    return options


def drawn_jobs(count: int, ranks: int | None = None) -> list[Job]:
    """Return so many different jobs, always the same."""
    drawn: dict[str, Job] = {}

    @settings(max_examples=2 * count, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(jobs(ranks))
    def collect(job: Job) -> None:
        drawn[repr(job)] = job

    collect()
    assert len(drawn) >= count
    return list(drawn.values())[:count]


@dataclass(frozen=True)
class Batch:
    indices: torch.Tensor
    features: torch.Tensor  # (samples, FEATURES)
    tokens: torch.Tensor  # (samples, longest), padded with a token that would be felt
    is_token: torch.Tensor  # (samples, longest)
    targets: torch.Tensor


class Data(torch.utils.data.Dataset[int]):
    """What a job trains on; an item is its index."""

    def __init__(self, job: Job) -> None:
        random = np.random.default_rng(job.seed)
        self.job = job
        self.dtype = DTYPES[job.dtype]
        self.sizes = np.array(job.sizes)
        self.features = torch.from_numpy(random.normal(size=(len(self.sizes), FEATURES))).to(self.dtype)
        # So far off that the errors have one sign: gradients that cancel out would have no digits left to compare.
        self.targets = torch.from_numpy(random.normal(8.0, size=len(self.sizes))).to(self.dtype)
        self.tokens = torch.from_numpy(random.integers(0, VOCABULARY, (len(self.sizes), LONGEST)))
        self.planned_weights = torch.from_numpy(self._planned_weights()).to(self.dtype)
        true_weights = self.planned_weights if job.amounts is None else torch.tensor(job.amounts)
        self.loss_weights = true_weights.to(self.dtype)

    def _planned_weights(self) -> NDArray[np.float64]:
        if isinstance(self.job.loss_weight, list):
            return np.array(self.job.loss_weight)
        return self.sizes.astype(np.float64) if self.job.loss_weight == "sizes" else np.ones(len(self.sizes))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, indices: list[int]) -> Batch:
        longest = int(self.sizes[indices].max())
        tokens = self.tokens[indices, :longest].clone()
        is_token = torch.arange(longest) < torch.from_numpy(self.sizes[indices])[:, None]
        tokens[~is_token] = 0
        return Batch(torch.tensor(indices), self.features[indices], tokens, is_token, self.targets[indices])

    @property
    def plan_options(self) -> dict[str, Any]:
        options = {**self.job.plan, "loss_weight": self.job.loss_weight}
        if isinstance(options["cost"], dict):
            options["cost"] = chronica.CostModel(**options["cost"])
        return options

    def plan(self, epoch: int) -> chronica.Plan:
        ranks = self.job.speeds or self.job.ranks
        return chronica.plan(self.sizes, ranks, self.job.batch_size, epoch=epoch, **self.plan_options)

    def drawn_steps(self, epoch: int) -> list[list[int]]:
        """Return the samples of each global batch as they are drawn, sorted."""
        job, options = self.job, self.job.plan
        size = job.batch_size * job.ranks
        if "indices" in options:
            order = options["indices"]
            steps = [sorted(order[first : first + size]) for first in range(0, len(order), size)]
        else:
            drawing = {name: options[name] for name in ("shuffle", "seed")}
            steps = distributed_sampler_steps(len(self), job.ranks, job.batch_size, **drawing, epoch=epoch)
        return [step for step in steps if len(step) == size or not options["drop_last"]]

    def steps(self, epoch: int) -> list[list[int]]:
        """Return the samples of each global batch as they are trained on, sorted: each drawn one counts once."""
        drawn = self.drawn_steps(epoch)
        if not self.job.moves_samples:
            return drawn
        plan = self.plan(epoch)
        steps = [step_samples(plan, step) for step in range(plan.steps)]
        assert sorted(itertools.chain(*steps)) == sorted(itertools.chain(*drawn))
        assert [len(step) for step in steps] == [len(step) for step in drawn]
        if self.job.plan["reorder"] == "batch":
            assert sorted(steps) == sorted(drawn), "whole steps change their place"
        return steps


class Model(nn.Module):
    """A sample's loss is the squared error of a small network over its features or the mean of its tokens' vectors.

    The gated one sends a sample through one of two layers, so that a batch may leave the other without a gradient.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.tokens = None
        if job.model in ("bag", "sparse"):
            self.tokens = nn.Embedding(VOCABULARY, FEATURES, sparse=job.model == "sparse")
        self.hidden, self.out = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.other = nn.Linear(FEATURES, WIDTH) if job.model == "gated" else None
        self.to(DTYPES[job.dtype])
        random = np.random.default_rng(job.seed + 1)
        with torch.no_grad():
            for parameter in self.parameters():
                values = random.uniform(0.3, 1.0, parameter.shape) * random.choice([-1.0, 1.0], parameter.shape)
                parameter.copy_(torch.from_numpy(values))

    def losses(self, batch: Batch) -> torch.Tensor:
        inputs = batch.features
        if self.tokens is not None:
            vectors = self.tokens(batch.tokens) * batch.is_token[:, :, None]
            inputs = vectors.sum(dim=1) / batch.is_token.sum(dim=1, keepdim=True).clamp(min=1)
        return (self.out(torch.tanh(self._hidden(inputs)))[:, 0] - batch.targets).square()

    def _hidden(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.other is None:
            return self.hidden(inputs)  # type: ignore[no-any-return]
        hidden = inputs.new_zeros(len(inputs), WIDTH)
        for layer, is_chosen in ((self.hidden, inputs[:, 0] > 0.0), (self.other, inputs[:, 0] <= 0.0)):
            if is_chosen.any():
                hidden = hidden.index_put((is_chosen.nonzero()[:, 0],), layer(inputs[is_chosen]))
        return hidden

    def gradients(self) -> dict[str, NDArray[Any]]:
        return {name: _dense_gradient(parameter) for name, parameter in self.named_parameters()}


def _dense_gradient(parameter: nn.Parameter) -> NDArray[Any]:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return (gradient.to_dense() if gradient.is_sparse else gradient).clone().numpy()


def _sgd(job: Job, model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=job.learning_rate, momentum=0.9)


@dataclass
class Trained:
    """What became of a job.

    Attributes
    ----------
    taken, losses
        Of each step: the micro-batches taken, and the mean loss.
    gradients, magnitudes
        Of each update, by parameter: the gradient; Σ |share · gradient of a sample's loss|, where that is needed.
    parameters
        At last.
    """

    taken: list[list[list[int]]] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, NDArray[Any]]] = dataclasses.field(default_factory=list)
    magnitudes: list[dict[str, NDArray[Any]]] = dataclasses.field(default_factory=list)
    parameters: dict[str, NDArray[Any]] = dataclasses.field(default_factory=dict)

    def end(self, model: Model) -> Trained:
        self.parameters = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
        return self

    def all_gradients(self, name: str) -> NDArray[Any]:
        """(updates, …) those of one parameter."""
        return np.stack([gradients[name] for gradients in self.gradients])


class Training:
    """A job on this rank, as a user's script is; every rank makes one and calls :meth:`run`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.data = Data(job)
        replicas = {} if job.speeds is None else {"num_replicas": job.speeds}
        self.sampler = chronica.BatchSampler(self.data.sizes, job.batch_size, **replicas, **self.data.plan_options)
        self.loader = chronica.DataLoader(self.data, batch_sampler=self.sampler, collate_fn=self.data.collate)
        self.model = Model(job)
        options = {**job.optimizer, "op": getattr(hvd, job.optimizer["op"])}
        if job.is_compressed:
            options["compression"] = getattr(hvd.Compression, job.optimizer["compression"])
        self.optimizer = chronica.DistributedOptimizer(
            _sgd(job, self.model), self.model.named_parameters(), sampler=self.sampler, **options
        )
        self.trained = Trained()

    def run(self) -> Trained:
        for epoch in range(self.job.epochs):
            self.sampler.set_epoch(epoch)
            counts = self.sampler.plan.counts[:, hvd.rank()]
            for step, micro_batches in enumerate(self._steps()):
                if step % self.job.steps_per_update == 0:
                    self.optimizer.zero_grad()
                ends_update = (step + 1) % self.job.steps_per_update == 0 or step + 1 == len(counts)
                self._step(micro_batches, is_filler=counts[step] == 0, ends_update=ends_update)
        return self.trained.end(self.model)

    def _steps(self) -> Iterator[Iterable[Batch]]:
        """Yield the micro-batches of each step, taken as the job says."""
        if self.job.loop == "steps":
            return self.loader.steps()
        if self.job.loop == "steps_ahead":
            return _read_ahead(list(step) for step in self.loader.steps())
        is_whole = self.sampler.micro_batches == 1
        batches = iter(self.loader) if is_whole else itertools.chain.from_iterable(self.loader.steps())
        if self.job.loop == "ahead":
            batches = _read_ahead(batches)
        plan = self.sampler.plan
        return (itertools.islice(batches, len(plan.batches(step, hvd.rank()))) for step in range(plan.steps))

    def _step(self, micro_batches: Iterable[Batch], is_filler: bool, ends_update: bool) -> None:
        taken, losses = [], []
        for batch in micro_batches:
            taken.append(batch.indices.tolist())
            if self.job.amounts is not None:
                self.optimizer.set_weight(float(self.data.loss_weights[batch.indices].sum()))
            loss = self._loss(batch) * (float("nan") if is_filler else 1.0)
            if not (is_filler and self.job.fillers == "skipped"):
                loss.backward()
            losses.append(loss.detach())
        self.trained.taken.append(taken)
        if self.job.average == "before" or not ends_update:
            self._average(losses)
        if ends_update:
            self._update()
            self.trained.gradients.append(self.model.gradients())
            if self.job.average == "after":
                self._average(losses)

    def _loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean as users compute it, which is NaN where nothing has weight."""
        weights, losses = self.data.loss_weights[batch.indices], self.model.losses(batch)
        return losses.sum() if self.job.loss_weight == "sum" else (weights * losses).sum() / weights.sum()

    def _average(self, losses: list[torch.Tensor]) -> None:
        value = losses[0] if self.sampler.micro_batches == 1 else losses
        self.trained.losses.append(chronica.average(value, self.sampler).item())

    def _update(self) -> None:
        if not self.job.clips:
            self.optimizer.step()
            return
        self.optimizer.synchronize()
        with self.optimizer.skip_synchronize():
            self.optimizer.step()


def _read_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield each when the one after it has been read, as wrappers do that copy to a device."""
    return (batch for batch, _ in itertools.pairwise(itertools.chain(batches, [None])))


def reference(job: Job) -> Trained:
    """Train in one process on the global batches, with torch alone."""
    data, model, trained = Data(job), Model(job), Trained()
    optimizer = _sgd(job, model)
    factor = job.ranks if job.optimizer["op"] == "Sum" else 1
    for epoch in range(job.epochs):
        steps = data.steps(epoch)
        every = list(zip(steps, _shares(data, steps), strict=True))
        for first in range(0, len(every), job.steps_per_update):
            update = every[first : first + job.steps_per_update]
            if job.is_compressed:
                trained.magnitudes.append(_magnitudes(model, data, update, factor))
            optimizer.zero_grad()
            for step, shares in update:
                loss = (shares * model.losses(data.collate(step))).sum()
                (loss * factor).backward()
                trained.taken.append([step])
                trained.losses.append(loss.item())
            trained.gradients.append(model.gradients())
            if job.ranks > 1:  # Horovod sends zeros for what nobody has used, and momentum goes on
                _fill(model)
            optimizer.step()
    return trained.end(model)


def _fill(model: Model) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _shares(data: Data, steps: list[list[int]]) -> list[torch.Tensor]:
    """Return what each sample of each step counts in the step's loss."""
    weights, job = data.loss_weights, data.job
    divisors = [float(weights[step].sum()) for step in steps]
    if job.plan["normalize"] == "epoch":  # as planned, whatever is true
        divisors = [float(np.mean([float(data.planned_weights[step].sum()) for step in steps]))] * len(steps)
    if job.loss_weight == "sum":
        divisors = [float(job.ranks)] * len(steps)
    return [
        weights[step] / divisor if divisor else 0.0 * weights[step]
        for step, divisor in zip(steps, divisors, strict=True)
    ]


def _magnitudes(
    model: Model, data: Data, update: list[tuple[list[int], torch.Tensor]], factor: float
) -> dict[str, NDArray[Any]]:
    """Return Σ |share · factor · gradient of a sample's loss| by parameter: no sum of a part of them is larger."""
    every = []
    for index, share in [pair for step, shares in update for pair in zip(step, shares, strict=True)]:
        model.zero_grad()
        (factor * share * model.losses(data.collate([index]))).sum().backward()
        every.append(model.gradients())
    return {name: sum(np.abs(gradients[name]) for gradients in every) for name in every[0]}


def check(job: Job, ranks: list[Trained]) -> float:
    """Compare what the ranks have trained with one process; returns the largest error ÷ what is allowed."""
    expected = reference(job)
    assert len(ranks) == job.ranks
    _check_batches(job, ranks, expected)
    for trained in ranks[1:]:
        for name in expected.parameters:
            np.testing.assert_array_equal(trained.parameters[name], ranks[0].parameters[name])
            np.testing.assert_array_equal(trained.all_gradients(name), ranks[0].all_gradients(name))
    errors = dict(_errors(job, ranks[0], expected))
    wrong = {what: error for what, error in errors.items() if not error <= 1.0}  # a NaN is wrong
    assert not wrong, f"error ÷ allowed error: {wrong}"
    return max(errors.values())


def _check_batches(job: Job, ranks: list[Trained], expected: Trained) -> None:
    """Each sample of a step is taken once, over all ranks, but by ranks that have a filler."""
    data = Data(job)
    plans = [data.plan(epoch) for epoch in range(job.epochs)]
    counts = np.concatenate([plan.counts for plan in plans])
    least = job.plan["min_local_batch"]
    for trained in ranks:
        assert len(trained.taken) == len(counts) == len(expected.taken)
    for step, (samples,) in enumerate(expected.taken):
        held = [sorted(itertools.chain(*trained.taken[step])) for trained in ranks]
        real = [indices for indices, count in zip(held, counts[step], strict=True) if count > 0]
        assert sorted(itertools.chain(*real)) == samples, f"step {step}"
        fillers = [len(indices) for indices, count in zip(held, counts[step], strict=True) if count == 0]
        assert fillers == [least] * len(fillers)
        assert len(samples) < job.ranks * least or min(map(len, held)) >= least, f"step {step} needs no filler"


def _errors(job: Job, trained: Trained, expected: Trained) -> Iterator[tuple[str, float]]:
    """Yield what is compared, and the error ÷ what is allowed."""
    limit = LIMITS[job.dtype]
    yield "losses", relative_error(np.array(trained.losses), np.array(expected.losses)) / limit
    for name in expected.parameters:
        found, wanted = trained.all_gradients(name), expected.all_gradients(name)
        if job.is_compressed:
            magnitudes = np.stack([magnitudes[name] for magnitudes in expected.magnitudes])
            yield f"gradients of {name}", float(np.max(np.abs(found - wanted) / _half_precision(job, magnitudes)))
        else:
            yield f"gradients of {name}", relative_error(found, wanted) / limit
        yield name, relative_error(trained.parameters[name], expected.parameters[name]) / limit


def _half_precision(job: Job, magnitudes: NDArray[Any]) -> NDArray[Any]:
    """Return what half precision may lose: each rank's part is rounded, scaled twice, and added to the others'.

    Each loses half a unit in the last of 11 bits, of no more than the parts' magnitudes together; numbers that are too
    small for that a fixed amount.
    """
    operations = job.ranks + 4
    return operations * (2.0**-11 * magnitudes + 2.0**-23)


def relative_error(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    return float(np.linalg.norm(found - wanted) / (np.linalg.norm(wanted) or 1.0))
