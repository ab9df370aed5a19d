"""FlatFlow's stable scheduler, called as its own sampler calls it, but without a torch graph. Optional: may be missing.

FlatFlow reads what a sample costs from a serialised graph of operators, whose FLOPs it sums up to a polynomial of the
size, and divides by the coefficients' greatest common divisor. Two matrix products give the polynomial wanted here:
(size × h)·(h × 12h) and (size × 2h)·(2h × size), so 12h² size + 2h size², times the bytes of a number. Its threads are
Rayon's (RAYON_NUM_THREADS); OMP_NUM_THREADS has no effect.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

HIDDEN = 4096
SIZE = (0, 1)  # a dimension is a pair: constant, coefficient of the size
FLOAT32, MATRIX_PRODUCT = 0, 24  # of FlatFlow's ScalarType and Operator


def load() -> Any:
    """Return FlatFlow's extension, or None where it is not installed."""
    try:
        return importlib.import_module("flatflow.ffi")
    except ImportError:
        return None


def graph() -> bytes:
    """Serialise the two products. ``flatflow.ops.serialize`` does the same for a traced model, and needs torch."""
    builder = importlib.import_module("flatbuffers").Builder()

    def vector(entries: list[int]) -> int:
        builder.StartVector(4, len(entries), 4)
        for entry in reversed(entries):
            builder.PrependUOffsetTRelative(entry)
        return int(builder.EndVector())

    def tensor(*shape: tuple[int, int]) -> int:
        builder.StartVector(16, len(shape), 8)
        for constant, coefficient in reversed(shape):
            builder.Prep(8, 16)
            builder.PrependInt64(coefficient)
            builder.PrependInt64(constant)
        dimensions = builder.EndVector()
        builder.StartObject(2)
        builder.PrependUint8Slot(0, FLOAT32, 0)
        builder.PrependUOffsetTRelativeSlot(1, dimensions, 0)
        return int(builder.EndObject())

    def product(rows: tuple[int, int], inner: tuple[int, int], columns: tuple[int, int]) -> int:
        arguments, result = vector([tensor(rows, inner), tensor(inner, columns)]), tensor(rows, columns)
        builder.StartObject(3)
        builder.PrependUint16Slot(0, MATRIX_PRODUCT, 0)
        builder.PrependUOffsetTRelativeSlot(1, arguments, 0)
        builder.PrependUOffsetTRelativeSlot(2, result, 0)
        return int(builder.EndObject())

    nodes = vector([product(SIZE, (HIDDEN, 0), (12 * HIDDEN, 0)), product(SIZE, (2 * HIDDEN, 0), SIZE)])
    builder.StartObject(1)
    builder.PrependUOffsetTRelativeSlot(0, nodes, 0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


def schedule(
    flatflow: Any, buffer: bytes, ranks: int, batch: int, rank: int, sizes: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Return (samples / ranks,) what one rank takes, step by step, ``batch`` samples in each.

    The whole schedule is computed for one rank's part, as in training, where every rank repeats it. One micro-batch per
    step. Policy "fast" balances the cost; FlatFlow's default "joint" the sizes.
    """
    order = np.arange(sizes.size, dtype=np.uintp)  # its sampler does not shuffle; sched works in place
    own: NDArray[np.uint64] = flatflow.sched(
        order, sizes, buffer, 1, 1, ranks, rank, ranks * batch, batch, "fast"
    )  # 1, 1: neither tensor nor context parallel
    return own


def batches(flatflow: Any, sizes: NDArray[np.int64], ranks: int, batch: int) -> NDArray[np.int64]:
    """Return (steps, ranks, batch) the indices all ranks take; step k holds the k-th global batch of ``sizes``."""
    buffer = graph()
    parts = [schedule(flatflow, buffer, ranks, batch, rank, sizes).reshape(-1, batch) for rank in range(ranks)]
    return np.stack(parts, axis=1).astype(np.int64)
