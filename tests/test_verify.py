from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint

import chronica_hvd as chronica
from chronica_hvd.verification import Verification

WIDTH, SAMPLES = 8, 60
SIZES = np.random.default_rng(0).integers(2, 30, SAMPLES)
DOUBLE, SINGLE = torch.float64, torch.float32

Step = Callable[[list[int]], torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread_and_one_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    yield
    torch.set_num_threads(threads)


def sampler(loss_weight: Any = "sizes", sizes: Any = SIZES, ranks: Any = 3, **options: Any) -> chronica.BatchSampler:
    return chronica.BatchSampler(sizes, 4, num_replicas=ranks, rank=0, loss_weight=loss_weight, **options)


def sequence(sample: int, dtype: torch.dtype = DOUBLE) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and target, (size, WIDTH) each."""
    values = torch.randn(2, int(SIZES[sample]), WIDTH, generator=torch.Generator().manual_seed(sample))
    return values[0].to(dtype), values[1].to(dtype)


def padded(sequences: list[torch.Tensor], left: bool = False) -> torch.Tensor:
    """(samples, longest, WIDTH), zeros where there is nothing."""
    longest = max(map(len, sequences))
    sides = [(0, 0, longest - len(each), 0) if left else (0, 0, 0, longest - len(each)) for each in sequences]
    return torch.stack([functional.pad(each, side) for each, side in zip(sequences, sides, strict=True)])


def batch(indices: list[int], dtype: torch.dtype = DOUBLE, left: bool = False) -> tuple[torch.Tensor, ...]:
    """Features, targets, and where they are real."""
    features, targets = zip(*(sequence(i, dtype) for i in indices), strict=True)
    real = padded([torch.ones(len(each), 1) for each in features], left)[..., 0] > 0
    return padded(list(features), left), padded(list(targets), left), real


def token_mean(model: nn.Module, dtype: torch.dtype = DOUBLE, left: bool = False) -> Step:
    """Mean over the tokens of all samples: the denominator is the size."""
    model.to(dtype)

    def step(indices: list[int]) -> torch.Tensor:
        x, y, real = batch(indices, dtype, left)
        return (model(x, real) - y)[real].square().mean()

    return step


def sample_mean(model: nn.Module, dtype: torch.dtype = DOUBLE) -> Step:
    """Mean over the samples of what a model says of each as a whole."""
    model.to(dtype)

    def step(indices: list[int]) -> torch.Tensor:
        x, y, real = batch(indices, dtype)
        return (model(x, real) - y[:, 0]).square().mean()

    return step


class Tokenwise(nn.Module):
    """A model of single tokens, with whatever else they go through on the way."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class OverTime(nn.Module):
    """A module of (samples, WIDTH, time) for tensors of (samples, time, WIDTH)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.mT).mT


class Attention(nn.Module):
    def __init__(self, masked: bool = True, dropout: float = 0.3) -> None:
        super().__init__()
        self.masked = masked
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        return self.out(self.block(x, src_key_padding_mask=~real if self.masked else None))


class Pooled(nn.Module):
    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked = masked
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        if self.masked:
            return self.last((x * real[..., None]).sum(1) / real.sum(1, keepdim=True))
        return self.last(x.mean(1))


class Recurrent(nn.Module):
    """An LSTM over padded sequences; the loss sees each token, or the state at the end of what was given."""

    def __init__(self, last_state: bool, packed: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.5)
        self.last_state, self.packed = last_state, packed

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        if self.packed:
            x = rnn.pack_padded_sequence(x, real.sum(1), batch_first=True, enforce_sorted=False)
        x, (state, _) = self.lstm(x)
        return state[-1] if self.last_state else x


class Scores(nn.Module):
    """Products of queries and keys, −∞ where there is padding."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        scores = q @ k.mT
        return scores if real is None else scores.masked_fill(~real, -torch.inf)


class Folded(nn.Module):
    """Attention of two heads, as a dimension of samples · heads, or of heads · samples."""

    def __init__(self, heads_first: bool, masked: bool = True) -> None:
        super().__init__()
        self.heads_first, self.masked = heads_first, masked
        self.qkv, self.scores, self.softmax = nn.Linear(WIDTH, 3 * WIDTH), Scores(), nn.Softmax(-1)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        samples, time, _ = x.shape
        order = (2, 0, 1, 3) if self.heads_first else (0, 2, 1, 3)
        q, k, v = (
            part.reshape(samples, time, 2, WIDTH // 2).permute(order).reshape(-1, time, WIDTH // 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        keys = real.repeat(2, 1) if self.heads_first else real.repeat_interleave(2, 0)
        x = self.softmax(self.scores(q, k, keys[:, None] if self.masked else None)) @ v
        back = (1, 2, 0, 3) if self.heads_first else (0, 2, 1, 3)
        heads = (2, samples) if self.heads_first else (samples, 2)
        return self.out(x.reshape(*heads, time, -1).permute(back).reshape(samples, time, WIDTH))


class TimeFirst(nn.Module):
    """A recurrent network of tensors (time, samples, WIDTH)."""

    def __init__(self, both_ways: bool) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH // 2 if both_ways else WIDTH, bidirectional=both_ways)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        return self.gru(x.transpose(0, 1))[0].transpose(0, 1)


class Flattened(nn.Module):
    """Layers of single tokens, all of them or only the real ones."""

    def __init__(self, only_real: bool) -> None:
        super().__init__()
        self.only_real = only_real
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        if not self.only_real:
            return self.last(self.first(x.reshape(-1, WIDTH)).relu()).reshape(x.shape)
        y = torch.zeros_like(x)
        y[real] = self.last(self.first(x[real]).relu())
        return y


class Experts(nn.Module):
    """Each token goes to one of three layers, so that these see tokens in no order that could be aligned."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, WIDTH)
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        y = torch.zeros_like(tokens)
        for place, expert in enumerate(self.experts):
            y[chosen == place] = expert(tokens[chosen == place]) * weight[chosen == place, None]
        return y.reshape(x.shape)


class Convolutions(nn.Module):
    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked = masked
        self.first, self.second = (nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        x = self.first(x.mT).relu()
        return self.second(x * real[:, None] if self.masked else x).mT


def reference(step_fn: Step, samples: chronica.BatchSampler, step: int, parameters: Any) -> list[float]:
    """The relative errors of a step, from .grad and by the plan's own numbers."""
    plan, parameters = samples.plan, list(parameters)
    planned = [torch.zeros_like(each) for each in parameters]
    everything: list[int] = []
    for rank in range(plan.ranks):
        for indices, factor in zip(plan.batches(step, rank), plan.micro_weights(step, rank), strict=True):
            everything += indices.tolist()
            for total, gradient in zip(
                planned, torch.autograd.grad(step_fn(indices.tolist()), parameters), strict=True
            ):
                total += factor / plan.ranks * gradient
    single = torch.autograd.grad(step_fn(everything), parameters)
    return [float((a - b).norm() / b.norm()) for a, b in zip(planned, single, strict=True)]


def assert_exact(found: Verification) -> None:
    assert found.is_exact, str(found)
    assert found.largest_error == max(found.errors.values()) <= found.limit
    assert (found.cause, found.module) == (None, None)
    assert str(found).startswith("Exact: ")


def assert_wrong(found: Verification, cause: str, module: str | None = None) -> None:
    assert not found.is_exact
    assert found.largest_error > 100 * found.limit
    assert (found.cause, found.module) == (cause, module), str(found)
    assert str(found).startswith("Not exact: ")
    assert f"Cause: {cause}" in str(found)
    assert module is None or module in str(found)


# What is exact


@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"micro_batches": 4},
        {"micro_batches": "auto", "ranks": [1, 1, 0.25]},
        {"local_batch": "equal"},
        {"padding": "none"},
        {"reorder": "window", "normalize": "epoch", "window": 4},
        {"reorder": "window", "normalize": "step", "window": 4},
    ],
)
def test_masked_attention_is_exact(options: dict[str, Any], dtype: torch.dtype) -> None:
    model = Attention()
    found = chronica.verify(token_mean(model, dtype), sampler(**options))
    assert_exact(found)
    assert found.limit == (1e-12 if dtype == DOUBLE else 1e-5)
    assert list(found.errors) == [name for name, _ in model.named_parameters()]
    assert found.largest_error > 0.0  # two orders of summation were compared, not one with itself


@pytest.mark.parametrize("loss_weight", ["samples", np.full(SAMPLES, 7.5)])
def test_masked_pooling_is_exact(loss_weight: Any) -> None:
    assert_exact(chronica.verify(sample_mean(Pooled(masked=True)), sampler(loss_weight)))


def test_summed_losses_are_exact_by_sum() -> None:
    model = Tokenwise().double()

    def summed(indices: list[int]) -> torch.Tensor:
        x, y, real = batch(indices)
        return (model(x, real) - y)[real].square().sum()

    assert_exact(chronica.verify(summed, sampler("sum", micro_batches=3)))


def test_an_array_of_weights_is_exact_where_the_loss_divides_by_it() -> None:
    model, weights = Tokenwise().double(), np.random.default_rng(5).uniform(0.1, 9.0, SAMPLES)

    def weighted(indices: list[int]) -> torch.Tensor:
        x, y, real = batch(indices)
        each = ((model(x, real) - y).square().mean(-1) * real).sum(1)
        return (torch.tensor(weights[indices]) * each).sum() / weights[indices].sum()

    assert_exact(chronica.verify(weighted, sampler(weights)))
    found = chronica.verify(weighted, sampler("samples"))
    assert_wrong(found, "loss weight")
    # The ratios that are printed are those of the weights.
    shown = [part.split(" (sample ") for part in found.advice.split("one another: ")[1].split("), ")]
    measured = {int(sample.split(",")[0]): float(ratio) for ratio, sample in shown if ratio[0].isdigit()}
    assert len(measured) == 6
    smallest = min(measured, key=lambda sample: int(SIZES[sample]))
    for sample, ratio in measured.items():
        assert ratio == pytest.approx(weights[sample] / weights[smallest], rel=1e-3)


def test_fillers_and_their_losses_that_are_not_finite_do_not_count() -> None:
    """Two samples on four ranks: two ranks repeat the cheapest sample, whose loss alone is 0 ÷ 0."""
    model = Tokenwise().double()

    def causal(indices: list[int]) -> torch.Tensor:
        terms = [0 if i == 1 else len(sequence(i)[0]) for i in indices]
        total = sum(
            (model(sequence(i)[0][:n], torch.ones(1)).square().sum() for i, n in zip(indices, terms, strict=True)),
            start=torch.zeros(()),
        )
        return total / sum(terms)

    weights = np.array([float(SIZES[0]), 0.0, float(SIZES[2])])
    few = sampler(weights, sizes=[9, 1, 5], ranks=4)
    assert not few.plan.counts.all()
    found = chronica.verify(causal, few)
    assert_exact(found)
    assert found.micro_batches == 2


def test_a_plan_that_divides_nothing_says_so() -> None:
    found = chronica.verify(token_mean(Tokenwise()), sampler(ranks=1))
    assert_exact(found)
    assert found.micro_batches == 1
    assert "nothing was put to the test" in str(found)


@pytest.mark.parametrize(
    "layer",
    [
        nn.LayerNorm(WIDTH),
        nn.Dropout(0.5),
        nn.AlphaDropout(0.5),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)),
        nn.BatchNorm1d(WIDTH).eval(),
    ],
)
def test_layers_that_are_exact(layer: nn.Module) -> None:
    if isinstance(layer, nn.BatchNorm1d):
        layer = OverTime(layer)
    assert_exact(chronica.verify(token_mean(Tokenwise(layer)), sampler()))


def test_group_norm_of_images_is_exact() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)).double()
    images = torch.randn(SAMPLES, 1, 6, 6, dtype=DOUBLE)
    model(images[:1])
    assert_exact(chronica.verify(lambda indices: model(images[indices]).square().mean(), sampler("samples")))


def test_functional_and_recurrent_dropout_is_switched_off() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.5)
            self.gru = nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=0.5)

        def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
            x = functional.dropout(self.lstm(x)[0], 0.5, self.training)
            x = torch.dropout(x, p=0.5, train=True)
            x = functional.scaled_dot_product_attention(x, x, x, real[:, None, :], 0.5)
            x = functional.scaled_dot_product_attention(x, x, x, real[:, None, :], dropout_p=0.5)
            return self.gru(x)[0]

    assert_exact(chronica.verify(token_mean(Dropping()), sampler()))


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, np.random.random])
def test_each_call_draws_the_same_random_numbers(draw: Callable[[], Any]) -> None:
    """What is drawn once per call (a layer that is dropped, a scale) is no difference."""
    step = token_mean(Tokenwise())
    assert_exact(chronica.verify(lambda indices: step(indices) * (1 + draw()), sampler()))


def test_packed_sequences_are_exact() -> None:
    assert_exact(chronica.verify(sample_mean(Recurrent(last_state=True, packed=True)), sampler("samples")))


def test_checkpoints_compute_anew_without_dropout() -> None:
    class Checkpointed(Attention):
        def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, real, use_reentrant=False)

    assert_exact(chronica.verify(token_mean(Checkpointed()), sampler()))


def test_compiled_models_run_uncompiled() -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("it was compiled")

    found = chronica.verify(token_mean(torch.compile(Attention(), backend=refuse)), sampler())
    assert_exact(found)
    assert "block.self_attn.out_proj.weight" in found.errors


def test_left_padding_that_is_masked_is_exact() -> None:
    assert_exact(chronica.verify(token_mean(Attention(), left=True), sampler()))


def test_a_gradient_that_is_zero_but_for_rounding_is_no_error() -> None:
    """Softmax does not see the bias of the keys."""
    found = chronica.verify(token_mean(Attention(), SINGLE), sampler())
    model = Attention()
    step_fn = token_mean(model)
    gradient = torch.autograd.grad(step_fn([0, 1, 2]), model.block.self_attn.in_proj_bias)[0]
    assert gradient[WIDTH : 2 * WIDTH].norm() < 1e-12 * gradient.norm()
    assert_exact(found)


# What is not, and why


@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE])
def test_the_errors_are_those_of_the_gradients(dtype: torch.dtype) -> None:
    model, given = Tokenwise(), sampler("samples", micro_batches=2)
    step_fn = token_mean(model, dtype)
    found = chronica.verify(step_fn, given)
    assert_wrong(found, "loss weight")
    expected = reference(step_fn, given, found.step, model.parameters())
    assert list(found.errors) == [name for name, _ in model.named_parameters()]
    assert list(found.errors.values()) == pytest.approx(expected, rel=1e-3)


def causal_mean(model: nn.Module, dtype: torch.dtype) -> Step:
    """Each token but the last predicts the next one."""
    model.to(dtype)

    def step(indices: list[int]) -> torch.Tensor:
        x, _, real = batch(indices, dtype)
        return (model(x, real)[:, :-1] - x[:, 1:])[real[:, 1:]].square().mean()

    return step


@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE])
@pytest.mark.parametrize(
    ("step", "given", "advice"),
    [
        (causal_mean, "sizes", "loss_weight='sizes'; give loss_weight=sizes - 1 (an array)"),
        (causal_mean, "samples", "loss_weight='samples'; give loss_weight=sizes - 1 (an array)"),
        (token_mean, "samples", "loss_weight='samples'; give loss_weight='sizes'"),
        (token_mean, SIZES - 1, "loss_weight=the array that was given; give loss_weight='sizes'"),
        (token_mean, "sum", "loss_weight='sum'; give loss_weight='sizes'"),
    ],
)
def test_wrong_loss_weights_are_named(step: Any, given: Any, advice: str, dtype: torch.dtype) -> None:
    found = chronica.verify(step(Attention(), dtype), sampler(given))
    assert_wrong(found, "loss weight")
    assert advice in str(found)


def test_what_is_advised_is_exact() -> None:
    assert_exact(chronica.verify(causal_mean(Attention(), DOUBLE), sampler(SIZES - 1)))


def test_a_mean_over_samples_with_sizes_is_named() -> None:
    found = chronica.verify(sample_mean(Pooled(masked=True)), sampler("sizes"))
    assert_wrong(found, "loss weight")
    assert "the number of samples" in str(found)
    assert "give loss_weight='samples'" in str(found)


def test_a_summed_loss_is_named() -> None:
    model = Tokenwise().double()

    def summed(indices: list[int]) -> torch.Tensor:
        x, y, real = batch(indices)
        return (model(x, real) - y)[real].square().sum() / 1000

    found = chronica.verify(summed, sampler("sizes"))
    assert_wrong(found, "loss weight")
    assert "give loss_weight='sum'" in str(found)


def test_loss_weights_are_told_apart_where_padding_is_on_the_left() -> None:
    """No module is accused for where a collate function puts the padding."""
    found = chronica.verify(token_mean(Attention(), left=True), sampler("samples"))
    assert_wrong(found, "loss weight")
    assert "give loss_weight='sizes'" in str(found)


@pytest.mark.parametrize("seed", range(4))
def test_what_differs_within_a_module_that_does_not_is_of_no_consequence(seed: int) -> None:
    torch.manual_seed(seed)
    assert_wrong(chronica.verify(token_mean(Experts()), sampler("samples")), "loss weight")


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Folded(heads_first=False),
        lambda: Folded(heads_first=True),
        lambda: Flattened(only_real=False),
        lambda: Flattened(only_real=True),
        lambda: Convolutions(masked=True),
        Experts,
        Attention,
    ],
)
def test_no_module_is_accused_where_the_loss_weight_is_to_blame(
    make: Callable[[], nn.Module], dtype: torch.dtype, left: bool
) -> None:
    step = token_mean(make(), dtype, left)
    assert_exact(chronica.verify(step, sampler("sizes")))
    assert_wrong(chronica.verify(step, sampler("samples")), "loss weight")


def test_batch_statistics_are_named() -> None:
    found = chronica.verify(token_mean(Tokenwise(OverTime(nn.BatchNorm1d(WIDTH)))), sampler())
    assert_wrong(found, "batch mates", "layers.0.layer (BatchNorm1d)")
    assert "GroupNorm" in str(found)


def test_batch_statistics_of_images_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)).double()
    images = torch.randn(SAMPLES, 1, 6, 6, dtype=DOUBLE)
    model(images[:1])
    found = chronica.verify(lambda indices: model(images[indices]).square().mean(), sampler("samples"))
    assert_wrong(found, "batch mates", "1 (BatchNorm2d)")


def test_batch_statistics_are_named_where_one_sample_alone_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    x = torch.randn(SAMPLES, 3, dtype=DOUBLE)
    given = sampler("samples", min_local_batch=2)
    found = chronica.verify(lambda indices: model(x[indices]).square().mean(), given)
    assert_wrong(found, "batch mates", "1 (BatchNorm1d)")


def test_a_step_that_fails_on_single_samples_is_told() -> None:
    model = Tokenwise().double()
    step = token_mean(model)

    def no_single(indices: list[int]) -> torch.Tensor:
        if len(indices) == 1:
            raise LookupError("at least two are needed")
        return step(indices)

    found = chronica.verify(no_single, sampler("samples", local_batch="equal"))
    assert not found.is_exact
    assert found.cause is None
    assert "LookupError: at least two are needed" in str(found)


def test_batch_mates_of_a_module_are_named() -> None:
    class Centred(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x[:, :2].mean((0, 1))

    assert_wrong(chronica.verify(token_mean(Tokenwise(Centred())), sampler()), "batch mates", "layers.0 (Centred)")


@pytest.mark.parametrize(
    ("model", "module"),
    [
        (Tokenwise(OverTime(nn.Conv1d(WIDTH, WIDTH, 3, padding=1))), "layers.0.layer (Conv1d)"),
        # The first one sees zeros in the padding, the second one the first one's bias.
        (Convolutions(masked=False), "second (Conv1d)"),
        (Folded(heads_first=False, masked=False), "softmax (Softmax)"),
        (Folded(heads_first=True, masked=False), "softmax (Softmax)"),
        (TimeFirst(both_ways=True), "gru (GRU)"),
        (Attention(masked=False), "block.self_attn (MultiheadAttention)"),
        (Tokenwise(OverTime(nn.InstanceNorm1d(WIDTH))), "layers.0.layer (InstanceNorm1d)"),
    ],
)
@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE])
def test_padding_that_is_not_masked_is_named(model: nn.Module, module: str, dtype: torch.dtype) -> None:
    assert_wrong(chronica.verify(token_mean(model, dtype), sampler()), "padding", module)


def test_pooling_over_padding_is_named() -> None:
    found = chronica.verify(sample_mean(Pooled(masked=False)), sampler("samples"))
    assert_wrong(found, "padding", "last (Linear)")


def test_what_happens_in_place_behind_a_module_is_not_its_fault() -> None:
    class InPlace(Tokenwise):
        def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            x += x.mean(1, keepdim=True).detach()
            return self.last(x)

    assert_wrong(chronica.verify(token_mean(InPlace()), sampler()), "padding", "last (Linear)")


def test_packed_outputs_are_passed_over() -> None:
    lstm = nn.LSTM(WIDTH, WIDTH).double()

    def step(indices: list[int]) -> torch.Tensor:
        packed, _ = lstm(rnn.pack_sequence([sequence(i)[0] for i in indices], enforce_sorted=False))
        return packed.data.square().mean()

    assert_exact(chronica.verify(step, sampler("sizes")))
    assert_wrong(chronica.verify(step, sampler("samples")), "loss weight")


def test_left_padding_of_a_recurrent_network_is_named() -> None:
    assert_exact(chronica.verify(token_mean(Recurrent(last_state=False)), sampler()))
    found = chronica.verify(token_mean(Recurrent(last_state=False), left=True), sampler())
    assert_wrong(found, "padding", "lstm (LSTM)")


def test_the_state_behind_the_padding_is_named_where_it_is_used() -> None:
    found = chronica.verify(sample_mean(Recurrent(last_state=True)), sampler("samples"))
    assert_wrong(found, "padding", "lstm (LSTM)")
    # Where it is not, the loss weights are to blame.
    found = chronica.verify(token_mean(Recurrent(last_state=False)), sampler("samples"))
    assert_wrong(found, "loss weight")


def test_in_batch_negatives_are_named() -> None:
    model = Pooled(masked=True).double()

    def contrast(indices: list[int]) -> torch.Tensor:
        x, y, real = batch(indices)
        return functional.cross_entropy(model(x, real) @ y[:, 0].T, torch.arange(len(indices)))

    found = chronica.verify(contrast, sampler("samples"))
    assert_wrong(found, "batch mates")
    assert "in-batch negatives" in str(found)


def test_a_loss_that_divides_by_the_padded_length_is_named() -> None:
    model = Tokenwise().double()

    def padded_mean(indices: list[int]) -> torch.Tensor:
        x, y, real = batch(indices)
        return ((model(x, real) - y).square() * real[..., None]).mean()

    found = chronica.verify(padded_mean, sampler())
    assert_wrong(found, "padding")
    assert "the padded length" in str(found)


def test_a_loss_over_padding_is_named() -> None:
    model = Tokenwise().double()

    def over_padding(indices: list[int]) -> torch.Tensor:
        x, y, real = batch(indices)
        return (model(x, real) - y).square().mean()

    two_sizes = np.where(np.arange(SAMPLES) % 2, 5, 20)
    assert_wrong(chronica.verify(over_padding, sampler()), "not a mean")
    whole = {i: torch.randn(2, int(n), WIDTH, dtype=DOUBLE) for i, n in enumerate(two_sizes)}

    def of_two_sizes(indices: list[int]) -> torch.Tensor:
        x, y = (padded([whole[i][place] for i in indices]) for place in (0, 1))
        return (model(x, x) - y).square().mean()

    found = chronica.verify(of_two_sizes, sampler(sizes=two_sizes))
    assert_wrong(found, "padding")
    assert "two samples of the same size is their mean" in str(found)


def test_two_samples_are_enough_to_tell_a_mean() -> None:
    model = nn.Linear(WIDTH, 1).double()
    given = sampler("samples", sizes=SIZES[:2], ranks=2)

    def weighted(indices: list[int]) -> torch.Tensor:
        losses = torch.stack([model(sequence(i)[0]).square().mean() for i in indices])
        weights = torch.tensor([1.0, 5.0], dtype=DOUBLE)[indices]
        return (weights * losses).sum() / weights.sum()

    def more_in_company(indices: list[int]) -> torch.Tensor:
        return weighted(indices) * (1 if len(set(indices)) == 1 else 100)

    found = chronica.verify(weighted, given)
    assert_wrong(found, "loss weight")
    first, second = ("1", "5") if SIZES[0] < SIZES[1] else ("0.2", "1")
    assert f"{first} (sample 0, size {SIZES[0]})" in str(found)
    assert f"{second} (sample 1, size {SIZES[1]})" in str(found)
    assert_wrong(chronica.verify(more_in_company, given), "not a mean")


def test_random_numbers_are_named() -> None:
    model = Tokenwise().double()

    def noisy(indices: list[int]) -> torch.Tensor:
        x, y, real = batch(indices)
        return (model(x + torch.randn_like(x), real) - y)[real].square().mean()

    assert_wrong(chronica.verify(noisy, sampler()), "random")
    state = np.random.default_rng(0)

    def own_generator(indices: list[int]) -> torch.Tensor:
        x, y, real = batch(indices)
        return (model(x + state.random(), real) - y)[real].square().mean()

    assert_wrong(chronica.verify(own_generator, sampler()), "random")


def test_a_small_difference_without_a_cause_is_rounding() -> None:
    model = Tokenwise().double()
    step = token_mean(model)

    class Perturbed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, samples: int) -> torch.Tensor:
            ctx.samples = samples
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] * (1 + ctx.error * ctx.samples), None

    def perturbed(error: float) -> Step:
        class OfThisError(Perturbed):
            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                return gradients[0] * (1 + error * ctx.samples), None

        return lambda indices: OfThisError.apply(step(indices), len(indices))

    found = chronica.verify(perturbed(1e-12), sampler())
    assert not found.is_exact
    assert found.cause == "rounding"
    found = chronica.verify(perturbed(1e-3), sampler())
    assert not found.is_exact
    assert found.cause is None
    assert "Cause: unknown" in str(found)
    assert "backward pass of their own" in str(found)


@pytest.mark.parametrize("kind", ["torch", "horovod"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_synchronized_batch_norm_runs_alone_and_needs_equal_calls(
    kind: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: Any = nn if kind == "torch" else pytest.importorskip("horovod.torch")
    norm = kinds.SyncBatchNorm(WIDTH)

    def of_all_ranks(*_: Any) -> None:
        raise AssertionError("the module's own forward was called")

    monkeypatch.setattr(type(norm), "forward", of_all_ranks)
    given = sampler(micro_batches=micro_batches)
    found = chronica.verify(token_mean(Tokenwise(OverTime(norm))), given)
    assert_wrong(found, "batch mates", "layers.0.layer (SyncBatchNorm)")
    assert "over all ranks" in str(found)
    assert ("use micro_batches=1" in str(found)) == (micro_batches != 1)
    assert "forward" not in vars(norm)


# Names


def test_tensors_of_several_modules_and_of_none_have_names() -> None:
    first, second, scale = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), torch.ones(3, requires_grad=True)

    def step(indices: list[int]) -> torch.Tensor:
        x = torch.cat([sequence(i, SINGLE)[0] for i in indices]).requires_grad_()
        return (second(first(x)) * scale).square().mean()

    found = chronica.verify(step, sampler())
    assert_exact(found)
    assert sorted(found.errors) == [
        "Linear#1.bias",
        "Linear#1.weight",
        "Linear#2.bias",
        "Linear#2.weight",
        "unnamed 0 of shape (3,)",
    ]


def test_the_outermost_module_gives_the_names_whenever_it_is_called() -> None:
    model = Tokenwise().double()
    step = token_mean(model)

    def inner_first(indices: list[int]) -> torch.Tensor:
        x, _, real = batch(indices)
        return model.first(x)[real].square().mean() + step(indices)

    found = chronica.verify(inner_first, sampler())
    assert_exact(found)
    assert list(found.errors) == ["first.weight", "first.bias", "last.weight", "last.bias"]


def test_a_tensor_that_the_planned_way_misses_is_wrong() -> None:
    model = Tokenwise().double()
    step = token_mean(model)
    extra = nn.Parameter(torch.ones((), dtype=DOUBLE))
    model.register_parameter("extra", extra)

    def only_in_large_batches(indices: list[int]) -> torch.Tensor:
        return step(indices) + (extra if len(indices) == 12 else 0.0)

    found = chronica.verify(only_in_large_batches, sampler())
    assert found.errors["extra"] == 1.0


def test_sparse_gradients_are_compared() -> None:
    model = nn.Embedding(SAMPLES, 3, sparse=True).double()
    found = chronica.verify(lambda indices: model(torch.tensor(indices)).square().mean(), sampler("samples"))
    assert_exact(found)
    assert list(found.errors) == ["weight"]
    assert_wrong(
        chronica.verify(lambda indices: model(torch.tensor(indices)).square().mean(), sampler("sizes")), "loss weight"
    )


# The limit and the step


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 1e-2), (torch.bfloat16, 8e-2)])
def test_short_types_have_wider_limits(dtype: torch.dtype, limit: float) -> None:
    found = chronica.verify(token_mean(Attention(), dtype), sampler())
    assert_exact(found)
    assert found.limit == limit
    assert found.largest_error > 1e-5
    wrong = chronica.verify(token_mean(Attention(), dtype), sampler("samples"))
    assert not wrong.is_exact


def test_autocast_has_the_limit_of_its_type() -> None:
    step = token_mean(Tokenwise(), SINGLE)

    def cast(indices: list[int]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return step(indices)

    found = chronica.verify(cast, sampler())
    assert_exact(found)
    assert found.limit == 8e-2


def test_the_step_is_the_smallest_of_those_that_test_something() -> None:
    given = sampler(micro_batches=1)
    plan = given.plan
    assert plan.counts[-1].sum() == plan.counts[0].sum()
    found = chronica.verify(token_mean(Tokenwise()), given)
    longest = plan.lengths.reshape(plan.steps, plan.ranks).max(axis=1)
    uneven = plan.counts.max(axis=1) > plan.counts.min(axis=1)
    assert uneven.any()
    assert uneven[found.step]
    assert longest[found.step] == longest[uneven].min()
    # The short last step is smaller still, and tests less.
    short = sampler(sizes=SIZES[:-1])
    assert short.plan.counts[-1].sum() == 11
    seen: list[int] = []
    step = token_mean(Tokenwise())
    chronica.verify(lambda indices: (seen.append(len(indices)), step(indices))[1], short)
    assert max(seen) == 12


def test_the_plan_of_the_current_epoch_is_verified() -> None:
    given = sampler()
    given.set_epoch(5)
    seen: list[list[int]] = []
    step = token_mean(Tokenwise())
    found = chronica.verify(lambda indices: (seen.append(indices), step(indices))[1], given)
    planned = [batch.tolist() for rank in range(3) for batch in sampler(epoch=5).plan.batches(found.step, rank)]
    assert seen == [*planned, [i for batch in planned for i in batch]]


# No traces


def state_of(model: nn.Module) -> dict[str, Any]:
    return {
        "buffers": {name: (id(value), value.tolist()) for name, value in model.named_buffers()},
        "parameters": {name: (id(value), value.tolist()) for name, value in model.named_parameters()},
        "gradients": {name: value.grad for name, value in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
        "gradient mode": torch.is_grad_enabled(),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
        "hooks": (
            len(nn.modules.module._global_forward_hooks),
            len(nn.modules.module._global_forward_pre_hooks),
        ),
    }


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [None, ValueError, Interrupted])
def test_no_traces_are_left(error: type[BaseException] | None) -> None:
    class Counting(nn.Module):
        """Counts its calls in a buffer that it replaces."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("nothing", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            self.nothing = x.detach()
            return x

    norm = OverTime(nn.BatchNorm1d(WIDTH))
    model = Tokenwise(norm, Counting(), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH).eval())
    step, calls = token_mean(model), 0
    with torch.no_grad():
        norm.layer.running_mean.fill_(0.5)
    model.first.weight.register_post_accumulate_grad_hook(lambda _: pytest.fail("a gradient was accumulated"))
    model.layers[3].weight.grad = torch.ones(WIDTH, WIDTH, dtype=DOUBLE)
    gradient = model.layers[3].weight.grad

    def counted(indices: list[int]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        loss = step(indices)
        if error is not None and calls == 3:
            raise error("third call")
        np.random.random()
        random.random()
        torch.rand(3)
        return loss

    before = state_of(model)
    if error is None:
        assert chronica.verify(counted, sampler()).cause == "batch mates"
        assert calls > 5
    else:
        with pytest.raises(error, match="third call"):
            chronica.verify(counted, sampler())
        assert calls == 3
    assert state_of(model) == before
    assert model.layers[3].weight.grad is gradient
    assert gradient.eq(1.0).all()


def test_every_call_begins_with_the_same_statistics() -> None:
    """Running statistics that moved on would give later batches other results."""

    class Drift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.ones((), dtype=DOUBLE))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.calls.clone()
            self.calls += 1
            return x

    assert_exact(chronica.verify(token_mean(Tokenwise(Drift())), sampler()))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_computed_whatever_the_mode_around(mode: Any) -> None:
    model = Tokenwise()
    step = token_mean(model)
    with mode():
        assert_exact(chronica.verify(step, sampler()))
        assert not torch.is_grad_enabled()


def test_nothing_of_the_progress_changes() -> None:
    given = sampler()
    loader = chronica.DataLoader(range(SAMPLES), batch_sampler=given, collate_fn=list)
    step = token_mean(Tokenwise())
    batches = iter(loader)
    taken = [next(batches)]
    weight = given.weight
    assert_exact(chronica.verify(step, given))
    assert given.weight == weight
    taken += list(batches)
    assert taken == list(sampler())


# What is refused


def test_what_is_no_sampler_or_no_function_is_refused() -> None:
    step = token_mean(Tokenwise())
    with pytest.raises(TypeError, match=r"sampler must be a chronica_hvd\.BatchSampler, not list"):
        chronica.verify(step, [[0, 1]])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="step_fn must be a function from a list of dataset indices to the loss, not 3"):
        chronica.verify(3, sampler())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (1.5, TypeError, "step_fn returned float; it must return the loss"),
        (None, TypeError, "step_fn returned NoneType"),
        (torch.ones(2, requires_grad=True) * 2, ValueError, r"shape \(2,\)"),
        (torch.ones((), dtype=torch.int64), ValueError, "int64"),
        (torch.ones(()), ValueError, "without a graph"),
        (torch.ones((), requires_grad=True) * float("nan"), ValueError, "the loss of samples .* is nan"),
        (torch.ones((), requires_grad=True) * float("inf"), ValueError, "is inf"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        chronica.verify(lambda indices: loss, sampler())


def test_gradients_that_are_not_finite_are_refused() -> None:
    model = nn.Linear(WIDTH, WIDTH)

    def root_of_zero(indices: list[int]) -> torch.Tensor:
        return (model(torch.zeros(len(indices), WIDTH)) - model.bias).sum().abs().sqrt() + model.bias.square().mean()

    with pytest.raises(ValueError, match=r"the gradient of (weight|bias) is not finite"):
        chronica.verify(root_of_zero, sampler("samples"))


def test_tensors_that_are_new_in_each_call_are_refused() -> None:
    with pytest.raises(ValueError, match="no tensor that requires a gradient is used in more than one call"):
        chronica.verify(lambda indices: torch.ones(3, requires_grad=True).mean(), sampler())


def test_a_backward_pass_within_the_step_is_refused() -> None:
    model = Tokenwise()
    step = token_mean(model)

    def trains(indices: list[int]) -> torch.Tensor:
        loss = step(indices)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"step_fn must return the loss and not call backward\(\)"):
        chronica.verify(trains, sampler())
    assert model.first.weight.grad is None


def test_lazy_modules_are_refused() -> None:
    model = nn.LazyLinear(1)
    with pytest.raises(ValueError, match="run the model once"):
        chronica.verify(lambda indices: model(torch.ones(len(indices), 2)).mean(), sampler())


def test_a_verification_is_frozen() -> None:
    found = chronica.verify(token_mean(Tokenwise()), sampler())
    with pytest.raises(AttributeError):
        found.limit = 1.0  # type: ignore[misc]
