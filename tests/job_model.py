"""The model of a random job, and what trains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from job_data import COMPUTES_IN, FEATURES, VOCABULARY, Batch
from numpy.typing import NDArray
from random_jobs import Job
from torch import nn

WIDTH = 5
LEAST_AT_FIRST = 0.3  # the magnitude of a parameter
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Model(nn.Module):
    """A sample's loss is the squared error of a small network over its features or the mean of its tokens' vectors.

    The gated one sends a few samples through another layer, so that a batch often leaves one without a gradient. The
    image one has a kernel, and so gradients, of the layout channels_last. Models of another ``number`` are others.
    """

    def __init__(self, job: Job, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.computes_in = COMPUTES_IN[job.dtype]
        self.tokens = None
        if job.model in ("bag", "sparse"):
            self.tokens = nn.Embedding(VOCABULARY, FEATURES, sparse=job.model == "sparse")
        self.is_image = job.model == "image"
        self.hidden = nn.Conv2d(2, WIDTH, 2) if self.is_image else nn.Linear(FEATURES, WIDTH)
        self.out = nn.Linear(WIDTH, 1)
        self.other = nn.Linear(FEATURES, WIDTH) if job.model == "gated" else None
        self.to(DTYPES[job.dtype])
        if self.is_image:
            self.to(memory_format=torch.channels_last)
        random = np.random.default_rng(job.seed + 1 + number)
        with torch.no_grad():
            for parameter in self.parameters():
                values = random.uniform(LEAST_AT_FIRST, 1.0, parameter.shape) * random.choice(
                    [-1.0, 1.0], parameter.shape
                )
                parameter.copy_(torch.from_numpy(values))

    def losses(self, batch: Batch) -> torch.Tensor:
        """Return the samples' losses; where parameters are of a lower precision they are raised to that of the data."""
        if self.hidden.weight.dtype == self.computes_in:
            return self(batch)  # type: ignore[no-any-return]
        raised = {name: parameter.to(self.computes_in) for name, parameter in self.named_parameters()}
        result: torch.Tensor = torch.func.functional_call(self, raised, (batch,))
        return result

    def forward(self, batch: Batch) -> torch.Tensor:
        inputs = batch.features
        if self.tokens is not None:
            vectors = self.tokens(batch.tokens) * batch.is_token[:, :, None]
            inputs = vectors.sum(dim=1) / batch.is_token.sum(dim=1, keepdim=True).clamp(min=1)
        return (self.out(torch.tanh(self._hidden(inputs)))[:, 0] - batch.targets).square()

    def _hidden(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.is_image:
            images = inputs.reshape(-1, 1, 2, 2)
            images = torch.cat([images, 0.5 * images.flip(3)], dim=1).to(memory_format=torch.channels_last)
            return self.hidden(images).flatten(1)  # type: ignore[no-any-return]
        if self.other is None:
            return self.hidden(inputs)  # type: ignore[no-any-return]
        hidden = inputs.new_zeros(len(inputs), WIDTH)
        for layer, is_chosen in ((self.hidden, inputs[:, 0] < 0.7), (self.other, inputs[:, 0] >= 0.7)):
            if is_chosen.any():
                hidden = hidden.index_put((is_chosen.nonzero()[:, 0],), layer(inputs[is_chosen]))
        return hidden

    def gradients(self) -> dict[str, NDArray[Any]]:
        return {f"{self.number}.{name}": _dense_gradient(parameter) for name, parameter in self.named_parameters()}

    def refuse_other_layouts(self) -> None:
        """Gradients lie in memory as their parameters do, else torch would warn and be slow."""
        for name, parameter in self.named_parameters():
            gradient = parameter.grad
            assert gradient is None or gradient.is_sparse or gradient.stride() == parameter.stride(), name

    def values(self) -> dict[str, NDArray[Any]]:
        return {f"{self.number}.{name}": _array(parameter.detach()) for name, parameter in self.named_parameters()}


def _dense_gradient(parameter: nn.Parameter) -> NDArray[Any]:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return _array(gradient.to_dense() if gradient.is_sparse else gradient)


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    return (tensor.double() if tensor.dtype == torch.bfloat16 else tensor.clone()).numpy()


class Trainer(torch.optim.SGD):
    """Momentum; with a closure it makes two updates, so that it must compute the gradients twice."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if closure is None:
            return super().step()
        with torch.enable_grad():
            loss = closure()
        super().step()
        with torch.enable_grad():
            closure()
        super().step()
        return loss


def trainer(job: Job, model: Model) -> Trainer:
    return Trainer(model.parameters(), lr=job.learning_rate, momentum=0.9)


def filled(model: Model) -> None:
    """Give parameters without a gradient zeros: Horovod sends those for what nobody has used, and momentum goes on."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def networks(job: Job) -> list[Model]:
    return [Model(job, number) for number in range(2 if job.second_every else 1)]


def is_trained(job: Job, model: Model, step: int) -> bool:
    """Whether a step of an epoch is one that a model is trained in: the second one is in every n-th."""
    return model.number == 0 or step % job.second_every == 0
