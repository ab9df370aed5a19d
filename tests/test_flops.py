from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import pickle
import random
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lognormal
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import chronica_hvd as chronica
from chronica_hvd import flops
from chronica_hvd.cost import non_negative_least_squares

WIDTH, HEADS, LAYERS, VOCABULARY = 64, 2, 2, 100


class Block(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        size = q.shape[-2]
        hidden = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, size, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, size, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, size, WIDTH))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(4096, WIDTH)
        self.blocks = nn.ModuleList(Block(fused) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(size: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (1, size))


def vectors(width: int) -> Callable[[int], torch.Tensor]:
    return lambda size: torch.randn(size, width)


class Calls(nn.Module):
    """A weight of 16 × 16, and a function of it and the inputs."""

    def __init__(self, function: Callable[..., Any], width: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width))
        self.function = function

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self.function(self.weight, *inputs, **keywords)


PRODUCT = 2 * 2 * 16 * 16  # FLOPs of x @ weight with x (1, 16): forward, and backward to the weight


def close_to(expected: float) -> Any:
    return pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_decoder(fused: bool, dtype: torch.dtype) -> None:
    estimate = flops.estimate(Decoder(fused).to(dtype), tokens, range(16, 1025))
    # Forward, by token: 4 projections and an MLP of width 4; by pair of tokens: scores and values.
    per_size = 2 * (LAYERS * (4 + 8) * WIDTH**2 + WIDTH * VOCABULARY)
    per_size2 = 2 * LAYERS * 2 * WIDTH
    assert estimate.per_size == close_to(3 * per_size)
    assert estimate.per_size2 == close_to(3 * per_size2)
    for size, counted in zip(estimate.sizes, estimate.counted, strict=True):
        assert counted == close_to(3 * (per_size * size + per_size2 * size**2))
    assert estimate.relative_error < 1e-6
    assert estimate.sizes == (16, 32, 64, 128, 256, 512, 1024)


GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("behind_a_layer", [False, True])
def test_recurrent(kind: type[nn.RNNBase], directions: int, behind_a_layer: bool) -> None:
    layer = kind(24, 32, bidirectional=directions == 2, batch_first=True)
    model = nn.Sequential(nn.Linear(24, 24), layer) if behind_a_layer else layer
    estimate = flops.estimate(model, lambda size: torch.zeros(1, size, 24), [20, 40])
    from_input, from_hidden = (2 * directions * GATES[kind] * 32 * width for width in (24, 32))
    # Without a layer before it, nobody asks for the input's gradient.
    expected = 3 * (from_input + from_hidden) + 2 * 2 * 24 * 24 if behind_a_layer else 2 * from_input + 3 * from_hidden
    for size, counted in zip(estimate.sizes, estimate.counted, strict=True):
        assert counted == close_to(expected * size)
    assert estimate.per_size == close_to(expected)


def test_packed_sequence() -> None:
    lstm = nn.LSTM(24, 32)

    def packed(size: int) -> Any:
        return nn.utils.rnn.pack_sequence([torch.zeros(size, 24)])

    assert flops.estimate(lstm, packed, [20, 40]).per_size == close_to(8 * 32 * (2 * 24 + 3 * 32))


def test_three_dimensional_convolution() -> None:
    model = nn.Sequential(nn.Conv3d(3, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(), nn.Conv3d(16, 8, 3, padding=1))
    estimate = flops.estimate(model, lambda size: torch.zeros(1, 3, size, 12, 10), [4, 8, 16])
    first, second = (2 * 27 * channels * 120 for channels in (3 * 16, 16 * 8))
    assert estimate.per_size == close_to(2 * first + 3 * second)


@pytest.mark.parametrize(
    ("layer", "forward"),
    [
        (nn.Conv1d(8, 6, 5, padding=2), 2 * 5 * 8 * 6),
        (nn.Conv1d(8, 8, 5, padding=2, groups=8), 2 * 5 * 8),
        (nn.ConvTranspose1d(8, 6, 4, stride=2), 2 * 4 * 8 * 6),
        (nn.ConvTranspose1d(8, 6, 4, stride=2, groups=2), 2 * 4 * 8 * 6 // 2),
    ],
)
def test_convolution(layer: nn.Module, forward: int) -> None:
    estimate = flops.estimate(layer, lambda size: torch.zeros(1, 8, size), [16, 32])
    assert estimate.counted == (2 * forward * 16, 2 * forward * 32)


@pytest.mark.parametrize("training", [True, False])
def test_torch_transformer(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS).train(training).requires_grad_(False)
    model = nn.Sequential(model, nn.Linear(WIDTH, WIDTH))
    estimate = flops.estimate(model, lambda size: torch.zeros(1, size, WIDTH), [32, 64, 128])
    assert estimate.per_size == close_to(2 * LAYERS * 12 * WIDTH**2 + 2 * 2 * WIDTH**2)  # frozen: forward only
    assert estimate.per_size2 == close_to(2 * LAYERS * 2 * WIDTH)


def test_linear() -> None:
    estimate = flops.estimate(nn.Linear(8, 4), vectors(8), [1, 10, 100])
    assert estimate.counted == (128, 1280, 12800)
    assert (estimate.fixed, estimate.per_sample, estimate.per_size, estimate.per_size2) == (0, 0, 128, 0)
    assert estimate.relative_error == 0.0
    assert estimate.rank_scale is None
    assert isinstance(estimate, chronica.CostModel)


def test_only_trained_parts_have_a_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    assert flops.estimate(model, vectors(8), [1, 2]).per_size == 2 * 64 * (1 + 2 + 3)
    with_gradient = flops.estimate(model, lambda size: torch.zeros(size, 8, requires_grad=True), [1, 2])
    assert with_gradient.per_size == 2 * 64 * (2 + 3 + 3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_counts(reentrant: bool) -> None:
    inner = nn.Sequential(nn.Linear(16, 16), nn.Dropout(), nn.Linear(16, 16))
    first = nn.Linear(16, 16)
    model = nn.ModuleDict({"first": first, "inner": inner})
    model.forward = types.MethodType(  # type: ignore[method-assign]
        lambda self, x: checkpoint(self["inner"], self["first"](x), use_reentrant=reentrant), model
    )
    # What is not reentrant stops recomputing where nothing more is needed: before the last product.
    recomputed = 2 if reentrant else 1
    assert flops.estimate(model, vectors(16), [1, 2]).per_size == 2 * 256 * (2 + 3 + 3 + recomputed)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


def sparse(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    diagonal = torch.arange(size).expand(2, size)
    return torch.sparse_coo_tensor(diagonal, torch.ones(size), (size, size), check_invariants=True), torch.ones(
        size, 16
    )


@pytest.mark.parametrize(
    ("function", "make_batch", "per_size"),
    [
        (lambda w, x: torch.einsum("sd,de->es", x, w), vectors(16), PRODUCT),
        (lambda w, x: torch.baddbmm(x[None], x[None], w[None]), vectors(16), PRODUCT),
        (lambda w, x: x.clone().addmm_(x, w), vectors(16), PRODUCT),
        (lambda w, x: x[None].clone().baddbmm_(x[None], w[None]), vectors(16), PRODUCT),
        (lambda w, x: x @ w[0], vectors(16), PRODUCT / 16),
        (lambda w, x: Square.apply(x, w), vectors(16), PRODUCT * 1.5),
        (lambda w, x: torch.compile(torch.matmul)(x, w), vectors(16), PRODUCT),
        (lambda w, a, x: torch.sparse.mm(a, x @ w), sparse, PRODUCT + 2 * 2 * 16),
        (lambda w, a, x: a @ (x @ w), sparse, PRODUCT + 2 * 2 * 16),
        (lambda w, x, scale: scale * (x @ w), lambda s: (torch.ones(s, 16), 0.5), PRODUCT),
        (lambda w, x, scale: scale * (x @ w), lambda s: [torch.ones(s, 16), 0.5], PRODUCT),
        (lambda w, x, scale: scale * (x @ w), lambda s: {"x": torch.ones(s, 16), "scale": 0.5}, PRODUCT),
        (lambda w, graph: graph.x @ w, lambda s: (types.SimpleNamespace(x=torch.ones(s, 16)),), PRODUCT),
        (lambda w, x: {"a": [x @ w, None, "text"], "b": 3}, vectors(16), PRODUCT),
        (lambda w, x: (x, types.SimpleNamespace(deep=(x @ w, x > 0))), vectors(16), PRODUCT),
        (lambda w, x: torch.complex(x @ w, x), vectors(16), PRODUCT),
    ],
)
def test_operators_inputs_and_outputs(function: Any, make_batch: Any, per_size: float) -> None:
    assert flops.estimate(Calls(function), make_batch, [128, 512]).per_size == per_size


def test_compiled_models() -> None:
    model = nn.Linear(8, 4)
    for compiled in (torch.compile(model), nn.Sequential(torch.compile(model))):
        assert flops.estimate(compiled, vectors(8), [1, 2]).per_size == 128
    model.compile()
    assert flops.estimate(model, vectors(8), [1, 2]).per_size == 128


class Everything(nn.Module):
    """What a run would change, in a module."""

    def __init__(self, needs_numbers: bool) -> None:
        super().__init__()
        self.needs_numbers = needs_numbers
        self.embedding = nn.Linear(32, 32)
        self.norm, self.dropout = nn.BatchNorm1d(32), nn.Dropout(0.5)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.quiet = nn.Sequential(nn.BatchNorm1d(32), nn.Dropout(0.5)).eval()
        self.head = nn.Linear(32, 32)
        self.head.weight = self.embedding.weight
        self.lstm = nn.LSTM(32, 32)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.calls, self.cache = 0, {"last": torch.zeros(1)}
        self.derived = self.embedding.weight * 2  # not a leaf, as what old weight_norm leaves behind
        self.register_forward_hook(count_call)
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.norm(self.embedding(x))) + torch.randn(32)
        if self.needs_numbers and x.sum() < -math.inf:
            raise AssertionError("no sum is less")
        x = self.head(self.quiet(self.frozen(x))) @ self.derived
        self.seen += 1
        self.cache["last"] = x.detach()
        self.cache["new"] = random.random() + np.random.random()
        return self.lstm(x)[0]


def count_call(module: Everything, inputs: Any, output: Any) -> None:
    module.calls += 1


def state_of(model: nn.Module) -> list[Any]:
    """Return everything in a model by which it could differ from what it was; tensors by identity and value."""
    state: list[Any] = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            state.append((name, key, value.copy() if isinstance(value, dict) else value))
    held = [*model.parameters(), *model.buffers(), model.derived, *model.cache.values()]  # type: ignore[misc]
    for tensor in held:
        gradient = tensor.grad if tensor.is_leaf else None
        state.append((tensor, id(gradient), gradient, tensor.requires_grad, tensor.device, tensor._version))
    return state


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    return a is b or bool(a == b)


def flags() -> list[Any]:
    modules = nn.modules.module
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_device(),
        torch.backends.mkldnn.enabled,  # type: ignore[attr-defined]
        torch.backends.cudnn.enabled,
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        dict(modules._global_forward_hooks),
        dict(modules._global_forward_pre_hooks),
        torch.overrides._len_torch_function_stack(),
        torch.utils._python_dispatch._len_torch_dispatch_stack(),
    ]


@contextlib.contextmanager
def nothing_changes() -> Iterator[None]:
    def random_states() -> Any:
        return torch.get_rng_state(), random.getstate(), list(map(str, np.random.get_state()))

    before = random_states(), flags()
    yield
    assert same(before, (random_states(), flags()))


def drawn(size: int) -> torch.Tensor:
    return torch.randn(size, 32) + random.random() + float(np.random.random())


@pytest.mark.parametrize("caller", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("needs_numbers", [False, True])
def test_the_model_and_the_random_states_stay_as_they_were(needs_numbers: bool, caller: Any) -> None:
    model = Everything(needs_numbers)
    passed: list[torch.Tensor] = []
    model.embedding.weight.register_hook(passed.append)
    before = state_of(model)
    values = [item.detach().clone() for item in (*model.parameters(), *model.buffers(), model.derived)]
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with caller(), nothing_changes():
        estimate = flops.estimate(model, drawn, [32, 64, 128])
    assert same(before, state_of(model))
    assert passed == []
    assert same(values, [*model.parameters(), *model.buffers(), model.derived])
    assert same(gradients, [p.grad for p in model.parameters()])
    assert (model.calls, list(model.cache), int(model.seen)) == (0, ["last"], 0)
    assert model.head.weight is model.embedding.weight
    # Two trained layers (the first without an input gradient), a frozen one, a product with a trained attribute, LSTM.
    assert estimate.per_size == close_to(2 * 32**2 * (2 + 3 + 2 + 3 + 3 * 4 * 2))


class NeedsNumbers(nn.Module):
    """A model whose control flow depends on data."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) if x.sum() > -math.inf else None


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("model", "make_batch"),
    [
        (Decoder(fused=True), tokens),
        (nn.Sequential(nn.Linear(32, 32), nn.LSTM(32, 32)), drawn),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2), lambda s: drawn(s)[None]),
        (nn.Conv1d(32, 32, 3, padding=1, groups=2), lambda s: drawn(s).T),
    ],
)
def test_the_same_is_counted_with_and_without_numbers(model: nn.Module, make_batch: Any, training: bool) -> None:
    for parameter in list(model.parameters())[:-1]:
        parameter.requires_grad_(training)
    with_numbers, without = (
        flops.estimate(each.train(training), make_batch, [32, 64]) for each in (NeedsNumbers(model), model)
    )
    assert with_numbers.counted == without.counted


def test_a_failing_model_leaves_nothing_behind() -> None:
    model = Everything(False)
    with nothing_changes(), pytest.raises(RuntimeError, match=r"the model raised .* make_batch\(4\) returned"):
        flops.estimate(model, lambda size: drawn(size)[:, :31], [4, 8])
    assert (model.calls, int(model.seen)) == (0, 0)


def test_nothing_is_computed_where_shapes_suffice() -> None:
    class Placed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.arange(2**20))

    layer = Placed(2**20, 2**20, bias=False, device="meta")  # 4 TiB, were it real
    estimate = flops.estimate(layer, lambda size: torch.zeros(size, 2**20, device="meta"), [1, 2])
    assert estimate.counted == (4 * 2**40, 8 * 2**40)


def test_inputs_are_not_changed() -> None:
    given = torch.ones(4, 16)
    flops.estimate(Calls(lambda w, x: x.add_(x.sum().item()) @ w), lambda size: given, [4])
    assert given.eq(1).all()


@torch.library.custom_op("chronica_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_autograd(lambda ctx, gradient: gradient * 2)


@pytest.mark.parametrize(
    ("function", "operator", "weight"),
    [
        (lambda w, x: torch.fft.fft(torch.complex(x @ w, x)), "aten._fft_c2c", 2 * 5 * 16 * math.log2(16)),
        (lambda w, x: torch.cdist(x @ w, w, p=1), "aten._cdist_forward", 3 * 16 * 16),
        (lambda w, x: torch.cdist(x @ w, w, p=1), "aten._cdist_backward", 2 * 3 * 16 * 16),
        (lambda w, x: torch.linalg.svdvals(x @ w), "aten._linalg_svd", 16 * 16),
        (lambda w, x: functional.bilinear(x, x, w.expand(2, 16, 16)), "aten._trilinear", 2 * 3 * 2 * 16 * 16),
        (lambda w, x: torch.sin(x * w[0]), "aten.sin", 16),
        (lambda w, x: (x * w[0]).sort(dim=1)[0], "aten.sort", 16 * math.log2(16 * 128)),
    ],
)
def test_heavy_operators_without_a_formula(function: Any, operator: str, weight: float) -> None:
    with pytest.warns(UserWarning, match=f"without a FLOP formula.*{operator}"):
        estimate = flops.estimate(Calls(function), vectors(16), [64, 128])
    assert dict(estimate.uncounted)[operator] == pytest.approx(weight * (64 + 128), rel=0.1)
    weights = [weight for _, weight in estimate.uncounted]
    assert weights == sorted(weights, reverse=True)


@pytest.mark.parametrize(
    ("function", "listed"),
    [
        (lambda w, x: x @ w + w[0], {"aten.add", "aten.sum", "aten.select_backward"}),
        (lambda w, x: torch.einsum("bsd,de->bse", x.view(2, -1, 16).transpose(0, 1), w), {"aten.clone"}),
        (lambda w, x: (x @ w, x.new_ones(99, 99), torch.zeros_like(x), torch.rand(99, 99), x.chunk(2), x.T), set()),
        (lambda w, x: x @ w if float(x[0, 0]) < 99 else None, set()),
    ],
)
def test_only_what_computes_is_listed(function: Any, listed: set[str]) -> None:
    estimate = flops.estimate(Calls(function), vectors(16), [64, 128])
    assert {name for name, _ in estimate.uncounted} == listed


@pytest.mark.parametrize("bags", [False, True])
def test_of_a_table_only_what_is_read_weighs(bags: bool) -> None:
    table = nn.EmbeddingBag(100_000, 64) if bags else nn.Embedding(100_000, 64)
    model = nn.Sequential(table, nn.Linear(64, 64))
    estimate = flops.estimate(model, lambda size: torch.zeros(size, 5, dtype=torch.long), [4, 8])
    lines = 1 if bags else 5
    assert estimate.per_size == lines * 3 * 2 * 64**2
    assert sum(weight for _, weight in estimate.uncounted) <= 5 * lines * (4 + 8) * 64


def test_fused_kernels_have_unknown_weight() -> None:
    model = Calls(lambda w, x: (x @ w, torch._int_mm(x.to(torch.int8), x.to(torch.int8).T)))
    with pytest.warns(UserWarning, match="_int_mm, whose weight is unknown"):
        flops.estimate(model, vectors(16), [32, 64])


def test_a_model_of_elementwise_operations_costs_what_they_weigh() -> None:
    with pytest.warns(UserWarning, match="the only ones"):
        estimate = flops.estimate(nn.Sequential(nn.LayerNorm(8), nn.GELU()), vectors(8), [10, 20])
    assert estimate.per_size >= 4 * 8
    assert sum(estimate.counted) == pytest.approx(sum(weight for _, weight in estimate.uncounted))


def test_operators_of_others_have_unknown_weight() -> None:
    model = Calls(lambda w, x: doubled(x @ w))
    with pytest.warns(UserWarning, match=r"chronica_tests.doubled, whose weight is unknown.*register_flop_formula"):
        estimate = flops.estimate(model, vectors(16), [64, 128])
    assert estimate.uncounted[0][0] == "chronica_tests.doubled"
    assert math.isinf(estimate.uncounted[0][1])
    assert pickle.loads(pickle.dumps(estimate)) == estimate
    assert estimate.per_size == PRODUCT


def test_operators_of_others_with_a_formula_count() -> None:
    registry = torch.utils.flop_counter.flop_registry
    packet = torch.ops.chronica_tests.doubled
    torch.utils.flop_counter.register_flop_formula(packet)(lambda x, out_shape=None, **_: 7 * x[0])
    try:
        assert flops.estimate(Calls(lambda w, x: doubled(x @ w)), vectors(16), [64, 128]).per_size == PRODUCT + 7
    finally:
        del registry[packet]


def test_a_polynomial_that_does_not_fit() -> None:
    with pytest.warns(UserWarning, match=r"do not follow c0 .* at size \d+ .*% off"):
        estimate = flops.estimate(
            Calls(lambda w, x: x[:1] @ w if len(x) < 100 else x.repeat(50, 1) @ w), vectors(16), [1, 10, 50, 100]
        )
    assert estimate.relative_error > 0.05
    predicted = estimate.predict(1, np.array(estimate.sizes), np.array(estimate.sizes) ** 2)
    errors = np.abs(predicted / np.array(estimate.counted) - 1)
    assert estimate.relative_error == pytest.approx(errors.max())
    assert min(estimate.per_sample, estimate.per_size, estimate.per_size2) >= 0


def test_sizes_are_spread() -> None:
    asked: list[int] = []

    def make_batch(size: Any) -> torch.Tensor:
        assert type(size) is int
        asked.append(size)
        return torch.zeros(size, 8)

    sizes = np.random.default_rng(0).permutation(np.repeat(np.arange(3, 5000), 2))
    assert flops.estimate(nn.Linear(8, 4), make_batch, sizes).sizes == (3, 10, 36, 122, 422, 1452, 4999)
    assert asked == [3, 10, 36, 122, 422, 1452, 4999]
    assert flops.estimate(nn.Linear(8, 4), make_batch, torch.tensor([7, 5, 7])).sizes == (5, 7)
    single = flops.estimate(nn.Linear(8, 4), make_batch, [5])
    assert (single.per_sample, single.per_size, single.per_size2) == (0, 128, 0)


@pytest.mark.parametrize("padding", ["max", "none"])
def test_a_plan_by_flops(padding: str) -> None:
    sizes = np.random.default_rng(0).integers(16, 1024, 256)
    estimate = flops.estimate(Decoder(fused=True), tokens, sizes)
    plan = chronica.plan(sizes, ranks=4, batch_size=16, cost=estimate, padding=padding)
    plain = chronica.CostModel(0, estimate.per_sample, estimate.per_size, estimate.per_size2)
    assert plan == chronica.plan(sizes, ranks=4, batch_size=16, cost=plain, padding=padding)
    for step in range(plan.steps):
        for rank in range(plan.ranks):
            (batch,) = plan.batches(step, rank)
            lengths = sizes[batch] if padding == "none" else np.full(len(batch), sizes[batch].max())
            load = estimate.predict(len(batch), lengths.sum(), (lengths**2).sum())
            assert plan.loads[step, rank] == pytest.approx(load)
    plain_deal = chronica.plan(sizes, ranks=4, batch_size=16, cost=estimate, padding=padding, policy="plain")
    assert plan.makespans.sum() < plain_deal.makespans.sum()


def test_it_is_a_value() -> None:
    estimate = flops.estimate(nn.Linear(8, 4), vectors(8), [1, 2])
    assert isinstance(estimate, flops.FlopModel)
    for twin in (pickle.loads(pickle.dumps(estimate)), copy.deepcopy(estimate), copy.copy(estimate)):
        assert twin == estimate
        assert hash(twin) == hash(estimate)
    scaled = dataclasses.replace(estimate, rank_scale=[1, 2])
    assert (scaled.rank_scale, scaled.counted, scaled.per_size) == ((1.0, 2.0), (128, 256), 128.0)
    for shown in ("per_size=128.0", "sizes=(1, 2)", "counted=(128, 256)", "relative_error=0.0"):
        assert shown in repr(estimate)
    with pytest.raises(dataclasses.FrozenInstanceError):
        estimate.per_size = 1.0  # type: ignore[misc]


def test_exact_fits_need_no_more_coefficients_than_they_have() -> None:
    size = np.array([3.0, 17.0, 300.0, 4096.0])
    flops_ = 1234.0 * size + 77.0 * size**2
    powers = np.stack([size**0, size, size**2], axis=1)
    fitted = non_negative_least_squares(powers / flops_[:, None], np.ones(4))
    assert fitted == pytest.approx([0.0, 1234.0, 77.0], rel=1e-9)
    assert fitted[0] == 0.0


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 4)
        self.lock = threading.Lock()


def replaced_forward() -> nn.Module:
    model = nn.Linear(8, 4)
    forward = model.forward
    model.forward = lambda x: forward(x)  # type: ignore[method-assign]
    return model


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Linear(8, 4))


def raising(size: int) -> Any:
    if size > 5:
        raise KeyError("no such sample")
    return torch.zeros(size, 8)


LINEAR = nn.Linear(8, 4)


@pytest.mark.parametrize(
    ("model", "make_batch", "sizes", "error", "message"),
    [
        (torch.relu, vectors(8), [1], TypeError, "model must be a torch.nn.Module, not <built-in"),
        (LINEAR, torch.zeros(8), [1], TypeError, "make_batch must be a function from a size"),
        (LINEAR, vectors(8), [], ValueError, "sizes is empty"),
        (LINEAR, vectors(8), 5, ValueError, "sizes must be one-dimensional"),
        (LINEAR, vectors(8), [3, 0], ValueError, "sizes must be at least 1; position 1 holds 0"),
        (LINEAR, vectors(8), [3, -2], ValueError, "sizes must not be negative; position 1 holds -2"),
        (LINEAR, vectors(8), [1.5], TypeError, "sizes must hold integers, not float64"),
        (LINEAR, vectors(8), [1, math.nan], TypeError, "sizes must hold integers, not float64"),
        (LINEAR, vectors(8), [True], TypeError, "sizes must hold integers or floats, not bool"),
        (LINEAR, raising, [5, 6], RuntimeError, r"make_batch\(6\) raised KeyError: 'no such sample'"),
        (LINEAR, lambda size: "text", [1], TypeError, r"make_batch\(1\) must return a tensor, .* not str; wrap"),
        (LINEAR, lambda size: None, [1], TypeError, "not NoneType"),
        (LINEAR, vectors(7), [3, 4], RuntimeError, r"raised RuntimeError on the input that make_batch\(3\).*3x7"),
        (LINEAR, lambda size: (threading.Lock(),), [3], TypeError, r"input that make_batch\(3\) .* cannot be copied"),
        (nn.LazyLinear(3), vectors(8), [1], ValueError, "lazy modules that have not run yet: run it once"),
        (nn.ReLU(), vectors(8), [2], ValueError, "gradient at size 2 .*returned a Tensor.*requires_grad=True"),
        (Calls(lambda w, x: (x.argmax(), None)), vectors(8), [2], ValueError, "no floating-point output"),
        (Calls(lambda w, x: w.T), vectors(8), [2], ValueError, "computes nothing that could be counted"),
        (scripted(), vectors(8), [2], TypeError, "the model is a TorchScript module"),
        (nn.Sequential(scripted()), vectors(8), [2], TypeError, "0 is a TorchScript module"),
        (Locked(), vectors(8), [2], TypeError, "the model cannot be copied, .*lock.*remove what cannot be copied"),
        (replaced_forward(), vectors(8), [2], TypeError, "cannot be copied, .*computes with a tensor of the model"),
    ],
)
def test_errors(model: Any, make_batch: Any, sizes: Any, error: type[Exception], message: str) -> None:
    with nothing_changes(), pytest.raises(error, match=message) as raised:
        flops.estimate(model, make_batch, sizes)
    assert (raised.value.__cause__ is not None) == any(word in message for word in ("raised", "copied"))


def test_a_model_that_computes_with_itself_is_not_run() -> None:
    model = replaced_forward()
    before = [(p, p.grad, p._version) for p in model.parameters()]
    with pytest.raises(TypeError, match="computes with a tensor of the model itself"):
        flops.estimate(model, vectors(8), [2])
    assert same(before, [(p, p.grad, p._version) for p in model.parameters()])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cells = nn.Embedding(5, 64), nn.GRU(64, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(self.embedding(x))[0]


@pytest.mark.parametrize(
    ("model", "make_batch", "sizes", "far"),
    [
        (Recurrent(), lambda size: torch.zeros(1, size, dtype=torch.long), [8, 16, 32], 200),
        (nn.Conv1d(1, 8, 9), lambda size: torch.zeros(1, 1, size), [200, 400, 800], 8000),
    ],
)
def test_a_negative_constant_does_not_bend_the_polynomial(
    model: nn.Module, make_batch: Any, sizes: list[int], far: int
) -> None:
    """The first step of an RNN has no gradient of its state, and a convolution ends before the border."""
    cost = flops.estimate(model, make_batch, sizes)
    (counted,) = flops.estimate(model, make_batch, [far]).counted
    assert cost.per_size2 == 0.0
    assert cost.predict(1, far, far**2) == pytest.approx(counted, rel=0.02)
    assert 0.005 < cost.relative_error < 0.1


def test_counts_in_several_threads_leave_the_switches_on() -> None:
    before, costs = flags(), []
    threads = [
        threading.Thread(target=lambda: costs.append(flops.estimate(nn.Linear(8, 4), vectors(8), [1, 2])))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert flags() == before
    assert len(set(costs)) == 1
    assert len(costs) == 4


def test_micro_batches_are_not_free() -> None:
    """FLOPs know nothing of what a micro-batch costs besides its samples: as by size, a sample of mean size."""
    cost = flops.estimate(nn.Linear(8, 4), vectors(8), [1, 10])
    sizes = lognormal(2000)
    by_flops = chronica.BatchSampler(sizes, 8, num_replicas=2, rank=0, cost=cost, micro_batches="auto")
    by_size = chronica.plan(sizes, 2, 8, micro_batches="auto")
    assert by_flops.cost.predict(0, 0, 0) == pytest.approx(128 * sizes.mean())
    assert by_flops.plan == by_size
    whole = chronica.BatchSampler(sizes, 8, num_replicas=2, rank=0, cost=cost)
    assert whole.cost == cost
