"""Model: copies of a user's model and of its input, to be run in their place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def as_shape(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on torch's meta device: shape and type without numbers, and without memory."""
    return tensor.to("meta", copy=True)


def copied(original: Any, copy_tensor: Callable[[torch.Tensor], torch.Tensor], name: str) -> Any:
    """Return a deep copy that shares no tensor with the original; tensors that were one stay one.

    Parameters
    ----------
    original
        A module, or anything that holds tensors, however deep.
    copy_tensor
        How a tensor is copied, for instance :func:`as_shape` or ``torch.clone``.
    name
        What the error calls the original.

    Raises
    ------
    TypeError
        Something in it cannot be copied.
    """
    try:
        with _TensorCopies(copy_tensor):
            return copy.deepcopy(original)
    except Exception as error:
        raise TypeError(
            f"{name} cannot be copied, so FLOPs cannot be counted without changing it: {type(error).__name__}: "
            f"{error}; remove what cannot be copied (locks, open files, process groups), or give the plain module "
            "that a wrapper holds"
        ) from error


class _TensorCopies(TorchFunctionMode):
    """Says how ``copy.deepcopy`` copies tensors, also those that are no leaves, which it would refuse."""

    def __init__(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._copy_tensor = copy_tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone):  # a parameter clones its data
            return self._copy_tensor(args[0].detach()).requires_grad_(args[0].requires_grad)
        return func(*args, **(kwargs or {}))
