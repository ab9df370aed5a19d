"""Report: calls a user's step function again and again from the same state, and watches the modules it runs."""

from __future__ import annotations

import contextlib
import inspect
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from chronica_hvd.random_states import kept_random_states

#: Functions that return their input where nothing is dropped.
_DROPOUTS = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_dropout,
    torch.feature_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
}
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
#: Where attention functions take ``dropout_p``, if it is not given by name.
_ATTENTION_DROPOUT_PLACE = {
    functional.scaled_dot_product_attention: 4,
    functional.multi_head_attention_forward: list(
        inspect.signature(functional.multi_head_attention_forward).parameters
    ).index("dropout_p"),
}


@dataclass(frozen=True)
class Output:
    """What a module returned in one of its calls.

    Parameters
    ----------
    module
        The module.
    call
        Which of its calls this was, from 0 on.
    depth
        How many calls of other modules this one is within.
    values
        Copies of the tensors it returned.
    tensors
        Those tensors themselves, in the graph of the loss.
    """

    module: torch.nn.Module
    call: int
    depth: int
    values: list[torch.Tensor]
    tensors: list[torch.Tensor]


class Probe:
    """Calls ``step_fn``, always from the state before the first call; made by :func:`probing`.

    Attributes
    ----------
    dtypes
        Floating-point types that modules returned in the graph of a loss.
    modules
        Every module that ran, and all it holds, in the order in which they were met.
    failure
        What ``step_fn`` raised last, or what was wrong with its loss.
    """

    def __init__(self, step_fn: Callable[[list[int]], torch.Tensor]) -> None:
        self._step_fn = step_fn
        self._thread = threading.get_ident()
        self._roots: list[torch.nn.Module] = []
        self._buffers: list[tuple[torch.nn.Module, str, torch.Tensor | None, torch.Tensor | None]] = []
        self._made_local: list[torch.nn.Module] = []
        self._outputs: list[Output] | None = None
        self._calls: dict[int, int] = {}
        self._depth = 0
        self.dtypes: set[torch.dtype] = set()
        self.modules: dict[int, torch.nn.Module] = {}
        self.failure: Exception | None = None

    def loss(self, samples: list[int], seed: int = 0) -> torch.Tensor:
        """Return the loss of a batch, with its graph.

        Raises
        ------
        TypeError, ValueError
            It is no differentiable, finite, floating-point scalar.
        """
        self.restore()
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            return _checked_loss(self._step_fn(list(samples)), samples)
        except Exception as error:
            self.failure = error
            raise

    def record(self, samples: list[int]) -> tuple[torch.Tensor, list[Output]]:
        """Return the loss of a batch, and what each module returned, in the order in which they were through."""
        self._outputs, self._calls, self._depth = [], {}, 0
        try:
            return self.loss(samples), self._outputs
        finally:
            self._outputs = None

    def restore(self) -> None:
        """Give every buffer back the value that it had before the first call."""
        with torch.no_grad():
            for module, name, tensor, value in self._buffers:
                if getattr(module, name) is not tensor:
                    setattr(module, name, tensor)
                if tensor is not None and value is not None and not torch.equal(tensor, value):
                    tensor.copy_(value)

    def parameter_names(self) -> dict[int, tuple[str, torch.nn.Parameter]]:
        """Return, by id, the parameters of all modules that ran, named from the outermost module."""
        return {
            id(parameter): (_plain(name), parameter)
            for prefix, root in self._named_roots()
            for name, parameter in root.named_parameters(prefix)
        }

    def module_name(self, module: torch.nn.Module) -> str:
        """Return a module's dotted name and, in brackets, its class; of an outermost one only the class."""
        kind = type(module).__name__
        for prefix, root in self._named_roots():
            for name, member in root.named_modules(prefix=prefix):
                if member is module:
                    return f"{_plain(name)} ({kind})" if name else kind
        return kind

    def _named_roots(self) -> list[tuple[str, torch.nn.Module]]:
        """Return the outermost modules, with a prefix where several have parameters."""
        roots = [root for root in self._roots if next(root.parameters(), None) is not None]
        if len(roots) < 2:
            return [("", root) for root in self._roots]
        return [(f"{type(root).__name__}#{place}", root) for place, root in enumerate(roots, start=1)]

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        """Before a module runs for the first time, keep what it may change."""
        if threading.get_ident() != self._thread:
            return
        self._depth += 1
        if id(module) in self.modules:
            return
        members = list(module.modules())
        self._roots = [root for root in self._roots if root not in members] + [module]
        for member in members:
            if id(member) not in self.modules:
                self.modules[id(member)] = member
                self._keep(member)

    def _keep(self, module: torch.nn.Module) -> None:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and is_lazy(tensor):
                raise ValueError(
                    f"{type(module).__name__} has lazy parameters that have no shape yet: run the model once before "
                    "it is verified"
                )
        for name, buffer in module._buffers.items():
            self._buffers.append((module, name, buffer, None if buffer is None else buffer.detach().clone()))
        if is_synchronized(module) and "forward" not in vars(module):
            # Its own forward would talk to the other ranks, which need not call verify at all.
            module.forward = MethodType(_BatchNorm.forward, module)
            self._made_local.append(module)

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Note what a module returns."""
        if threading.get_ident() != self._thread:
            return
        self._depth -= 1
        tensors = _tensors(output)
        self.dtypes.update(tensor.dtype for tensor in tensors if tensor.requires_grad)
        if self._outputs is not None:
            call = self._calls.get(id(module), 0)
            self._calls[id(module)] = call + 1
            values = [tensor.detach().clone() for tensor in tensors]  # what follows may change them in place
            self._outputs.append(Output(module, call, self._depth, values, tensors))

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        handles = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module in self._made_local:
                del module.forward
            self.restore()


@contextlib.contextmanager
def probing(step_fn: Callable[[list[int]], torch.Tensor]) -> Iterator[Probe]:
    """Make a :class:`Probe`; inside, nothing is dropped out, and afterwards all is as it was.

    Modules stay in training mode, compiled ones run uncompiled, and float32 is not rounded to less.
    """
    probe = Probe(step_fn)
    with (
        warnings.catch_warnings(),
        kept_random_states(),
        torch.inference_mode(False),  # which also enables gradients
        _full_precision(),
        _uncompiled(),
        probe._watching(),
        _WithoutDropout(),
    ):
        # They fire once more for the wrapper, which does no harm.
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
        yield probe


def gradients_of(loss: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradient with respect to each tensor, ``None`` where the loss does not depend on it.

    As ``torch.autograd.grad``, in which modes as ours are off: what a checkpoint computes anew would be dropped out.
    """
    if not tensors:
        return []
    one = torch.ones_like(loss)
    engine = torch.autograd.Variable._execution_engine
    return list(engine.run_backward((loss,), (one,), False, False, tuple(tensors), True, accumulate_grad=False))


def is_synchronized(module: torch.nn.Module) -> bool:
    """Whether a module is torch's or Horovod's SyncBatchNorm."""
    return isinstance(module, _BatchNorm) and type(module).__name__ == "SyncBatchNorm"


def takes_batch_statistics(module: torch.nn.Module) -> bool:
    """Whether a module normalises by the mean and variance of the batch, as it is now."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def _checked_loss(loss: Any, samples: list[int]) -> torch.Tensor:
    returned = f"step_fn returned {type(loss).__name__}"
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"{returned}; it must return the loss, a tensor of one floating-point number")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(
            f"{returned} of shape {tuple(loss.shape)} and {loss.dtype}; it must return the loss of the batch, one "
            "floating-point number, for instance its mean"
        )
    if loss.grad_fn is None:
        raise ValueError(
            f"{returned} without a graph, so it has no gradient: the loss must be computed from parameters that "
            "require one, without detach(), item() or torch.no_grad()"
        )
    if not bool(loss.isfinite()):
        shown = f"{samples[:8]}{' and others' if len(samples) > 8 else ''}"
        raise ValueError(
            f"the loss of samples {shown} is {loss.item()}, so nothing can be compared: have step_fn compute without "
            "overflow (float32, smaller weights), or give samples without any term in the loss the loss weight 0"
        )
    return loss.reshape(())


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors in what a module returned, in order; packed and nested ones are left out."""
    if isinstance(value, torch.Tensor):
        is_plain = value.is_floating_point() and value.layout == torch.strided and not value.is_nested
        return [value] if is_plain else []
    if isinstance(value, PackedSequence):
        return []
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _plain(name: str) -> str:
    """Return a name without what torch.compile puts into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


class _WithoutDropout(TorchFunctionMode):
    """Has every function of torch that drops at random drop nothing, whatever mode its module is in."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.backward:
            raise RuntimeError("step_fn must return the loss and not call backward(): verify computes the gradients")
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _RECURRENT:
            place = 3 + next(place for place, value in enumerate(args) if isinstance(value, list))
            args = (*args[:place], 0.0, *args[place + 1 :])
        if func in _ATTENTION_DROPOUT_PLACE:
            place = _ATTENTION_DROPOUT_PLACE[func]
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Have float32 products computed in float32, not in TF32 or less: its rounding would hide what is looked for."""
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Have compiled functions run as they were written, where torch can (2.6): compiled ones call no hooks."""
    set_stance: Any = getattr(torch.compiler, "set_stance", None)
    return contextlib.nullcontext() if set_stance is None else set_stance("force_eager")
