"""Model: the operators that torch's FLOP counter leaves out, and about what they weigh."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

#: Operators of torch itself; what others compute cannot be told from their shapes.
_OWN_NAMESPACES = ("aten", "prims", "prim", "profiler")
#: Fused kernels that hold matrix products of unknown number, should a model insist on one.
_FUSED = re.compile(r"mm$|mm_|rnn|lstm_mps|attention|transformer_encoder")
#: Operators that touch only so much of a table as they write or are given.
_READS_PART = {"embedding", "_embedding_bag", "_embedding_bag_forward_only", "index", "index_select", "gather"}
_WRITES_PART = {"embedding_dense_backward", "_embedding_bag_backward", "slice_backward", "select_backward"}
#: Views that do not say so.
_VIEWS = {"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"}
#: Factorisations and solvers: of the order of n³ for an n × n matrix.
_CUBIC = re.compile(r"_?(linalg_(?!vector_norm|cross)|cholesky|lu_|triangular_solve|geqrf|ormqr)")
_SORTS = {"sort", "topk", "unique", "_unique2", "kthvalue", "median"}


def _product(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """Two for each multiply-add of (batched) matrix products; those with zeros of a sparse matrix are not computed."""
    columns = b.shape[-1] if b.ndim > 1 else 1
    if b.layout != torch.strided:
        return 2 * _stored(b) * a.shape[0]
    return 2 * _stored(a) * columns


def _stored(matrix: torch.Tensor) -> int:
    return matrix.numel() if matrix.layout == torch.strided else int(matrix._nnz())


def _added_product(_: Any, a: Any, b: Any, *__: Any, **___: Any) -> int:
    return _product(a, b)


def _convolution_backward(gradient: Any, image: Any, weight: Any, *others: Any, **_: Any) -> int:
    """As the forward pass, once for each of the input's and the weight's gradient that is wanted."""
    transposed, wanted = others[4], others[7]
    samples, _, *positions = (image if transposed else gradient).shape
    return int(2 * samples * math.prod(positions) * weight.numel() * (wanted[0] + wanted[1]))


_PRODUCTS = ("mm", "mv", "dot", "vdot")
_ADDED_PRODUCTS = ("addmm", "addmm_", "addmv", "addmv_", "baddbmm_", "addbmm", "addbmm_", "_sparse_addmm")
#: Formulas that torch's counter lacks (matrix × vector, sums in place), or has for dense matrices and convolutions of
#: one group only.
FORMULAS: dict[Any, Callable[..., int]] = {
    **{getattr(torch.ops.aten, name): _product for name in _PRODUCTS},
    **{getattr(torch.ops.aten, name): _added_product for name in _ADDED_PRODUCTS},
    torch.ops.aten.convolution_backward: _convolution_backward,
}
for _formula in FORMULAS.values():
    _formula._get_raw = True  # type: ignore[attr-defined]  # the counter's mark of those that want tensors, not shapes


class SharedTensorError(RuntimeError):
    """What was to run on copies computes with a tensor of the original."""


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that are finally executed and that have no FLOP formula.

    To be entered before the FLOP counter, so that it sees what the counter has decomposed.

    Parameters
    ----------
    originals
        Tensors that must not be computed with.

    Raises
    ------
    SharedTensorError
        From within the model, before an operator that is given one of them.
    """

    supports_higher_order_operators = True

    def __init__(self, originals: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._originals = {id(tensor): tensor for tensor in originals}
        #: Estimated FLOPs by operator; infinite where the weight cannot be known.
        self.weights: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = tensors_in((args, kwargs))
        if any(id(tensor) in self._originals for tensor in inputs):
            raise SharedTensorError(f"{func} computes with a tensor of the model itself")
        output = func(*args, **(kwargs or {}))
        packet = getattr(func, "_overloadpacket", func)
        if packet not in flop_registry and packet not in FORMULAS and inputs and not _is_view(func):
            name = func.name().split(".")[0].replace("::", ".")
            # Sums of gradients are left out: those of a weight used in every step of an RNN would outweigh the rest,
            # yet are one matrix product in the kernels that training uses.
            is_sum = name in ("aten.add", "aten.add_") and torch._C._current_graph_task_id() >= 0
            if not is_sum and (weight := _weight(name, args, inputs, tensors_in(output))):
                self.weights[name] = self.weights.get(name, 0.0) + weight
        return output


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors held by nested sequences, mappings, dataclasses and other plain objects, each once."""
    found = []
    seen: dict[int, Any] = {}  # the items themselves too, so that no id is used again
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, Mapping):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            waiting.extend(item)
        elif hasattr(item, "__dict__") and not isinstance(
            item, torch.nn.Module | type | ModuleType | FunctionType | MethodType
        ):
            waiting.extend(vars(item).values())
    return found


def _is_view(func: Any) -> bool:
    """Whether an operator only looks at its input anew, as the aliases in its schema say."""
    schema = getattr(func, "_schema", None)
    return schema is not None and any(
        result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
    )


def _weight(name: str, args: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> float:
    """Return about how many FLOPs an operator takes: at least the elements read or written; 0 for factories."""
    namespace, _, operator = name.partition(".")
    if namespace not in _OWN_NAMESPACES or _FUSED.search(operator):
        return math.inf
    if not outputs or operator.endswith("_like") or operator.startswith("new_") or operator in _VIEWS:
        return 0.0
    largest = max(inputs + outputs, key=torch.Tensor.numel)
    flops = float(largest.numel())
    if operator in _READS_PART:
        flops = float(max(tensor.numel() for tensor in outputs))
    elif operator in _WRITES_PART:
        flops = float(args[0].numel())
    elif operator.startswith("_fft"):
        flops *= 5.0 * math.log2(max(2, math.prod(largest.shape[dim] for dim in args[1])))
    elif operator.startswith("_cdist"):
        flops = 3.0 * _coordinate_pairs(*args[operator.endswith("backward") :][:2])
    elif operator == "_trilinear":
        shapes = [_unsqueezed(args[i].shape, args[3 + i]) for i in range(3)]
        flops = 3.0 * math.prod(map(max, *shapes))
    elif operator in _SORTS:
        flops *= math.log2(max(2.0, flops))
    elif _CUBIC.match(operator):
        flops = float(max(tensor.numel() * min(tensor.shape[-2:], default=1) for tensor in inputs + outputs))
    return flops


def _coordinate_pairs(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return how many pairs of coordinates the points of ``a`` (..., P, M) and of ``b`` (..., R, M) make."""
    return a.numel() * b.shape[-2]


def _unsqueezed(shape: Iterable[int], places: Iterable[int]) -> list[int]:
    """Return a shape with ones inserted at these places."""
    shape = list(shape)
    for place in places:
        shape.insert(place, 1)
    return shape
