"""Model: what a sample costs in FLOPs, from its size, by counting the operators of the model itself."""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.jit import ScriptModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.utils.flop_counter import FlopCounterMode

from chronica_hvd import checks
from chronica_hvd.cost import CostModel, non_negative_least_squares
from chronica_hvd.operators import FORMULAS, OperatorWatch, SharedTensorError, tensors_in
from chronica_hvd.random_states import kept_random_states
from chronica_hvd.replica import as_shape, copied

#: How many sizes are counted at most: three determine the polynomial, the others show whether it fits.
MOST_SIZES = 7
#: Above this share, what the polynomial misses or what could not be counted is worth a warning.
WORTH_A_WARNING = 0.05

#: The switches and random states that a count sets and restores belong to the whole process.
_ONE_AT_A_TIME = threading.RLock()

#: Positional and keyword arguments of the model.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class FlopModel(CostModel):
    """Cost of a micro-batch in FLOPs of forward and backward pass, and what it was fitted to.

    A multiply-add counts as two. FLOPs know nothing of what a micro-batch costs besides its samples: where ``fixed`` is
    0, plans with several padded micro-batches take it to be what a sample of mean size costs, until it is measured.

    Parameters
    ----------
    sizes, counted
        The sizes at which the model was run, and the FLOPs that were counted for one sample of each.
    relative_error
        The largest |predicted − counted| ÷ counted over ``sizes``: how well the polynomial fits what was counted, not
        how well FLOPs predict time.
    uncounted
        Operators without a FLOP formula, heaviest first, with estimated FLOPs, summed over ``sizes`` (compare with
        ``sum(counted)``): at least the elements that they read or wrote; infinite where the weight cannot be known.
        They are not in ``counted`` unless nothing else was.
    """

    is_in_flops: ClassVar[bool] = True

    sizes: tuple[int, ...] = ()
    counted: tuple[float, ...] = ()
    relative_error: float = 0.0
    uncounted: tuple[tuple[str, float], ...] = field(default=(), repr=False)


def estimate(model: torch.nn.Module, make_batch: Callable[[int], Any], sizes: Any) -> FlopModel:
    """Estimate the FLOPs of training on one sample, as a polynomial of its size with no coefficient negative.

    The model is run, forward and backward, at up to 7 sizes under torch's own FlopCounterMode: copies of it on torch's
    meta device, which has shapes but no numbers, so that nothing is computed and no memory is taken. A model that
    cannot run there (whose control flow depends on data, or that has an operator without a meta kernel) is copied and
    run on its own device, with attention unfused, which takes memory for its matrices. Either way the model, the random
    states and the gradient mode are left as they were; only what its code changes outside of it (a global, what a
    closure holds) is changed.

    The backward pass is that of the sum of all floating outputs that require a gradient. Frozen parameters are not
    counted a gradient, and recomputation in checkpoints counts.

    Parameters
    ----------
    model
        The module, on any device, as it will be trained. Lazy modules must have run once.
    make_batch
        Gives the model's input for one sample of a size: a tensor, a tuple or list of positional arguments, or a
        mapping of keyword arguments; on the model's device.
    sizes
        Integers of at least 1: those of the whole data set, or a few. Up to 7 distinct ones are used, spread from the
        smallest to the largest by equal ratios. Of a single one, the FLOPs are taken to be proportional to the size.
        RNNs are counted step by step, some milliseconds for each step and layer: for long samples give a few short
        sizes, say 16 to 128; they are linear in the size beyond.

    Returns
    -------
    FlopModel
        A cost for :func:`chronica_hvd.plan`: ``per_sample + per_size · s + per_size2 · s²`` for a sample of size s.

    Raises
    ------
    TypeError
        The model is not a module, or cannot be copied (TorchScript modules among them); ``make_batch`` cannot be called
        or returns something else; sizes are not integers.
    ValueError
        There are no sizes, or one is below 1; a lazy module has not run yet; no output requires a gradient; nothing
        is computed.
    RuntimeError
        ``make_batch`` or the model raised at a size.

    Warns
    -----
    UserWarning
        The polynomial misses a count by more than 5 %, or operators that have no formula weigh more than 5 % of the
        FLOPs that were counted, or are not torch's own, so that their weight cannot be known.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Linear(8, 4)
    >>> estimate(model, lambda size: torch.zeros(size, 8), [1, 10, 100]).per_size  # 2 · 8 · 4, forward and backward
    128.0
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {model!r}")
    if not callable(make_batch):
        raise TypeError(f"make_batch must be a function from a size to the model's input, not {make_batch!r}")
    chosen = _spread(_integers(sizes))
    model = getattr(model, "_orig_mod", model)  # of torch.compile: compiled code hides its operators
    scripted = [name or "the model" for name, module in model.named_modules() if isinstance(module, ScriptModule)]
    if scripted:
        raise TypeError(
            f"{scripted[0]} is a TorchScript module, whose copies share its parameters, so its FLOPs cannot be counted "
            "without changing it: give the module that was scripted or traced"
        )
    if any(is_lazy(tensor) for tensor in _tensors_of(model)):
        raise ValueError("the model has lazy modules that have not run yet: run it once before its FLOPs are counted")
    with _ONE_AT_A_TIME, kept_random_states():
        batches = {size: _arguments(make_batch, size) for size in chosen}
        counts, weights = zip(*_count_all(model, batches), strict=True)
    names = {name for each in weights for name in each}
    total = {name: sum(each.get(name, 0.0) for each in weights) for name in names}
    uncounted = tuple(sorted(total.items(), key=lambda item: (-item[1], item[0])))
    _warn_of_uncounted(uncounted, sum(counts))
    if not any(counts):
        counts = tuple(sum(weight for weight in each.values() if math.isfinite(weight)) for each in weights)
    if not any(counts):
        raise ValueError("the model computes nothing that could be counted; fit a CostModel to measured times")
    return _fitted(chosen, counts, uncounted)


def _integers(sizes: Any) -> NDArray[np.int64]:
    array = checks.vector("sizes", sizes)
    if array.dtype.kind == "f":
        raise TypeError(f"sizes must hold integers, not {array.dtype}")
    array = checks.non_negative("sizes", array).astype(np.int64)
    if (array < 1).any():
        raise ValueError(
            f"sizes must be at least 1; position {int(np.argmin(array))} holds {array.min()}; leave out empty samples"
        )
    return array


def _spread(sizes: NDArray[np.int64]) -> tuple[int, ...]:
    """Return at most 7 distinct sizes with the smallest and the largest, in about equal ratios, ascending."""
    distinct = np.unique(sizes)
    if distinct.size > MOST_SIZES:
        wanted = np.geomspace(distinct[0], distinct[-1], MOST_SIZES)
        distinct = distinct[np.unique([np.abs(distinct - value).argmin() for value in wanted])]
    return tuple(int(size) for size in distinct)


def _tensors_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    return chain(model.parameters(), model.buffers())


def _arguments(make_batch: Callable[[int], Any], size: int) -> Arguments:
    """Return the model's positional and keyword arguments for a sample of this size."""
    try:
        batch = make_batch(size)
    except Exception as error:
        raise RuntimeError(f"make_batch({size}) raised {type(error).__name__}: {error}") from error
    if isinstance(batch, torch.Tensor | PackedSequence):
        return (batch,), {}
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    raise TypeError(
        f"make_batch({size}) must return a tensor, a tuple of the model's positional arguments or a dict of its "
        f"keyword arguments, not {type(batch).__name__}; wrap a single argument of another type as (argument,)"
    )


def _count_all(model: torch.nn.Module, batches: Mapping[int, Arguments]) -> list[tuple[int, dict[str, float]]]:
    """Return, for each size, the FLOPs counted and the estimated weights of the operators without a formula."""
    with contextlib.suppress(Exception):  # whatever it is, a run with numbers either works or says it better
        return [_count(model, size, arguments, on_meta=True) for size, arguments in batches.items()]
    return [_count(model, size, arguments, on_meta=False) for size, arguments in batches.items()]


def _count(model: torch.nn.Module, size: int, arguments: Arguments, on_meta: bool) -> tuple[int, dict[str, float]]:
    """Run a new copy of the model, for it may keep something from one call to the next."""
    copy_tensor = as_shape if on_meta else torch.clone
    watch = OperatorWatch(_tensors_of(model))
    with _countable(), torch.inference_mode(False):  # which also enables gradients
        replica = copied(model, copy_tensor, "the model")
        positional, keywords = copied(arguments, copy_tensor, f"the input that make_batch({size}) returned")
        with watch, FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
            try:
                with torch.device("meta") if on_meta else contextlib.nullcontext():
                    returned = replica(*positional, **keywords)
                    outputs = _trainable(returned)
                if outputs:
                    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            except SharedTensorError as error:
                raise TypeError(
                    "the model cannot be copied, so its FLOPs cannot be counted without changing it: in its copy, "
                    f"{error} (does a hook, a lambda, a compiled method or a replaced forward hold the module?); give "
                    "the model without that"
                ) from error
            except Exception as error:
                raise RuntimeError(
                    f"the model raised {type(error).__name__} on the input that make_batch({size}) returned: {error}"
                ) from error
    if not outputs:
        raise ValueError(
            f"no floating-point output of the model requires a gradient at size {size} (it returned a "
            f"{type(returned).__name__}), so there is no backward pass to count; an output must depend on a parameter "
            "with requires_grad=True, and be found in tensors, sequences, mappings or attributes"
        )
    return counter.get_total_flops(), watch.weights


@contextlib.contextmanager
def _countable() -> Iterator[None]:
    """Switch fused kernels off that torch's counter takes for nothing, and warnings, which training will show."""
    switches: tuple[Any, ...] = (torch.backends.mkldnn, torch.backends.cudnn)
    were_enabled = [switch.enabled for switch in switches]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        for switch in switches:
            switch.enabled = False
        torch.backends.mha.set_fastpath_enabled(False)
        with warnings.catch_warnings(), sdpa_kernel([SDPBackend.MATH]):
            warnings.simplefilter("ignore")
            yield
    finally:
        for switch, was_enabled in zip(switches, were_enabled, strict=True):
            switch.enabled = was_enabled
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _trainable(output: Any) -> list[torch.Tensor]:
    return [
        tensor
        for tensor in tensors_in(output)
        if tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
    ]


def _warn_of_uncounted(uncounted: tuple[tuple[str, float], ...], counted: float) -> None:
    unknown = [name for name, weight in uncounted if math.isinf(weight)]
    known = {name: weight for name, weight in uncounted if math.isfinite(weight)}
    missed = []
    if unknown:
        missed.append(f"{', '.join(unknown)}, whose weight is unknown")
    if sum(known.values()) > WORTH_A_WARNING * counted:
        share = f"{sum(known.values()) / counted:.0%} of those counted" if counted else "the only ones"
        missed.append(f"{', '.join(list(known)[:5])}, estimated at {sum(known.values()):.3g} FLOPs, {share}")
    if missed:
        warnings.warn(
            f"operators without a FLOP formula are not in the estimate: {'; '.join(missed)}. "
            "Give them one by torch.utils.flop_counter.register_flop_formula, or fit a CostModel to measured times",
            UserWarning,
            stacklevel=3,
        )


def _fitted(sizes: tuple[int, ...], counts: tuple[float, ...], uncounted: tuple[tuple[str, float], ...]) -> FlopModel:
    """Fit the polynomial to the counts, by least squares of the relative errors."""
    size, flops = np.array(sizes, np.float64), np.array(counts, np.float64)
    # (sizes, 4). Where few sizes leave a choice, the fit takes the first: proportional to the size before constant.
    # Borders of convolutions and the first step of an RNN are a constant below 0, which is fitted, so that no square
    # bends to it, and then left out, since a cost has none: it is felt at small sizes only.
    powers = np.stack([size, size**2, size**0, -(size**0)], axis=1)
    scale = np.maximum(flops, flops[flops > 0].min())
    solution = non_negative_least_squares(powers / scale[:, None], flops / scale)[:3]
    coefficients = [float(f"{value:.12g}") for value in solution]  # all ranks alike, whatever their linear algebra
    predicted = powers[:, :3] @ coefficients
    errors = np.abs(predicted - flops) / scale
    worst = int(errors.argmax())
    if errors[worst] > WORTH_A_WARNING:
        warnings.warn(
            f"the FLOPs do not follow c0 + c1·s + c2·s² with coefficients of at least 0: at size {sizes[worst]} "
            f"{flops[worst]:.4g} were counted and {predicted[worst]:.4g} are predicted, "
            f"{errors[worst]:.0%} off; to plan by it all the same is right if that is near enough",
            UserWarning,
            stacklevel=3,
        )
    c1, c2, c0 = coefficients
    return FlopModel(
        per_sample=c0,
        per_size=c1,
        per_size2=c2,
        sizes=sizes,
        counted=counts,
        relative_error=float(errors[worst]),
        uncounted=uncounted,
    )
