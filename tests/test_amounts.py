"""True amounts of one rank: what a loop that was left early has said does not count any more."""

from __future__ import annotations

import pytest
import torch
from inprocess import run_ranks

import chronica_hvd as chronica


def gradient_after(amounts: list[float], *, leaves_after: int | None) -> float:
    """Train a step for each amount on the loss 3p, one of them left after its backward pass; return the last one's."""

    def train(_: int) -> float:
        p = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        sampler = chronica.BatchSampler([1] * len(amounts), 1, micro_batches=1)
        loader = chronica.DataLoader(range(len(amounts)), batch_sampler=sampler)
        optimizer = chronica.DistributedOptimizer(torch.optim.SGD([p], lr=0.0), [("p", p)], sampler=sampler)
        batches = iter(loader)
        for place, amount in enumerate(amounts):
            next(batches)
            p.grad = None
            optimizer.set_weight(amount)
            (3 * p).sum().backward()
            if place == leaves_after:
                batches = iter(loader)
            else:
                optimizer.step()
        assert p.grad is not None
        return p.grad.item()

    return run_ranks(1, train)[0]


@pytest.mark.parametrize("leaves_after", [None, 1])
def test_a_step_left_early_leaves_no_amount_behind(leaves_after: int | None) -> None:
    assert gradient_after([2.0, 50.0, 4.0], leaves_after=leaves_after) == pytest.approx(3.0, rel=1e-15)


def test_where_nothing_counts_the_gradient_is_zero() -> None:
    assert gradient_after([2.0, 0.0], leaves_after=None) == 0.0
