from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

class StepTimer:
    def __init__(
        self,
        capacity: int,
        device: int | Callable[[], int] | None = None,
        current_stream: Callable[[int], int] | None = None,
        *,
        clock: object = None,
    ) -> None: ...
    def start(self, step: int = 0, samples: int = 0, size: int = 0, size2: int = 0, flops: int = 0) -> None: ...
    def stop(self) -> None: ...
    def extend(self) -> None: ...
    def drain(self) -> NDArray[Any]: ...
    @property
    def overwritten(self) -> int: ...
    @property
    def skipped(self) -> int: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def clock(self) -> str: ...
    @property
    def capacity(self) -> int: ...

def cuda_driver_problem() -> str | None: ...

class PassWeight:
    def __init__(self, owner: object) -> None: ...
    def forget(self) -> None: ...
    def unreached(self, parameters: Iterable[Any]) -> list[Any]: ...
    def apply(self, parameter: object, gradients: tuple[Any]) -> tuple[Any] | None: ...

def assign(
    costs: NDArray[np.float64],
    sizes: NDArray[np.float64],
    speeds: NDArray[np.float64],
    capacity: NDArray[np.float64],
    *,
    fixed_cost: float,
    is_hard: bool,
    global_batch: int,
    least: int,
    micro_batches: int,
    comm: float,
    padded: bool,
    equal_counts: bool,
    is_dealt: bool,
    threads: int,
) -> tuple[
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.float64],
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.float64],
    NDArray[np.float64],
    NDArray[np.float64],
    int,
]: ...
def regroup(
    costs: NDArray[np.float64],
    speeds: NDArray[np.float64],
    *,
    fixed_cost: float,
    global_batch: int,
    most_moved: int,
) -> NDArray[np.int64]: ...
def deal(
    costs: NDArray[np.float64],
    speeds: NDArray[np.float64],
    *,
    policy: str,
    fixed_cost: float,
    global_batch: int,
    seed: int,
) -> NDArray[np.int64]: ...
def permutation(n: int, seed: int) -> NDArray[np.int64]: ...
