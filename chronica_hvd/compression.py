"""Weigh: gradients that Horovod cannot send as they are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from chronica_hvd.world import horovod

#: Floating types that Horovod combines.
SENDABLE = (torch.float16, torch.float32, torch.float64)


class _Sent(NamedTuple):
    """What a gradient was, before it was made fit to be sent."""

    compressed: Any  # the other compression's own note
    dtype: torch.dtype  # of what that has made of it
    gradient: torch.Tensor


class Carrier:
    """A compression that carries what Horovod refuses: bfloat16 as float32, and other layouts than the contiguous one.

    Everything else goes through the given compression alone.
    """

    def __init__(self, compression: Any) -> None:
        self._compression = compression
        self._is_none = compression is horovod().Compression.none
        self._on_their_way: list[tuple[torch.Tensor, int]] = []  # each with its version

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what is sent for a gradient, and what :meth:`decompress` needs to know."""
        if tensor.is_sparse:
            raise ValueError(
                "a sparse gradient cannot be sent in a group: leave out groups, or give the layer sparse=False"
            )
        self._on_their_way.append((tensor, tensor._version))
        if self._is_none and tensor.dtype in SENDABLE and tensor.is_contiguous():
            return tensor, None
        compressed, note = self._compression.compress(tensor)
        dtype = compressed.dtype
        if dtype.is_floating_point and dtype not in SENDABLE:
            compressed = compressed.to(torch.float32)
        return compressed.contiguous(), _Sent(note, dtype, tensor)

    def refuse_changed(self) -> None:
        """Raise a RuntimeError if a gradient was changed after it was given to be sent."""
        if any(tensor._version != version for tensor, version in self._on_their_way):
            raise RuntimeError(
                "gradients were changed between backward() and synchronize() or step(), while Horovod was sending "
                "them: what arrives depends on chance, and the ranks would drift apart. To clip or otherwise change "
                "them, call optimizer.synchronize() first, and then optimizer.step() within "
                "optimizer.skip_synchronize()"
            )

    def forget(self) -> None:
        """Note that all gradients have arrived."""
        self._on_their_way.clear()

    def decompress(self, tensor: torch.Tensor, sent: Any) -> torch.Tensor:
        """Return the combined gradient in the type and layout of the one that was sent."""
        if sent is None:  # sent as it was, as all sparse gradients are
            return tensor
        result: torch.Tensor = self._compression.decompress(tensor.to(sent.dtype), sent.compressed)
        gradient = sent.gradient
        if result.stride() != gradient.stride() and result.shape == gradient.shape:
            result = torch.empty_like(gradient).copy_(result)
        return result
