"""Ranks in one process do what Horovod does, and are stricter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from horovod.torch import mpi_ops
from inprocess import Hang, RanksError, run_ranks
from torch import nn

import chronica_hvd as chronica


def errors_of(count: int, function: Callable[[int], Any]) -> dict[int, BaseException]:
    """Return what each rank raises."""
    with pytest.raises(RanksError) as failed:
        run_ranks(count, function)
    return failed.value.errors


def test_each_rank_knows_itself() -> None:
    def facts(rank: int) -> tuple[Any, ...]:
        hvd.init()
        everybody = hvd.global_process_set
        return hvd.is_initialized(), hvd.rank(), hvd.size(), hvd.local_rank(), everybody.rank(), everybody.size()

    assert run_ranks(3, facts) == [(True, rank, 3, rank, rank, 3) for rank in range(3)]
    assert run_ranks(2, lambda rank: hvd.global_process_set.included()) == [True, True]
    library = mpi_ops.mpi_lib
    assert type(library).__name__ == "module", "Horovod's own is back"


@pytest.mark.parametrize(("op", "expected"), [(hvd.Average, 2.0), (hvd.Sum, 6.0)])
def test_allreduce(op: int, expected: float) -> None:
    results = run_ranks(3, lambda rank: hvd.allreduce(torch.tensor([rank + 1.0]), op=op, name="x").item())
    assert results == [expected] * 3


def test_scale_factors() -> None:
    def scaled(rank: int) -> float:
        handle = hvd.allreduce_async_(
            torch.tensor([rank + 1.0]), op=hvd.Sum, name="x", prescale_factor=0.5, postscale_factor=10.0
        )
        return hvd.synchronize(handle).item()  # type: ignore[no-any-return]

    assert run_ranks(2, scaled) == [15.0, 15.0]


def test_groups_gathers_and_objects() -> None:
    def everything(rank: int) -> tuple[Any, ...]:
        tensors = [torch.tensor([1.0 + rank]), torch.tensor([[3.0 * rank, 4.0]])]
        hvd.synchronize(hvd.grouped_allreduce_async_(tensors, name="group"))
        gathered = hvd.allgather(torch.arange(rank + 1), name="gather").tolist()
        sent = hvd.broadcast_object({"from": rank}, root_rank=1)
        return tensors[0].tolist(), tensors[1].tolist(), gathered, sent

    assert run_ranks(2, everything) == [([1.5], [[1.5, 4.0]], [0, 0, 1], {"from": 1})] * 2


def test_sparse_tensors_are_averaged() -> None:
    def average(rank: int) -> list[float]:
        own = torch.tensor([[1.0, 2.0, 0.0], [4.0, 0.0, 6.0]][rank]).to_sparse()
        result = hvd.sparse_allreduce_async(own, name="sparse", op=hvd.Average)()
        return result.to_dense().tolist()  # type: ignore[no-any-return]

    assert run_ranks(2, average) == [[2.5, 1.0, 3.0]] * 2


def test_results_arrive_at_other_moments_with_other_seeds() -> None:
    def moments(rank: int) -> tuple[float, ...]:
        """Return what the tensor holds while others are enqueued: it may be written to at any moment."""
        tensor = torch.tensor([rank + 1.0])
        handles = [hvd.allreduce_async_(tensor, name="first")]
        seen = []
        for number in range(4):
            handles.append(hvd.allreduce_async_(torch.zeros(1), name=f"other {number}"))
            seen.append(tensor.item())
        for handle in handles:
            hvd.synchronize(handle)
        assert tensor.item() == 1.5
        return tuple(seen)

    every = [tuple(run_ranks(2, moments, seed=seed)) for seed in range(20)]
    assert len(set(every)) > 3
    assert tuple(run_ranks(2, moments, seed=7)) == every[7], "a run can be repeated"


def test_polling_ends() -> None:
    def poll(rank: int) -> float:
        handle = hvd.allreduce_async(torch.tensor([float(rank)]), name="x")
        while not hvd.poll(handle):
            pass
        return hvd.synchronize(handle).item()  # type: ignore[no-any-return]

    assert run_ranks(2, poll) == [0.5, 0.5]

    def poll_in_vain(rank: int) -> None:
        handle = hvd.allreduce_async(torch.tensor([float(rank)]), name=f"x{rank}")
        while not hvd.poll(handle):
            pass

    assert all(isinstance(error, Hang) for error in errors_of(2, poll_in_vain).values())


def test_a_rank_that_ends_leaves_the_others_hanging() -> None:
    errors = errors_of(3, lambda rank: rank == 2 or hvd.allreduce(torch.ones(1), name="never"))
    assert errors.keys() == {0, 1}
    assert all(isinstance(error, Hang) for error in errors.values())
    assert "rank 0 waits in allreduce 'never' for ranks 2" in str(errors[0])
    assert "rank 2 has ended" in str(errors[0])


def test_other_names_are_a_hang() -> None:
    errors = errors_of(2, lambda rank: hvd.allreduce(torch.ones(1), name=f"name{rank}"))
    assert [type(errors[rank]) for rank in (0, 1)] == [Hang, Hang]
    assert "'name0' for ranks 1" in str(errors[0])
    assert "'name1' for ranks 0" in str(errors[0])


def test_the_cause_is_the_error_and_not_the_hang_after_it() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise KeyError("lost")
        hvd.allreduce(torch.ones(1), name="x")

    with pytest.raises(RanksError, match="rank 1: KeyError: 'lost'") as failed:
        run_ranks(2, fail)
    assert isinstance(failed.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("tensor", "options", "what"),
    [
        (lambda rank: torch.ones(1, dtype=(torch.float32, torch.float64)[rank]), {}, "dtype"),
        (lambda rank: torch.ones(1 + rank), {}, "shape"),
        (lambda rank: torch.ones(1), {"op": (hvd.Sum, hvd.Average)}, "op"),
        (lambda rank: torch.ones(1), {"prescale_factor": (1.0, 2.0)}, "prescale factor"),
        (lambda rank: torch.ones(1), {"postscale_factor": (1.0, 2.0)}, "postscale factor"),
    ],
)
def test_ranks_that_differ_fail_alike(tensor: Any, options: dict[str, Any], what: str) -> None:
    def differ(rank: int) -> None:
        hvd.allreduce(tensor(rank), name="x", **{name: value[rank] for name, value in options.items()})

    errors = errors_of(2, differ)
    assert [type(errors[rank]) for rank in (0, 1)] == [hvd.HorovodInternalError] * 2
    assert all(f"Mismatched {what}" in str(error) for error in errors.values())


def test_another_operation_of_the_same_name_fails_on_both() -> None:
    operations = (hvd.allreduce, hvd.allgather)
    errors = errors_of(2, lambda rank: operations[rank](torch.ones(1), name="x"))
    assert all("Mismatched operation" in str(errors[rank]) for rank in (0, 1))


@pytest.mark.parametrize(
    ("tensor", "error", "match"),
    [
        (torch.ones(1, dtype=torch.bfloat16), ValueError, "not supported"),
        (torch.ones(2, 3).t(), ValueError, "contiguous"),
    ],
)
def test_what_horovod_refuses_is_refused(tensor: torch.Tensor, error: type[Exception], match: str) -> None:
    errors = errors_of(2, lambda rank: hvd.allreduce(tensor, name="x"))
    assert [type(errors[rank]) for rank in (0, 1)] == [error] * 2
    assert match in str(errors[0])


def test_names_are_needed_and_once_at_a_time() -> None:
    unnamed = errors_of(2, lambda rank: hvd.allreduce(torch.ones(1)))
    assert "needs a name" in str(unnamed[0])

    def twice(rank: int) -> None:
        for _ in range(2):
            hvd.allreduce_async(torch.ones(1), name="x")

    assert all("Duplicate tensor name x" in str(error) for error in errors_of(2, twice).values())


def test_writing_to_a_tensor_on_its_way_is_an_error() -> None:
    def race(rank: int) -> None:
        tensor = torch.ones(1)
        handle = hvd.allreduce_async_(tensor, name="x")
        tensor += 1.0
        hvd.synchronize(handle)

    assert any("was written to" in str(error) for error in errors_of(2, race).values())


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"gradient_predivide_factor": 2.0}])
def test_horovods_own_optimizer_averages_gradients(options: dict[str, Any]) -> None:
    def step(rank: int) -> list[list[float]]:
        model = nn.Linear(2, 1).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), **options
        )
        model(torch.tensor([[rank, 2.0 * rank]], dtype=torch.float64)).sum().backward()
        optimizer.step()
        return [parameter.flatten().tolist() for parameter in model.parameters()]

    assert run_ranks(3, step) == [[[0.0, -1.0], [0.0]]] * 3


def test_a_micro_batch_too_many_is_noticed_as_by_horovod() -> None:
    def twice(rank: int) -> None:
        model = nn.Linear(1, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        for _ in range(2):
            model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    errors = errors_of(2, twice)
    assert any("backward_passes_per_step" in str(error) for error in errors.values())


def test_our_optimizer_and_average_run_in_it() -> None:
    """Two optimizers, so that their collectives' names must agree over the ranks; another sampler for each."""
    inputs = torch.arange(1.0, 6.0, dtype=torch.float64)

    def train(rank: int) -> list[tuple[list[float], float]]:
        seen = []
        for _ in range(2):
            sampler = chronica.BatchSampler([5, 1, 1, 1, 1], 3, shuffle=False)
            loader = chronica.DataLoader(inputs, batch_sampler=sampler)
            weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
            optimizer = chronica.DistributedOptimizer(
                torch.optim.SGD([weight], lr=1.0), [("weight", weight)], sampler=sampler
            )
            for batch in loader:
                loss = (batch * weight + batch).mean()
                loss.backward()
                seen.append(chronica.average(loss.detach(), sampler).item())
                optimizer.step()
            seen.append(weight.item())
        return seen

    for result in run_ranks(2, train):
        assert result == pytest.approx([3.0, -3.0] * 2, rel=1e-15)


def test_other_plans_are_an_error_on_every_rank() -> None:
    def train(rank: int) -> None:
        sampler = chronica.BatchSampler([1, 2, 3, 4 + rank], 2)
        loader = chronica.DataLoader(torch.ones(4, 1), batch_sampler=sampler)
        model = nn.Linear(1, 1)
        optimizer = chronica.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), sampler=sampler
        )
        sampler.set_epoch(rank)
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()

    errors = errors_of(2, train)
    assert all(type(error) is RuntimeError and "do not hold the same plan" in str(error) for error in errors.values())
    assert len(errors) == 2
